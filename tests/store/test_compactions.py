"""Compactions in recorded coding-agent sessions: what they leave behind is the first to go, before any page of a live branch."""

import gzip
import itertools
from collections import Counter
from pathlib import Path

import pytest

from kvstore.hints import Hints, Turn
from kvstore.lab.readers import ReadOptions, read_trace
from kvstore.lab.trace import Trace
from kvstore.store import Space, Store
from kvstore.store.checking.check import check
from kvstore.store.dram.eviction import InDram, dram_victims
from kvstore.store.dram.replacement import DRAM
from tests.store.test_sessions import turn
from tests.store.test_store import Prefix, config, settings_named, tokens_of

FILE = Path(__file__).parents[3] / "shared" / "traces" / "weka_cc_even.jsonl.gz"
SESSIONS, LONG_BYTES = 180, 1_300_000
COMPACTED, OTHERS = 3, 3
"""Sessions with compactions, and without; all of them with sub-agents."""

Request = tuple[Prefix, Hints]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The first half of the recording without its longest sessions: reading all takes longer than the tests, and these choose the same."""
    if not FILE.exists():
        pytest.skip(f"the trace {FILE.name} is not there")
    front = tmp_path_factory.mktemp("trace") / "front.jsonl"
    with gzip.open(FILE, "rb") as file:
        front.write_bytes(b"".join(line for line in itertools.islice(file, SESSIONS) if len(line) < LONG_BYTES))
    return read_trace(front, ReadOptions(page_tokens=4096))


def requests_of(trace: Trace) -> list[Request]:
    hints = [hint or Hints() for hint in trace.hints]
    runs = zip(trace.starts.tolist(), trace.ends.tolist(), hints, strict=True)
    return [(tuple(trace.pages[start:end].tolist()), hint) for start, end, hint in runs if end > start]


def session_of(hints: Hints) -> str:
    """The recorded session that a line, of the session itself or of a sub-agent, belongs to."""
    return hints.session_id.decode().split("/")[0]


def shared_front(one: Prefix, other: Prefix) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def left_behind(last: Prefix, now: Prefix) -> int | None:
    """The first page that a session has given up by going from one context to another; None if it has not."""
    common = shared_front(last, now)
    cut = len(last) - common
    return common if 0 < common < len(now) < len(last) and cut >= 2 and cut > 0.1 * len(last) else None


def excerpt(trace: Trace) -> list[Request]:
    """The requests, in order, of the shortest sessions with sub-agents: some with compactions, some without."""
    found = requests_of(trace)
    size: Counter[str] = Counter()
    last: dict[str, Prefix] = {}
    compacted, branched = dict[str, None](), dict[str, None]()
    for prefix, hints in found:
        name = session_of(hints)
        size[name] += 1
        if hints.turn is Turn.MAIN:
            if name in last and left_behind(last[name], prefix) is not None:
                compacted[name] = None
            last[name] = prefix
        else:
            branched[name] = None
    both = sorted((name for name in compacted if name in branched), key=lambda name: size[name])
    chosen = {*both[:COMPACTED], *sorted(branched.keys() - compacted.keys(), key=lambda name: size[name])[:OTHERS]}
    return [(prefix, hints) for prefix, hints in found if session_of(hints) in chosen]


def order_to_go(store: Store, space: Space) -> list[bytes]:
    """All pages, the first to go first."""
    worth = store.replacement.values
    candidates = InDram(space)
    while candidates.look():
        pass
    units = dram_victims([candidates], 1 << 40, lambda candidates, wanted: worth(DRAM, candidates, wanted))
    return [unit.key for unit in units]


def keys_of(space: Space, prefix: Prefix) -> list[bytes]:
    slots = space.tree.path_slots(space.tree.match(tokens_of(prefix)))
    return [space.tree.pages.key_bytes(slot) for slot in slots.tolist()]


@pytest.mark.parametrize("policy", ["lru", "classifier"])
async def test_what_a_compaction_leaves_behind_goes_before_any_live_page(trace: Trace, tmp_path: Path, policy: str) -> None:
    requests = excerpt(trace)
    sub_agents = sum(hints.turn is Turn.SUB_AGENT for _, hints in requests)
    assert sub_agents, "no sub-agent: this test shows half of it"
    sizes = {"dram_bytes": 256 << 20, "ssd_bytes": 64 << 20, "segment_bytes": 1 << 20}
    async with Store(config(tmp_path, policy=policy, **sizes)) as store:
        space = await store.create_namespace(settings_named())
        last: dict[bytes, Prefix] = {}
        history: dict[bytes, list[Prefix]] = {}
        users: dict[bytes, set[bytes]] = {}
        given_up: set[bytes] = set()
        compactions = 0
        for prefix, hints in requests:
            line = hints.session_id
            before = last.get(line)
            first = None if before is None or hints.turn is not Turn.MAIN else left_behind(before, prefix)
            if first is not None and before is not None:
                for past in history[line]:  # what hangs from the abandoned pages, such as a turn that was taken back, goes too
                    if shared_front(past, before) > first:
                        given_up |= {key for key in keys_of(space, past)[first:] if users[key] == {line}}
                compactions += 1
            await turn(store, space, prefix, hints)
            for key in keys_of(space, prefix):
                users.setdefault(key, set()).add(line)
                given_up.discard(key)
            last[line] = prefix
            history.setdefault(line, []).append(prefix)
            if first is not None:
                order = order_to_go(store, space)
                assert set(order[: len(given_up)]) == given_up, f"after {compactions} compactions a live page goes before an abandoned one"
        assert compactions >= COMPACTED
        assert given_up
        assert store.stats.compactions == compactions, "the store saw other compactions than there were"
        check(store)
