"""Work whose asker is gone before it ends: a read from SSD that fails, a namespace that is created and dropped meanwhile."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from kvstore.store import Ack, Store
from kvstore.store.checking.check import check
from kvstore.tiers.ssd import BlobBatch
from tests.store.test_store import PARTS, SPEC, config, put, settings_named


async def test_a_read_that_fails_after_its_reader_left_is_nobodys_unhandled_error(tmp_path: Path) -> None:
    loop, unhandled = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    async with Store(config(tmp_path / "first")) as store:
        await put(store, await store.create_namespace(settings_named()), (1, 2), b"v" * 16, Ack.DURABLE)
    async with Store(config(tmp_path / "first")) as store:  # what it loads is on SSD only
        space = store.space("default", "ns")
        await store.settle()
        row = space.rows_of(int(space.tree.live_slots()[0]))[0]
        lost = BlobBatch(delete=[(space.number, space.blobs.id_of(row), space.stored_bytes(row))])
        await asyncio.to_thread(store.blob_file.commit, lost)
        reader = asyncio.create_task(store.reading.hold(space, row))
        while not store.reading._loading:
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        while store.reading._loading:
            await asyncio.sleep(0.001)
        await store.settle()
        check(store)
    del reader  # whose traceback holds the read's task
    gc.collect()
    await asyncio.sleep(0)
    assert not unhandled, unhandled


async def test_a_namespace_created_anew_outlives_an_earlier_creation_that_is_cancelled(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        async with store._writeback.lock:  # so that all of this happens while the first record is being written
            first = asyncio.create_task(store.create_namespace(settings_named()))
            await asyncio.sleep(0)
            drop = asyncio.create_task(store.drop_namespace(store.space("default", "ns")))
            await asyncio.sleep(0)
            second = asyncio.create_task(store.create_namespace(settings_named()))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
        await drop
        assert store.space("default", "ns") is await second


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_large_namespace_is_dropped_in_steps(tmp_path: Path, cancelled: bool) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        for number in range(5000):
            row = space.blobs.add(number.to_bytes(16, "little"), SPEC.slice_layout(PARTS[0]))
            space.blobs.pages[row] = 1
        drop = asyncio.create_task(store.drop_namespace(space))
        left = [5000]
        while space.blobs.count:
            await asyncio.sleep(0)
            left.append(space.blobs.count)
            if cancelled:
                drop.cancel()
        assert len(set(left)) > 3, "nobody else had a turn"
        await asyncio.gather(drop, return_exceptions=True)
        assert drop.cancelled() == cancelled
        await store.settle()
        check(store)


async def test_a_namespace_whose_drop_is_cancelled_is_gone_all_the_same(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2), b"v" * 16, Ack.DURABLE)
        async with store._writeback.lock:
            drop = asyncio.create_task(store.drop_namespace(space))
            await asyncio.sleep(0)
            drop.cancel()
            await asyncio.gather(drop, return_exceptions=True)
        await store.settle()
        check(store)
    async with Store(config(tmp_path / "d")) as store:
        assert store.namespaces("default") == []
        assert store.figures.usage()["ssd"].used == 0
