"""Fetches, against a peer that does the worst between two frames."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api.sending import Then
from kvstore.api.sessions import Session
from kvstore.api.streaming import read_fetch, stream_fetch
from kvstore.api.wire import FrameType, Run, SliceLayout, pack, pack_runs, slice_digest
from kvstore.api.wire.frames import HEADER_BYTES, decode_header
from kvstore.api.wire.messages import FetchRequest, Message
from kvstore.errors import Corrupt
from kvstore.store import Ack, Space, Store
from kvstore.store.checking.check import check
from kvstore.tiers.ssd import BlobFile
from tests.store.test_store import PARTS, config, page_bytes, put, settings_named, tokens_of


class CollectingPeer:
    """Takes what is sent to it."""

    def __init__(self, store: Store, space: Space) -> None:
        self.store = store
        self.session = Session(b"", 1, "default", "test")
        self.sent = b""
        self.behind: list[bytes] = []
        """What went out behind the last frame."""
        self._space = space
        self._frames = 0

    async def reply(self, request: int, frame_type: FrameType, message: Message, payload: bytes = b"") -> None:
        assert frame_type is FrameType.FETCHED

    def interruptible(self, request: int) -> AbstractContextManager[None]:
        return nullcontext()

    async def send_pieces(
        self, request: int, meta: bytes, pieces: Sequence[memoryview], promised: Sequence[bytes | None], then: Then | None = None
    ) -> list[bytes]:
        self._frames += 1
        self.sent += b"".join(pieces)
        digests = [slice_digest(p) for p in pieces]
        if then is not None:
            self.behind.append(bytes(b"".join(then(digests))))
        await self.after_frame()
        return digests

    async def after_frame(self) -> None:
        """What happens between two frames."""

    async def fetch(self, meta: bytes, payload: bytes) -> None:
        """A FETCH, answered as a large one is."""
        await stream_fetch(self, 1, read_fetch(self, meta, payload))


class EvictingPeer(CollectingPeer):
    """After the first frame it evicts all that is being fetched, and puts other pages in its place."""

    async def after_frame(self) -> None:
        if self._frames == 1:
            first = self._space.tree.path_slots(self._space.tree.match(tokens_of((1,))))[0]
            self._space.remove_page(int(first))
            await put(self.store, self._space, tuple(range(5000, 5400)), b"other".ljust(16))


async def test_a_bad_copy_in_dram_costs_one_fetch_and_is_replaced_from_ssd(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1,), b"v" * 16, Ack.DURABLE)
        table = store.match(space, tokens_of((1,)), {}, parts=True).parts
        assert table is not None
        name, expected = table.ids[:16], page_bytes((1,), b"v" * 16, 0)
        fetch = pack(FetchRequest(namespace="ns", blobs=1)), name + pack_runs([Run(0, 0, len(expected))])
        row = store.reading.find(space, name)
        other = store.reading.hold_resident(space, row)
        assert other is not None
        other.view[5] ^= 1
        peer = CollectingPeer(store, space)
        with pytest.raises(Corrupt):
            await peer.fetch(*fetch)
        assert peer.behind == [b""]
        for _ in range(2):  # with the bad copy still in use, and after
            peer = CollectingPeer(store, space)
            await peer.fetch(*fetch)
            assert peer.sent == expected
            assert len(peer.behind) == 1
            assert decode_header(peer.behind[0][:HEADER_BYTES]).type is FrameType.FETCHED
            if other is not None:
                other.release()
                other = None
        await store.settle()
        check(store)


async def test_a_blob_evicted_in_the_middle_of_its_fetch_is_not_replaced_by_another(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"dram_bytes": 64 << 20, "ssd_bytes": 64 << 20, "segment_bytes": 1 << 20}
    prefix = (1, *range(10, 760))
    async with Store(config(tmp_path / "d", **sizes)) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, prefix, b"v" * 16)
        table = store.match(space, tokens_of(prefix), {}, parts=True).parts
        assert table is not None
        ids = [table.ids[i : i + 16] for i in range(0, len(table.ids), 16)]
        head = [ids[page * len(PARTS)] for page in range(len(prefix))]  # part 0: one of the two heads
        half = len(page_bytes(prefix[:1], b"v" * 16, 0)) - 64  # less than the slices, so that no blob id can vouch for it
        runs = [Run(number, 0, half) for number in range(len(head))]
        peer = EvictingPeer(store, space)
        await peer.fetch(pack(FetchRequest(namespace="ns", blobs=len(head), frame_bytes=1 << 20)), b"".join(head) + pack_runs(runs))
        expected = b"".join(page_bytes(prefix[: page + 1], b"v" * 16, 0)[:half] for page in range(len(prefix)))
        assert len(peer.sent) == len(expected) > 1 << 20, "one frame took it all: this test shows nothing"
        assert np.array_equal(np.frombuffer(peer.sent, np.uint8), np.frombuffer(expected, np.uint8)), "another blob's bytes were served"
        await store.settle()
        check(store)


@pytest.mark.parametrize("pauses", range(6))
async def test_a_fetch_cancelled_twice_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: int) -> None:
    """By a CANCEL, and then by its connection going away: while the first blob still comes up from SSD, and others are there."""
    read, gate = BlobFile.read, threading.Event()
    slow: set[bytes] = set()

    def gated(self: BlobFile, namespace: int, blob: bytes, layout: SliceLayout, target: memoryview, **more: Any) -> None:
        if blob in slow:
            gate.wait(10)
        read(self, namespace, blob, layout, target, **more)

    monkeypatch.setattr(BlobFile, "read", gated)
    prefix = (1, 2, 3, 4)
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, prefix, b"v" * 16, Ack.DURABLE)
        table = store.match(space, tokens_of(prefix), {}, parts=True).parts
        assert table is not None
        ids = [table.ids[i : i + 16] for i in range(0, len(table.ids), 16)][:: len(PARTS)]
        for name in ids:
            space.clear_slot(store.reading.find(space, name))
        slow.add(ids[0])
        fetch = pack(FetchRequest(namespace="ns", blobs=len(ids))), b"".join(ids) + pack_runs([Run(i, 0, 64) for i in range(len(ids))])
        fetching = asyncio.create_task(CollectingPeer(store, space).fetch(*fetch))
        while not all(store.reading.resident(space, store.reading.find(space, name)) for name in ids[1:]):
            await asyncio.sleep(0.001)
        fetching.cancel()
        for _ in range(pauses):
            await asyncio.sleep(0)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        gate.set()
        await store.settle()
        while store.reading.resident(space, store.reading.find(space, ids[0])) is None:
            await asyncio.sleep(0.001)  # its read goes on: others may have asked for it meanwhile
        await asyncio.sleep(0)
        assert store.figures.pinned_blobs == 0
        check(store)
