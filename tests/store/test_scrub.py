"""The scrubber finds bits that changed at rest, in either tier, and mends what has a good copy."""

import asyncio
import threading
from pathlib import Path

import pytest

from kvstore.kvspec import SliceLayout
from kvstore.store import Ack, Space, Store
from kvstore.store.checking import scrub
from kvstore.store.checking.check import check
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.ssd import BlobBatch, BlobFile
from tests.store.test_store import config, put, read, settings_named, tokens_of


def rows_of(space: Space, prefix: tuple[int, ...]) -> list[int]:
    return space.rows_of(int(space.tree.path_slots(space.tree.match(tokens_of(prefix)))[-1]))


def spoil_ssd(store: Store, space: Space, row: int) -> None:
    stored = bytearray(space.stored_bytes(row))
    store.blob_file.read(space.number, space.blobs.id_of(row), space.blobs.layout_of(row), memoryview(stored))
    stored[100] ^= 4
    store.blob_file.commit(BlobBatch(put=[(space.number, space.blobs.id_of(row), memoryview(stored))]))


def spoil_dram(store: Store, space: Space, row: int) -> None:
    store._arena.view(int(space.blobs.slot[row]))[100] ^= 4


def evict(space: Space, prefix: tuple[int, ...]) -> None:
    for row in rows_of(space, prefix):
        space.clear_slot(row)


@pytest.fixture
def contexts() -> list[tuple[int, ...]]:
    return [(i,) for i in range(8)]


async def test_what_is_bad_is_mended_or_dropped(tmp_path: Path, contexts: list[tuple[int, ...]]) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=4 << 20, ssd_bytes=4 << 20)) as store:
        space = await store.create_namespace(settings_named())
        for context in contexts:
            await put(store, space, context, b"v" * 16, Ack.DURABLE)
        await put(store, space, (100,), b"v" * 16)  # only in DRAM
        evict(space, contexts[0])
        spoil_ssd(store, space, rows_of(space, contexts[0])[1])  # on SSD only: lost
        spoil_ssd(store, space, rows_of(space, contexts[1])[0])  # a good copy in DRAM: written anew
        spoil_dram(store, space, rows_of(space, contexts[2])[2])  # a good copy on SSD: dropped from DRAM
        bad_row = rows_of(space, contexts[3])[0]
        spoil_dram(store, space, bad_row)
        spoil_ssd(store, space, bad_row)  # none: lost
        spoil_dram(store, space, rows_of(space, (100,))[0])  # lost
        dropped = rows_of(space, contexts[2])[2]
        recency = space.tree.pages.recency[: space.tree.pages.ranges.high].copy()
        await store.scrubber.scrub_all()
        assert (space.tree.pages.recency[: len(recency)][space.tree.live_slots()] == recency[space.tree.live_slots()]).all()
        assert store.stats.scrub_repaired == 1
        assert store.stats.corrupt_blobs == 5 + 1  # of the one that is bad in both tiers, both copies count
        assert store.stats.promoted_blobs == 0
        assert store.scrubber.progress.passes == 1
        assert space.blobs.slot[dropped] == NO_SLOT
        await store.settle()
        check(store)
        assert [await read(store, space, context) for context in contexts] == [0, 1, 1, 0, 1, 1, 1, 1]
        assert await read(store, space, (100,)) == 0
        evict(space, contexts[1])
        assert await read(store, space, contexts[1]) == 1, "what was written anew is bad"
        before = store.stats.corrupt_blobs
        await store.scrubber.scrub_all()
        assert store.stats.corrupt_blobs == before
        check(store)


@pytest.mark.usefixtures("never_blocks")
async def test_it_runs_by_itself_without_blocking(tmp_path: Path, contexts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "_IDLE_S", 0.01)
    async with Store(config(tmp_path / "d", dram_bytes=4 << 20, ssd_bytes=4 << 20, scrub_bytes_s=1 << 30)) as store:
        space = await store.create_namespace(settings_named())
        for context in contexts:
            await put(store, space, context, b"v" * 16, Ack.DURABLE)
        before = store.scrubber.progress.passes
        while store.scrubber.progress.passes < before + 2:
            await read(store, space, contexts[0])
            await asyncio.sleep(0.001)
        assert store.stats.scrubbed_blobs >= 3 * len(contexts)
        assert store.stats.corrupt_blobs == 0


async def test_what_is_being_looked_at_is_no_reason_to_refuse_a_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies on SSD of blobs that are pinned in DRAM, or only looked at on SSD, make room for others."""
    read, gate, looking = BlobFile.read, threading.Event(), threading.Event()

    def gated(self: BlobFile, namespace: int, blob: bytes, layout: SliceLayout, target: memoryview, *, uncached: bool = False) -> None:
        if uncached:
            looking.set()
            gate.wait(10)
        read(self, namespace, blob, layout, target, uncached=uncached)

    monkeypatch.setattr(BlobFile, "read", gated)
    async with Store(config(tmp_path / "d", dram_bytes=4 << 20, ssd_bytes=10 * 3 * 8160)) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        for number in range(8):
            await put(store, space, (number,), b"v" * 16, Ack.DURABLE)
        evict(space, (0,))
        scrubbing = asyncio.create_task(store.scrubber.scrub_all())
        while not looking.is_set():
            await asyncio.sleep(0.001)
        try:
            for number in range(8, 30):
                await put(store, space, (number,), b"v" * 16, Ack.DURABLE)
        finally:
            gate.set()
        assert store.stats.evicted_ssd_pages >= 15, "there was room for all: this test shows nothing"
        await scrubbing
        assert store.stats.corrupt_blobs == 0
        await store.settle()
        check(store)


async def test_small_blobs_are_looked_at_a_few_at_a_time_and_count_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a blob costs the loop does not depend on its size: a pass over small ones neither holds it up nor keeps it busy."""
    batches, taken = list[int](), list[int]()
    async with Store(config(tmp_path / "d", dram_bytes=4 << 20, ssd_bytes=4 << 20)) as store:
        space = await store.create_namespace(settings_named())
        for number in range(100):
            await put(store, space, (number,), b"v" * 16)
        scrub_batch = store.scrubber._scrub

        async def noted(space: Space, batch: list[scrub._Blob]) -> int:
            batches.append(len(batch))
            return await scrub_batch(space, batch)

        async def paced(nbytes: int, _started: float) -> None:
            taken.append(nbytes)

        monkeypatch.setattr(store.scrubber, "_scrub", noted)
        monkeypatch.setattr(store.scrubber, "_pace", paced)
        await store.scrubber.scrub_all()
    assert sum(batches) == store.stats.scrubbed_blobs == 300
    assert max(batches) <= 64
    assert sum(taken) >= 300 << 15
