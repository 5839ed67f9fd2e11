"""One connection to a daemon: requests in flight, and the task that reads replies. How one comes to be is in opening.py."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.api.wire import (
    SLICES_META,
    Busy,
    Channel,
    ConnectionLost,
    FrameType,
    Header,
    KVStoreError,
    encode,
    pack,
    unpack,
)
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.eager import Begun, begin
from kvstore.api.wire.messages import Cancel, Empty, Fetched, Hello, LeaseRequest, Matched, Message
from kvstore.api.wire.put_messages import PutHandle, PutReady
from kvstore.api.wire.spin import Spin, spin_s
from kvstore.api.wire.writing import Bulk
from kvstore_client.answers import QUIET_S, Answers, Arrived, Call, Frame, fetch_request
from kvstore_client.plan import FetchPlan
from kvstore_client.progress import bytes_received
from kvstore_client.stripes import Stripe
from kvstore_client.waiting import Patience

M = TypeVar("M", bound=Message)

_STALLED_S = 0.1
"""A cancelled fetch does not wait for a frame of which nothing has come for so long."""
_SOON_BYTES = 256 << 10
"""What is fetched into no more than this is expected within microseconds."""
_LOOKS = 8
"""At the socket, for an answer, between two turns of the loop: as long as one of those takes."""

Pending = Call[asyncio.Future[Frame]]
Request = tuple[FrameType, Message, bytes | memoryview]
"""Of a frame: its type, meta and payload."""

Sender = Callable[[list[bytes | memoryview]], Coroutine[Any, Any, None]]
"""Sends a request's frame."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A request that is answered only if there is something to say."""

    number: int
    call: Pending

    def said(self, reply: type[M]) -> M | None:
        """What was said so far, if anything. Raises an error that came."""
        return unpack(reply, self.call.done.result()[1]) if self.call.done.done() else None


class Connection(Answers[asyncio.Future[Frame]]):
    """Made by `open_connection`. Many requests may be in flight; each gets its own replies."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._write_lock = asyncio.Lock()
        self._spin = Spin()
        self._reader: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self, hello: Hello) -> None:
        """Greet the daemon, and from then on read what it says."""
        await self._greet(hello)
        self._reader = asyncio.create_task(self._read_replies(), name="kvstore-client-reader")

    async def close(self) -> None:
        """Close; requests in flight fail with ConnectionLost."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._fail(ConnectionLost("the connection was closed"))
        self._channel.close()

    def drop(self) -> None:
        """As `close`, where its event loop does not run any more."""
        with contextlib.suppress(RuntimeError):  # it has no use for its ends
            self._fail(ConnectionLost("the connection was closed"))
        with contextlib.suppress(RuntimeError):
            self._channel.close()
        self._channel.sock.close()

    @property
    def local(self) -> bool:
        """Whether the daemon is on this machine."""
        return self._channel.local

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return len(self._calls)

    # --- requests ------------------------------------------------------------------------------------------------------

    async def call(self, frame_type: FrameType, message: Message, reply: type[M], payload: bytes | memoryview = b"") -> tuple[M, bytes]:
        """Send a control request and wait for its reply. Raises the daemon's typed error."""
        _, meta, body = await self._request(frame_type, message, payload, Call(asyncio.get_running_loop().create_future()))
        return unpack(reply, meta), body

    async def tell(self, frame_type: FrameType, message: Message) -> None:
        """Send a request that is not answered. The daemon does it before what is sent over this connection next."""
        self._raise_if_lost()
        await self._send(encode(frame_type, next(self._numbers), pack(message)))

    def tell_soon(self, frame_type: FrameType, message: Message) -> bool:
        """As `tell`, but what can't be sent at once is sent by itself. False if the connection is lost."""
        try:
            rest = begin(self.tell(frame_type, message))
        except ConnectionLost:
            return False
        if rest is not None:
            self._adopt(_end(rest))
        return True

    async def call_behind(self, send: Sender, frame_type: FrameType, message: Message, reply: type[M]) -> M:
        """As `call`, but the request is sent by `send`, behind something else that goes out with it."""
        call: Pending = Call(asyncio.get_running_loop().create_future())
        _, meta, _ = await self._request(frame_type, message, b"", call, send)
        return unpack(reply, meta)

    async def call_with(self, frame_type: FrameType, message: Message, reply: type[M], descriptor: int) -> M:
        """As `call`, on a connection for descriptors, and with one of them."""
        assert isinstance(self._channel, DescriptorChannel)
        number, call = next(self._numbers), Call(asyncio.get_running_loop().create_future())
        self._raise_if_lost()
        self._calls[number] = call
        try:
            async with self._write_lock:
                try:
                    await self._channel.send_with(encode(frame_type, number, pack(message)), [descriptor])
                except Busy:  # nothing of it was sent
                    raise
                except BaseException as error:
                    self._fail(error if isinstance(error, ConnectionLost) else ConnectionLost("a frame was cut short"))
                    raise
            _, meta, _ = await call.done
        except BaseException:
            call.done.add_done_callback(_heard)
            raise
        finally:
            self._calls.pop(number, None)
        return unpack(reply, meta)

    async def fetch(
        self, namespace: str, stripe: Stripe, target: memoryview, plan: FetchPlan, arrived: Arrived | None = None,
        quiet_s: float = QUIET_S,
    ) -> Fetched:  # fmt: skip
        """Fetch a stripe of a plan straight into `target`. The plan, or `arrived` in its place, is told of the pieces as they arrive.

        Waits while the tenant has as much in flight as its quota allows. Once this returns or raises, nothing more is
        written into `target`: when it is cancelled, a frame that is just arriving has `quiet_s` to end, or the connection is given up.
        """
        message, payload = fetch_request(namespace, stripe, plan)
        with Patience() as patience:
            while True:
                call = Call(asyncio.get_running_loop().create_future(), stripe, target, arrived or plan.arrived, quiet_s=quiet_s)
                try:
                    _, meta, _ = await self._request(FrameType.FETCH, message, payload, call)
                except Busy as busy:  # said before the first piece
                    await patience.wait(busy)
                else:
                    return unpack(Fetched, meta)

    @asynccontextmanager
    async def unanswered(
        self, frame_type: FrameType, message: Message, payload: bytes | memoryview = b"", *, before: Request | None = None
    ) -> AsyncIterator["Unanswered"]:
        """Send a request that is answered only if there is something to say. What fails in the block because of that raises that error.

        With `before`, another such request is sent in front of it, in one go, and what is said to that counts first.
        """
        self._raise_if_lost()
        requests = [(frame_type, message, payload)] if before is None else [before, (frame_type, message, payload)]
        numbers = [next(self._numbers) for _ in requests]
        calls: list[Pending] = [Call(asyncio.get_running_loop().create_future()) for _ in requests]
        self._calls.update(zip(numbers, calls, strict=True))
        try:
            await self._send(
                [
                    part
                    for number, (kind, meta, body) in zip(numbers, requests, strict=True)
                    for part in encode(kind, number, pack(meta), body)
                ]
            )
            yield Unanswered(numbers[-1], calls[-1])
        except KVStoreError:
            for call in calls:
                if call.done.done() and (said := call.done.exception()) is not None:
                    raise said from None
            raise
        finally:
            for number, call in zip(numbers, calls, strict=True):
                self._calls.pop(number, None)
                if call.done.done():
                    call.done.exception()  # it is told above, or does not matter any more

    async def send_slices(self, handle: int, page: int, part: int, first_slice: int, slices: Sequence[memoryview]) -> None:
        """Send consecutive slices of one part of a put; digests are computed on the way. There is no reply: commit tells.

        What the daemon can't take is said at once, too.
        """
        await self.send_frames([(SLICES_META.pack(handle, page, part, first_slice), slices)], next(self._numbers))

    async def send_frames(self, frames: Sequence[Bulk], number: int, behind: Sequence[bytes | memoryview] = ()) -> None:
        """As `send_slices`, several frames of them: what the daemon can't take is said to the request of that `number`.

        Others may come `behind` them.
        """
        self._raise_if_lost()
        async with self._write_lock:
            try:
                await self._channel.send_frames(FrameType.SLICES, number, frames, behind)
            except BaseException as error:
                self._fail(error if isinstance(error, ConnectionLost) else ConnectionLost("a frame was cut short"))
                raise

    async def deliver(self, handle: int, page: int, part: int, first_slice: int, slices: Sequence[memoryview]) -> None:
        """As `send_slices`, and wait until the daemon has them: it answers a PING that comes behind them when it has read them."""
        self._raise_if_lost()
        meta = SLICES_META.pack(handle, page, part, first_slice)
        number, call = next(self._numbers), Call(asyncio.get_running_loop().create_future())
        self._calls[number] = call
        try:
            async with self._write_lock:
                try:
                    await self._channel.send_pieces(FrameType.SLICES, next(self._numbers), meta, slices, [None] * len(slices))
                    await self._channel.send(encode(FrameType.PING, number, pack(Empty())))
                except BaseException as error:
                    self._fail(error if isinstance(error, ConnectionLost) else ConnectionLost("a frame was cut short"))
                    raise
            await call.done
        finally:
            self._calls.pop(number, None)
            call.done.add_done_callback(_heard)

    def give_up(self, why: str) -> None:
        """End it at once, from this side: nothing more is read or written. `close` comes later."""
        self._fail(ConnectionLost(why))
        if self._reader is not None:
            self._reader.cancel()

    async def _request(
        self, frame_type: FrameType, message: Message, payload: bytes | memoryview, call: Pending, send: Sender | None = None
    ) -> tuple[Header, bytes, bytes]:
        self._raise_if_lost()
        number = next(self._numbers)
        buffers = encode(frame_type, number, pack(message), payload)
        self._calls[number] = call
        try:
            await (send or self._send)(buffers)
            nbytes = 0 if call.target is None else len(call.target)
            if nbytes <= _SOON_BYTES:
                await self._spin_until(call.done, nbytes)
            return await call.done
        except asyncio.CancelledError:
            if call.done.done() and not call.done.cancelled() and call.done.exception() is None:
                header, meta, _ = call.done.result()  # the answer came in the same moment
                self._undo_late(header.type, meta)
            call.done.cancel()  # it is not yet, where the cancel came before it was waited for
            call.done.add_done_callback(_heard)
            await self._cancel(number)
            raise
        except BaseException:
            call.done.add_done_callback(_heard)  # it could not be sent, and that is told here
            raise
        finally:
            if call.done.done():
                self._calls.pop(number, None)

    async def _spin_until(self, done: "asyncio.Future[Frame]", nbytes: int) -> None:
        """Look for the answer for a moment, without sleeping, if that has paid lately. The loop has its turns meanwhile."""
        if self._spin.worth():
            until = time.monotonic() + spin_s(nbytes)
            while not done.done() and time.monotonic() < until:
                for _ in range(_LOOKS):
                    self._channel.look()
                    if done.done():
                        break
                else:
                    await asyncio.sleep(0)
            self._spin.tried(came=done.done())

    async def _send(self, buffers: list[bytes | memoryview]) -> None:
        async with self._write_lock:
            try:
                await self._channel.send(buffers)
            except BaseException as error:
                self._fail(error if isinstance(error, ConnectionLost) else ConnectionLost("a frame was cut short"))
                raise

    async def _cancel(self, number: int) -> None:
        """Tell the daemon to stop, and make sure that nothing more reaches the caller's buffer."""
        call = self._calls.get(number)
        if call is None or self.lost is not None:
            return
        call.target = None
        try:
            self._adopt(self._tell_to_stop(number))  # whose time is over does not wait for it, too
            async with asyncio.timeout(call.quiet_s):
                while self._receiving == number:
                    await self._wait_for_frame()
        except BaseException as error:  # also if it is cancelled again meanwhile
            self.give_up("a cancelled transfer did not stop")
            if not isinstance(error, TimeoutError):
                raise

    async def _tell_to_stop(self, number: int) -> None:
        try:
            async with asyncio.timeout(QUIET_S):
                await self._send(encode(FrameType.CANCEL, 0, pack(Cancel(target=number))))
        except (TimeoutError, ConnectionLost):
            self.give_up("a cancelled transfer did not stop")

    async def _wait_for_frame(self) -> None:
        """Wait for the frame that is arriving, or for more of it. Raises TimeoutError if nothing comes."""
        before = bytes_received(self._channel.sock)
        try:
            async with asyncio.timeout(_STALLED_S):
                await self._frame_done.wait()
        except TimeoutError:
            if bytes_received(self._channel.sock) == before:
                raise

    # --- replies -------------------------------------------------------------------------------------------------------

    async def _read_replies(self) -> None:
        try:
            self._channel.offer_frames(self._receive, bulk=True)
            while (found := await self._channel.read_header()) is not None:
                header, raw = found
                await self._receive(header, *await self._channel.read_body(header, raw))
            self._fail(ConnectionLost("the daemon closed the connection"))
        except KVStoreError as error:
            self._fail(error)

    def _undo_late(self, answer: FrameType, meta: bytes) -> None:
        undo: tuple[FrameType, Message]
        if answer is FrameType.PUT_READY:
            undo = FrameType.ABORT, PutHandle(handle=unpack(PutReady, meta).handle)
        elif answer is FrameType.MATCHED and (lease := unpack(Matched, meta).lease):
            undo = FrameType.LEASE_RELEASE, LeaseRequest(lease=lease, quiet=True)
        else:
            return
        self._adopt(self._undo(*undo))

    def _adopt(self, last: Coroutine[Any, Any, None]) -> None:
        """Run something that nobody waits for."""
        task = asyncio.create_task(last)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _undo(self, frame_type: FrameType, message: Message) -> None:
        try:
            await self._send(encode(frame_type, next(self._numbers), pack(message)))
        except ConnectionLost:
            pass  # then the daemon ends it with the session


async def _end(begun: Begun[None]) -> None:
    with contextlib.suppress(ConnectionLost):  # the next request finds out
        await begun


def _heard(done: "asyncio.Future[tuple[Header, bytes, bytes]]") -> None:
    """Nobody waits for this answer any more: an error in it is none that was missed."""
    if not done.cancelled():
        done.exception()
