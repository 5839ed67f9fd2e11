"""Small fetches are answered at once, if all of it is in DRAM; never with a byte that does not verify."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.api.sessions import Session
from kvstore.api.small_fetch import SMALL_BYTES, Buffers, fetch_small
from kvstore.api.streaming import read_fetch
from kvstore.api.wire import Channel, FrameType, pack, unpack
from kvstore.api.wire.frames import HEADER_BYTES, MAX_PIECES, decode_header
from kvstore.api.wire.messages import Fetched, FetchRequest
from kvstore.api.wire.runs import Run, pack_runs
from kvstore.digests import slice_digest
from kvstore.errors import Busy, Corrupt, NotFound
from kvstore.store import Ack, Space, Store
from kvstore.store.quotas import Quota
from tests.store.test_store import PARTS, config, page_bytes, put, settings_named, tokens_of

VALUE = b"v" * 16


class Peer:
    """Keeps what is sent to it."""

    channel: Channel

    def __init__(self, store: Store) -> None:
        self.store = store
        self.session = Session(b"", 1, "default", "test")
        self.sent = b""

    async def send_at_once(self, gather: Callable[[], Buffers | None]) -> bool:
        buffers = gather()
        self.sent = b"".join(buffers or [])
        return buffers is not None

    async def fetch(self, names: list[bytes], runs: list[Run], **more: int | bool) -> bool:
        meta = pack(FetchRequest(namespace="ns", blobs=len(names), **more))  # type: ignore[arg-type]
        return await fetch_small(self, 7, read_fetch(self, meta, b"".join(names) + pack_runs(runs)))  # type: ignore[arg-type]

    def pieces(self, sizes: list[int]) -> list[bytes]:
        """What came, checked: DATA of pieces of these sizes, each with its digest, and FETCHED."""
        header = decode_header(self.sent)
        assert (header.type, header.request, header.pieces, header.payload_bytes) == (FrameType.DATA, 7, len(sizes), sum(sizes))
        at, found = HEADER_BYTES + header.meta_bytes, []
        for size in sizes:
            found.append(self.sent[at : at + size])
            at += size
        assert self.sent[at : at + header.trailer_bytes] == b"".join(map(slice_digest, found))
        at += header.trailer_bytes
        last = decode_header(self.sent[at:])
        assert (last.type, last.request) == (FrameType.FETCHED, 7)
        assert unpack(Fetched, self.sent[at + HEADER_BYTES :]) == Fetched(pieces=len(sizes), payload_bytes=sum(sizes))
        return found


async def stored(store: Store, prefix: tuple[int, ...], ack: Ack = Ack.MEMORY) -> tuple[Space, list[bytes]]:
    """A namespace with a prefix in it, and the ids of part 0 of its pages."""
    space = await store.create_namespace(settings_named())
    await put(store, space, prefix, VALUE, ack)
    table = store.match(space, tokens_of(prefix), {}, parts=True).parts
    assert table is not None
    return space, [table.ids[i : i + 16] for i in range(0, len(table.ids), 16)][:: len(PARTS)]


async def test_wholes_and_pieces_of_slices(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        _, names = await stored(store, (1, 2))
        first, second = page_bytes((1,), VALUE, 0), page_bytes((1, 2), VALUE, 0)
        peer = Peer(store)
        assert await peer.fetch(names, [Run(1, 0, len(second)), Run(0, 3, 5, 64, 2)])
        slices = store.space("default", "ns").blobs.layout_of(store.reading.find(store.space("default", "ns"), names[1])).sizes
        assert b"".join(peer.pieces([*slices, 5, 5])) == second + first[3:8] + first[67:72]
        assert store.stats.fetches == 1
        assert store.stats.fetch_bytes == len(second) + 10


async def test_what_is_not_for_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, names = await stored(store, (1,), Ack.DURABLE)
        peer = Peer(store)
        assert not await peer.fetch(names, [Run(0, 0, 64)], provisional=True)
        assert not await peer.fetch(names, [Run(0, 0, 64)] * (SMALL_BYTES // 64 + 1))
        assert not await peer.fetch(names, [Run(0, 0, 64)], frame_bytes=32)
        assert not await peer.fetch(names, [Run(0, 0, 1, 1, 64)] * (MAX_PIECES // 64) + [Run(0, 0, 1)]), "a frame takes no more pieces"
        with pytest.raises(NotFound):
            await peer.fetch([b"x" * 16], [Run(0, 0, 64)])
        space.clear_slot(store.reading.find(space, names[0]))
        assert not await peer.fetch(names, [Run(0, 0, 64)]), "it is on SSD only"
        assert store.stats.fetches == 0


@pytest.mark.parametrize("at", [5, -5])
async def test_bytes_and_digests_that_do_not_verify(tmp_path: Path, at: int) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, names = await stored(store, (1,), Ack.DURABLE)
        view = store.reading.resident(space, store.reading.find(space, names[0]))
        assert view is not None
        view[at] ^= 1
        peer = Peer(store)
        with pytest.raises(Corrupt):
            await peer.fetch(names, [Run(0, 0, 64)])
        assert not peer.sent
        assert not await peer.fetch(names, [Run(0, 0, 64)]), "the bad copy is still there"


async def test_the_quota_counts_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        _, names = await stored(store, (1,))
        store.quotas.replace({"default": Quota(in_flight=100)})
        peer = Peer(store)
        store.quotas.start_fetch("default", 50)
        with pytest.raises(Busy):
            await peer.fetch(names, [Run(0, 0, 64)])
        store.quotas.end("default", 50)
        assert await peer.fetch(names, [Run(0, 0, 64)])


@pytest.mark.parametrize("bad", [0, 3, 7])
@pytest.mark.parametrize("at", [5, -5])
async def test_one_bad_blob_of_many_is_dropped_and_no_other(tmp_path: Path, bad: int, at: int) -> None:
    prefix = tuple(range(1, 9))
    async with Store(config(tmp_path / "d")) as store:
        space, names = await stored(store, prefix, Ack.DURABLE)
        size = len(page_bytes((1,), VALUE, 0))
        peer = Peer(store)
        assert await peer.fetch(names, [Run(number, 0, size) for number in range(len(names))])
        assert b"".join(page_bytes(prefix[: n + 1], VALUE, 0) for n in range(len(prefix))) in peer.sent
        view = store.reading.resident(space, store.reading.find(space, names[bad]))
        assert view is not None
        view[at] ^= 1
        del view
        with pytest.raises(Corrupt, match=names[bad].hex()):
            await Peer(store).fetch(names, [Run(number, 0, size) for number in range(len(names))])
        left = [name for number, name in enumerate(names) if number != bad]
        assert await Peer(store).fetch(left, [Run(number, 0, size) for number in range(len(left))])


async def test_blobs_of_several_slices_and_in_any_order(tmp_path: Path) -> None:
    prefix = tuple(range(1, 6))
    async with Store(config(tmp_path / "d")) as store:
        space, names = await stored(store, prefix)
        pages = [page_bytes(prefix[: n + 1], VALUE, 0) for n in range(len(prefix))]
        slices = list(space.blobs.layout_of(store.reading.find(space, names[0])).sizes)
        for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1], [3, 3]):
            peer = Peer(store)
            asked = [names[number] for number in order]
            assert await peer.fetch(asked, [Run(number, 0, len(pages[0])) for number in range(len(order))])
            assert b"".join(peer.pieces(slices * len(order))) == b"".join(pages[number] for number in order)
        peer = Peer(store)
        assert await peer.fetch(names[:2], [Run(1, 0, len(pages[0])), Run(0, 0, len(pages[0]))])
        assert b"".join(peer.pieces(slices * 2)) == pages[1] + pages[0]
        space.clear_slot(store.reading.find(space, names[2]))
        assert not await Peer(store).fetch(names, [Run(number, 0, len(pages[0])) for number in range(len(names))])
