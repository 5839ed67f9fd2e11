"""Puts of bytes that are in DRAM already, where memory has changed since: the copy that is shared is a good one."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.kvspec import SliceLayout
from kvstore.store import Ack, Held, NamespaceSettings, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.dram.copies import verifies
from tests.store.test_arriving import DATA, LARGE, cold_page, large_store, put_large


def _served(store: Store, space: Space, token: int) -> int:
    return store.match(space, np.full(LARGE.page_tokens, token, np.uint32).tobytes(), {}).pages


async def _warm_page(store: Store, ack: Ack = Ack.MEMORY) -> tuple[Space, int, Held]:
    """A namespace with one page, whose blob is in DRAM and held."""
    space = await store.create_namespace(NamespaceSettings("default", "large", "model", LARGE, retention_s=0))
    await put_large(store, space, 1, ack=ack)
    await store.settle()
    (row,) = space.rows_of(int(space.tree.live_slots()[0]))
    held = store.reading.hold_resident(space, row)
    assert held is not None
    return space, row, held


def _good(store: Store, space: Space, row: int) -> bool:
    view = store.reading.resident(space, row)
    return view is not None and view[: len(DATA)] == DATA


async def test_a_put_does_not_share_a_copy_that_has_changed(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, row, held = await _warm_page(store)
        held.view[3 << 20] ^= 1
        held.release()
        await put_large(store, space, 2)
        assert _good(store, space, row), "the put shares bad bytes"
        assert [_served(store, space, token) for token in (1, 2)] == [1, 1]
        assert store.stats.corrupt_blobs == 1
        await store.settle()
        check(store)


async def test_a_put_shares_a_copy_that_is_what_it_was(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, row, held = await _warm_page(store)
        slot = int(space.blobs.slot[row])
        await put_large(store, space, 2)
        held.release()
        assert (space.blobs.slot[row], store.stats.dedup_blobs, store.stats.corrupt_blobs) == (slot, 1, 0)
        await store.settle()
        check(store)


async def test_who_reads_the_bad_copy_does_not_discard_the_good_one(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, row, held = await _warm_page(store)
        held.view[7] ^= 1
        await put_large(store, space, 2)
        assert held.view[: len(DATA)] != DATA, "memory that somebody reads has changed under them"
        used = store.figures.usage()["dram"].used
        store.reading.discard_bad_copy(space, row, held.view[:100])
        assert _good(store, space, row), "the good copy was thrown away"
        held.release()
        assert store.figures.usage()["dram"].used < used, "the bad copy stays"
        assert [_served(store, space, token) for token in (1, 2)] == [1, 1]
        await store.settle()
        check(store)


async def test_a_copy_that_is_known_to_be_bad_is_replaced_at_once(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, row, held = await _warm_page(store, Ack.DURABLE)
        held.view[7] ^= 1
        store.reading.discard_bad_copy(space, row, held.view)
        assert store.reading.resident(space, row) is None
        await put_large(store, space, 2)
        assert _good(store, space, row)
        held.release()
        assert _good(store, space, row)
        assert store.stats.corrupt_blobs == 1
        await store.settle()
        check(store)


async def test_bad_bytes_that_were_read_around_dram_say_nothing_of_a_copy_there(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        held = await store.reading._stage(space, row, None)
        held.view[7] ^= 1
        await put_large(store, space, 2)
        store.reading.discard_bad_copy(space, row, held.view)
        held.release()
        assert _good(store, space, row)
        await store.settle()
        check(store)


async def test_the_scrubber_discards_what_it_has_seen_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, looked = threading.Event(), threading.Event()

    def gated(name: bytes, layout: SliceLayout, stored: memoryview) -> bool:
        good = verifies(name, layout, stored)
        looked.set()
        gate.wait(20)
        return good

    monkeypatch.setattr("kvstore.store.checking.scrub.verifies", gated)
    async with large_store(tmp_path) as store:
        space, row, held = await _warm_page(store)
        held.view[7] ^= 1
        held.release()
        scrubbing = asyncio.create_task(store.scrubber.scrub_all())
        while not looked.is_set():
            await asyncio.sleep(0.001)
        await put_large(store, space, 2)
        gate.set()
        await scrubbing
        assert _good(store, space, row)
        assert [_served(store, space, token) for token in (1, 2)] == [1, 1]
        await store.settle()
        check(store)
