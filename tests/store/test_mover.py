"""The mover: how much it takes, and that it leaves alone what was used while it was at work."""

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.digests import slice_digest
from kvstore.errors import Busy, NoSpace
from kvstore.kvspec import Component, KVSpec, PartRange, SliceLayout
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.tiers.policies.make import NAMES
from kvstore.tiers.ssd import BlobFile
from kvstore.tiers.watermarks import Watermarks
from tests.store.test_store import OWNER, config, put, read, settings_named, tokens_of

TINY = KVSpec(1, (Component("full", 1, 1, 140, "u8"),))
"""Pages of 280 bytes, whose stored form takes a DRAM slot of 512."""


async def _put_tiny(store: Store, space: Space, token: int) -> None:
    tokens, part = np.uint32(token).tobytes(), PartRange(0, 0, 1, 0, 1)
    under_way = await store.begin_put(OWNER, space, PutRequest(token.to_bytes(16, "little"), tokens, {}, 0, (part,), Ack.MEMORY))
    data = np.random.default_rng(token).bytes(TINY.part_bytes(part))
    view, _ = under_way.locate(0, 0, 0, len(data), 1)
    view[:] = data
    digest = slice_digest(view)
    under_way.received(0, 0, 0, [digest], digest)
    await store.commit_put(under_way)


@pytest.mark.parametrize("policy", NAMES)
async def test_small_pages_are_not_evicted_in_excess(tmp_path: Path, policy: str) -> None:
    """What goes is counted as what it takes up: slots, not the bytes stored in them."""
    settings = config(tmp_path / "d", dram_bytes=400 * 512, ssd_bytes=4 << 20, watermarks=Watermarks(0.8, 0.6), policy=policy)
    async with Store(settings) as store:
        space = await store.create_namespace(NamespaceSettings("default", "tiny", "m", TINY))
        for token in range(340):
            await _put_tiny(store, space, token)
            if store.figures.usage()["dram"].used > 0.8 * settings.dram_bytes:
                await store.settle()
        assert store.stats.evicted_dram_pages, "the mover had nothing to do: this test shows nothing"
        assert store.figures.usage()["dram"].used >= 0.58 * settings.dram_bytes
        check(store)


async def _full_ssd(store: Store) -> Space:
    """SSD is full of what is retained, and DRAM has only that."""
    space = await store.create_namespace(settings_named(retention_s=86_400))
    number = 100
    with contextlib.suppress(NoSpace):
        for number in range(100, 200):
            await put(store, space, (number,), b"r" * 16, Ack.DURABLE)
    assert number < 199, "SSD never got full: this test shows nothing"
    await store.settle()
    return space


@pytest.mark.parametrize("policy", NAMES)
async def test_what_is_used_while_it_is_to_be_written_is_not_dropped(tmp_path: Path, policy: str) -> None:
    async with Store(config(tmp_path / "d", ssd_bytes=20 * 5000, dram_bytes=60 * 5000, policy=policy)) as store:
        space = await _full_ssd(store)
        for number in range(5):
            await put(store, space, (number,), b"m" * 16)
        async with store._writeback.lock:  # the disk is slow
            moving = asyncio.create_task(store._residency.reclaim(1 << 30))
            while not len(store.figures.backlog):
                await asyncio.sleep(0.001)
            assert await read(store, space, (0,)) == 1
            await put(store, space, (0, 7), b"m" * 16, first=1)
        await moving
        assert space.tree.match(tokens_of((0, 7))).pages == 2
        assert not space.tree.match(tokens_of((1,))).pages, "nothing was dropped: this test shows nothing"
        check(store)


async def test_a_durable_put_that_finds_no_space_at_its_commit_is_counted(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", ssd_bytes=20 * 5000, dram_bytes=60 * 5000)) as store:
        await _full_ssd(store)
        assert store.stats.puts_no_space == 1


async def test_a_read_whose_copy_goes_takes_nothing_that_was_put_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_ssd, gate = BlobFile.read, threading.Event()

    def gated(self: BlobFile, namespace: int, blob: bytes, layout: SliceLayout, target: memoryview, **more: Any) -> None:
        gate.wait(10)
        from_ssd(self, namespace, blob, layout, target, **more)

    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        await put(store, space, (1,), b"v" * 16, Ack.DURABLE)
        (slot,) = space.tree.live_slots().tolist()
        rows = space.rows_of(slot)
        for row in rows:
            space.clear_slot(row)
        monkeypatch.setattr(BlobFile, "read", gated)
        fetching = asyncio.create_task(store.reading.hold(space, rows[0]))
        await asyncio.sleep(0)
        await store.prefixes.delete(space, tokens_of((1,)), {}, 0)
        await put(store, space, (1,), b"v" * 16)
        await store._writeback.emptied()
        gate.set()
        (await fetching).release()
        assert await read(store, space, (1,)) == 1
        await store.settle()
        check(store)


async def test_what_is_read_ahead_takes_no_buffer_from_what_is_needed_now(tmp_path: Path) -> None:
    """Around DRAM that is all leased there are four buffers: later blobs of one fetch must not keep them from the next one of another."""
    async with Store(config(tmp_path / "d", put_wait_s=0.05, ssd_bytes=4 << 20)) as store:
        space = await store.create_namespace(settings_named())
        cold = tuple(range(100, 106))
        await put(store, space, cold, b"v" * 16, Ack.DURABLE)
        rows = [row for slot in space.tree.live_slots().tolist() for row in space.rows_of(slot)]
        for row in rows:
            space.clear_slot(row)
        number = 0
        with contextlib.suppress(Busy):
            while True:
                await put(store, space, (number,), b"v" * 16)
                store.match(space, tokens_of((number,)), {}, owner=OWNER, lease_s=60)
                number += 1
        ahead = [asyncio.create_task(store.reading.hold(space, row, asyncio.Event())) for row in rows[1:6]]
        async with asyncio.timeout(20):
            while store.figures.usage()["dram"].used < 0.9 * store.figures.usage()["dram"].capacity:
                await asyncio.sleep(0)
            await asyncio.sleep(0.5)
            (await store.reading.hold(space, rows[0])).release()
        for task in ahead:
            task.cancel()
        for held in await asyncio.gather(*ahead, return_exceptions=True):
            if not isinstance(held, BaseException):
                held.release()  # a small one for which there was room
        store.release_owner(OWNER)
        await store.settle()
        check(store)
