"""The reading half of a channel: exact reads into their destination, and frames that are dealt with as they come. For one task."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from xxhash import xxh3_128_digest

from kvstore.api.wire.eager import Begun, begin
from kvstore.api.wire.filling import Filling
from kvstore.api.wire.frames import HEADER_BYTES, Header, decode_header
from kvstore.api.wire.pieces import CHUNK, PieceHasher
from kvstore.errors import ConnectionLost

T = TypeVar("T")

_BUFFER = 16 << 10
_DIRECT = 4 << 10
"""Reads of at least so many bytes go straight to their destination."""
_GATHER = 512
_BULK = 16 << 10
_SPINS = 40
_LOW_WATER = 512 << 10
"""So much of a bulk payload, or what is left of it, is waited for at a time."""
_OFFERED = 8
"""Frames that are dealt with as they come before others on the loop get a turn."""


class ReadingEnd(Protocol):
    """Who waits until there is something to read (see `Incoming`)."""

    def bound(self, seconds: float | None) -> None:
        """How long what follows may be waited for in all."""

    async def receive(self, read: Callable[[], T]) -> T:
        """What `read`, a call on the socket, returns once there is something."""

    def look(self) -> None:
        """Read now what somebody waits for, if it is there."""

    def close(self) -> None:
        """End what is waited for."""


Handler = Callable[[Header, bytes, bytes], Coroutine[Any, Any, None]]
"""Deals with a frame of which header, meta and (unless it is bulk) payload were read and verified."""


class ReadingHalf:
    """Frames out of a socket. Raises ConnectionLost when the peer is gone."""

    def __init__(self, sock: socket.socket, reader: ReadingEnd) -> None:
        self.sock = sock
        self._marks = sock.family in (socket.AF_INET, socket.AF_INET6)
        """Whether the kernel can be asked to wake us only for so much; a Unix socket wakes for anything."""
        self._mark = 1
        self._reader = reader
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0
        self._spins = 0
        self._handler: Handler | None = None
        self._offer_bulk = False
        self._begun: Begun[None] | None = None

    def close(self) -> None:
        """End a read under way, with ConnectionLost."""
        self._abandon()
        self._handler = None  # it holds whoever has this channel
        self._reader.close()

    def bound_reads(self, seconds: float | None) -> None:
        """How long what is read from now on may be waited for in all. Raises TimeoutError there."""
        self._reader.bound(seconds)

    def offer_frames(self, handler: Handler, *, bulk: bool = False) -> None:
        """Let `handler` deal with frames that are whole when they come, in that moment: who waits for the next frame does not hear of them.

        Frames with slices only if `bulk`. What the handler has to wait for, the waiting task waits for. Must be ready for both ways.
        """
        self._handler, self._offer_bulk = handler, bulk

    def look(self) -> None:
        """Read now what is waited for, if it is there, and have frames dealt with that were offered: sooner than the loop would."""
        self._reader.look()

    async def wait_readable(self) -> bool:
        """Wait, for as long as it takes, until the next frame begins; False if the peer closed instead."""
        while self._start == self._end:
            try:
                if not await self._fill(or_end=True):
                    return False
            except asyncio.CancelledError:
                self._abandon()
                raise
            if (begun := self._begun) is not None:
                self._begun = None
                await begun
        return True

    def _abandon(self) -> None:
        if (begun := self._begun) is not None:
            self._begun = None
            begun.abandon()

    def _read_frames(self) -> int:
        """Read, and have what is whole dealt with. Raises BlockingIOError if that was all."""
        self._start, self._end = 0, self._read_start()
        if self._end:
            for _ in range(_OFFERED):
                if self._begun is not None or not self._offer():
                    break
                if self._start == self._end and self._begun is None:
                    raise BlockingIOError
        return self._end

    def _offer(self) -> bool:
        """Have the next frame dealt with, if it is all there and the handler's."""
        assert self._handler is not None
        start = self._start
        if self._end - start < HEADER_BYTES:
            return False
        raw = bytes(self._buffer[start : start + HEADER_BYTES])
        header = decode_header(raw)
        body = start + HEADER_BYTES + header.meta_bytes
        end = body + header.payload_bytes + header.trailer_bytes
        if end > self._end or (header.pieces and not self._offer_bulk):
            return False
        meta = bytes(self._buffer[start + HEADER_BYTES : body])
        self._start = body if header.pieces else end
        payload = bytes(self._buffer[body : self._start])
        header.verify(raw, meta, payload)
        self._begun = begin(self._handler(header, meta, payload))
        return True

    def _read_start(self) -> int:
        """Into the buffer, what may be the beginning of a frame."""
        return self.sock.recv_into(self._buffer)

    async def read_header(self) -> tuple[Header, bytes] | None:
        """The next header and its raw bytes; None if the peer closed between two frames. Raises ProtocolError."""
        if not await self.wait_readable():
            return None
        raw = await self.read(HEADER_BYTES)
        return decode_header(raw), raw

    async def read_body(self, header: Header, raw: bytes) -> tuple[bytes, bytes]:
        """Meta and, in a control frame, payload; verified. A bulk frame's payload is left to `read_pieces`."""
        meta = await self.read(header.meta_bytes)
        payload = b"" if header.bulk or not header.payload_bytes else await self.read(header.payload_bytes)
        header.verify(raw, meta, payload)
        return meta, payload

    async def read(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        if self._end - self._start >= count:
            self._start += count
            return bytes(self._buffer[self._start - count : self._start])
        target = memoryview(bytearray(count))
        await self.read_into(target)
        return target.tobytes()

    async def read_into(self, target: memoryview, hasher: PieceHasher | None = None) -> None:
        """Fill `target`; the hasher is told of progress."""
        filled, size = 0, len(target)
        if self._marks and size >= _DIRECT:
            await self._read_woken([target], [hasher])
            return
        while filled < size:
            buffered = self._end - self._start
            if buffered:
                count = min(buffered, size - filled)
                target[filled : filled + count] = self._buffer[self._start : self._start + count]
                self._start += count
                filled += count
            elif size - filled >= _DIRECT:
                count = await self._receive(target[filled:])
                filled += count
            else:
                await self._fill()
                continue
            if hasher is not None:
                hasher.advance(filled)

    async def read_pieces(self, header: Header, spans: Sequence[tuple[memoryview, Sequence[int]]]) -> tuple[list[bytes], bytes]:
        """A bulk payload into its destinations, each a buffer and the sizes of the pieces in it.

        Returns the digests of what arrived, and the ones that were sent, concatenated.
        """
        if header.payload_bytes + header.trailer_bytes <= self._end - self._start:
            return self._take_pieces(spans), await self.read(header.trailer_bytes)
        hashers = [PieceHasher(view, list(sizes)) for view, sizes in spans]
        if len(spans) == 1:
            await self.read_into(spans[0][0], hashers[0])
        elif self._marks:
            await self._read_woken([view for view, _ in spans], hashers)
        else:
            await self._read_scattered([view for view, _ in spans], hashers)
        return [digest for hasher in hashers for digest in hasher.digests], await self.read(header.trailer_bytes)

    def _take_pieces(self, spans: Sequence[tuple[memoryview, Sequence[int]]]) -> list[bytes]:
        """As `read_pieces`, of a payload that is all here."""
        digests: list[bytes] = []
        for view, sizes in spans:
            start, at = self._start, 0
            self._start += len(view)
            view[:] = self._buffer[start : self._start]
            for size in sizes:
                digests.append(xxh3_128_digest(view[at : at + size]))
                at += size
        return digests

    async def _read_woken(self, targets: Sequence[memoryview], hashers: Sequence[PieceHasher | None]) -> None:
        """Fill buffers one after the other; this task sleeps until all is there."""
        filling = Filling(self.sock, targets, hashers, self._wake_for, self._buffer)
        count = min(self._end - self._start, filling.left)
        filling.take(self._buffer[self._start : self._start + count])
        self._start += count
        try:
            await self._reader.receive(filling.read)
            if filling.beyond:
                self._start, self._end = 0, filling.beyond
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error

    async def _read_scattered(self, targets: list[memoryview], hashers: list[PieceHasher]) -> None:
        """Fill buffers one after the other, several by one system call if they are there."""
        at, filled = 0, 0
        while at < len(targets):
            target = targets[at][filled:]
            count = min(self._end - self._start, len(target))
            if count:
                target[:count] = self._buffer[self._start : self._start + count]
                self._start += count
            elif self._spins or len(target) >= _DIRECT:
                count = await self._receive_scattered([target, *targets[at + 1 : at + _GATHER]])
            else:
                await self._fill()
            while count:
                taken = min(count, len(targets[at]) - filled)
                filled, count = filled + taken, count - taken
                hashers[at].advance(filled)
                if filled == len(targets[at]):
                    at, filled = at + 1, 0

    async def skip(self, count: int) -> None:
        """Read and drop bytes."""
        scratch = memoryview(bytearray(min(count, CHUNK)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            await self.read_into(piece)
            count -= len(piece)

    async def _fill(self, *, or_end: bool = False) -> bool:
        self._start = self._end = 0
        if or_end and self._handler is not None and not (self._spins and not self._marks):
            self._wake_for(1)
            try:
                return await self._reader.receive(self._read_frames) > 0
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from error
        self._end = await self._receive(self._buffer, or_end=or_end)
        return self._end > 0

    async def _receive(self, target: memoryview, *, or_end: bool = False) -> int:
        count = await self._receive_spinning(target) if self._spins and not self._marks else None
        if count is None:
            try:
                count = await self._reader.receive(partial(self._receive_some, target))
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from error
        if count == 0 and not or_end:
            raise ConnectionLost("the peer closed the connection in the middle of a frame")
        if count >= _BULK and not self._marks:
            self._spins = _SPINS
        elif self._spins:
            self._spins -= 1  # what comes in drops is worth no spinning
        return count

    def _receive_some(self, target: memoryview) -> int:
        try:
            return self.sock.recv_into(target)
        except BlockingIOError:
            self._wake_for(1)
            raise

    def _wake_for(self, nbytes: int) -> None:
        """Let the loop hear of the socket once so many bytes are there, of bulk only some, or its end (SO_RCVLOWAT)."""
        nbytes = min(nbytes, _LOW_WATER)
        if self._marks and nbytes != self._mark:
            self._mark = nbytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    async def _receive_scattered(self, targets: list[memoryview]) -> int:
        """As `_receive`, into several buffers while bulk is flowing."""
        if len(targets) == 1:
            return await self._receive(targets[0])
        count = await self._receive_spinning(targets) if self._spins else None
        if count is None:
            try:
                count = (await self._reader.receive(partial(self.sock.recvmsg_into, targets)))[0]
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from error
        if count == 0:
            raise ConnectionLost("the peer closed the connection in the middle of a frame")
        return count

    async def _receive_spinning(self, target: memoryview | list[memoryview]) -> int | None:
        """Try a few turns of the loop before sleeping: while bulk is flowing, the next bytes are microseconds away.

        A sleep costs the sender a wake-up for every segment, which halves the throughput in a virtual machine
        (docs/decisions/0005-spin-before-sleep.md). None, and no more spinning until bulk flows again, if nothing came.
        """
        for _ in range(self._spins):
            try:
                return self.sock.recvmsg_into(target)[0] if isinstance(target, list) else self.sock.recv_into(target)
            except BlockingIOError:
                await asyncio.sleep(0)
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from error
        self._spins = 0
        return None
