"""Pieces going out for a fetch, gathered into DATA frames, every slice verified on the way."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

from kvstore.api.wire import (
    DATA_META,
    MAX_BULK_PAYLOAD,
    MAX_DATA_PAYLOAD,
    FrameType,
    Piece,
    Run,
    SliceLayout,
    cut_lazily,
    encode,
    pack,
    whole_slices,
)
from kvstore.api.wire.messages import Fetched
from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.errors import Corrupt
from kvstore.store import Held, Space, Store

_FRAME_PIECES = 1024
"""Pieces of a DATA frame at most: some milliseconds of work."""
_BREATH = 16 << 20
_PIECE_WORK = 32 << 10
_PROVISIONAL = -1
"""In place of a blob row: the bytes belong to a put under way."""

Then = Callable[[list[bytes]], Sequence[bytes | memoryview]]
"""Told the digests of a frame, says what goes behind it."""


class Outlet(Protocol):
    """The connection that they go out by."""

    store: Store

    def interruptible(self, request: int) -> AbstractContextManager[None]:
        """While a fetch waits for something that is not its own frame, it can be stopped at once."""

    async def send_pieces(
        self, request: int, meta: bytes, pieces: Sequence[memoryview], promised: Sequence[bytes | None], then: Then | None = None
    ) -> list[bytes]:
        """Send one DATA frame, and what `then`, told the digests computed on the way, has to go behind it. Returns the digests."""


class Sender:
    """Gathers pieces into DATA frames. Every slice is verified on the way: whole ones as they are sent, others before."""

    def __init__(self, connection: Outlet, request: int, space: Space, frame_bytes: int) -> None:
        self.request = request
        self._frame_bytes = min(frame_bytes or MAX_BULK_PAYLOAD, MAX_DATA_PAYLOAD)
        self.pieces_sent = 0
        self.payload_bytes = 0
        self.answered = False
        """Whether FETCHED went out with the last frame."""
        self.held_up = False
        """Whether something had to be read from SSD before it could be sent."""
        self._connection = connection
        self._space = space
        self._pieces: list[memoryview] = []
        self._promised: list[bytes | None] = []
        self._owners: list[int] = []
        self._bytes = 0
        self._held: list[Held] = []
        self._named: set[int] = set()
        """Rows whose digest table was found to be the one that their id names, in the bytes that this fetch holds."""
        self._verified: tuple[int, int] | None = None
        self._cut: tuple[Run, SliceLayout, list[tuple[int, int, int]]] | None = None
        """The run that was last added whole, and the slices of it."""
        self._work = 0
        """Since others had a turn: bytes hashed, and pieces as so many bytes."""

    @property
    def waiting(self) -> bool:
        """Whether there are pieces to flush."""
        return bool(self._pieces)

    async def send_held(self, run: Run, held: Held) -> None:
        """Send a run of a blob that is held, and let go of it once its pieces are sent. It may still be on its way from SSD."""
        self._held.append(held)
        self._named.discard(held.row)
        await self.send_run(run, held.row, held.view, held)

    def add_whole(self, run: Run, row: int, stored: memoryview, layout: SliceLayout) -> bool:
        """Gather a run of whole slices of a blob that stays in place for the fetch, if the frame has room for all of it; else do nothing.

        Most runs are so, and alike: this is `send_run` without what has been looked at already.
        """
        if self._bytes + run.length > self._frame_bytes or self._work > _BREATH:
            return False
        cut = self._cut
        if cut is None or cut[0] is not run or cut[1] is not layout:
            cut = self._cut = run, layout, whole_slices(run, layout)
        slices, count = cut[2], len(cut[2])
        if not count or len(self._pieces) + count > _FRAME_PIECES:
            return False
        if row not in self._named:
            self._check_name(row, stored, layout)
        self._verified = None
        for number, start, end in slices:
            table = layout.payload_bytes + DIGEST_BYTES * number
            self._pieces.append(stored[start:end])
            self._promised.append(bytes(stored[table : table + DIGEST_BYTES]))
            self._owners.append(row)
        self._bytes += run.length
        self._work += _PIECE_WORK * count
        return True

    def _check_name(self, row: int, stored: memoryview, layout: SliceLayout) -> None:
        """See that the digest table is the one that the blob's id names."""
        if blob_id(stored[layout.payload_bytes :]) != self._space.blobs.id_of(row):
            self._corrupt(row, stored)
        self._named.add(row)

    async def send_run(self, run: Run, row: int, stored: memoryview, held: Held | None = None) -> None:
        """Send a run of a blob. Its stored form stays in place for the fetch, or is `held`, the last that was taken over."""
        layout = self._space.blobs.layout_of(row)
        if row not in self._named:
            self._check_name(row, stored, layout)
        self._verified = None
        for piece in cut_lazily(run, layout):
            if held is not None and not held.has(piece.slice):
                await self._wait_for(held, piece.slice)
            if self.full(piece):
                await self.flush(keep_last=True)
            self.add(piece, layout, stored, row)
            if self._work > _BREATH:  # many small pieces are much work for few bytes, and no write that waits
                self._work = 0
                await asyncio.sleep(0)

    async def _wait_for(self, held: Held, number: int) -> None:
        """Wait for a slice that is being read; what came before it is sent meanwhile."""
        self.held_up = True
        await self.flush(keep_last=True)
        with self._connection.interruptible(self.request):
            await held.wait_for(number)

    def full(self, piece: Piece) -> bool:
        """Whether a piece has no place in the frame any more."""
        most = min(self._frame_bytes, MAX_BULK_PAYLOAD) if self._held else self._frame_bytes  # what comes from SSD is not saved up
        return (bool(self._pieces) and self._bytes + piece.size > most) or len(self._pieces) >= _FRAME_PIECES

    def add(self, piece: Piece, layout: SliceLayout, stored: memoryview, row: int = _PROVISIONAL) -> None:
        """Gather a piece of the stored form of a blob, or of a part of a put under way."""
        table = layout.payload_bytes + piece.slice * DIGEST_BYTES
        promise = bytes(stored[table : table + DIGEST_BYTES])
        if not piece.whole and self._verified != (row, piece.slice):
            whole = stored[layout.offsets[piece.slice] : layout.offsets[piece.slice + 1]]
            if slice_digest(whole) != promise:
                self._corrupt(row, whole)
            self._verified = (row, piece.slice) if row != _PROVISIONAL else None
            self._work += len(whole)
        self._work += _PIECE_WORK
        self._pieces.append(stored[piece.offset : piece.offset + piece.size])
        self._promised.append(promise if piece.whole else None)
        self._owners.append(row)
        self._bytes += piece.size

    async def flush(self, *, keep_last: bool = False, last: bool = False) -> None:
        """Send what is gathered, and let go of the blobs that were taken over, except the last if it is still being sent.

        Nothing comes behind what is the `last` but FETCHED, which goes with it.
        """
        if self._pieces:
            meta = DATA_META.pack(self.pieces_sent)
            self.pieces_sent += len(self._pieces)
            self.payload_bytes += self._bytes
            digests = await self._connection.send_pieces(self.request, meta, self._pieces, self._promised, self._answer if last else None)
            if digests != self._promised:
                for digest, promise, row, piece in zip(digests, self._promised, self._owners, self._pieces, strict=True):
                    if promise is not None and digest != promise:
                        self._corrupt(row, piece)
            self._pieces, self._promised, self._owners, self._bytes = [], [], [], 0
        kept = [self._held.pop()] if keep_last and self._held else []
        self.release()
        self._held = kept

    def fetched(self) -> Fetched:
        """What the client is told at the end."""
        return Fetched(pieces=self.pieces_sent, payload_bytes=self.payload_bytes)

    def _answer(self, digests: list[bytes]) -> Sequence[bytes | memoryview]:
        """What goes behind the last frame: nothing if it does not verify."""
        self.answered = all(promise is None or promise == digest for promise, digest in zip(self._promised, digests, strict=True))
        return encode(FrameType.FETCHED, self.request, pack(self.fetched())) if self.answered else ()

    def release(self) -> None:
        """Let go of all blobs."""
        for held in self._held:
            held.release()
        self._held.clear()

    def _corrupt(self, row: int, seen: memoryview) -> NoReturn:
        if row == _PROVISIONAL:
            raise Corrupt("a slice of a put under way did not verify in DRAM")
        corrupt(self._connection.store, self._space, row, seen)


def corrupt(store: Store, space: Space, row: int, seen: memoryview) -> NoReturn:
    """Drop a copy in DRAM that did not verify, in the memory `seen`, and say so. Raises Corrupt."""
    name = space.blobs.id_of(row).hex()
    store.reading.discard_bad_copy(space, row, seen)
    raise Corrupt(f"blob {name} did not verify in DRAM; that copy was dropped")
