"""Fetches of large blobs that are only on SSD: pieces go out while later ones are read."""

import asyncio
from pathlib import Path

import pytest

from kvstore.api.wire import Run, pack, pack_runs
from kvstore.api.wire.messages import FetchRequest
from kvstore.errors import Corrupt
from kvstore.store.checking.check import check
from tests.api.test_streaming import CollectingPeer
from tests.store.test_arriving import DATA, MIB, cold_page, damage, large_store, stopping_before


async def test_slices_are_sent_while_later_ones_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        peer = CollectingPeer(store, space)
        runs = [Run(0, 0, 2 * MIB), Run(0, 2 * MIB - 100, len(DATA) - 2 * MIB + 100)]
        with stopping_before(monkeypatch, 2) as gate:
            fetch = asyncio.create_task(
                peer.fetch(pack(FetchRequest(namespace="large", blobs=1)), space.blobs.id_of(row) + pack_runs(runs))
            )
            async with asyncio.timeout(20):
                while len(peer.sent) < 2 * MIB + 100:
                    await asyncio.sleep(0.001)
            assert not fetch.done()
            assert store.stats.fetches == 0
            gate.set()
            await fetch
        assert peer.sent == DATA[: 2 * MIB] + DATA[2 * MIB - 100 :]
        assert (store.stats.fetches, store.stats.promoted_blobs) == (1, 1)
        await store.settle()
        check(store)


async def test_a_fetch_whose_last_slice_is_bad_is_none(tmp_path: Path) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        damage(tmp_path, 4)
        peer = CollectingPeer(store, space)
        with pytest.raises(Corrupt, match="slice 4"):
            await peer.fetch(pack(FetchRequest(namespace="large", blobs=1)), space.blobs.id_of(row) + pack_runs([Run(0, 0, len(DATA))]))
        assert peer.sent == DATA[: len(peer.sent)]
        assert len(peer.sent) <= 4 * MIB
        assert (store.stats.fetches, store.stats.fetch_bytes, store.stats.promoted_blobs) == (0, 0, 0)
        await store.settle()
        check(store)
        assert not store.figures.usage()["dram"].used


async def test_a_fetch_that_is_cancelled_while_slices_come_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_store(tmp_path) as store:
        space, row = await cold_page(store)
        peer = CollectingPeer(store, space)
        with stopping_before(monkeypatch, 2) as gate:
            request = space.blobs.id_of(row) + pack_runs([Run(0, 0, len(DATA))])
            fetch = asyncio.create_task(peer.fetch(pack(FetchRequest(namespace="large", blobs=1)), request))
            async with asyncio.timeout(20):
                while not peer.sent:
                    await asyncio.sleep(0.001)
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
            gate.set()
        while store.reading._loading:
            await asyncio.sleep(0.001)
        await store.settle()
        check(store)
