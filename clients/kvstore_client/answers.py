"""What is under way on one connection, and what the frames that come mean for it. Shared by all kinds of connections: no waiting here."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvstore.api.wire import (
    DATA_META,
    Channel,
    ConnectionLost,
    DeadlineExceeded,
    FrameType,
    Header,
    KVStoreError,
    ProtocolError,
    encode,
    error_from_code,
    pack,
    unpack,
)
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.messages import ErrorReply, FetchRequest, Hello, Message, Welcome
from kvstore.api.wire.same_host import SegmentList, SegmentMeta
from kvstore_client.plan import FetchPlan
from kvstore_client.stripes import Stripe

M = TypeVar("M", bound=Message)

QUIET_S = 5.0
"""How long a cancelled fetch waits for the frame that is just arriving in the caller's buffer."""

Arrived = Callable[[Stripe, int, list[bytes], bytes], None]
"""Told of pieces of a stripe from the n-th on: their digests, and those that the daemon sent."""

Frame = tuple[Header, bytes, bytes]


class Answer(Protocol):
    """Where the answer to a request goes: an asyncio.Future, or something as simple as `Slot`."""

    def done(self) -> bool:
        """Whether it is there, or nobody wants it any more."""

    def set_result(self, result: Frame, /) -> None:
        """It is there."""

    def set_exception(self, exception: BaseException, /) -> None:
        """It is an error."""


class Slot:
    """An answer that nobody waits for by an event loop."""

    __slots__ = ("error", "frame")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is there."""
        return self.frame is not None or self.error is not None

    def set_result(self, result: Frame, /) -> None:
        """It is there."""
        self.frame = result

    def set_exception(self, exception: BaseException, /) -> None:
        """It is an error."""
        self.error = exception

    def result(self) -> Frame:
        """The answer; raises the error."""
        if self.error is not None:
            raise self.error
        assert self.frame is not None
        return self.frame


A = TypeVar("A", bound=Answer)


@dataclass(slots=True)
class Call(Generic[A]):
    """A request in flight. A fetch also has a stripe, the caller's buffer, and whom to tell of pieces."""

    done: A
    stripe: Stripe | None = None
    target: memoryview | None = None
    arrived: Arrived | None = None
    next_piece: int = 0
    quiet_s: float = QUIET_S


_PLAIN = "it speaks TLS (then the endpoint is tls://HOST:PORT)"


def cut_off(error: ConnectionLost) -> bool:
    """Whether the daemon has closed the connection, and has not read all that was sent to it."""
    return isinstance(error.__cause__, ConnectionResetError | BrokenPipeError)


def refused(error: BaseException) -> bool:
    """Whether it is the daemon's answer to a request: then nothing has come of that."""
    return isinstance(error, KVStoreError) and not isinstance(error, ConnectionLost | DeadlineExceeded | ProtocolError)


def without_a_word(otherwise: str) -> ConnectionLost:
    """The error for a connection that was closed before the daemon said anything."""
    full = "it has as many connections as it takes (close clients that are not needed, or raise its max_connections)"
    return ConnectionLost(f"the daemon closed the connection before it said anything: {full}, it is stopping, or {otherwise}")


def fetch_request(namespace: str, stripe: Stripe, plan: FetchPlan) -> tuple[FetchRequest, bytes]:
    """What is sent to fetch a stripe of a plan."""
    blobs, payload = stripe.asked()
    message = FetchRequest(
        namespace=namespace, blobs=blobs, provisional=plan.provisional, frame_bytes=plan.frame_bytes, priority=plan.priority,
        ahead=plan.take_ahead(),
    )  # fmt: skip
    return message, payload


class Answers(Generic[A]):
    """The requests in flight on a channel; each gets its own replies."""

    def __init__(self, channel: Channel) -> None:
        self.welcome: Welcome
        self._channel = channel
        self._calls: dict[int, Call[A]] = {}
        self._numbers = itertools.count(1)
        self._receiving: int | None = None
        self._frame_done = asyncio.Event()
        self.lost: KVStoreError | None = None
        self.on_segments: Callable[[list[SegmentMeta], list[int]], None] | None = None
        """Takes over the descriptors of segments as they come, whether or not somebody still waits for them."""

    async def _greet(self, hello: Hello) -> None:
        sent: ConnectionLost | None = None
        try:
            await self._channel.send(encode(FrameType.HELLO, 0, pack(hello)))
        except ConnectionLost as error:
            if not cut_off(error):
                raise
            sent = error  # it may have said why before
        try:
            found = await self._channel.read_header()
        except ConnectionLost as error:
            if not cut_off(error):
                raise
            raise without_a_word(_PLAIN) from error
        if found is None:
            raise without_a_word(_PLAIN) from sent
        header, raw = found
        meta, _ = await self._channel.read_body(header, raw)
        if header.type is FrameType.ERROR:
            raise _typed(meta)
        if header.type is not FrameType.WELCOME:
            raise ProtocolError(f"the daemon answered HELLO with {header.type.name}")
        self.welcome = unpack(Welcome, meta)

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise ConnectionLost(self.lost.message)

    async def _receive(self, header: Header, meta: bytes, payload: bytes) -> None:
        if header.type is FrameType.DATA:
            await self._receive_data(header, meta)
        else:
            self._answer(header, meta, payload)

    def _answer(self, header: Header, meta: bytes, payload: bytes) -> None:
        if header.type is FrameType.ERROR and header.request == 0:
            raise _typed(meta)
        if header.type is FrameType.SEGMENT_LIST:
            self._take_segments(unpack(SegmentList, meta).items)
        call = self._calls.pop(header.request, None)
        if call is None or call.done.done():
            self._undo_late(header.type, meta)
            return  # it was cancelled, or it is an early word on slices whose commit will say the same
        if header.type is FrameType.ERROR:
            call.done.set_exception(_typed(meta))
        else:
            call.done.set_result((header, meta, payload))

    async def _receive_data(self, header: Header, meta: bytes) -> None:
        call = self._calls.get(header.request)
        if call is None or call.stripe is None or call.target is None or call.done.done():
            await self._channel.skip(header.payload_bytes + header.trailer_bytes)
            return
        first = call.next_piece
        if DATA_META.unpack(meta)[0] != first or call.stripe.reach(first, header.pieces) != (header.pieces, header.payload_bytes):
            raise ProtocolError(
                f"DATA of {header.pieces} pieces and {header.payload_bytes} bytes does not continue the fetch at piece {first}"
            )
        self._receiving = header.request
        self._frame_done.clear()
        try:
            target = call.target
            into = [(target[at : at + size], sizes) for at, size, sizes in call.stripe.spans(first, header.pieces)]
            digests, claimed = await self._channel.read_pieces(header, into)
        finally:
            self._receiving = None
            self._frame_done.set()
        call.next_piece += header.pieces
        if call.arrived is not None and not call.done.done():
            try:
                call.arrived(call.stripe, first, digests, claimed)
            except KVStoreError as error:
                call.target = None
                call.done.set_exception(error)

    def _take_segments(self, items: list[SegmentMeta]) -> None:
        if not isinstance(self._channel, DescriptorChannel) or self.on_segments is None:
            raise ProtocolError("segments came where none were asked for")
        self.on_segments(items, self._channel.take(len(items)))

    def _undo_late(self, answer: FrameType, meta: bytes) -> None:
        """Something was answered that nobody waits for any more: a put must not stay open, nor a lease be kept."""

    def _fail(self, error: KVStoreError) -> None:
        if self.lost is None:
            self.lost = error
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(ConnectionLost(error.message) if not isinstance(error, ProtocolError) else error)
        self._calls.clear()


def _typed(meta: bytes) -> KVStoreError:
    reply = unpack(ErrorReply, meta)
    return error_from_code(reply.code, reply.message, reply.retry_after_ms).after(reply.done_pages)
