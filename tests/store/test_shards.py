"""Hybrid components put by several shards and computations, in process, on a real disk, against a simple model.

After each step every invariant is recomputed. What is read is a random sub-range of layers and heads, put together from the
parts as a client would, and compared byte for byte with what some computation brought.
"""

import time
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvstore.digests import slice_digest
from kvstore.errors import BadRequest, Busy, Conflict, MissingParent, NoSpace
from kvstore.hints import Hints, Turn
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.store import Ack, Match, NamespaceSettings, PutRequest, PutResult, Space, Store, StoreConfig
from kvstore.store.checking.check import check
from kvstore.store.expiry import Expiry
from kvstore.tiers.policies.make import NAMES
from kvstore.tiers.watermarks import Watermarks
from kvstore_client.blocks import Block, PageBlobs, PageShape
from kvstore_client.plan import page_parts
from tests.store.disk_machine import EXAMPLES, EvictingMachine

PAGE_TOKENS = 4
RANKS = 2
SPEC = KVSpec(
    PAGE_TOKENS,
    (Component("full", 4, 2, 32), Component("window", 2, 2, 32, window=8), Component("state", 2, 2, 64, planes=1)),
    max_slice_bytes=4096,
)

Prefix = tuple[int, ...]


def parts_of(rank: int | None) -> tuple[PartRange, ...]:
    """One rank's heads of every component, cut once more by layers for `full`; all of everything for None."""
    heads = (0, 2) if rank is None else (rank, rank + 1)
    return (PartRange(0, 0, 3, *heads), PartRange(0, 3, 4, *heads), PartRange(1, 0, 2, *heads), PartRange(2, 0, 2, *heads))


def payload(prefix: Prefix, version: bytes, component: int) -> npt.NDArray[np.uint8]:
    """(layer, plane, head, bytes): what a computation gives for one component of the last page of a prefix."""
    c = SPEC.components[component]
    seed = blake2b(version + repr((prefix, component)).encode(), digest_size=8).digest()
    shape = (c.layers, c.planes, c.kv_heads, SPEC.layer_bytes(PartRange(component, 0, 1, 0, 1)) // c.planes)
    return np.random.default_rng(int.from_bytes(seed, "little")).integers(0, 256, shape, dtype=np.uint8)


def cut(whole: npt.NDArray[np.uint8], part: PartRange) -> bytes:
    return whole[part.layer_lo : part.layer_hi, :, part.head_lo : part.head_hi].tobytes()


def tokens_of(prefix: Prefix) -> bytes:
    return np.array(prefix, np.uint32).repeat(PAGE_TOKENS).tobytes()


def spans_of(total: int, first: int, window_pages: int, with_state: bool) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Which of the four parts are put, and on which pages: window on the last few, state on the last."""
    which, spans = [0, 1], [(first, total), (first, total)]
    if window_pages:
        which, spans = [*which, 2], [*spans, (max(total - window_pages, first), total)]
    if with_state:
        which, spans = [*which, 3], [*spans, (total - 1, total)]
    return which, tuple(spans)


async def put_shard(
    store: Store, space: Space, prefix: Prefix, version: bytes, rank: int | None, *, owner: int = 1, window_pages: int = 2,
    with_state: bool = True, first: int = 0, ack: Ack = Ack.MEMORY, base: int = 0, skip: int = 0,
) -> PutResult:  # fmt: skip
    which, spans = spans_of(len(prefix), first, window_pages, with_state)
    ranges = tuple(parts_of(rank)[i] for i in which)
    request = PutRequest(version, tokens_of(prefix[skip:]), {}, first, ranges, ack, spans)
    under_way = await store.begin_put(owner, space, request, base)
    for page, part in under_way.wanted_cells():
        data = cut(payload(prefix[: page + 1], version, ranges[part].component), ranges[part])
        sizes = SPEC.slice_layout(ranges[part]).sizes
        view, _ = under_way.locate(page, part, 0, len(data), len(sizes))
        view[:] = data
        offsets = SPEC.slice_layout(ranges[part]).offsets
        digests = [slice_digest(data[at : at + size]) for at, size in zip(offsets, sizes, strict=False)]
        under_way.received(page, part, 0, digests, b"".join(digests))
    return await store.commit_put(under_way)


async def fetch_page(store: Store, space: Space, match: Match, page: int, wanted: PartRange) -> bytes:
    """A range of one page, put together from the stored parts."""
    assert match.parts is not None
    at = 0
    for run in match.parts.runs:
        for here in range(run.first_page, run.first_page + run.pages):
            if here == page:
                ids = [match.parts.ids[(at + i) * 16 : (at + i + 1) * 16] for i in range(len(run.ranges))]
                out = np.zeros(SPEC.part_bytes(wanted), np.uint8)
                shape = PageShape(page_parts(SPEC, run.ranges, wanted))
                for item in Block(shape, PageBlobs(b"".join(ids), len(ids)), 0, (0,)).items():
                    held = await store.reading.hold(space, store.reading.find(space, item.blob))
                    for segment in range(item.run.segments):
                        source = item.run.offset + segment * item.run.stride
                        target = item.target + segment * item.target_stride
                        out[target : target + item.run.length] = np.frombuffer(held.view, np.uint8)[source : source + item.run.length]
                    held.release()
                return out.tobytes()
            at += len(run.ranges)
    raise AssertionError(f"page {page} is not in the part table")


def config(data_dir: Path, **changes: Any) -> StoreConfig:
    defaults: dict[str, Any] = {
        "dram_bytes": 160_000, "ssd_bytes": 260_000, "max_pages": 20_000, "segment_bytes": 10_000,
        "put_wait_s": 0.2, "journal_bytes": 64 << 20, "watermarks": Watermarks(0.8, 0.6), "max_ghosts": 20,
    }  # fmt: skip
    return StoreConfig(data_dir=data_dir, **{**defaults, **changes})


SETTINGS = NamespaceSettings(tenant="default", name="ns", fingerprint="model", spec=SPEC)

prefixes = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
versions = st.sampled_from([b"a" * 16, b"b" * 16, b"c" * 16])
ranks = st.sampled_from([0, 1, 1, 0, None])


class ShardMachine(EvictingMachine):
    """The model: what each rank of each computation ever put, and the boundaries that were acknowledged as durable."""

    space_name = "ns"

    @initialize(recipes=st.booleans(), max_ghosts=st.sampled_from([0, 3, 20]), policy=st.sampled_from(NAMES))
    def start(self, recipes: bool, max_ghosts: int, policy: str) -> None:
        self.brought: dict[tuple[Prefix, bytes, int], set[int]] = {}
        self.durable: set[Prefix] = set()
        self.begin(partial(config, max_ghosts=max_ghosts, policy=policy))
        settings_ = NamespaceSettings(tenant="default", name="ns", fingerprint="model", spec=SPEC, recipes=recipes)
        self.run(self.store.create_namespace(settings_))

    def opened(self) -> None:
        self.leases: list[int] = []
        self.pins: list[int] = []

    @rule(
        prefix=prefixes, version=versions, rank=ranks, durable=st.sampled_from([False, False, True]),
        window_pages=st.sampled_from([0, 1, 2, 2, 6]), with_state=st.booleans(), first=st.sampled_from([0, 0, 0, 1, 3]),
    )  # fmt: skip
    def put(self, prefix: Prefix, version: bytes, rank: int | None, durable: bool, window_pages: int, with_state: bool, first: int) -> None:
        first = min(first, len(prefix) - 1)
        window_pages = min(window_pages, len(prefix))
        which, spans = spans_of(len(prefix), first, window_pages, with_state)
        for component, span in zip([parts_of(rank)[i].component for i in which], spans, strict=True):
            for page in range(*span):
                known = self.brought.setdefault((prefix[: page + 1], version, component), set())
                known |= {0, 1} if rank is None else {rank}
        try:
            result = self.run(
                put_shard(
                    self.store, self.space, prefix, version, rank, owner=7 + (rank or 0), window_pages=window_pages,
                    with_state=with_state, first=first, ack=Ack.DURABLE if durable else Ack.MEMORY,
                )
            )  # fmt: skip
        except (Busy, NoSpace, MissingParent):
            return
        except BadRequest:
            return  # it overlaps with what another shard of the same put id brings
        assert result.new_pages + result.existing_pages + result.pending_pages == len(prefix) - first
        assert result.gained_pages <= result.existing_pages
        if durable and not result.pending_pages and self.match(prefix).pages == len(prefix):
            self.durable.add(prefix)

    def match(self, prefix: Prefix, **changes: Any) -> Match:
        return self.store.match(self.space, tokens_of(prefix), {}, owner=1, parts=True, boundaries=True, **changes)

    @rule(prefix=prefixes, layers=st.tuples(st.integers(0, 3), st.integers(1, 4)), heads=st.sampled_from([(0, 1), (1, 2), (0, 2)]))
    def read(self, prefix: Prefix, layers: tuple[int, int], heads: tuple[int, int]) -> None:
        self.run(self.read_checked(prefix, layers, heads))

    async def read_checked(self, prefix: Prefix, layers: tuple[int, int], heads: tuple[int, int]) -> None:
        match = self.match(prefix, lease_s=60)
        assert match.pages == match.boundaries[-1] <= match.known_pages
        promised = max((len(p) for p in self.durable if prefix[: len(p)] == p), default=0)
        assert match.pages >= promised, f"{promised} pages of {prefix} are durable, {match.pages} were found"
        for component in range(3):
            pages = SPEC.boundary_pages(component) or match.pages
            for page in range(max(match.pages - pages, 0), match.pages):
                low = min(layers[0], SPEC.components[component].layers - 1)
                wanted = PartRange(component, low, max(low + 1, min(layers[1], SPEC.components[component].layers)), *heads)
                got = await fetch_page(self.store, self.space, match, page, wanted)
                here = prefix[: page + 1]
                whole = [v for (p, v, c), brought in self.brought.items() if p == here and c == component and len(brought) == RANKS]
                assert got in [cut(payload(here, v, component), wanted) for v in whole], "bytes that no whole computation brought"
        if match.lease is not None:
            self.store.release_lease(1, match.lease.id)

    @rule(prefix=prefixes)
    def lease(self, prefix: Prefix) -> None:
        match = self.match(prefix, lease_s=60)
        if match.lease is not None:
            self.leases.append(match.lease.id)

    @rule()
    def release(self) -> None:
        if self.leases:
            self.store.release_lease(1, self.leases.pop())

    @rule(prefix=prefixes, version=versions, more=st.integers(0, 1))
    def go_on_from_a_lease(self, prefix: Prefix, version: bytes, more: int) -> None:
        match = self.match(prefix, lease_s=60)
        if match.lease is None:
            return
        longer = (*prefix[: match.pages], more)
        for component in range(3):
            self.brought.setdefault((longer, version, component), set()).update({0, 1})
        try:
            result = self.run(
                put_shard(
                    self.store, self.space, longer, version, None, first=match.pages, base=match.lease.id, skip=match.pages, window_pages=1
                )
            )
            assert not result.pending_pages
            again = self.store.match(self.space, tokens_of((more,)), {}, owner=1, base=match.lease.id)
            assert again.known_pages == match.pages + 1
        except (Busy, NoSpace, BadRequest):
            pass  # no room, or it overlaps with what another shard of the same put id brings
        self.store.release_lease(1, match.lease.id)

    @rule(prefix=prefixes, from_page=st.integers(0, 3))
    def abandon(self, prefix: Prefix, from_page: int) -> None:
        pages = self.store.prefixes.abandon(self.space, tokens_of(prefix), {}, from_page)
        assert 0 <= pages <= max(len(prefix) - from_page, 0)

    @rule(prefix=prefixes, session=st.sampled_from(["", "a", "b"]), turn=st.sampled_from([None, Turn.SUB_AGENT]))
    def come_back(self, prefix: Prefix, session: str, turn: Turn | None) -> None:
        match = self.store.match(self.space, tokens_of(prefix), {}, owner=1, lease_s=60, hints=Hints(session, turn))
        if match.lease is not None:
            self.store.release_lease(1, match.lease.id)

    @rule(session=st.sampled_from(["a", "b", "unknown"]))
    def abandon_session(self, session: str) -> None:
        self.store.prefixes.abandon_session(self.space, Hints(session))
        assert self.store.prefixes.abandon_session(self.space, Hints(session)) == 0

    @rule(past_retention=st.booleans())
    def expire(self, past_retention: bool) -> None:
        self.store.uses.note_time()
        now = 1e12 if past_retention else time.time() + 60
        kept = set() if past_retention else self.durable
        self.run(Expiry(lambda: [self.space], self.store.uses, lambda: now, self.store._writeback.poke).expire(self.space))
        self.durable &= kept

    @rule(prefix=prefixes, from_page=st.integers(0, 3))
    def delete(self, prefix: Prefix, from_page: int) -> None:
        try:
            self.run(self.store.prefixes.delete(self.space, tokens_of(prefix), {}, from_page))
        except Conflict:
            return
        assert self.match(prefix).known_pages <= from_page
        gone = prefix[: from_page + 1]
        self.durable = {p for p in self.durable if p[: len(gone)] != gone}

    @rule(prefix=prefixes)
    def prefetch(self, prefix: Prefix) -> None:
        self.run(self.store.prefixes.prefetch(self.space, tokens_of(prefix), {}))

    @rule(prefix=prefixes)
    def pin(self, prefix: Prefix) -> None:
        if self.match(prefix).pages:
            self.pins.append(self.store.prefixes.pin(self.space, tokens_of(prefix), {}, 60).id)

    @rule(rank=st.integers(0, 1))
    def a_rank_dies(self, rank: int) -> None:
        self.store.release_owner(7 + rank)

    @rule()
    def shards_do_not_come(self) -> None:
        self.store._puts.sweep(float("inf"))
        assert self.store.figures.pending_pages == 0

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.settle())
            check(self.store)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for lease in self.leases:
                self.store.release_lease(1, lease)
            for prefix in sorted(self.durable):
                self.run(self.read_checked(prefix, (0, 4), (0, 2)))
            self.end()


TestShards = ShardMachine.TestCase
TestShards.settings = EXAMPLES
