"""DRAM made ahead of need: how much, for whom, and that it is nobody's loss."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import Busy
from kvstore.store import Ack, NamespaceSettings, Store
from kvstore.store.checking.check import check
from kvstore.tiers.dram import Arena
from kvstore.tiers.segments import Room, SlotClass
from tests.store.test_arriving import LARGE, MIB, put_large
from tests.store.test_store import SPEC, config, put, settings_named

AHEAD = 200_000


def spare_bytes(store: Store) -> int:
    return store.figures.dram_segments.reserved - store.figures.dram_segments.held


def with_ahead(folder: Path, **changes: Any) -> Store:
    return Store(config(folder / "d", **{"dram_bytes": 4_000_000, "ssd_bytes": 4_000_000, "ahead_bytes": AHEAD, **changes}))


async def test_a_class_has_as_much_ready_as_it_holds(tmp_path: Path) -> None:
    async with with_ahead(tmp_path) as store:
        space = await store.create_namespace(settings_named())
        assert store.figures.dram_segments.count == 0, "memory was made for nobody"
        await put(store, space, (1,), b"v" * 16)
        await store.settle()
        few = spare_bytes(store)
        assert 0 < few <= store.figures.dram_segments.held
        for number in range(100):
            await put(store, space, (number, 2), b"v" * 16)
        await store.settle()
        assert few < spare_bytes(store) <= AHEAD
        check(store)


async def test_a_store_that_starts_has_room_for_what_is_on_ssd(tmp_path: Path) -> None:
    async with with_ahead(tmp_path) as store:
        space = await store.create_namespace(settings_named())
        for number in range(30):
            await put(store, space, (number, 2), b"v" * 16, Ack.DURABLE)
    async with with_ahead(tmp_path) as store:
        await store.settle()
        there = store.figures.dram_segments
        assert (there.held, store.figures.usage()["dram"].used) == (0, 0)
        assert AHEAD // 2 < there.reserved <= AHEAD
        space = store.space("default", "ns")
        (await store.reading.hold(space, space.rows_of(int(space.tree.live_slots()[0]))[0])).release()
        assert store.figures.dram_segments.held, "it was made for other blobs"
        check(store)


async def test_a_store_with_little_on_ssd_makes_no_more_than_that(tmp_path: Path) -> None:
    async with with_ahead(tmp_path) as store:
        await put(store, await store.create_namespace(settings_named()), (1,), b"v" * 16, Ack.DURABLE)
    async with with_ahead(tmp_path) as store:
        await store.settle()
        assert 0 < store.figures.dram_segments.reserved < AHEAD // 4


async def test_nothing_is_made_ahead_if_that_is_off(tmp_path: Path) -> None:
    async with with_ahead(tmp_path, ahead_bytes=0) as store:
        await put(store, await store.create_namespace(settings_named()), (1,), b"v" * 16, Ack.DURABLE)
        await store.settle()
        assert spare_bytes(store) == 0
    async with with_ahead(tmp_path, ahead_bytes=0) as store:
        await store.settle()
        assert store.figures.dram_segments.count == 0


async def test_spares_of_one_size_are_no_loss_for_another(tmp_path: Path) -> None:
    """All of DRAM can be filled with blobs of one size although spares of another were made."""
    async with with_ahead(tmp_path, dram_bytes=24 * MIB, ahead_bytes=12 * MIB, ssd_bytes=4 * MIB) as store:
        space = await store.create_namespace(settings_named())
        for number in range(600):
            await put(store, space, (number,), b"v" * 16)
        await store.settle()
        assert spare_bytes(store) > 3 * MIB, "there are no spares: this test shows nothing"
        large = await store.create_namespace(NamespaceSettings("default", "large", "model", LARGE))
        for token in range(3):
            await put_large(store, large, token, np.random.default_rng(token).bytes(LARGE.page_bytes))
        assert large.tree.live_slots().size == 3
        await store.settle()
        assert store.figures.dram_segments.reserved <= 24 * MIB
        check(store)


async def test_a_machine_without_memory_is_asked_again_by_who_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_ahead(tmp_path) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1,), b"v" * 16, Ack.DURABLE)

    def refuse(room: Room) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.store.dram.residency.make_segment", refuse)
        async with with_ahead(tmp_path) as store:
            await store.settle()
            assert store.figures.dram_segments.reserved == 0
            patch.undo()
            space = store.space("default", "ns")
            (await store.reading.hold(space, space.rows_of(int(space.tree.live_slots()[0]))[0])).release()
            await store.settle()
            assert store.stats.promoted_blobs == 1
            check(store)


async def test_a_stop_waits_for_the_segment_that_is_being_made(tmp_path: Path) -> None:
    async with with_ahead(tmp_path) as store:
        space = await store.create_namespace(settings_named())
        for number in range(20):
            await put(store, space, (number,), b"v" * 16)
    assert not store._residency.spares.busy
    assert not store._residency._growing
    assert store.figures.dram_segments.reserved == 0


async def test_spares_are_kept_while_idle_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.dram.residency._IDLE_S", 0.02)
    async with with_ahead(tmp_path) as store:
        space = await store.create_namespace(settings_named())
        for number in range(200):
            await put(store, space, (number,), b"v" * 16)
        await store.settle()
        for number in range(200):
            await store.prefixes.delete(space, np.full(SPEC.page_tokens, number, np.uint32).tobytes(), {}, 0)
        async with asyncio.timeout(10):
            while store.figures.dram_segments.reserved > AHEAD + 40_000:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert AHEAD <= store.figures.dram_segments.reserved <= AHEAD + 40_000


def test_a_spare_takes_nothing_from_others() -> None:
    arena = Arena(1 << 20, 1 << 16)
    first = SlotClass("a", 4096)
    assert arena.reserve_spare(first, 100) is None
    rooms = []
    with contextlib.suppress(AssertionError):
        while (room := arena.reserve_segment(SlotClass("b", 4096))) is not None:
            rooms.append(room)
    assert rooms
    assert arena.reserve_spare(first, 1 << 20) is None, "there is no room"
    arena.cancel_segment(rooms[0])
    assert arena.reserve_spare(first, 1 << 20) is not None


async def test_a_full_tier_goes_on_as_without_spares(tmp_path: Path) -> None:
    async with with_ahead(tmp_path, dram_bytes=40 * 5000, ssd_bytes=60 * 5000, ahead_bytes=100_000) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        for number in range(60):
            with contextlib.suppress(Busy):
                await put(store, space, (number,), b"v" * 16)
        await store.settle()
        assert store.figures.dram_segments.reserved <= 40 * 5000
        check(store)
