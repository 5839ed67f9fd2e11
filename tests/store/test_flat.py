"""Puts of several pages of a flat namespace, in process, on a real disk: one by one, and any of them in turn against a simple model."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.digests import page_key, slice_digest
from kvstore.errors import BadDigest, BadRequest, Busy, Conflict, NoSpace, NotFound
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.radix.check import check as check_tree
from kvstore.store import Ack, NamespaceSettings, Put, PutRequest, PutResult, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.puts.pages import MAX_FLAT_PAGES
from kvstore.tiers.policies.make import NAMES
from tests.store.test_shards import config

T = TypeVar("T")

FULL, STATE = Component("full", 4, 2, 32), Component("state", 2, 2, 64, planes=1)
ONE = KVSpec(4, (FULL,), max_slice_bytes=4096, hash_bytes=16, flat=True)
TWO = KVSpec(4, (FULL, STATE), max_slice_bytes=4096, hash_bytes=16, flat=True)
EXTRA = bytes(range(32))
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@dataclass(frozen=True)
class Page:
    """What names a page: its digest, and perhaps extra keys."""

    number: int
    extra: bool = False

    @property
    def digest(self) -> bytes:
        return self.number.to_bytes(16, "big")


def pages_of(*numbers: int) -> tuple[Page, ...]:
    return tuple(Page(number) for number in numbers)


def key_of(space: Space, page: Page) -> bytes:
    return page_key(space.tree.root_key, page.digest + (EXTRA if page.extra else bytes(32)))


def labels(pages: Sequence[Page]) -> tuple[bytes, dict[int, bytes]]:
    return b"".join(page.digest for page in pages), {at: EXTRA for at, page in enumerate(pages) if page.extra}


def parts_of(spec: KVSpec, rank: int | None, with_state: bool = True) -> tuple[PartRange, ...]:
    """One rank's heads, `full` cut once more by layers; all of everything for None."""
    heads = (0, 2) if rank is None else (rank, rank + 1)
    full = (PartRange(0, 0, 3, *heads), PartRange(0, 3, 4, *heads))
    return (*full, PartRange(1, 0, 2, *heads)) if with_state and len(spec.components) > 1 else full


def data_of(spec: KVSpec, page: Page, version: bytes, part: PartRange) -> bytes:
    """What a computation gives for a part; some pages have the same bytes."""
    seed = blake2b(version + repr((page.number // 2 if page.number > 6 else page, part)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed, "little")).bytes(spec.part_bytes(part))


async def begin(
    store: Store, space: Space, pages: Sequence[Page], version: bytes = A, rank: int | None = None, *, owner: int = 1,
    ack: Ack = Ack.MEMORY, with_state: bool = True,
) -> Put:  # fmt: skip
    tokens, extras = labels(pages)
    request = PutRequest(version, tokens, extras, 0, parts_of(space.spec, rank, with_state), ack)
    return await store.begin_put(owner, space, request)


def send(put: Put, pages: Sequence[Page], only: set[int] | None = None, bad: int = -1) -> None:
    """Send what is wanted (of `only` some pages); page `bad` with one byte wrong."""
    spec, ranges = put.space.spec, put.request.ranges
    for page, part in put.wanted_cells():
        if only is not None and page not in only:
            continue
        data = data_of(spec, pages[page], put.request.put_id, ranges[part])
        layout = spec.slice_layout(ranges[part])
        view, _ = put.locate(page, part, 0, len(data), layout.count)
        view[:] = data
        claimed = [slice_digest(data[at : at + size]) for at, size in zip(layout.offsets, layout.sizes, strict=False)]
        if page == bad:
            view[7] ^= 1
        arrived = [slice_digest(view[at : at + size]) for at, size in zip(layout.offsets, layout.sizes, strict=False)]
        try:
            put.received(page, part, 0, arrived, b"".join(claimed))
        except BadDigest as error:
            put.fail(error)  # as a connection does
            return


async def put_pages(
    store: Store, space: Space, pages: Sequence[Page], version: bytes = A, rank: int | None = None, **given: Any
) -> PutResult:
    put = await begin(store, space, pages, version, rank, **given)
    send(put, pages)
    return await store.commit_put(put)


def there(store: Store, space: Space, pages: Sequence[Page]) -> list[bool]:
    return [space.tree.pages.find_key(key_of(space, page)) >= 0 for page in pages]


async def read_page(store: Store, space: Space, page: Page) -> dict[PartRange, bytes]:
    """The parts of a page that is there, verified from wherever they are."""
    columns = space.tree.parts_of(np.array([space.tree.pages.find_key(key_of(space, page))], np.int32))
    found = {}
    for row, component, ranges in zip(columns.blob.tolist(), columns.component.tolist(), columns.ranges.tolist(), strict=True):
        part = PartRange(component, *ranges)
        held = await store.hold(space, row)
        found[part] = bytes(held.view[: space.spec.part_bytes(part)])
        held.release()
    return found


def settings_of(spec: KVSpec, **changes: Any) -> NamespaceSettings:
    return NamespaceSettings(tenant="default", name="flat", fingerprint="model", spec=spec, **changes)


# --- one by one --------------------------------------------------------------------------------------------------------


async def test_a_put_brings_many_pages_and_says_which_were_there(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        assert await put_pages(store, space, pages_of(4, 2)) == PutResult(2, 0, 0)
        pages = (*pages_of(5, 4, 1, 2, 3), Page(2, extra=True))
        put = await begin(store, space, pages, B)
        assert put.wanted_runs() == [(p, *run) for p in (0, 1) for run in ((0, 1), (2, 3), (4, 6))]
        assert put.first_needed == 0
        send(put, pages)
        result = await store.commit_put(put)
        assert (result, result.existing) == (PutResult(4, 2, 0), ((1, 2), (3, 4)))
        check(store)
        found = store.match(space, labels(pages)[0], labels(pages)[1], owner=1, lease_s=60, parts=True, holes=True)
        assert found.known_pages == 6
        for page, version in zip(pages, (B, A, B, A, B, B), strict=True):
            assert await read_page(store, space, page) == {part: data_of(ONE, page, version, part) for part in parts_of(ONE, None)}
        assert found.lease is not None
        store.release_lease(1, found.lease.id)
        assert (await put_pages(store, space, pages[::-1])).existing == ((0, 6),), "the order of pages is nothing"
        check(store)


async def test_a_page_named_twice_is_refused(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        with pytest.raises(BadRequest, match="pages 1 and 3 of the put are the same"):
            await begin(store, space, pages_of(1, 2, 3, 2))
        await put_pages(store, space, (Page(2), Page(2, extra=True)))
        assert store.figures.puts_open == 0
        check(store)


@pytest.mark.parametrize("bad", [0, 2, 4])
async def test_one_bad_digest_among_many_leaves_nothing(tmp_path: Path, bad: int) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(1, 2, 3, 4, 5)
        put = await begin(store, space, pages)
        send(put, pages, bad=bad)
        with pytest.raises(BadDigest, match=f"page {bad}, part 0"):
            await store.commit_put(put)
        assert not any(there(store, space, pages))
        assert store.figures.usage()["dram"].used == 0
        check(store)
        assert await put_pages(store, space, pages, B) == PutResult(5, 0, 0)
        check(store)


async def test_a_put_that_lacks_slices_says_of_which_page(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(1, 2, 3)
        put = await begin(store, space, pages)
        send(put, pages, only={0, 2})
        with pytest.raises(BadRequest, match="page 1"):
            await store.commit_put(put)
        assert not any(there(store, space, pages))
        check(store)


async def test_more_pages_than_one_put_may_have_are_refused(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        for pages in (pages_of(*range(MAX_FLAT_PAGES + 1)), ()):
            with pytest.raises(BadRequest, match=f"1 to {MAX_FLAT_PAGES}"):
                await begin(store, space, pages)
        many = tuple(PartRange(0, layer, layer + 1, head, head + 1) for layer in range(4) for head in range(2))
        wide = PutRequest(A, labels(pages_of(*range(64)))[0], {}, 0, many * 9, Ack.MEMORY)
        with pytest.raises(BadRequest):
            await store.begin_put(1, space, wide)
        with pytest.raises(BadRequest, match="from page 1 on"):
            await store.begin_put(1, space, PutRequest(A, labels(pages_of(1, 2))[0], {}, 1, parts_of(ONE, None), Ack.MEMORY))
        assert store.figures.puts_open == 0


async def test_the_first_commit_of_each_page_wins(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        mine, others = pages_of(1, 2, 3), pages_of(3, 4, 2)
        put, other = await begin(store, space, mine), await begin(store, space, others, B)
        send(put, mine)
        send(other, others)
        assert await store.commit_put(other) == PutResult(3, 0, 0)
        result = await store.commit_put(put)
        assert (result, result.existing) == (PutResult(1, 2, 0), ((1, 3),))
        assert (await read_page(store, space, Page(3)))[PartRange(0, 0, 3, 0, 2)] == data_of(ONE, Page(3), B, PartRange(0, 0, 3, 0, 2))
        check(store)


async def test_pages_wait_for_their_shards_each_alone(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        assert await put_pages(store, space, pages_of(1, 2, 3), A, 0) == PutResult(0, 0, 3)
        assert await put_pages(store, space, pages_of(3, 1), A, 1) == PutResult(2, 0, 0)
        assert there(store, space, pages_of(1, 2, 3)) == [True, False, True]
        check(store)
        assert await put_pages(store, space, pages_of(2, 4), B, 1) == PutResult(0, 0, 2), "shards of two computations were mixed"
        with pytest.raises(BadRequest, match="another shard"):
            await begin(store, space, pages_of(9, 2), A, None)
        again = await begin(store, space, pages_of(2, 3), A, 0)
        assert again.wanted_runs() == [], "what an earlier try had brought was asked for again"
        assert await store.commit_put(again) == PutResult(0, 1, 1)
        check(store)
        store.release_owner(1)
        assert store.figures.pending_pages == 0
        check(store)


async def test_a_shard_can_wait_for_the_others(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        put = await begin(store, space, pages_of(1, 2), A, 0, ack=Ack.DURABLE)
        send(put, pages_of(1, 2))
        waiting = asyncio.create_task(store.commit_put(put, 20))
        await asyncio.sleep(0)
        for number in (2, 1):
            await put_pages(store, space, pages_of(number), A, 1, owner=2)
        assert await waiting == PutResult(2, 0, 0)
        assert all(space.is_durable(space.tree.pages.find_key(key_of(space, page))) for page in pages_of(1, 2))


async def test_a_page_gets_the_state_it_lacks(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(TWO))
        await put_pages(store, space, pages_of(1, 2), A, with_state=False)
        result = await put_pages(store, space, pages_of(1, 3), B)
        assert (result, result.existing) == (PutResult(1, 1, 0), ((0, 1),))
        check(store)
        state = PartRange(1, 0, 2, 0, 2)
        assert (await read_page(store, space, Page(1)))[state] == data_of(TWO, Page(1), B, state)
        assert state not in await read_page(store, space, Page(2))


async def test_a_durable_put_is_there_after_a_kill(tmp_path: Path) -> None:
    pages = pages_of(1, 2, 3, 4)
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages[:1])
        assert await put_pages(store, space, pages, ack=Ack.DURABLE) == PutResult(3, 1, 0)
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    async with Store(config(tmp_path / "killed")) as store:
        space = store.space("default", "flat")
        assert all(there(store, space, pages))
        for page in pages:
            assert await read_page(store, space, page) == {part: data_of(ONE, page, A, part) for part in parts_of(ONE, None)}
        assert await put_pages(store, space, (*pages, Page(5)), B) == PutResult(1, 4, 0)
        check(store)


async def test_pages_that_are_there_are_held_while_the_rest_is_sent(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages_of(1, 2))
        put = await begin(store, space, pages_of(1, 2, 3), B)
        with pytest.raises(Conflict):
            await store.prefixes.delete(space, Page(2).digest, {})
        store.release_owner(1)
        check(store)
        assert put.closed
        await store.prefixes.delete(space, Page(2).digest, {})
        assert there(store, space, pages_of(1, 2, 3)) == [True, False, False]


async def test_a_lost_page_ends_the_puts_that_count_on_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages_of(1, 2))
        put, other = await begin(store, space, pages_of(3, 2)), await begin(store, space, pages_of(1, 4))
        slot = space.tree.pages.find_key(key_of(space, Page(2)))
        space.lose_blob(space.rows_of(slot)[0])
        with pytest.raises(Busy, match="put it again"):
            await store.commit_put(put)
        send(other, pages_of(1, 4))
        assert await store.commit_put(other) == PutResult(1, 1, 0)
        assert await put_pages(store, space, pages_of(3, 2)) == PutResult(2, 0, 0)
        check(store)


async def test_a_full_table_of_pages_takes_none_of_a_put(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", max_pages=5, max_ghosts=0)) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages_of(1, 2, 3))
        with pytest.raises(NoSpace):
            await put_pages(store, space, pages_of(3, 4, 5, 6))
        assert there(store, space, pages_of(1, 2, 3, 4, 5, 6)) == [True, True, True, False, False, False]
        check(store)
        assert await put_pages(store, space, pages_of(4, 5)) == PutResult(2, 0, 0)
        check(store)


async def test_a_put_larger_than_dram_is_refused(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        with pytest.raises(NoSpace, match="fewer pages at once"):
            await begin(store, space, pages_of(*range(100)))
        check(store)


async def test_several_pages_are_pinned_abandoned_and_deleted(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, prefixes = await store.create_namespace(settings_of(ONE)), store.prefixes
        await put_pages(store, space, pages_of(1, 2, 3, 4, 5), ack=Ack.DURABLE)
        pin = prefixes.pin(space, *labels((*pages_of(2, 9), Page(1, extra=True), *pages_of(4))), 60)
        assert pin.pages == 2
        check(store)
        with pytest.raises(Conflict, match="page 1 of this list"):
            await prefixes.delete(space, *labels(pages_of(1, 2, 3)))
        assert all(there(store, space, pages_of(1, 2, 3))), "a part of a list that could not be deleted is gone"
        assert await prefixes.delete(space, *labels(pages_of(2, 3, 9, 5)), 1) == 2
        prefixes.unpin(space, pin.id)
        check(store)
        with pytest.raises(NotFound):
            prefixes.pin(space, *labels(pages_of(7, 8, 9)), 60)
        recency, find = space.tree.pages.recency, space.tree.pages.find_key
        assert prefixes.abandon(space, *labels(pages_of(9, 4, 2))) == 2
        one, two, four = (int(recency[find(key_of(space, Page(number)))]) for number in (1, 2, 4))
        assert max(two, four) < one
        with pytest.raises(BadRequest, match="at most 256"):
            prefixes.abandon(space, *labels(pages_of(*range(257))))
        check(store)
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    async with Store(config(tmp_path / "killed")) as store:
        assert there(store, store.space("default", "flat"), pages_of(1, 2, 3, 4, 5)) == [True, True, False, True, False]


# --- any of it in turn -------------------------------------------------------------------------------------------------

some_pages = st.lists(st.builds(Page, st.integers(0, 9), st.sampled_from([False, False, True])), min_size=1, max_size=7, unique=True).map(
    tuple
)
versions = st.sampled_from([A, B, C])
ranks = st.sampled_from([0, 1, None, None])


class FlatMachine(RuleBasedStateMachine):
    """The model: what each rank of each computation ever put of a page, and the pages acknowledged as durable."""

    @initialize(spec=st.sampled_from([ONE, TWO]), max_ghosts=st.sampled_from([0, 3, 20]), policy=st.sampled_from(NAMES))
    def start(self, spec: KVSpec, max_ghosts: int, policy: str) -> None:
        self.spec, self.max_ghosts, self.policy = spec, max_ghosts, policy
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
        self.generation = 0
        self.loop = asyncio.new_event_loop()
        self.loop.slow_callback_duration = 60
        self.brought: dict[tuple[Page, bytes, int], set[int]] = {}
        self.durable: set[Page] = set()
        self.open()
        self.run(self.store.create_namespace(settings_of(spec)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    def open(self) -> None:
        folder = self.folder / str(self.generation)
        self.store = self.run(Store(config(folder, max_ghosts=self.max_ghosts, policy=self.policy)).__aenter__())
        self.leases: list[int] = []
        self.pins: list[int] = []
        self.open_puts: list[tuple[Put, tuple[Page, ...]]] = []

    @property
    def space(self) -> Space:
        return self.store.space("default", "flat")

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
        holes = len(self.spec.components) == 1
        match = self.store.match(self.space, tokens, extras, owner=1, lease_s=60, parts=True, holes=holes)
        if holes:
            assert match.known_pages == sum(there(self.store, self.space, pages))
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

    @rule(nbytes=st.integers(1, 60_000))
    def evict_from_dram(self, nbytes: int) -> None:
        self.run(self.store._residency.reclaim(nbytes))

    @rule(nbytes=st.integers(1, 60_000), past_retention=st.booleans())
    def evict_from_ssd(self, nbytes: int, past_retention: bool) -> None:
        self.store._residency.make_ssd_room(nbytes, 1e12 if past_retention else time.time())
        self.store._writeback.poke()
        if past_retention:
            self.durable.clear()

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

    @rule()
    def unpin(self) -> None:
        if self.pins:
            self.store.prefixes.unpin(self.space, self.pins.pop())

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

    @rule()
    def restart(self) -> None:
        self.run(self.store.__aexit__(None, None, None))
        self.open()

    @rule()
    def kill(self) -> None:
        """What is on disk now, with nothing flushed, is all that the next daemon gets."""
        shutil.copytree(self.folder / str(self.generation), self.folder / str(self.generation + 1))
        self.run(self.store.__aexit__(None, None, None))
        self.generation += 1
        self.open()

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
            self.run(self.store.__aexit__(None, None, None))
            self.loop.close()
            shutil.rmtree(self.folder)


TestFlat = FlatMachine.TestCase
TestFlat.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
