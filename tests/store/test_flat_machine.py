"""Puts of several pages of a flat namespace, and all else that is done with them, in any turn, against a simple model. On a real disk."""

from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvstore.errors import BadDigest, BadRequest, Busy, Conflict, NoSpace, NotFound
from kvstore.kvspec import KVSpec
from kvstore.radix.check import check as check_tree
from kvstore.store import Ack, Put
from kvstore.store.checking.check import check
from kvstore.tiers.policies.make import NAMES
from tests.store.disk_machine import EXAMPLES, EvictingMachine
from tests.store.flat_pages import ONE, TWO, A, B, C, Page, begin, data_of, labels, read_page, send, settings_of, there
from tests.store.test_shards import config

some_pages = st.lists(st.builds(Page, st.integers(0, 9), st.sampled_from([False, False, True])), min_size=1, max_size=7, unique=True).map(
    tuple
)
versions = st.sampled_from([A, B, C])
ranks = st.sampled_from([0, 1, None, None])


class FlatMachine(EvictingMachine):
    """The model: what each rank of each computation ever put of a page, and the pages acknowledged as durable."""

    space_name = "flat"

    @initialize(spec=st.sampled_from([ONE, TWO]), max_ghosts=st.sampled_from([0, 3, 20]), policy=st.sampled_from(NAMES))
    def start(self, spec: KVSpec, max_ghosts: int, policy: str) -> None:
        self.spec = spec
        self.brought: dict[tuple[Page, bytes, int], set[int]] = {}
        self.durable: set[Page] = set()
        self.begin(partial(config, max_ghosts=max_ghosts, policy=policy))
        self.run(self.store.create_namespace(settings_of(spec)))

    def opened(self) -> None:
        self.leases: list[int] = []
        self.pins: list[int] = []
        self.open_puts: list[tuple[Put, tuple[Page, ...]]] = []

    def note(self, pages: tuple[Page, ...], version: bytes, rank: int | None, with_state: bool) -> None:
        for component in range(len(self.spec.components) if with_state else 1):
            for page in pages:
                known = self.brought.setdefault((page, version, component), set())
                known |= {0, 1} if rank is None else {rank}

    @rule(pages=some_pages, version=versions, rank=ranks, with_state=st.booleans(), durable=st.booleans())
    def put(self, pages: tuple[Page, ...], version: bytes, rank: int | None, with_state: bool, durable: bool) -> None:
        there_before = there(self.store, self.space, pages)
        ack = Ack.DURABLE if durable else Ack.MEMORY
        try:
            put = self.run(begin(self.store, self.space, pages, version, rank, owner=7 + (rank or 0), ack=ack, with_state=with_state))
        except (Busy, NoSpace, BadRequest):  # no room, or it overlaps with what another shard of the put id brings
            return
        self.note(pages, version, rank, with_state)
        self.commit(put, pages, there_before)

    def commit(self, put: Put, pages: tuple[Page, ...], there_before: list[bool] | None = None) -> None:
        send(put, pages)
        try:
            result = self.run(self.store.commit_put(put))
        except (Busy, NoSpace, NotFound):  # NotFound: what was promised had to go before it was durable
            return
        assert result.new_pages + result.existing_pages + result.pending_pages == len(pages)
        existing = [any(low <= at < high for low, high in result.existing) for at in range(len(pages))]
        assert sum(existing) == result.existing_pages
        if there_before is not None and not self.store._residency.moving:
            assert not any(now and not before for now, before in zip(existing, there_before, strict=True))
        if put.request.ack is Ack.DURABLE and not result.pending_pages:
            self.durable.update(pages)

    @rule(pages=some_pages, version=versions, rank=ranks, durable=st.booleans())
    def begin_one(self, pages: tuple[Page, ...], version: bytes, rank: int | None, durable: bool) -> None:
        if len(self.open_puts) > 2:
            return
        ack = Ack.DURABLE if durable else Ack.MEMORY
        try:
            put = self.run(begin(self.store, self.space, pages, version, rank, owner=7 + (rank or 0), ack=ack))
        except (Busy, NoSpace, BadRequest):
            return
        self.note(pages, version, rank, with_state=True)
        self.open_puts.append((put, pages))

    @rule(which=st.integers(0, 3))
    def end_one(self, which: int) -> None:
        if self.open_puts:
            put, pages = self.open_puts.pop(which % len(self.open_puts))
            if not put.closed:
                self.commit(put, pages)

    @rule(pages=some_pages, version=versions, bad=st.integers(0, 6))
    def one_page_is_bad(self, pages: tuple[Page, ...], version: bytes, bad: int) -> None:
        before = there(self.store, self.space, pages)
        try:
            put = self.run(begin(self.store, self.space, pages, version))
        except (Busy, NoSpace, BadRequest):
            return
        bad %= len(pages)
        if not put.wants(bad, 0):
            self.store.abort_put(put)
            return
        send(put, pages, bad=bad)
        with pytest.raises(BadDigest, match=f"page {bad},"):
            self.run(self.store.commit_put(put))
        if not self.store._residency.moving:
            after = there(self.store, self.space, pages)
            assert not any(now and not then for now, then in zip(after, before, strict=True)), "a part of a bad put can be seen"

    @rule(pages=some_pages)
    def a_page_twice(self, pages: tuple[Page, ...]) -> None:
        with pytest.raises(BadRequest, match="are the same"):
            self.run(begin(self.store, self.space, (*pages, pages[0])))

    @rule(pages=some_pages)
    def read(self, pages: tuple[Page, ...]) -> None:
        self.run(self.read_checked(pages))

    async def read_checked(self, pages: tuple[Page, ...]) -> None:
        tokens, extras = labels(pages)
        match = self.store.match(self.space, tokens, extras, owner=1, lease_s=60, parts=True, holes=True)
        assert match.known_pages == sum(self.store.match(self.space, *labels((page,))).pages for page in pages)
        for page, is_there in zip(pages, there(self.store, self.space, pages), strict=True):
            assert is_there or page not in self.durable, f"{page} is durable, and not there"
            if is_there:
                try:
                    found = await read_page(self.store, self.space, page)
                except Busy:
                    continue
                for part, got in found.items():
                    whole = [v for (p, v, c), ranks in self.brought.items() if p == page and c == part.component and len(ranks) == 2]
                    assert got in [data_of(self.spec, page, v, part) for v in whole], "bytes that no whole computation brought"
        if match.lease is not None:
            self.store.release_lease(1, match.lease.id)

    @rule(pages=some_pages)
    def lease(self, pages: tuple[Page, ...]) -> None:
        match = self.store.match(self.space, *labels(pages), owner=1, lease_s=60, parts=True)
        if match.lease is not None:
            self.leases.append(match.lease.id)

    @rule()
    def release(self) -> None:
        if self.leases:
            self.store.release_lease(1, self.leases.pop())

    @rule(pages=some_pages)
    def delete(self, pages: tuple[Page, ...]) -> None:
        before = there(self.store, self.space, pages)
        try:
            assert self.run(self.store.prefixes.delete(self.space, *labels(pages))) == sum(before)
        except Conflict:
            return
        assert not any(there(self.store, self.space, pages))
        self.durable -= set(pages)

    @rule(pages=some_pages)
    def abandon(self, pages: tuple[Page, ...]) -> None:
        self.store.prefixes.abandon(self.space, *labels(pages))

    @rule(pages=some_pages)
    def pin(self, pages: tuple[Page, ...]) -> None:
        try:
            self.pins.append(self.store.prefixes.pin(self.space, *labels(pages), 60).id)
        except NotFound:
            assert self.store.match(self.space, *labels(pages[:1])).pages == 0

    @rule(rank=st.integers(0, 1), part=st.integers(0, 6))
    def a_rank_dies(self, rank: int, part: int) -> None:
        """In the middle of what it was sending."""
        for put, pages in self.open_puts:
            if put.owner == 7 + rank and not put.closed:
                send(put, pages, only=set(range(part)))
        self.store.release_owner(7 + rank)
        self.open_puts = [(put, pages) for put, pages in self.open_puts if put.owner != 7 + rank]

    @rule()
    def shards_do_not_come(self) -> None:
        self.store._puts.sweep(float("inf"))
        self.open_puts = []
        assert self.store.figures.pending_pages == self.store.figures.puts_open == 0

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.settle())
            if any(not put.closed for put, _ in self.open_puts):
                check_tree(self.space.tree)
            else:
                check(self.store)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for lease in self.leases:
                self.store.release_lease(1, lease)
            self.store.release_owner(7)
            self.store.release_owner(8)
            if self.durable:
                self.run(self.read_checked(tuple(self.durable)))
            self.end()


TestFlat = FlatMachine.TestCase
TestFlat.settings = EXAMPLES
