"""Blobs brought up before they are asked for: real stores on real files."""

import asyncio
from pathlib import Path

import pytest

from kvstore.digests import DIGEST_BYTES
from kvstore.store import Ack, NamespaceSettings, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.dram import read_ahead
from kvstore.store.quotas import Quota
from tests.store.test_arriving import DATA, LARGE, MIB, damage, large_store, put_large, stopping_before
from tests.waiting import until

Blobs = list[tuple[int, bytes]]


async def cold_pages(store: Store, count: int, tenant: str = "default") -> tuple[Space, Blobs]:
    """Pages that are on SSD only, the first of them as in `test_arriving`: the rows and ids of their blobs."""
    space = await store.create_namespace(NamespaceSettings(tenant, "large", "model", LARGE, retention_s=0))
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
        assert there(store, space, blobs) == [False, True], "what stands beside it is read all the same"
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


async def test_a_stop_before_it_began_leaves_nothing(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, blobs = await cold_pages(store, 1)
        store.reading.ahead.want(space, ids(blobs))
        await store.reading.ahead.stop()
        assert not store.reading.ahead.busy
        store.reading.ahead.want(space, ids(blobs))
        assert not store.reading.ahead.busy, "nothing is begun after a stop"


async def test_who_names_more_than_there_is_room_for_waits_for_those_who_name_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MOST_WAITING", 2)
    async with large_store(tmp_path) as store:
        many, its = await cold_pages(store, 3, "many")
        few, one = await cold_pages(store, 1, "few")
        with stopping_before(monkeypatch, 2) as gate:
            store.reading.ahead.want(many, ids(its[:1]))
            await until(lambda: loading(store, many, its[0]))
            store.reading.ahead.want(many, ids(its[1:]))
            store.reading.ahead.want(few, ids(one))
            gate.set()
            await until(lambda: not store.reading.ahead.busy)
        assert there(store, few, one) == [True]
        assert there(store, many, its) == [True, True, False]
        await store.settle()
        check(store)


async def test_a_tenant_without_room_takes_nothing_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        full, its = await cold_pages(store, 2, "full")
        other, one = await cold_pages(store, 1, "other")
        store.quotas.replace({"full": Quota(dram=1)})
        store.reading.ahead.want(full, ids(its))
        store.reading.ahead.want(other, ids(one))
        await until(lambda: not store.reading.ahead.busy)
        assert there(store, full, its) == [False, False]
        assert there(store, other, one) == [True]
        other.clear_slot(one[0][0])
        waits: list[float] = []
        allocate = store.reading._allocate

        async def noted(space: Space, nbytes: int, wait_s: float) -> int:
            waits.append(wait_s)
            return await allocate(space, nbytes, wait_s)

        monkeypatch.setattr(store.reading, "_allocate", noted)
        (await store.reading.hold(other, one[0][0])).release()
        (await store.reading.hold(full, its[0][0])).release()
        assert waits[0] > 0, "it would not wait for room because another tenant has waited in vain"
        assert waits[1] == 0, "it has just waited in vain"
        await store.settle()
        check(store)


async def test_the_disk_is_left_to_who_is_served_around_dram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        full, its = await cold_pages(store, 1, "full")
        other, one = await cold_pages(store, 1, "other")
        store.quotas.replace({"full": Quota(dram=1)})
        with stopping_before(monkeypatch, 2) as gate:
            waiting = asyncio.create_task(store.reading.hold(full, its[0][0]))
            await until(lambda: store.reading._staging._value < 4)
            store.reading.ahead.want(other, ids(one))
            await asyncio.sleep(0.05)
            assert not loading(store, other, one[0]), "the disk is read for nobody while somebody waits for it"
            gate.set()
            (await waiting).release()
        await until(lambda: there(store, other, one) == [True])
        await store.settle()
        check(store)


async def test_of_what_one_request_names_no_more_is_read_than_is_soon_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MOST_BYTES", 9 * MIB)
    async with large_store(tmp_path) as store:
        space, blobs = await cold_pages(store, 3)
        store.reading.ahead.want(space, ids(blobs))
        await until(lambda: not store.reading.ahead.busy)
        assert there(store, space, blobs) == [True, True, False], "up to the one that passes the limit"
        check(store)
