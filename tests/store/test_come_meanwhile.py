"""Blobs that come to DRAM, or turn out bad, while somebody waits to read them from SSD: what was acknowledged stays, and is served."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.digests import slice_digest
from kvstore.errors import Busy, NotFound
from kvstore.kvspec import SliceLayout
from kvstore.store import Ack, Held, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.dram.copies import verifies
from kvstore.store.dram.eviction import evict_ssd
from kvstore.store.puts.put import Put
from kvstore.tiers.ssd import BlobBatch, BlobFile
from tests.store.test_arriving import DATA, LARGE, MIB, PART, SLICES, cold_page, damage, large_store, put_large, stopping_before
from tests.store.test_scrub import rows_of, spoil_dram, spoil_ssd
from tests.store.test_store import OWNER, config, put, read, settings_named

_FIRST = 1
"""The token of the page that `cold_page` makes."""


def _tokens(token: int) -> bytes:
    return np.full(LARGE.page_tokens, token, np.uint32).tobytes()


def _slot(space: Space, token: int) -> int:
    return int(space.tree.path_slots(space.tree.match(_tokens(token)))[0])


def _served(store: Store, space: Space, token: int) -> int:
    return store.match(space, _tokens(token), {}).pages


async def _received(store: Store, space: Space, token: int, ack: Ack) -> Put:
    """A put of the same bytes that has come whole, and is to be committed."""
    under_way = await store.begin_put(OWNER, space, PutRequest(bytes([token]) * 16, _tokens(token), {}, 0, (PART,), ack))
    view, _ = under_way.locate(0, 0, 0, len(DATA), SLICES)
    view[:] = DATA
    digests = [slice_digest(DATA[at : at + MIB]) for at in range(0, len(DATA), MIB)]
    under_way.received(0, 0, 0, digests, b"".join(digests))
    return under_way


@asynccontextmanager
async def _full_dram(store: Store, space: Space) -> AsyncIterator[None]:
    """All of DRAM is in use, for as long as this lasts."""
    async with AsyncExitStack() as stack:
        held: list[Held] = []
        for token in range(100, 120):
            try:
                await put_large(store, space, token, np.random.default_rng(token).bytes(len(DATA)))
            except Busy:
                break
            (row,) = space.rows_of(_slot(space, token))
            found = store.reading.hold_resident(space, row)
            assert found is not None
            held.append(found)
            stack.callback(found.release)
        assert held
        yield


async def _nothing_left(store: Store) -> None:
    async with asyncio.timeout(30):
        while store.reading._loading:
            await asyncio.sleep(0.001)
        await store.settle()
    check(store)


@asynccontextmanager
async def _waiting_for_a_buffer(store: Store, space: Space, row: int) -> AsyncIterator["asyncio.Task[Held]"]:
    """A reader of a blob waits for a buffer, as others have all of them; it gets one when this ends."""
    reading = store.reading
    for _ in range(4):
        await reading._staging.acquire()
    reader = asyncio.create_task(store.reading.hold(space, row, early=True))
    while not reading._staging._waiters:
        await asyncio.sleep(0.001)
    try:
        yield reader
    finally:
        for _ in range(4):
            reading._staging.release()


@pytest.mark.parametrize("ack", [Ack.MEMORY, Ack.DURABLE])
async def test_a_page_that_is_put_anew_while_a_fetch_waits_for_a_buffer_stays(tmp_path: Path, ack: Ack) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        under_way = await _received(store, space, 2, ack)
        async with _full_dram(store, space), _waiting_for_a_buffer(store, space, row) as reader:
            space.remove_page(_slot(space, _FIRST), ghosts=False)
            store._writeback.poke()
            commit = asyncio.create_task(store.commit_put(under_way))
            while store.reading.resident(space, row) is None:
                await asyncio.sleep(0)
            assert not space.blobs.on_ssd[row], "there is a copy on SSD: this test shows nothing"
        held = await reader
        assert held.view[: len(DATA)] == DATA
        held.release()
        await commit
        assert _served(store, space, 2) == 1, "an acknowledged page is gone"
        await _nothing_left(store)


async def test_a_page_that_leaves_ssd_while_a_fetch_waits_for_a_buffer_stays(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        async with AsyncExitStack() as stack:
            full = await stack.enter_async_context(AsyncExitStack())
            await full.enter_async_context(_full_dram(store, space))
            reader = await stack.enter_async_context(_waiting_for_a_buffer(store, space, row))
            await full.aclose()
            space.remove_page(_slot(space, 100), ghosts=False)
            (await store.reading.hold(space, row)).release()  # somebody else has it brought up
            evict_ssd([space], 1 << 40, 1e12, store.blob_file.footprint, store._residency._worth_on_ssd)
            assert store.reading.resident(space, row) is not None
            assert not space.blobs.on_ssd[row]
        held = await reader
        assert held.view[: len(DATA)] == DATA
        held.release()
        assert _served(store, space, _FIRST) == 1, "a page was dropped with no fault at all"
        await _nothing_left(store)


@pytest.mark.parametrize(("ack", "promote"), [(Ack.MEMORY, False), (Ack.DURABLE, False), (Ack.MEMORY, True)])
async def test_a_page_that_is_put_anew_while_a_fetch_waits_for_room_stays(tmp_path: Path, ack: Ack, promote: bool) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        under_way = await _received(store, space, 2, ack)
        space.pin(row)
        async with _full_dram(store, space):
            if promote:
                waiting: asyncio.Task[object] = asyncio.create_task(store.reading.promote(space, row))
            else:
                waiting = asyncio.create_task(store.reading.hold(space, row, early=True))
            while not store._residency._demand:
                await asyncio.sleep(0)
            space.remove_page(_slot(space, _FIRST), ghosts=False)
            store._writeback.poke()
            commit = asyncio.create_task(store.commit_put(under_way))
            while store.reading.resident(space, row) is None:
                await asyncio.sleep(0)
            assert not space.blobs.on_ssd[row], "there is a copy on SSD: this test shows nothing"
            assert not waiting.done()
        held = await waiting
        if isinstance(held, Held):
            assert held.view[: len(DATA)] == DATA
            held.release()
        await commit
        space.unpin(row)
        assert _served(store, space, 2) == 1, "an acknowledged page is gone"
        await _nothing_left(store)


async def test_what_needs_a_blob_that_is_in_no_tier_is_deleted_at_once(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        space.blobs.on_ssd[row] = False
        with pytest.raises(NotFound, match="in no tier"):
            await store.reading.hold(space, row)
        assert _served(store, space, _FIRST) == 0
        await _nothing_left(store)


# --- bad copies -------------------------------------------------------------------------------------------------------


async def _good_on_ssd(store: Store, space: Space, row: int) -> None:
    await _nothing_left(store)
    space.clear_slot(row)
    held = await store.reading.hold(space, row)
    assert held.view[: len(DATA)] == DATA
    held.release()
    await _nothing_left(store)


@pytest.mark.parametrize("ack", [Ack.MEMORY, Ack.DURABLE])
async def test_a_bad_copy_on_ssd_is_written_anew_from_bytes_that_a_put_brings_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ack: Ack
) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        damage(tmp_path, 3)
        with stopping_before(monkeypatch, 3) as gate:
            held = await store.reading.hold(space, row, early=True)
            whole = asyncio.create_task(store.reading.hold(space, row))
            await put_large(store, space, 2, ack=ack)
            gate.set()
            await held.wait_for(SLICES - 1)
            assert held.view[: len(DATA)] == DATA
            other = await whole
            assert other.view[: len(DATA)] == DATA
        held.release()
        other.release()
        assert store.stats.corrupt_blobs == 1
        await _good_on_ssd(store, space, row)
        assert [_served(store, space, token) for token in (_FIRST, 2)] == [1, 1], "the only good copy was thrown away"


async def test_a_blob_read_around_dram_is_served_from_there_if_its_copy_on_ssd_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        damage(tmp_path, 3)
        under_way = await _received(store, space, 2, Ack.MEMORY)
        async with _full_dram(store, space):
            with stopping_before(monkeypatch, 3) as gate:
                reader = asyncio.create_task(store.reading.hold(space, row))
                while not store.reading._staging._value < 4:
                    await asyncio.sleep(0.001)
                await store.commit_put(under_way)
                gate.set()
                held = await reader
        assert held.view[: len(DATA)] == DATA
        assert store.reading._staging._value == 4, "a buffer was lost"
        held.release()
        await _good_on_ssd(store, space, row)
        assert [_served(store, space, token) for token in (_FIRST, 2)] == [1, 1], "the only good copy was thrown away"


async def test_a_bad_copy_that_cant_be_written_anew_keeps_the_good_one_in_dram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, tries = BlobFile.commit, list[int]()

    def failing(self: BlobFile, batch: BlobBatch) -> None:
        tries.append(len(batch.put))
        if len(tries) == 1:
            raise OSError(5, "Input/output error")
        commit(self, batch)

    monkeypatch.setattr("kvstore.store.ssd.writeback._PROBE_S", 0.01)
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        damage(tmp_path, 3)
        with stopping_before(monkeypatch, 3) as gate:
            held = await store.reading.hold(space, row, early=True)
            await put_large(store, space, 2)
            monkeypatch.setattr(BlobFile, "commit", failing)
            gate.set()
            await held.wait_for(SLICES - 1)
        held.release()
        async with asyncio.timeout(30):
            while not tries:
                await asyncio.sleep(0.001)
        assert space.blobs.pins[row], "the good copy may go while the other is bad"
        await _good_on_ssd(store, space, row)
        assert len(tries) >= 2
        assert store.stats.ssd_errors == 1


@pytest.mark.parametrize("early", [False, True])
async def test_who_waits_for_a_blob_that_another_finds_bad_in_memory_reads_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        with stopping_before(monkeypatch, 2) as gate:
            held = await store.reading.hold(space, row, early=True)
            waiting = None if early else asyncio.create_task(store.reading.hold(space, row))
            await asyncio.sleep(0)
            held.view[7] ^= 1
            store.reading.discard_bad_copy(space, row, held.view)
            waiting = waiting or asyncio.create_task(store.reading.hold(space, row, early=True))
            await asyncio.sleep(0.02)
            gate.set()
            other = await waiting
        assert other.view[: len(DATA)] == DATA, "the second reader got what is known to be bad"
        other.release()
        held.release()
        assert _served(store, space, _FIRST) == 1
        await _nothing_left(store)
        assert not space.spoiled


async def test_the_scrubber_mends_nothing_from_a_copy_that_is_found_bad_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, looked = threading.Event(), threading.Event()

    def gated(name: bytes, layout: SliceLayout, stored: memoryview) -> bool:
        good = verifies(name, layout, stored)
        looked.set()
        gate.wait(20)
        return good

    monkeypatch.setattr("kvstore.store.checking.scrub.verifies", gated)
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1,), b"v" * 16, Ack.DURABLE)
        await store.settle()
        row = rows_of(space, (1,))[0]
        spoil_ssd(store, space, row)
        scrubbing = asyncio.create_task(store.scrubber.scrub_all())
        while not looked.is_set():
            await asyncio.sleep(0.001)
        spoil_dram(store, space, row)
        store.reading.discard_bad_copy(space, row, store._arena.view(int(space.blobs.slot[row])))
        gate.set()
        await scrubbing
        assert store.stats.scrub_repaired == 0, "bad bytes were written over bad bytes"
        assert await read(store, space, (1,)) == 0
        await _nothing_left(store)
