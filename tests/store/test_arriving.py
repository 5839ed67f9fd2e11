"""Blobs that are held while they are still being read from SSD: real stores on real files, with the disk stopped or damaged on the way."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.digests import slice_digest
from kvstore.errors import Cancelled, Corrupt
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.store import Ack, Held, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.tiers.extent_file import ExtentFile
from kvstore.tiers.free_space import Extent
from kvstore.tiers.ssd import extents_beside
from tests.store.test_store import OWNER, config

MIB = 1 << 20
SLICES = 5
LARGE = KVSpec(16, (Component("full", SLICES, 2, 32 << 10, "u8", planes=1),), max_slice_bytes=MIB)
"""Pages of 5 MiB, in slices of one MiB, each of which is read by itself."""
PART = PartRange(0, 0, SLICES, 0, 2)
DATA = np.random.default_rng(5).bytes(SLICES * MIB)


async def put_large(store: Store, space: Space, token: int, data: bytes = DATA, ack: Ack = Ack.MEMORY) -> None:
    tokens = np.full(LARGE.page_tokens, token, np.uint32).tobytes()
    under_way = await store.begin_put(OWNER, space, PutRequest(bytes([token]) * 16, tokens, {}, 0, (PART,), ack))
    if under_way.wanted_cells():
        view, _ = under_way.locate(0, 0, 0, len(data), SLICES)
        view[:] = data
        digests = [slice_digest(data[at : at + MIB]) for at in range(0, len(data), MIB)]
        under_way.received(0, 0, 0, digests, b"".join(digests))
    await store.commit_put(under_way)


@contextmanager
def stopping_before(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[threading.Event]:
    """Reads from SSD wait at the slice of this number until the event is set; the last slice is read first, with the digest table."""
    read, gate = ExtentFile.read, threading.Event()

    def gated(self: ExtentFile, extents: Sequence[Extent], start: int, end: int, out: memoryview, **how: bool) -> None:
        if number * MIB < end <= len(DATA):
            gate.wait(20)
        read(self, extents, start, end, out, **how)

    with monkeypatch.context() as patch:
        patch.setattr(ExtentFile, "read", gated)
        try:
            yield gate
        finally:
            gate.set()


async def cold_page(store: Store) -> tuple[Space, int]:
    """A namespace with one page that is on SSD only. Returns the row of its blob, too."""
    space = await store.create_namespace(NamespaceSettings("default", "large", "model", LARGE, retention_s=0))
    await put_large(store, space, 1, ack=Ack.DURABLE)
    await store.settle()
    (slot,) = space.tree.live_slots().tolist()
    (row,) = space.rows_of(slot)
    space.clear_slot(row)
    return space, row


def large_store(folder: Path, **changes: Any) -> Store:
    return Store(config(folder / "d", dram_bytes=32 * MIB, ssd_bytes=64 * MIB, segment_bytes=8 * MIB, **changes))


def damage(folder: Path, number: int) -> None:
    """Change a byte on SSD in the middle of a slice."""
    file = extents_beside(folder / "d" / "blobs")
    found = file.read_bytes().find(DATA[number * MIB + 4096 : number * MIB + 4096 + 64])
    assert found > 0
    with file.open("r+b") as data:
        data.seek(found)
        data.write(bytes([DATA[number * MIB + 4096] ^ 1]))


async def _nothing_left(store: Store, held: Held) -> None:
    held.release()
    await store.settle()
    check(store)


async def test_first_slices_are_there_before_the_last_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        with stopping_before(monkeypatch, 2) as gate:
            held = await store.reading.hold(space, row, early=True)
            await held.wait_for(1)
            assert [held.has(number) for number in range(SLICES)] == [True, True, False, False, False]
            assert held.view[: 2 * MIB] == DATA[: 2 * MIB]
            assert store.reading.resident(space, row) is None, "a blob that is not there counts as one that is"
            second = await store.reading.hold(space, row, early=True)
            whole = asyncio.create_task(store.reading.hold(space, row))
            last = asyncio.create_task(held.wait_for(SLICES - 1))
            await asyncio.sleep(0.05)
            assert not whole.done()
            assert not last.done()
            gate.set()
            await last
            assert held.view[: len(DATA)] == DATA
            (await whole).release()
        assert store.stats.promoted_blobs == 1
        assert store.reading.resident(space, row) is not None
        second.release()
        await _nothing_left(store, held)


@pytest.mark.parametrize("number", [0, 2, SLICES - 1])
async def test_a_blob_of_which_a_later_slice_is_bad_is_no_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        damage(tmp_path, number)
        with stopping_before(monkeypatch, number) as gate:
            if 0 < number < SLICES - 1:
                held = await store.reading.hold(space, row, early=True)
                await held.wait_for(number - 1)
                assert held.view[: number * MIB] == DATA[: number * MIB]
                gate.set()
                with pytest.raises(Corrupt, match=f"slice {number}"):
                    await held.wait_for(SLICES - 1)
                assert not held.has(number)
                assert store.figures.usage()["dram"].used, "its slot was given away while somebody reads from it"
                await _nothing_left(store, held)
            else:
                gate.set()
                with pytest.raises(Corrupt):
                    await store.reading.hold(space, row, early=True)
        assert not store.figures.usage()["dram"].used
        assert not space.tree.live_slots().size, "the page is still there"
        assert (store.stats.promoted_blobs, store.stats.corrupt_blobs) == (0, 1)
        await put_large(store, space, 1)  # it can come again
        assert space.tree.live_slots().size == 1
        await store.settle()
        check(store)


async def test_a_holder_that_leaves_before_the_end_takes_nothing_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        with stopping_before(monkeypatch, 2) as gate:
            held = await store.reading.hold(space, row, early=True)
            waiting = asyncio.create_task(held.wait_for(SLICES - 1))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            held.release()
            gate.set()
            other = await store.reading.hold(space, row)
        assert other.view[: len(DATA)] == DATA
        await _nothing_left(store, other)


async def test_bytes_that_a_put_brings_meanwhile_are_not_moved_under_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        with stopping_before(monkeypatch, 2) as gate:
            held = await store.reading.hold(space, row, early=True)
            await put_large(store, space, 2)
            assert store.reading.resident(space, row) is not None
            gate.set()
            await held.wait_for(SLICES - 1)
            while store.reading._loading:
                await asyncio.sleep(0.001)
            assert store.figures.usage()["dram"].used > 2 * len(DATA), "the slot that is read from was given back"
            assert held.view[: len(DATA)] == DATA
        await _nothing_left(store, held)
        assert store.figures.usage()["dram"].used < 2 * len(DATA)


async def test_a_bad_copy_that_is_found_while_the_rest_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that changed between the read and the sending: the copy is dropped with its last reader, and nothing remembers it as bad."""
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        with stopping_before(monkeypatch, 2) as gate:
            held = await store.reading.hold(space, row, early=True)
            held.view[7] ^= 1
            store.reading.discard_bad_copy(space, row, held.view)
            gate.set()
            await held.wait_for(SLICES - 1)
            while store.reading._loading:
                await asyncio.sleep(0.001)
            assert store.reading.resident(space, row) is None
        await _nothing_left(store, held)
        assert not space.spoiled
        again = await store.reading.hold(space, row)
        assert again.view[: len(DATA)] == DATA
        await _nothing_left(store, again)


async def test_a_close_ends_what_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await large_store(tmp_path).__aenter__()
    space, row = await cold_page(store)
    with stopping_before(monkeypatch, 2) as gate:
        held = await store.reading.hold(space, row, early=True)
        waiting = asyncio.create_task(store.reading.hold(space, row))
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.__aexit__())
        while not store.reading._stopped:
            await asyncio.sleep(0.001)
        gate.set()
        await closing
    assert not store.stuck
    assert [task.get_name() for task in asyncio.all_tasks() if "kvstore" in task.get_name()] == [], "a task was left"
    for cut_off in (held.wait_for(SLICES - 1), waiting, store.reading.hold(space, row)):
        with pytest.raises(Cancelled):
            await cut_off
    held.release()


async def test_a_close_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await large_store(tmp_path, shutdown_s=0.1).__aenter__()
    space, row = await cold_page(store)
    with stopping_before(monkeypatch, 2) as gate:
        held = await store.reading.hold(space, row, early=True)
        async with asyncio.timeout(15):
            await store.__aexit__()
        assert store.stuck
        gate.set()
        with pytest.raises(Cancelled):
            await held.wait_for(SLICES - 1)
    held.release()
    await asyncio.to_thread(store._close)
