"""The whole store in process, on a real disk, against a simple model; every invariant recomputed after each step."""

import asyncio
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvstore.digests import slice_digest
from kvstore.errors import BadRequest, Busy, Conflict, MissingParent, NoSpace, UnknownNamespace
from kvstore.hints import NO_HINTS, Hints
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.store import Ack, NamespaceSettings, PutRequest, PutResult, Space, Store, StoreConfig
from kvstore.store.checking.check import check
from kvstore.store.checking.running import check_running
from kvstore.store.checking.verify import CheckProgress, CheckReport
from kvstore.tiers.policies.make import NAMES
from kvstore.tiers.watermarks import Watermarks
from tests.store.disk_machine import EXAMPLES, DiskMachine

PAGE_TOKENS = 4
SPEC = KVSpec(PAGE_TOKENS, (Component("full", 4, 2, 64),), max_slice_bytes=4096)
PARTS = (PartRange(0, 0, 4, 0, 1), PartRange(0, 0, 2, 1, 2), PartRange(0, 2, 4, 1, 2))
OWNER = 1

Prefix = tuple[int, ...]


def config(data_dir: Path, **changes: Any) -> StoreConfig:
    defaults: dict[str, Any] = {
        "dram_bytes": 40 * 5000, "ssd_bytes": 60 * 5000, "max_pages": 20_000, "segment_bytes": 20_000,
        "put_wait_s": 0.2, "journal_bytes": 64 << 20, "watermarks": Watermarks(0.8, 0.6),
    }  # fmt: skip
    return StoreConfig(data_dir=data_dir, **{**defaults, **changes})


def settings_named(name: str = "ns", **changes: Any) -> NamespaceSettings:
    return NamespaceSettings(tenant="default", name=name, fingerprint="model", spec=SPEC, **changes)


def tokens_of(prefix: Prefix) -> bytes:
    return np.array(prefix, np.uint32).repeat(PAGE_TOKENS).tobytes()


def page_bytes(prefix: Prefix, version: bytes, part: int) -> bytes:
    """What a computation with this put id gives for the last page of a prefix: a function of the whole prefix."""
    seed = blake2b(version + repr((prefix, part)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed, "little")).bytes(SPEC.part_bytes(PARTS[part]))


async def put(
    store: Store, space: Space, prefix: Prefix, version: bytes, ack: Ack = Ack.MEMORY, first: int = 0, hints: Hints = NO_HINTS,
    now: bool = False,
) -> PutResult:  # fmt: skip
    """A whole put, as a connection would make it; with `now` its commit is answered without waiting, if that can be."""
    request = PutRequest(version, tokens_of(prefix), {}, first, PARTS, ack, hints=hints)
    under_way = await store.begin_put(OWNER, space, request)
    for page, part in under_way.wanted_cells():
        data, at = page_bytes(prefix[: page + 1], version, part), 0
        for index, size in enumerate(SPEC.slice_layout(PARTS[part]).sizes):
            view, sizes = under_way.locate(page, part, index, size, 1)
            assert sizes == (size,)
            view[:] = data[at : at + size]
            digest = slice_digest(view)
            under_way.received(page, part, index, [digest], digest)
            at += size
    later: list[Callable[[], None]] = []
    if now and (told := store.commit_put_now(under_way, later.append)) is not None:
        later[0]()
        there = space.tree.match(tokens_of(prefix)).pages
        assert there == len(prefix), f"{told} was answered, and {there} of {len(prefix)} pages are there"
        return told
    return await store.commit_put(under_way)


async def read(store: Store, space: Space, prefix: Prefix) -> int:
    """Match, lease and read a prefix; every byte must be that of the version the tree names. Returns the pages."""
    match = store.match(space, tokens_of(prefix), {}, owner=OWNER, lease_s=60, parts=True)
    assert match.parts is not None
    slots = space.tree.path_slots(space.tree.match(tokens_of(prefix)))
    versions = [space.tree.version_of(int(slot)) for slot in slots]
    for index in range(match.pages * len(PARTS)):
        page, part = divmod(index, len(PARTS))
        held = await store.reading.hold(space, store.reading.find(space, match.parts.ids[index * 16 : index * 16 + 16]))
        try:
            expected = page_bytes(prefix[: page + 1], versions[page], part)
            assert bytes(held.view[: len(expected)]) == expected, f"wrong bytes in page {page}, part {part}"
        finally:
            held.release()
    if match.lease is not None:
        store.release_lease(OWNER, match.lease.id)
    return match.pages


prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


class StoreMachine(DiskMachine):
    """The model: which prefixes were ever put, and which were acknowledged as durable (those must never be missed)."""

    space_name = "ns"

    @initialize(recipes=st.booleans(), policy=st.sampled_from(NAMES))
    def start(self, recipes: bool, policy: str) -> None:
        self.ever: set[Prefix] = set()
        self.durable: set[Prefix] = set()
        self.put_number = 0
        self.begin(partial(config, policy=policy))
        self.run(self.store.create_namespace(settings_named(recipes=recipes)))

    @rule(prefix=prefixes, durable=st.sampled_from([False, False, True]), share=st.booleans(), now=st.booleans())
    def put(self, prefix: Prefix, durable: bool, share: bool, now: bool) -> None:
        self.put_number += 1
        version = (b"shared" if share else b"%d" % self.put_number).ljust(16, b"\0")
        try:
            self.run(put(self.store, self.space, prefix, version, Ack.DURABLE if durable else Ack.MEMORY, now=now))
        except (Busy, NoSpace):
            return
        finally:
            self.ever |= {prefix[: n + 1] for n in range(len(prefix))}
        if durable:
            self.durable |= {prefix[: n + 1] for n in range(len(prefix))}

    @rule(prefix=prefixes)
    def read(self, prefix: Prefix) -> None:
        pages = self.run(read(self.store, self.space, prefix))
        assert prefix[:pages] in self.ever or not pages
        promised = max((n for n in range(1, len(prefix) + 1) if prefix[:n] in self.durable), default=0)
        assert pages >= promised, f"{promised} pages of {prefix} are durable, {pages} were found"

    @rule(prefix=prefixes)
    def give_up_a_put(self, prefix: Prefix) -> None:
        async def half() -> None:
            under_way = await self.store.begin_put(OWNER, self.space, PutRequest(b"x" * 16, tokens_of(prefix), {}, 0, PARTS, Ack.MEMORY))
            self.store.abort_put(under_way)

        try:
            self.run(half())
        except Busy:
            return

    @rule()
    def check_while_serving(self) -> None:
        """In between, with the mover and the writer at work."""

        async def last() -> CheckReport | CheckProgress:
            return [step async for step in check_running(self.store, self.store.all_spaces(), lambda: True)][-1]

        report = self.run(last())
        assert isinstance(report, CheckReport)
        assert report.clean, report.damage

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.settle())
            check(self.store)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for prefix in sorted(self.durable):
                assert self.run(read(self.store, self.space, prefix)) == len(prefix)
            self.end()


TestStore = StoreMachine.TestCase
TestStore.settings = EXAMPLES


@pytest.mark.usefixtures("never_blocks")
async def test_overflowing_dram_demotes_and_promotes_without_blocking(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", ssd_bytes=4 << 20, put_wait_s=10.0)) as store:
        space = await store.create_namespace(settings_named())
        contexts = [(i, i + 1, i + 2) for i in range(0, 120, 3)]
        for number, context in enumerate(contexts):
            await put(store, space, context, (b"%d" % number).ljust(16))
        assert store.stats.demoted_pages > 50
        for context in contexts:
            assert await read(store, space, context) == 3
        assert store.stats.promoted_blobs > 0, "all was read around DRAM"  # on a slow disk most is, as no room comes in time
        await store.settle()
        check(store)


@pytest.mark.usefixtures("never_blocks")
async def test_everything_comes_back_after_a_clean_stop(tmp_path: Path) -> None:
    contexts = [(i, i + 1, i + 2) for i in range(0, 30, 3)]
    async with Store(config(tmp_path / "d", ssd_bytes=4 << 20, put_wait_s=10.0)) as store:
        space = await store.create_namespace(settings_named())
        for context in contexts:
            await put(store, space, context, b"v" * 16)
    async with Store(config(tmp_path / "d", ssd_bytes=4 << 20)) as store:
        for context in contexts:
            assert await read(store, store.space("default", "ns"), context) == 3
        await store.settle()
        check(store)


async def test_retained_pages_are_not_given_up_for_newer_ones(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        kept: list[Prefix] = []
        try:
            for number in range(200):
                await put(store, space, (number,), b"v" * 16, Ack.DURABLE)
                kept.append((number,))
        except NoSpace:
            pass
        assert 10 < len(kept) < 200
        for number in range(1000, 1100):
            try:
                await put(store, space, (number,), b"v" * 16)
            except Busy:
                await asyncio.sleep(0.05)
        for context in kept:
            assert await read(store, space, context) == 1
        await store.settle()
        check(store)


async def test_a_put_that_is_refused_says_how_much_of_its_prefix_is_there(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=1 << 20, ssd_bytes=20 * 5000)) as store:
        space = await store.create_namespace(settings_named())
        prefix, kept = tuple(range(1000, 1008)), 0
        await put(store, space, prefix[:3], b"v" * 16, Ack.DURABLE)
        with pytest.raises(NoSpace):  # noqa: PT012 - until SSD is full
            for kept in range(100):
                await put(store, space, (kept,), b"v" * 16, Ack.DURABLE)
        with pytest.raises(NoSpace) as refused:
            await put(store, space, prefix, b"v" * 16, Ack.DURABLE)
        slots = space.tree.path_slots(space.tree.match(tokens_of(prefix)))
        assert (len(slots), refused.value.done_pages) == (8, 3), "all can be read, and three are durable"
        assert [space.is_durable(int(slot)) for slot in slots] == [True] * 3 + [False] * 5
        with pytest.raises(NoSpace) as refused:
            await put(store, space, (*prefix, 5, 6), b"v" * 16, Ack.DURABLE, first=8)
        assert refused.value.done_pages == 3
        with pytest.raises(NoSpace) as refused:
            await put(store, space, (999,), b"v" * 16, Ack.DURABLE)
        assert refused.value.done_pages == 0
        with pytest.raises(NoSpace, match="fewer pages at once") as refused:
            await store.begin_put(OWNER, space, PutRequest(b"w" * 16, tokens_of((*prefix, *range(400))), {}, 0, PARTS, Ack.MEMORY))
        assert refused.value.done_pages == 8, "of a put that is not to be durable"
        check(store)


async def test_pages_past_their_retention_make_room(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        for number in range(200):
            await put(store, space, (number,), b"v" * 16, Ack.DURABLE)
        assert await read(store, space, (199,)) == 1
        assert store.stats.evicted_ssd_pages > 50
        await store.settle()
        check(store)


async def test_leased_pages_stay(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", ssd_bytes=1 << 20, put_wait_s=10.0)) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        await put(store, space, (1, 2), b"v" * 16)
        match = store.match(space, tokens_of((1, 2)), {}, owner=OWNER, lease_s=60, parts=True)
        for number in range(10, 400):
            await put(store, space, (number,), b"v" * 16)
        assert store.match(space, tokens_of((1, 2)), {}, parts=True).dram_pages == 2
        assert match.lease is not None
        store.release_owner(OWNER)
        assert len(store.leases) == 0
        await store.settle()
        check(store)


async def test_first_commit_wins(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        requests = [PutRequest(v * 16, tokens_of((1, 2)), {}, 0, PARTS, Ack.MEMORY) for v in (b"a", b"b")]
        both = [await store.begin_put(OWNER, space, request) for request in requests]
        for under_way in both:
            for page in range(2):
                for part, part_range in enumerate(PARTS):
                    data = page_bytes((1, 2)[: page + 1], under_way.request.put_id, part)
                    sizes = SPEC.slice_layout(part_range).sizes
                    view, _ = under_way.locate(page, part, 0, len(data), len(sizes))
                    view[:] = data
                    digests = [slice_digest(data[o : o + s]) for o, s in zip(SPEC.slice_layout(part_range).offsets, sizes, strict=False)]
                    under_way.received(page, part, 0, digests, b"".join(digests))
        assert await store.commit_put(both[1]) == PutResult(2, 0)
        assert await store.commit_put(both[0]) == PutResult(0, 2)
        assert await read(store, space, (1, 2)) == 2
        assert space.tree.version_of(int(space.tree.path_slots(space.tree.match(tokens_of((1, 2))))[0])) == b"b" * 16
        check(store)


async def test_a_commit_while_slices_are_being_written_is_busy_and_not_wrong(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        for still_written in (True, False):
            under_way = await store.begin_put(OWNER, space, PutRequest(b"a" * 16, tokens_of((1,)), {}, 0, PARTS, Ack.MEMORY))
            sizes = SPEC.slice_layout(PARTS[0]).sizes
            under_way.locate(0, 0, 0, sum(sizes), len(sizes))
            if not still_written:
                under_way.release_writer(0, 0, 0, len(sizes))
            with pytest.raises(Busy if still_written else BadRequest) as caught:
                await store.commit_put(under_way)
            assert bool(caught.value.retry_after_ms) == still_written
            assert under_way.closed
            if still_written:
                under_way.release_writer(0, 0, 0, len(sizes))
        check(store)


async def test_a_put_needs_its_parent(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        with pytest.raises(MissingParent):
            await put(store, space, (1, 2, 3), b"v" * 16, first=2)
        check(store)


async def test_namespaces(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", ssd_bytes=2 << 20)) as store:
        space = await store.create_namespace(settings_named())
        assert await store.create_namespace(settings_named()) is space
        with pytest.raises(Conflict):
            await store.create_namespace(NamespaceSettings("default", "ns", "another model", SPEC))
        with pytest.raises(Conflict):
            await store.create_namespace(settings_named("other-name"))
        with pytest.raises(UnknownNamespace):
            store.space("another tenant", space.id)
        with pytest.raises(BadRequest):
            NamespaceSettings("default", "w", "m", KVSpec(4, (Component("window", 1, 1, 8, window=16),)))
        other = await store.create_namespace(NamespaceSettings("default", "other", "another model", SPEC))
        for number in range(20):
            await put(store, space, (number,), b"v" * 16, Ack.DURABLE)
            await put(store, other, (number,), b"v" * 16, Ack.DURABLE)
        used = store.figures.usage()
        await store.drop_namespace(space)
        assert store.figures.usage()["ssd"].used == used["ssd"].used // 2
        assert store.figures.usage()["dram"].used <= used["dram"].used
        assert await read(store, other, (7,)) == 1
        check(store)
    async with Store(config(tmp_path / "d")) as store:
        assert [s.settings.name for s in store.namespaces("default")] == ["other"]
        assert await read(store, store.space("default", "other"), (7,)) == 1
        again = await store.create_namespace(settings_named())
        assert await read(store, again, (7,)) == 0
