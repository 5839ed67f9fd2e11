"""Blobs moved in DRAM for the sake of other part sizes, in a real store: nothing is lost, and nothing in use is moved."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.digests import slice_digest
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store, StoreConfig
from kvstore.store.checking.check import check
from kvstore.store.dram.leased import LeasedBlobs
from kvstore.store.dram.vacate import Vacator
from kvstore.tiers.watermarks import Watermarks
from tests.store.flat_pages import TWO, begin, key_of, pages_of, put_pages, send, settings_of
from tests.store.test_store import config as machine_config
from tests.store.test_store import put as put_prefix
from tests.store.test_store import settings_named, tokens_of

OWNER = 1
PART = PartRange(0, 0, 1, 0, 1)
SMALL, LARGE = 700, 4_500


def config(data_dir: Path, move_share: float = 0.5) -> StoreConfig:
    """A DRAM tier in which nothing needs to be evicted below 97%."""
    return StoreConfig(
        data_dir=data_dir, dram_bytes=2 << 20, ssd_bytes=16 << 20, max_pages=20_000, journal_bytes=64 << 20,
        watermarks=Watermarks(0.97, 0.96), shutdown_s=0.0, put_wait_s=5.0, move_share=move_share,
    )  # fmt: skip


async def namespace(store: Store, half: int) -> Space:
    spec = KVSpec(1, (Component("full", 1, 1, half, "u8"),))
    return await store.create_namespace(NamespaceSettings("default", f"half-{half}", "model", spec))


def content(space: Space, token: int) -> bytes:
    return np.random.default_rng([token, space.number]).bytes(space.spec.page_bytes)


async def put(store: Store, space: Space, token: int) -> None:
    request = PutRequest(token.to_bytes(16, "little"), np.uint32(token).tobytes(), {}, 0, (PART,), Ack.MEMORY)
    under_way = await store.begin_put(OWNER, space, request)
    data = content(space, token)
    view, _ = under_way.locate(0, 0, 0, len(data), 1)
    view[:] = data
    digest = slice_digest(view)
    under_way.received(0, 0, 0, [digest], digest)
    await store.commit_put(under_way)


def page_of(space: Space, token: int) -> int:
    return int(space.tree.path_slots(space.tree.match(np.uint32(token).tobytes()))[0])


def row_of(space: Space, token: int) -> int:
    return space.rows_of(page_of(space, token))[0]


def slot_of(space: Space, token: int) -> int:
    return int(space.blobs.slot[row_of(space, token)])


async def read(store: Store, space: Space, token: int) -> None:
    held = await store.reading.hold(space, row_of(space, token))
    assert bytes(held.view[: space.spec.page_bytes]) == content(space, token)
    held.release()


async def with_holes(store: Store, keep: float = 0.5, share: float = 0.9) -> tuple[Space, list[int]]:
    """A namespace that filled `share` of DRAM, and lost pages at random until `keep` of them were left."""
    space, tokens = await namespace(store, SMALL), list[int]()
    while store.figures.usage()["dram"].fraction < share:
        tokens.append(len(tokens))
        await put(store, space, tokens[-1])
    random.Random(1).shuffle(tokens)
    for token in tokens[int(keep * len(tokens)) :]:
        space.remove_page(page_of(space, token))
    return space, tokens[: int(keep * len(tokens))]


def vacator(store: Store) -> Vacator:
    return store._residency._vacator


async def settle(store: Store) -> None:
    await store.settle()
    check(store)


@pytest.mark.usefixtures("never_blocks")
async def test_another_part_size_takes_over_without_a_restart_and_without_evicting(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        old, kept = await with_holes(store)
        dropped, new, put_tokens = store.stats.dropped_pages, await namespace(store, LARGE), list(range(2**20, 2**20 + 90))

        async def load(tokens: list[int]) -> None:
            for token in tokens:
                await put(store, new, token)
                await read(store, old, random.Random(token).choice(kept))

        await asyncio.gather(*(load(put_tokens[worker::3]) for worker in range(3)))
        assert store.figures.usage()["dram"].fraction > 0.8
        assert (store.stats.dropped_pages, store.stats.evicted_dram_pages, store.stats.demoted_pages) == (dropped, 0, 0)
        assert store.stats.moved_blobs > 50
        assert store.stats.moved_stored_bytes <= (2 << 20) // 8 + store.stats.put_bytes
        for token in kept:
            await read(store, old, token)
        for token in put_tokens:
            await read(store, new, token)
        await settle(store)


async def test_without_moving_the_same_is_evicted_for(tmp_path: Path) -> None:
    """What the test above would not notice if moving were not needed there."""
    async with Store(config(tmp_path / "d", move_share=0.0)) as store:
        await with_holes(store)
        new = await namespace(store, LARGE)
        for token in range(90):
            await put(store, new, token)
        assert store.stats.moved_blobs == 0
        assert store.stats.demoted_pages > 0
        await settle(store)


async def test_what_is_leased_or_pinned_is_not_moved(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, kept = await with_holes(store)
        leased, pinned = kept[:3], kept[3:6]
        for token in leased:
            assert store.match(space, np.uint32(token).tobytes(), {}, owner=OWNER, lease_s=60).lease is not None
        held = [await store.reading.hold(space, row_of(space, token)) for token in pinned]
        before = {token: slot_of(space, token) for token in kept}
        for _ in range(100):
            if not await vacator(store).make_room(store._arena.room + 1, 5.0):
                break
        after = {token: slot_of(space, token) for token in kept}
        assert sum(before[token] != after[token] for token in kept) > len(kept) // 10
        assert all(before[token] == after[token] for token in leased + pinned)
        for item in held:
            item.release()
        for token in kept:
            await read(store, space, token)
        store.release_owner(OWNER)
        await settle(store)


async def test_slots_of_a_put_under_way_stay_where_they_are(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, kept = await with_holes(store)
        request = PutRequest(b"p" * 16, np.uint32(10**6).tobytes(), {}, 0, (PART,), Ack.MEMORY)
        under_way = await store.begin_put(OWNER, space, request)
        data = content(space, 10**6)
        view, _ = under_way.locate(0, 0, 0, len(data), 1)
        while await vacator(store).make_room(store._arena.room + 1, 5.0):
            pass
        view[:] = data
        digest = slice_digest(view)
        under_way.received(0, 0, 0, [digest], digest)
        await store.commit_put(under_way)
        for token in [*kept, 10**6]:
            await read(store, space, token)
        await settle(store)


async def begin_to_vacate(store: Store, space: Space, kept: list[int]) -> list[int]:
    """Start to move, and return the pages whose blobs are being moved: those that are pinned, as nothing else is under way."""
    assert vacator(store)._start(40_000)
    while vacator(store).busy:
        await asyncio.sleep(0)
        if moving := [token for token in kept if space.blobs.pins[row_of(space, token)]]:
            return moving
    raise AssertionError("nothing is moved")


async def test_a_fetch_that_begins_during_the_move_keeps_its_bytes(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, kept = await with_holes(store)
        before = {token: slot_of(space, token) for token in kept}
        moving = await begin_to_vacate(store, space, kept)
        held = store.reading.hold_resident(space, row_of(space, moving[0]))
        assert held is not None
        await store.settle()
        assert slot_of(space, moving[0]) == before[moving[0]]
        assert all(slot_of(space, token) != before[token] for token in moving[1:])
        await put(store, space, 10**6)  # would take a slot that was freed too early
        assert bytes(held.view[: space.spec.page_bytes]) == content(space, moving[0])
        held.release()
        for token in kept:
            await read(store, space, token)
        await settle(store)


async def test_what_is_leased_or_removed_during_the_move_is_not_moved(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, kept = await with_holes(store, keep=0.7)
        before = {token: slot_of(space, token) for token in kept}
        moving = await begin_to_vacate(store, space, kept)
        assert len(moving) >= 2
        leased, removed = moving[:2]
        store.match(space, np.uint32(leased).tobytes(), {}, owner=OWNER, lease_s=60)
        space.remove_page(page_of(space, removed))
        await store.settle()
        assert slot_of(space, leased) == before[leased]
        kept.remove(removed)
        for token in kept:
            await read(store, space, token)
        store.release_owner(OWNER)
        await settle(store)


async def test_a_namespace_dropped_during_the_move_leaves_nothing(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, kept = await with_holes(store)
        await begin_to_vacate(store, space, kept)
        await store.drop_namespace(space)
        await settle(store)
        assert store.figures.usage()["dram"].used == 0


async def test_a_stop_during_the_move_waits_for_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, kept = await with_holes(store)
        await begin_to_vacate(store, space, kept)
    assert not vacator(store).busy


async def test_empty_segments_go_back_to_the_system_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.dram.residency._IDLE_S", 0.02)
    async with Store(config(tmp_path / "d")) as store:
        await with_holes(store, keep=0.0)
        while store.figures.dram_segments.reserved > 10_000:
            await asyncio.sleep(0.01)
        assert (store.figures.dram_segments.count, store.figures.dram_segments.held) == (1, 0)
        await settle(store)


async def test_what_a_run_was_moved_from_is_not_leased(tmp_path: Path) -> None:
    async with Store(machine_config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        for prefix in ((1,), (2,)):
            await put_prefix(store, space, prefix, b"a" * 16, Ack.MEMORY)
        lease = store.match(space, tokens_of((1,)), {}, owner=OWNER, lease_s=60).lease
        before = int(space.tree.path_slots(space.tree.match(tokens_of((1,))))[0])
        await put_prefix(store, space, (1, 3, 4), b"a" * 16, Ack.MEMORY, first=1)
        after = int(space.tree.path_slots(space.tree.match(tokens_of((1,))))[0])
        assert before != after, "the run was not moved"
        assert await leased_rows(space) == set(space.rows_of(after))
        assert lease is not None
        store.release_lease(OWNER, lease.id)
        assert space.tree.pages.leases[before], "the place says what it did"
        assert not await leased_rows(space)
        check(store)


async def leased_rows(space: Space) -> set[int]:
    leased = await LeasedBlobs.of(space)
    try:
        return set(np.flatnonzero(leased.needs(np.arange(space.blobs.slots.high))).tolist())
    finally:
        leased.close()


@pytest.mark.parametrize("seed", range(12))
async def test_what_is_leased_while_it_is_looked_for_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Leases come and go, and runs of pages are moved, between places that have been looked at and others."""
    monkeypatch.setattr("kvstore.store.dram.leased._SLOTS_AT_ONCE", 2)
    monkeypatch.setattr("kvstore.store.dram.leased._LEASED_AT_ONCE", 1)
    draw = random.Random(seed)
    async with Store(machine_config(tmp_path / "d")) as store:
        space, leases, prefixes = await store.create_namespace(settings_named()), list[int](), list[tuple[int, ...]]()

        async def something() -> None:
            if len(prefixes) < 3 or draw.random() < 0.6:
                above = draw.choice([(), *prefixes])
                prefixes.append((*above, len(prefixes)))
                await put_prefix(store, space, prefixes[-1], b"a" * 16, Ack.MEMORY, first=len(above))
            elif lease := store.match(space, tokens_of(draw.choice(prefixes)), {}, owner=OWNER, lease_s=60).lease:
                leases.append(lease.id)
            if leases and draw.random() < 0.3:
                store.release_lease(OWNER, leases.pop(draw.randrange(len(leases))))

        for _ in range(8):
            await something()
        assert store.match(space, tokens_of(prefixes[0]), {}, owner=OWNER, lease_s=60).lease is not None
        looking = asyncio.create_task(LeasedBlobs.of(space))
        while not looking.done():
            await asyncio.sleep(0)
            await something()
        leased = looking.result()
        for _ in range(4):
            await something()
        slots = space.tree.live_slots()
        needed = {row for slot in slots[space.tree.pages.leases[slots] > 0].tolist() for row in space.rows_of(slot)}
        assert leased.needs(np.array(sorted(needed))).all()
        leased.close()
        check(store)


async def test_what_a_leased_page_gets_late_is_leased_too(tmp_path: Path) -> None:
    async with Store(machine_config(tmp_path / "d")) as store:
        space, pages = await store.create_namespace(settings_of(TWO)), pages_of(1)
        await put_pages(store, space, pages, with_state=False)
        slot = space.tree.pages.find_key(key_of(space, pages[0]))
        space.tree.pin(space.tree.path_to(slot))
        late = await begin(store, space, pages)
        send(late, pages)
        leased, before = await LeasedBlobs.of(space), space.rows_of(slot)
        await store.commit_put(late)
        assert len(space.rows_of(slot)) > len(before)
        assert leased.needs(np.array(space.rows_of(slot))).all()
        leased.close()
        space.tree.unpin(key_of(space, pages[0]))
        check(store)
