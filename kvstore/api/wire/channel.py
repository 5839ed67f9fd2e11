"""One connection's socket: exact reads, straight into their destination, and gathered writes. No protocol logic.

Works on a non-blocking TCP or Unix socket under any asyncio event loop. Reads are for one task; writes are serialised by
the caller, frame by frame.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from xxhash import xxh3_128_digest

from kvstore.api.wire.congestion import unpace
from kvstore.api.wire.eager import Begun, begin
from kvstore.api.wire.filling import Filling
from kvstore.api.wire.frames import HEADER_BYTES, FrameType, Header, decode_header, encode_bulk
from kvstore.api.wire.incoming import Incoming
from kvstore.api.wire.outgoing import Outgoing
from kvstore.api.wire.pieces import CHUNK, PieceHasher
from kvstore.digests import DIGEST_BYTES
from kvstore.errors import ConnectionLost

T = TypeVar("T")

_BUFFER = 16 << 10
_DIRECT = 4 << 10
"""Reads of at least so many bytes go straight to their destination."""
_GATHER = 512
_BULK = 16 << 10
SEND = 1 << 20
"""Bulk is sent, and then hashed, by so much: in the cache still, and few system calls."""
_APART = 256 << 10
"""The end of a bulk frame that goes out before its digests are computed; a smaller one goes with them, by one system call."""
_SPINS = 40
_LOW_WATER = 512 << 10
"""So much of a bulk payload, or what is left of it, is waited for at a time."""
_OFFERED = 8
"""Frames that are dealt with as they come before others on the loop get a turn."""


class Ends(Protocol):
    """Both sides of a socket, where they are not those of an event loop (see `Incoming` and `Outgoing`)."""

    def bound(self, seconds: float | None) -> None:
        """How long what follows may be waited for in all."""

    async def receive(self, read: Callable[[], T]) -> T:
        """What `read`, a call on the socket, returns once there is something."""

    async def send(self, write: Callable[[], bool]) -> None:
        """Call `write` until it says that all is out."""

    def close(self) -> None:
        """End what is waited for."""


Handler = Callable[[Header, bytes, bytes], Coroutine[Any, Any, None]]
"""Deals with a frame of which header, meta and (unless it is bulk) payload were read and verified."""


Bulk = tuple[bytes, Sequence[memoryview]]
"""A bulk frame to be: its meta, and its pieces."""
Turn = Callable[["Channel"], Awaitable[None] | None]
"""Says what bulk has to wait for before it goes on, if for anything."""


class Channel:
    """Frames over a socket. Raises ConnectionLost when the peer is gone."""

    def __init__(self, sock: socket.socket, ends: Ends | None = None) -> None:
        sock.setblocking(False)
        self.local = sock.family == socket.AF_UNIX
        """Whether the peer is on this machine."""
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.local = unpace(sock)
        self._marks = sock.family in (socket.AF_INET, socket.AF_INET6)
        """Whether the kernel can be asked to wake us only for so much; a Unix socket wakes for anything."""
        self._mark = 1
        self.sock = sock
        self._reader = ends or Incoming(sock)
        self._writer = ends or Outgoing(sock)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0
        self._spins = 0
        self._handler: Handler | None = None
        self._offer_bulk = False
        self._begun: Begun[None] | None = None
        self._flags = 0
        """Of a send that is not to wait."""

    async def shake_hands(self) -> None:
        """What comes before the first frame: nothing on a plain socket."""

    def close(self) -> None:
        """Close the socket; a read or a write under way ends with ConnectionLost."""
        self._abandon()
        self._handler = None  # it holds whoever has this channel
        self._reader.close()
        self._writer.close()
        self.sock.close()

    def bound_reads(self, seconds: float | None) -> None:
        """How long what is read from now on may be waited for in all. Raises TimeoutError there."""
        self._reader.bound(seconds)

    def bound_writes(self, seconds: float) -> None:
        """How long the peer may take in all over what is written from now on. Raises TimeoutError there."""
        self._writer.bound(seconds)

    # --- reading -------------------------------------------------------------------------------------------------------

    def offer_frames(self, handler: Handler, *, bulk: bool = False) -> None:
        """Let `handler` deal with frames that are whole when they come, in that moment: who waits for the next frame does not hear of them.

        Frames with slices only if `bulk`. What the handler has to wait for, the waiting task waits for. Must be ready for both ways.
        """
        self._handler, self._offer_bulk = handler, bulk

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

    # --- writing -------------------------------------------------------------------------------------------------------

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send buffers in order, gathered."""
        views = [memoryview(b) for b in buffers if len(b)]
        for first in range(0, len(views), _GATHER):
            await self._send_some(views[first : first + _GATHER])

    def send_now(self, buffers: Sequence[bytes | memoryview]) -> bytes:
        """Send what the socket takes at once; returns a copy of the rest, to be sent next."""
        left = b""
        for first in range(0, len(buffers), _GATHER):
            views = buffers[first : first + _GATHER]
            try:
                sent = 0 if left else self.sock.sendmsg(views)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from error
            if sent < sum(map(len, views)):
                left += b"".join(views)[sent:]
        return left

    def _begin(self, buffers: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """Send what the socket takes of some buffers at once. Returns what is left of them."""
        while buffers:
            try:
                sent = self.sock.sendmsg(buffers[:_GATHER], (), self._flags)
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from error
            for index, buffer in enumerate(buffers[:_GATHER]):
                if sent < len(buffer):
                    return [memoryview(buffer)[sent:], *buffers[index + 1 :]] if sent else buffers[index:]
                sent -= len(buffer)
            buffers = buffers[_GATHER:]
        return buffers

    async def _send_some(self, views: list[memoryview]) -> None:
        await self._send_rest(self._begin(views))

    async def _send_rest(self, views: Sequence[bytes | memoryview]) -> None:
        """Send what the socket did not take a moment ago: what it stopped at, then the others."""
        if not views:
            return
        try:
            await self._send_all(views[0])
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error
        await self.send(views[1:])

    async def _send_all(self, view: memoryview | bytes) -> None:
        """Send what the socket did not take at once."""
        rest = memoryview(view)

        def write() -> bool:
            nonlocal rest
            rest = rest[self.sock.send(rest) :]
            return not rest

        await self._writer.send(write)

    async def send_pieces(
        self, frame_type: FrameType, request: int, meta: bytes, pieces: Sequence[memoryview], promised: Sequence[bytes | None],
        turn: Turn | None = None, step: int = SEND, then: Callable[[list[bytes]], Sequence[bytes | memoryview]] | None = None,
    ) -> list[bytes]:  # fmt: skip
        """A bulk frame: pieces, hashed as they go out, then one digest each. Returns the digests computed.

        `promised` holds the digest to send for a piece where one is on record; otherwise the computed one is sent. `turn` is asked
        before every `step` bytes what to wait for, if for anything. `then` is told the digests, and returns what goes out with them, behind
        the frame. What the kernel has copied is hashed then: out of the cache, and while the peer is already at it.
        """
        digests, pending = await self._send_frame([], frame_type, request, meta, pieces, promised, turn, step)
        if then is not None:
            pending += then(digests)
        if rest := self._begin(pending):
            await self._send_rest(rest)
        return digests

    async def send_frames(
        self, frame_type: FrameType, request: int, frames: Sequence[Bulk], behind: Sequence[bytes | memoryview] = ()
    ) -> None:
        """Bulk frames, one right after the other: the digests of one go out with the beginning of the next, and small ones together.

        Other frames may come `behind` the last.
        """
        pending: list[bytes | memoryview] = []
        waiting = 0
        for meta, pieces in frames:
            _, pending = await self._send_frame(pending, frame_type, request, meta, pieces, [None] * len(pieces), None, SEND)
            waiting = waiting + sum(map(len, pieces)) if len(pending) > 1 else 0
            if waiting >= SEND or len(pending) >= _GATHER:
                if rest := self._begin(pending):
                    await self._send_rest(rest)
                pending, waiting = [], 0
        if rest := self._begin([*pending, *behind]):
            await self._send_rest(rest)

    async def _send_frame(
        self, before: list[bytes | memoryview], frame_type: FrameType, request: int, meta: bytes, pieces: Sequence[memoryview],
        promised: Sequence[bytes | None], turn: Turn | None, step: int,
    ) -> tuple[list[bytes], list[bytes | memoryview]]:  # fmt: skip
        """Send what is to go `before`, and a bulk frame but for its end. Returns the digests computed, and what is still to be sent."""
        left = sum(map(len, pieces))
        pending = [*before, encode_bulk(frame_type, request, meta, left, len(pieces))]
        digests: list[bytes] = []
        behind: list[memoryview] = []
        waiting = 0
        for piece in pieces:
            size = len(piece)
            left -= size
            if size > step:
                digests += map(xxh3_128_digest, behind)
                digests.append(await self._send_in_steps(pending, piece, turn, step))
                pending, behind, waiting = [], [], 0
                continue
            pending.append(piece)
            behind.append(piece)
            waiting += size
            if waiting >= step or (not left and waiting >= _APART):
                if turn is not None and (waiting_for := turn(self)) is not None:
                    await waiting_for
                rest = self._begin(pending)
                digests += map(xxh3_128_digest, behind)
                if rest:
                    await self._send_rest(rest)
                pending, behind, waiting = [], [], 0
        digests += map(xxh3_128_digest, behind)
        trailer = b"".join([kept or computed for kept, computed in zip(promised, digests, strict=True)])
        assert len(trailer) == len(pieces) * DIGEST_BYTES
        pending.append(trailer)
        return digests, pending

    async def _send_in_steps(self, before: list[bytes | memoryview], piece: memoryview, turn: Turn | None, step: int) -> bytes:
        """Send what is to go before a piece, and the piece by so many bytes. Returns its digest."""
        hasher = PieceHasher(piece, [len(piece)])
        for start in range(0, len(piece), step):
            end = min(start + step, len(piece))
            if turn is not None and (waiting_for := turn(self)) is not None:
                await waiting_for
            rest = self._begin([*before, piece[start:end]])
            before = []
            hasher.advance(end)
            if rest:
                await self._send_rest(rest)
        return hasher.digests[0]
