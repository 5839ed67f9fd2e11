"""Sessions by hints: where each was last, what a compaction leaves behind, and what nobody else uses of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import BadRequest
from kvstore.hints import NO_HINTS, Ended, Hints, Turn
from kvstore.radix.pages import Slots
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.dram.eviction import InDram, dram_victims
from kvstore.store.dram.replacement import DRAM
from kvstore.store.session_ends import Line, SessionEnds
from kvstore.store.uses import Asked, Use
from tests.store.test_store import OWNER, PARTS, SPEC, Prefix, config, put, settings_named, tokens_of

A, B = Hints("a"), Hints("b")
OLD: Prefix = tuple(range(20))
ROOT: Prefix = OLD[:3]
COMPACTED: Prefix = (*ROOT, 90, 91)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store(config(tmp_path, dram_bytes=200 * 5000)) as opened:
        await opened.create_namespace(settings_named())
        yield opened
        await opened.settle()
        check(opened)


@pytest.fixture
def space(store: Store) -> Space:
    return store.space("default", "ns")


def come_back(store: Store, space: Space, prefix: Prefix, hints: Hints) -> int:
    match = store.match(space, tokens_of(prefix), {}, owner=OWNER, lease_s=60, hints=hints)
    if match.lease is not None:
        store.release_lease(OWNER, match.lease.id)
    return match.pages


async def turn(store: Store, space: Space, prefix: Prefix, hints: Hints, version: bytes = b"v" * 16) -> None:
    """A request as a worker makes it: what is there, then what is not."""
    there = come_back(store, space, prefix, hints)
    if there < len(prefix):
        await put(store, space, prefix, version, first=there, hints=hints)


def first_to_go(store: Store, space: Space, pages: int) -> set[bytes]:
    """The keys of so many pages that would go first if room were wanted."""
    found: list[bytes] = []
    worth = store.replacement.values
    candidates = InDram(space)
    while candidates.look():
        pass
    for unit in dram_victims([candidates], 1 << 40, lambda candidates, wanted: worth(DRAM, candidates, wanted)):
        if unit.key not in found:
            found.append(unit.key)
    return set(found[:pages])


def keys(space: Space, prefix: Prefix, first: int = 0) -> set[bytes]:
    path = space.tree.match(tokens_of(prefix))
    assert path.pages == len(prefix)
    return {space.tree.pages.key_bytes(int(slot)) for slot in space.tree.path_slots(path)[first:]}


async def test_after_a_compaction_the_abandoned_pages_go_before_any_page_of_a_live_branch(store: Store, space: Space) -> None:
    await turn(store, space, (50, 51, 52, 53), B)  # older than all that follows, and alive
    await turn(store, space, OLD, A)
    await turn(store, space, COMPACTED, A)
    assert (store.stats.compactions, store.stats.abandoned_pages) == (1, 17)
    assert first_to_go(store, space, 17) == keys(space, OLD, 3)


async def test_a_compaction_shows_at_the_match_before_anything_is_put(store: Store, space: Space) -> None:
    await turn(store, space, OLD, A)
    assert come_back(store, space, COMPACTED, A) == 3
    assert store.stats.abandoned_pages == 17
    assert come_back(store, space, OLD, B) == 20, "they are still there"
    await turn(store, space, COMPACTED, A)
    assert store.stats.compactions == 1, "one compaction is noticed once"


async def test_what_another_session_was_last_at_stays(store: Store, space: Space) -> None:
    await turn(store, space, OLD, A)
    await turn(store, space, OLD[:8], B)
    await turn(store, space, (*OLD[:6], 70, 71), Hints("c"))
    await turn(store, space, COMPACTED, A)
    assert store.stats.abandoned_pages == 12, "not the first eight pages"
    await turn(store, space, (*OLD[:1], 60, 61), B)
    assert store.stats.abandoned_pages == 12 + 14, "B has left them too: of all this only what C was at is of use"
    assert first_to_go(store, space, 14) == keys(space, OLD, 6)


async def test_a_session_that_branched_off_keeps_all_before_it(store: Store, space: Space) -> None:
    await turn(store, space, OLD, A)
    await turn(store, space, (*OLD[:18], 80, 81), B)
    await turn(store, space, COMPACTED, A)
    assert store.stats.abandoned_pages == 2
    assert first_to_go(store, space, 2) == keys(space, OLD, 18)


async def test_its_own_earlier_branches_go_with_it(store: Store, space: Space) -> None:
    await turn(store, space, (*OLD[:10], 80, 81), A)  # say, a thought that is not kept in the prompt
    await turn(store, space, OLD, A)
    await turn(store, space, COMPACTED, A)
    assert store.stats.abandoned_pages == 19
    assert first_to_go(store, space, 19) == keys(space, OLD, 3) | keys(space, (*OLD[:10], 80, 81), 10)


@pytest.mark.parametrize("other", [NO_HINTS, Hints("a", Turn.SUB_AGENT), Hints("b", Turn.SUB_AGENT)])
async def test_what_those_without_a_session_and_sub_agents_used_stays(store: Store, space: Space, other: Hints) -> None:
    await turn(store, space, OLD, A)
    assert come_back(store, space, OLD[:15], other) == 15
    await turn(store, space, COMPACTED, A)
    assert store.stats.abandoned_pages == 5


async def test_a_sub_agent_of_the_same_session_is_no_compaction(store: Store, space: Space) -> None:
    await turn(store, space, OLD, A)
    for number in range(3):
        await turn(store, space, (*ROOT, 100 + number), Hints("a", Turn.SUB_AGENT))
    assert store.stats.compactions == 0
    await turn(store, space, (*OLD, 20), A)
    assert store.stats.compactions == 0


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ((*OLD[:19], 80), "only the last page was rewritten"),
        ((*OLD[:18], 80), "a tenth, and no more"),
        ((*OLD[:3], *range(100, 120)), "it is longer than before"),
        (OLD[:5], "a look at the front of the same context"),
        ((*OLD, 20, 21), "it went on"),
        ((200, 201), "another context altogether: a title for the conversation, say"),
    ],
)
async def test_what_is_no_compaction(store: Store, space: Space, prompt: Prefix, why: str) -> None:
    await turn(store, space, OLD, A)
    await turn(store, space, prompt, A)
    assert store.stats.compactions == 0, why


async def test_a_put_in_several_commits_is_no_compaction(store: Store, space: Space) -> None:
    await turn(store, space, OLD, A)
    for upto in (5, 10, 15, 20):
        await put(store, space, OLD[:upto], b"w" * 16, hints=A)
    assert store.stats.compactions == 0
    await turn(store, space, COMPACTED, A)
    assert store.stats.abandoned_pages == 17, "where it was last is still known"


async def test_pages_evicted_meanwhile_do_not_hide_a_compaction(store: Store, space: Space) -> None:
    await turn(store, space, OLD, A)
    space.remove_page(int(space.tree.path_slots(space.tree.match(tokens_of(OLD)))[12]))
    await turn(store, space, COMPACTED, A)
    assert (store.stats.compactions, store.stats.abandoned_pages) == (1, 9)
    assert first_to_go(store, space, 9) == keys(space, OLD[:12], 3)


async def test_a_namespace_knows_only_its_own_sessions(store: Store, space: Space) -> None:
    other = await store.create_namespace(NamespaceSettings("default", "other", "another model", SPEC))
    await turn(store, space, OLD, A)
    await turn(store, other, COMPACTED, A)
    assert store.stats.compactions == 0
    assert store.prefixes.abandon_session(other, A) == 5


async def test_an_abandoned_session_leaves_what_others_use(store: Store, space: Space) -> None:
    await turn(store, space, OLD, A)
    await turn(store, space, (*ROOT, 70), Hints("a", Turn.SUB_AGENT))
    await turn(store, space, (*OLD[:10], 80), B)
    assert store.prefixes.abandon_session(space, A) == 11, "ten of the main line, one of the sub-agent"
    assert first_to_go(store, space, 11) == keys(space, OLD, 10) | keys(space, (*ROOT, 70), 3)
    assert store.prefixes.abandon_session(space, A) == 0, "it is forgotten"
    with pytest.raises(BadRequest):
        store.prefixes.abandon_session(space, Hints(turn=Turn.MAIN))


async def test_uses_say_what_was_hit_and_hinted(store: Store, space: Space) -> None:
    seen: list[Use] = []
    told: list[tuple[int, int]] = []
    cooled: list[int] = []

    class Watcher:
        def used(self, space: Space, use: Use, asked: Asked | None) -> None:
            seen.append(use)

        def abandoned(self, space: Space, slots: Slots, first: int) -> None:
            told.append((len(slots), first))

        def cooled(self, space: Space, slots: Slots) -> None:
            cooled.append(len(slots))

    store.uses.observers.append(Watcher())
    await put(store, space, OLD[:4], b"v" * 16, hints=Hints("a", Turn.MAIN, Ended.TOOL_CALL, 60))
    come_back(store, space, OLD, A)
    await put(store, space, OLD[:6], b"v" * 16, first=4, hints=A)
    assert [(len(use.slots), use.hits) for use in seen] == [(4, 0), (4, 4), (6, 4)]
    assert seen[0].hints.ended is Ended.TOOL_CALL
    assert seen[0].now <= seen[1].now <= seen[2].now
    assert come_back(store, space, (60, 61), B) == 0
    assert len(seen[3].slots) == 0, "what finds nothing was asked for all the same"
    store.prefixes.abandon(space, tokens_of(OLD[:6]), {}, 4)
    store.prefixes.abandon_session(space, A)
    assert told == [(6, 4), (6, 0)]
    assert cooled == [2, 6]


async def test_who_waited_for_another_session_s_pages_keeps_its_own_hints(store: Store, space: Space) -> None:
    front = await store.begin_put(OWNER, space, PutRequest(b"x" * 16, tokens_of(OLD[:2]), {}, 0, PARTS, Ack.MEMORY))
    assert (await put(store, space, OLD[:4], b"x" * 16, first=2, hints=B)).pending_pages == 2
    store.abort_put(front)
    assert (await put(store, space, OLD[:2], b"y" * 16, hints=A)).new_pages == 2
    assert store.match(space, tokens_of(OLD[:4]), {}).pages == 4
    assert store.prefixes.abandon_session(space, A) == 0, "B is below"
    assert store.prefixes.abandon_session(space, B) == 4


def test_the_sessions_longest_silent_are_forgotten_first() -> None:
    x, y, z = (name * 32 for name in (b"x", b"y", b"z"))
    keys = np.frombuffer(x + y + z, np.uint8).reshape(3, 32)
    ends = SessionEnds(most=2)
    one, two, three = (Line(number, sub_agent=False) for number in (1, 2, 3))
    ends.put(two, x)
    ends.put(one, x)
    ends.put(two, y)
    assert ends.last_of(keys) == 1
    ends.heard(one)
    ends.put(three, x)
    assert (len(ends), ends.get(two), ends.last_of(keys)) == (2, None, 0)
    ends.take(one)
    assert ends.last_of(keys) == 0, "three is there still"
    ends.take(three)
    assert ends.last_of(keys) == ends.last_of(keys[:0]) == -1


@pytest.mark.parametrize("bad", [{"session": "x" * 65}, {"session": "\u00e9" * 33}, {"ttl_s": -1}, {"ttl_s": float("nan")}])
def test_hints_out_of_range(bad: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        Hints(**bad)  # type: ignore[arg-type]


def test_text_and_bytes_name_the_same_session() -> None:
    assert Hints("a").session_hash == Hints(b"a").session_hash != Hints("b").session_hash
    assert NO_HINTS.session_hash == 0
    assert Hints("\ud800").session_id, "half a character from somebody's JSON"
