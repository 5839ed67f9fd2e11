"""Blobs that are sent from a slot and leave it again, as memory for more is still being made: real stores, with the making held up."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import Run, pack, pack_runs
from kvstore.api.wire.messages import FetchRequest
from kvstore.store import Ack, NamespaceSettings, Space, Store
from kvstore.store.checking.check import check
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.segments import Room, Segment, make_segment
from tests.api.test_streaming import CollectingPeer
from tests.store.test_arriving import DATA, LARGE, MIB, large_store, put_large

PAGES = [np.random.default_rng(token).bytes(len(DATA)) for token in range(3)]


class Scarce:
    """A store just started, whose blobs are on SSD only: there is memory for one of them, and the next waits for `more`."""

    def __init__(self, store: Store, more: threading.Event) -> None:
        self.store = store
        self.more = more
        self.space: Space = store.space("default", "large")
        tree = self.space.tree
        tokens = [np.full(LARGE.page_tokens, token, np.uint32).tobytes() for token in range(len(PAGES))]
        slots = [int(tree.path_slots(tree.match(prompt))[0]) for prompt in tokens]
        self.rows = [row for slot in slots for row in self.space.rows_of(slot)]

    @property
    def used(self) -> int:
        """Bytes of DRAM in use."""
        return self.store.figures.usage()["dram"].used

    def resident(self, page: int) -> bool:
        return bool(self.space.blobs.slot[self.rows[page]] != NO_SLOT)

    async def more_is_made(self) -> None:
        self.more.set()
        await self.store.settle()

    async def read(self) -> None:
        """Wait until nothing is being read."""
        while self.store._reading._loading:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def scarce_store(folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: int = 12 * MIB) -> AsyncIterator[Scarce]:
    async with large_store(folder) as store:
        space = await store.create_namespace(NamespaceSettings("default", "large", "model", LARGE, retention_s=0))
        for token, data in enumerate(PAGES):
            await put_large(store, space, token, data, ack=Ack.DURABLE)
    more, asked, held_up = threading.Event(), threading.Event(), threading.Event()

    def make(room: Room) -> Segment:
        if asked.is_set():
            held_up.set()
            more.wait(20)
        asked.set()
        return make_segment(room)

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.store.dram.residency.make_segment", make)
        try:
            async with large_store(folder, ahead_bytes=ahead) as store:
                while not held_up.is_set():
                    await asyncio.sleep(0.001)
                scarce = Scarce(store, more)
                yield scarce
                more.set()
                await scarce.read()
                await store.settle()
                check(store)
                assert not store._reading._passing
        finally:
            more.set()


async def test_one_slot_serves_blob_after_blob_as_long_as_there_is_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        for row, data in zip(scarce.rows, PAGES, strict=True):
            peer = CollectingPeer(scarce.store, scarce.space)
            request = scarce.space.blobs.id_of(row) + pack_runs([Run(0, 0, len(data))])
            await peer.fetch(pack(FetchRequest(namespace="large", blobs=1)), request)
            assert peer.sent == data
            assert scarce.used == 0
        assert scarce.store.stats.promoted_blobs == 0
        assert scarce.store.figures.dram_segments.count == 1


async def test_what_is_sent_stays_if_memory_for_the_next_is_there_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        held = await scarce.store.hold(scarce.space, scarce.rows[0], early=True)
        await scarce.read()
        assert not scarce.resident(0)
        await scarce.more_is_made()
        assert held.view[: len(DATA)] == PAGES[0]
        held.release()
        assert scarce.resident(0)
        assert scarce.store.stats.promoted_blobs == 1


async def test_what_somebody_else_wants_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        first = await scarce.store.hold(scarce.space, scarce.rows[0], early=True)
        await scarce.read()
        second = await scarce.store.hold(scarce.space, scarce.rows[0], early=True)
        assert scarce.resident(0)
        first.release()
        assert second.view[: len(DATA)] == PAGES[0]
        second.release()
        assert (scarce.resident(0), scarce.store.stats.promoted_blobs) == (True, 1)


@pytest.mark.parametrize("when", ["before", "while it passes"])
async def test_what_is_to_be_in_dram_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """As for a client that maps it."""
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        space, row = scarce.space, scarce.rows[0]
        space.pin(row)
        promoting = [asyncio.create_task(scarce.store._reading.promote(space, row))] if when == "before" else []
        held = await scarce.store.hold(space, row, early=True)
        await scarce.read()
        await asyncio.gather(*promoting, scarce.store._reading.promote(space, row))
        assert scarce.resident(0)
        held.release()
        space.unpin(row)
        assert scarce.resident(0)


async def test_what_is_found_bad_while_it_passes_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        space, row = scarce.space, scarce.rows[0]
        held = await scarce.store.hold(space, row, early=True)
        await scarce.read()
        held.view[7] ^= 1
        scarce.store.discard_bad_copy(space, row, held.view)
        await scarce.more_is_made()
        again = await scarce.store.hold(space, row, early=True)
        held.release()
        await scarce.read()
        assert again.view[: len(DATA)] == PAGES[0]
        again.release()
        assert not space.spoiled
        assert scarce.used < 2 * len(DATA)


async def test_a_put_of_the_same_bytes_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        held = await scarce.store.hold(scarce.space, scarce.rows[0], early=True)
        await scarce.read()
        scarce.more.set()
        await put_large(scarce.store, scarce.space, 7, PAGES[0])
        assert scarce.resident(0)
        assert scarce.used > 2 * len(DATA)
        held.release()
        assert scarce.resident(0)
        assert scarce.used < 2 * len(DATA)


async def test_a_page_that_goes_while_it_passes_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        held = await scarce.store.hold(scarce.space, scarce.rows[0], early=True)
        await scarce.read()
        await scarce.store.drop_namespace(scarce.space)
        await scarce.more_is_made()
        assert held.view[: len(DATA)] == PAGES[0]
        held.release()
        await scarce.store.settle()
        assert scarce.used == 0


async def test_a_reader_that_is_gone_before_all_is_read_leaves_the_slot_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        hold = asyncio.create_task(scarce.store.hold(scarce.space, scarce.rows[0], early=True))
        await asyncio.sleep(0)
        hold.cancel()
        await asyncio.gather(hold, return_exceptions=True)
        await scarce.read()
        assert scarce.used == 0
        assert not scarce.resident(0)


async def test_a_close_while_it_passes_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_store(tmp_path, monkeypatch) as scarce:
        held = await scarce.store.hold(scarce.space, scarce.rows[0], early=True)
        await scarce.read()
        scarce.more.set()
        await scarce.store._reading.stop(1)
        held.release()
        assert scarce.used == 0
