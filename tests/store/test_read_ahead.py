"""Blobs brought up before they are asked for: real stores on real files."""

import asyncio
from pathlib import Path

import pytest

from kvstore.digests import DIGEST_BYTES
from kvstore.store import Ack, NamespaceSettings, Space, Store
from kvstore.store.checking.check import check
from tests.store.test_arriving import DATA, LARGE, MIB, damage, large_store, put_large, stopping_before
from tests.waiting import until

Blobs = list[tuple[int, bytes]]


async def cold_pages(store: Store, count: int) -> tuple[Space, Blobs]:
    """Pages that are on SSD only, the first of them as in `test_arriving`: the rows and ids of their blobs."""
    space = await store.create_namespace(NamespaceSettings("default", "large", "model", LARGE, retention_s=0))
    found: Blobs = []
    for number in range(count):
        await put_large(store, space, number + 1, DATA[number:] + DATA[:number], ack=Ack.DURABLE)
        await store.settle()
        for slot in space.tree.live_slots().tolist():
            (row,) = space.rows_of(slot)
            if row not in [known for known, _ in found]:
                found.append((row, space.blobs.id_of(row)))
        space.clear_slot(found[-1][0])
    return space, found


def there(store: Store, space: Space, blobs: Blobs) -> list[bool]:
    return [store.reading.resident(space, row) is not None for row, _ in blobs]


def loading(store: Store, space: Space, blob: tuple[int, bytes]) -> bool:
    return (space.number, blob[0]) in store.reading._loading


def ids(blobs: Blobs) -> bytes:
    return b"".join(blob_id for _, blob_id in blobs)


async def test_what_is_wanted_comes_up_and_is_itself(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, blobs = await cold_pages(store, 3)
        store.reading.ahead.want(space, ids(blobs))
        await until(lambda: all(there(store, space, blobs)))
        await until(lambda: store.stats.read_ahead_blobs == 3)
        assert store.stats.promoted_blobs == 3
        for number, (row, _) in enumerate(blobs):
            held = await store.reading.hold(space, row)
            assert held.view[: len(DATA)] == DATA[number:] + DATA[:number]
            held.release()
        store.reading.ahead.want(space, ids(blobs))
        await store.settle()
        assert store.stats.promoted_blobs == 3, "what is in DRAM was read again"
        check(store)


async def test_what_somebody_waits_for_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        space, blobs = await cold_pages(store, 2)
        with stopping_before(monkeypatch, 2) as gate:
            held = await store.reading.hold(space, blobs[0][0], early=True)
            store.reading.ahead.want(space, ids(blobs))
            await asyncio.sleep(0.05)
            assert not loading(store, space, blobs[1]), "the disk is read for nobody while somebody waits for it"
            gate.set()
            await until(lambda: all(there(store, space, blobs)))
        held.release()
        await until(lambda: store.stats.read_ahead_blobs == 1)
        check(store)


async def test_who_asks_for_what_is_being_read_ahead_gets_it_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        space, blobs = await cold_pages(store, 1)
        with stopping_before(monkeypatch, 2) as gate:
            store.reading.ahead.want(space, ids(blobs))
            await until(lambda: loading(store, space, blobs[0]))
            held = await store.reading.hold(space, blobs[0][0], early=True)
            await held.wait_for(1)
            assert held.view[: 2 * MIB] == DATA[: 2 * MIB]
            assert not held.has(2)
            gate.set()
            await held.wait_for(4)
        held.release()
        await until(lambda: store.stats.read_ahead_blobs == 1)
        assert store.stats.promoted_blobs == 1, "it was read twice"
        check(store)


async def test_what_is_unknown_gone_or_dropped_is_passed_over(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, blobs = await cold_pages(store, 2)
        store.reading.ahead.want(space, b"?" * DIGEST_BYTES + ids(blobs[1:]))
        await until(lambda: there(store, space, blobs) == [False, True])
        store.reading.ahead.want(space, ids(blobs[:1]))
        await store.drop_namespace(space)
        store.reading.ahead.want(space, ids(blobs))
        await asyncio.sleep(0.02)
        await store.settle()
        assert not store.figures.usage()["dram"].used
        check(store)


async def test_without_room_nothing_comes_up_and_nothing_leased_goes(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, blobs = await cold_pages(store, 7)
        held = [await store.reading.hold(space, row) for row, _ in blobs[:5]]
        try:
            store.reading.ahead.want(space, ids(blobs[5:]))
            await until(lambda: not store.reading.ahead.busy)
            full = there(store, space, blobs)
            assert all(full[:5])
            assert not all(full)
        finally:
            for one in held:
                one.release()
        await store.settle()
        check(store)


async def test_a_damaged_blob_is_a_miss_and_the_next_ones_are_still_to_be_had(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, blobs = await cold_pages(store, 2)
        damage(tmp_path, 2)
        store.reading.ahead.want(space, ids(blobs))
        await until(lambda: not store.reading.ahead.busy)
        assert store.stats.corrupt_blobs == 1
        held = await store.reading.hold(space, blobs[1][0])
        assert held.view[: len(DATA)] == DATA[1:] + DATA[:1]
        held.release()
        await store.settle()
        check(store)


async def test_a_stop_in_the_midst_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopping_before(monkeypatch, 2) as gate:
        async with large_store(tmp_path) as store:
            gate.set()
            space, blobs = await cold_pages(store, 2)
            gate.clear()
            store.reading.ahead.want(space, ids(blobs))
            await until(lambda: loading(store, space, blobs[0]))
            asyncio.get_running_loop().call_later(0.05, gate.set)
    assert not store.reading.ahead.busy
    assert not store.stuck
