"""The writing half of a channel: gathered writes, and bulk that is hashed as it goes out. Serialised by the caller, frame by frame."""

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from xxhash import xxh3_128_digest

from kvstore.api.wire.frames import FrameType, encode_bulk
from kvstore.api.wire.pieces import PieceHasher
from kvstore.digests import DIGEST_BYTES
from kvstore.errors import ConnectionLost

_GATHER = 512
SEND = 1 << 20
"""Bulk is sent, and then hashed, by so much: in the cache still, and few system calls."""
_APART = 256 << 10
"""The end of a bulk frame that goes out before its digests are computed; a smaller one goes with them, by one system call."""


class WritingEnd(Protocol):
    """Who waits until the socket takes more (see `Outgoing`)."""

    def bound(self, seconds: float) -> None:
        """How long what follows may be waited for in all."""

    async def send(self, write: Callable[[], bool]) -> None:
        """Call `write` until it says that all is out."""

    def close(self) -> None:
        """End what is waited for."""


Bulk = tuple[bytes, Sequence[memoryview]]
"""A bulk frame to be: its meta, and its pieces."""
Turn = Callable[["WritingHalf"], Awaitable[None] | None]
"""Says what bulk has to wait for before it goes on, if for anything."""


class WritingHalf:
    """Frames into a socket. Raises ConnectionLost when the peer is gone."""

    def __init__(self, sock: socket.socket, writer: WritingEnd) -> None:
        self.sock = sock
        self._writer = writer
        self._flags = 0
        """Of a send that is not to wait."""

    def close(self) -> None:
        """End a write under way, with ConnectionLost."""
        self._writer.close()

    def bound_writes(self, seconds: float) -> None:
        """How long the peer may take in all over what is written from now on. Raises TimeoutError there."""
        self._writer.bound(seconds)

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
