"""One client connection of the data plane: handshake, the frame loop, and replies.

Quick requests are answered in the loop; those that may wait (fetches, puts, commits, drops) run as tasks of the
connection, at most `MAX_REQUESTS` at a time. The loop stops reading while there are more: that is the back-pressure.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvstore import __version__
from kvstore.api.auth import Grant, forbidden
from kvstore.api.guard import Guard
from kvstore.api.priority import INTERACTIVE, LinkTraffic
from kvstore.api.rebuilds import slow_match, waits
from kvstore.api.replies import Reply
from kvstore.api.request_stats import RequestStats
from kvstore.api.request_tables import ACCESS, QUICK, SLOW
from kvstore.api.requests import Slow, commit_now
from kvstore.api.same_host import SameHost, SameHostPeer
from kvstore.api.sessions import Session, Sessions
from kvstore.api.small_fetch import fetch_small
from kvstore.api.streaming import Asked, Then, read_fetch, receive_slices, stream_fetch
from kvstore.api.wire import PROTOCOL_VERSION, Channel, FrameType, Header, encode, pack, unpack, unpack_request
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.eager import begin
from kvstore.api.wire.messages import Cancel, Commit, ErrorReply, Hello, Message, Welcome
from kvstore.errors import (
    Busy,
    Cancelled,
    ConnectionLost,
    Forbidden,
    KVStoreError,
    ProtocolError,
    Unauthenticated,
    VersionMismatch,
)
from kvstore.store import Store

T = TypeVar("T")

_log = logging.getLogger("kvstore.connection")

MAX_REQUESTS = 64
_YIELD_EVERY = 8
_TURN_NS = 1_000_000
"""A connection whose requests, of those answered at once, have taken so long lets others have a turn: a match of 8,000 pages is a ms."""
_HANDSHAKE_S = 10.0
LARGE_PAYLOAD = 1 << 20
"""Control payloads over this size are received by a few connections at a time, so that their memory is bounded."""
_FIRST_BYTES = 64 << 10
"""A longer reply does not go out before what was put off for it is done: its rest would be copied."""
MAX_HELLO = 8 << 10
"""Bytes of meta of a HELLO: what somebody unknown can make the daemon read."""
CLIENT_TIMEOUT_S = 30.0
"""How long the rest of a frame may take once its first byte is there, and a frame to be taken by the client."""


Work = Callable[[], Coroutine[None, None, None]]


@dataclass(slots=True)
class _Running:
    """A request that has a task."""

    interruptible: bool
    since_ns: int
    urgent: bool = False
    """Whether it is sent before what is bulk."""
    task: asyncio.Task[None] | None = None
    begun: bool = False
    cancelled: bool = False
    answering: bool = False


class Connection:
    """Serves one socket until the client leaves or breaks the protocol.

    `expect` is called when a small request was answered, with the bytes that went with it: the next one may come at once. With a `refusal`
    it does no more than say that.
    """

    def __init__(
        self, channel: Channel, store: Store, sessions: Sessions, endpoint: str, large_payloads: asyncio.Semaphore,
        guard: Guard, request_stats: RequestStats,
        timeout_s: float = CLIENT_TIMEOUT_S, host: SameHost | None = None, traffic: LinkTraffic | None = None,
        expect: Callable[[int], None] = lambda nbytes: None, refusal: Busy | None = None,
    ) -> None:  # fmt: skip
        self.store = store
        self._refusal_at_once = refusal
        self._expect = expect
        self._traffic = traffic
        self._stats = request_stats
        self._timeout_s = timeout_s
        self._large_payloads = large_payloads
        self.endpoint = endpoint
        self.channel = channel
        self.session: Session
        self.number = 0
        self.grant: Grant | None = None
        self._host = host or SameHost()
        self.same_host: SameHostPeer | None = None
        self._guard = guard
        self._over: KVStoreError | None = None
        self._sessions = sessions
        self._write_lock = asyncio.Lock()
        self._broken = False
        self._turn_ns = 0
        self._running: dict[int, _Running] = {}
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    async def serve(self) -> None:
        """Handshake, then frames until the end. Never raises for what a client does."""
        try:
            async with asyncio.timeout(min(_HANDSHAKE_S, self._timeout_s)):
                welcomed = await self._handshake()
            if welcomed:
                try:
                    await self._frames()
                finally:
                    if self.same_host is not None:
                        self.same_host.close()
                    self._sessions.leave(self.session)
        except (ConnectionLost, TimeoutError) as error:
            _log.debug("connection closed: %s", error)
        except ProtocolError as error:
            _log.warning("connection closed: %s", error.message)
            await self._last_words(error)
        except asyncio.CancelledError:
            if self._over is None:
                raise
            await self._last_words(self._over)

    def expel(self, task: "asyncio.Task[None]") -> None:
        """End the connection, which `task` serves, because its token is over."""
        if self._over is None:
            self._over = Unauthenticated("the token of this connection was removed or changed, or it has expired")
            task.cancel()

    async def _handshake(self) -> bool:
        await self.channel.shake_hands()
        found = await self.channel.read_header()
        if found is None:
            return False
        header, raw = found
        if header.type is not FrameType.HELLO:
            raise ProtocolError(f"the first frame is HELLO, not {header.type.name}")
        if header.meta_bytes > MAX_HELLO or header.payload_bytes:
            raise ProtocolError(f"a HELLO has at most {MAX_HELLO} bytes of meta and no payload")
        meta, _ = await self.channel.read_body(header, raw)
        hello = unpack(Hello, meta)
        if PROTOCOL_VERSION not in hello.versions:
            await self._error(
                header.request, VersionMismatch(f"this daemon speaks version {PROTOCOL_VERSION}, the client {hello.versions}")
            )
            return False
        try:
            self.grant = self._guard.admit(hello.token)
            if self._refusal_at_once is not None:
                raise self._refusal_at_once
            self.session = self._sessions.join(hello.session, self.grant.tenant, hello.client[:100])
        except KVStoreError as error:
            _log.info("a client is refused (%s): %s", error.code, error.message)
            await self._error(header.request, error)
            return False
        task = asyncio.current_task()
        assert task is not None
        self.number = self.session.serve(task)
        self.same_host = self._host.peer(self.channel)
        same_host, host = self._host.hint(self.channel.sock)
        welcome = Welcome(
            version=PROTOCOL_VERSION, epoch=self.store.epoch, session=self.session.id,
            server=f"kvstore {__version__}", endpoint=self.endpoint, same_host=same_host, host=host,
            connection=self.number, store=self.store.id,
            put_bytes=self.store.quotas.put_bytes(self.grant.tenant, self.store.config.dram_bytes),
        )  # fmt: skip
        try:
            await self.reply(header.request, FrameType.WELCOME, welcome)
        except BaseException:
            self._sessions.leave(self.session)
            raise
        return True

    async def _frames(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    frames = 0
                    self.channel.offer_frames(partial(self._dispatch, group))
                    while (frame := await self._next_frame()) is not None:
                        await self._dispatch(group, *frame)
                        frames += 1
                        if frames % _YIELD_EVERY == 0:
                            await asyncio.sleep(0)  # a client that never lets the socket run dry must not starve the others
                finally:
                    for running in self._running.values():
                        if running.task is not None:
                            running.task.cancel()
        except* (ConnectionLost, TimeoutError, ProtocolError) as ended:  # all in one: two raised here would be a group again
            broken = [error for error in ended.exceptions if isinstance(error, ProtocolError)]
            raise broken[0] if broken else ConnectionLost(str(ended.exceptions[0])) from None

    async def _next_frame(self) -> tuple[Header, bytes, bytes] | None:
        if not await self.channel.wait_readable():
            return None
        try:
            self.channel.bound_reads(self._timeout_s)
            found = await self.channel.read_header()
            if found is None:
                return None
            header, raw = found
            if header.bulk or header.payload_bytes <= LARGE_PAYLOAD:
                return await self._rest_of_frame(header, raw)
            async with self._large_payloads:  # not on this client's time: others hold it up
                self.channel.bound_reads(self._timeout_s)
                return await self._rest_of_frame(header, raw)
        finally:
            self.channel.bound_reads(None)

    async def _rest_of_frame(self, header: Header, raw: bytes) -> tuple[Header, bytes, bytes]:
        meta, payload = await self.channel.read_body(header, raw)
        if header.type is FrameType.SLICES:
            error: KVStoreError | None = self._refusal(header.type)
            if error is None:
                error = await receive_slices(self, header, meta)
            else:
                await self.channel.skip(header.payload_bytes + header.trailer_bytes)
            if error is not None:
                await self._error(header.request, error)
        return header, meta, payload

    async def _dispatch(self, group: asyncio.TaskGroup, header: Header, meta: bytes, payload: bytes) -> None:
        kind = header.type
        if kind is FrameType.SLICES:
            return
        began = time.perf_counter_ns()
        refused = self._refusal(kind)
        if refused is not None:
            await self._error(header.request, refused)
        elif kind is FrameType.CANCEL:
            self._cancel(unpack(Cancel, meta).target)
        elif kind in QUICK:
            message_type, quick = QUICK[kind]
            try:
                message = unpack_request(message_type, meta)
                if waits(self, kind, message):
                    await self._start(group, header, began, partial(self._slow, header.request, slow_match, message, payload))
                else:
                    if (reply := quick(self, message, payload)) is not None:
                        await self._send_reply(header.request, reply)
                    self._stats.answered(kind.name, began)
                    self._expect(0)
                    await self._give_way(began)
            except KVStoreError as error:
                self._fatal_if_protocol(error)
                await self._error(header.request, error)
        elif kind is FrameType.FETCH:
            await self._fetch(group, header, began, meta, payload)
        elif kind in SLOW:
            message_type, slow = SLOW[kind]
            try:
                message = unpack_request(message_type, meta)
                if isinstance(message, Commit) and await self._committed(header, began, message, payload):
                    return
            except KVStoreError as error:
                self._fatal_if_protocol(error)
                await self._error(header.request, error)
                return
            await self._start(group, header, began, partial(self._slow, header.request, slow, message, payload))
            if kind is FrameType.PUT:
                await asyncio.sleep(0)  # it has begun, nearly always, when its slices follow at once
        else:
            raise ProtocolError(f"a {kind.name} frame from a client")

    async def _committed(self, header: Header, began: int, message: Commit, payload: bytes) -> bool:
        """Answer a COMMIT at once, if there is nothing to wait for."""
        if header.request in self._running or (reply := commit_now(self, message, payload)) is None:
            return False
        await self._send_reply(header.request, reply)
        self._stats.answered(header.type.name, began)
        return True

    async def _give_way(self, since_ns: int) -> None:
        """Let others have a turn, if requests of this connection have had the loop for long."""
        self._turn_ns += time.perf_counter_ns() - since_ns
        if self._turn_ns > _TURN_NS:
            self._turn_ns = 0
            await asyncio.sleep(0)

    async def _fetch(self, group: asyncio.TaskGroup, header: Header, began: int, meta: bytes, payload: bytes) -> None:
        try:
            asked = read_fetch(self, meta, payload)
            crowded = self._traffic if self._traffic is not None and self._traffic.crowded else None
            with nullcontext() if crowded is None else crowded.fetching(self.channel, asked.priority, self.session.link.bytes_s):
                answered = header.request not in self._running and await fetch_small(self, header.request, asked)
        except KVStoreError as error:
            self._fatal_if_protocol(error)
            await self._error(header.request, error)
        else:
            if answered:
                self._stats.answered(header.type.name, began)
                self._expect(asked.nbytes)
            else:
                await self._start(group, header, began, partial(self._stream, header.request, asked))
                if asked.priority == INTERACTIVE:
                    self._running[header.request].urgent = True

    async def _stream(self, request: int, asked: Asked) -> None:
        with self._fetching(asked):
            await stream_fetch(self, request, asked)

    @contextmanager
    def _fetching(self, asked: Asked) -> Iterator[None]:
        with self.session.fetching(asked.nbytes):
            if self._traffic is None:
                yield
                return
            with self._traffic.fetching(self.channel, asked.priority, self.session.link.bytes_s):
                yield

    def _refusal(self, kind: FrameType) -> Forbidden | None:
        """Why the token does not allow a frame; None if it does. Raises ProtocolError for what no client sends."""
        needed = ACCESS.get(kind)
        if needed is None:
            raise ProtocolError(f"a {kind.name} frame from a client")
        assert self.grant is not None
        return None if self.grant.access >= needed else forbidden(self.grant, needed)

    def _cancel(self, request: int) -> None:
        """Stop a request, once. One that is being answered is done; one that has not begun stops as it begins.

        A fetch that is sending stops before its next frame: half a frame would spoil the connection.
        """
        running = self._running.get(request)
        if running is None or running.cancelled or running.answering:
            return
        running.cancelled = True
        if running.begun and running.interruptible and running.task is not None:
            running.task.cancel()

    @contextmanager
    def interruptible(self, request: int) -> Iterator[None]:
        """While a fetch waits for something that is not its own frame, it can be stopped at once."""
        running = self._running[request]
        if running.cancelled:
            raise Cancelled("the request was cancelled")
        running.interruptible = True
        try:
            yield
        finally:
            running.interruptible = False

    async def _slow(self, request: int, slow: Slow, message: Message, payload: bytes) -> None:
        reply = await slow(self, message, payload)
        self._running[request].answering = True
        if reply is not None:
            await self._send_reply(request, reply)

    async def _start(self, group: asyncio.TaskGroup, header: Header, began: int, work: Work) -> None:
        if header.request in self._running:
            raise ProtocolError(f"request {header.request} is still under way")
        await self._slots.acquire()
        self._running[header.request] = running = _Running(interruptible=header.type is not FrameType.FETCH, since_ns=began)
        running.task = group.create_task(self._guarded(header, running, work), name=f"kvstore-{header.type.name}")

    async def _guarded(self, header: Header, running: _Running, work: Work) -> None:
        running.begun = True
        try:
            if running.cancelled:
                raise Cancelled("the request was cancelled")
            await work()
            self._stats.answered(header.type.name, running.since_ns)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling() and not running.cancelled:
                raise  # the connection ends, and nobody asked for that: what is not answered the client asks for again
            task.uncancel()
            await self._error(header.request, Cancelled("the request was cancelled"))
        except KVStoreError as error:
            self._fatal_if_protocol(error)
            await self._error(header.request, error)
        except Exception:  # noqa: BLE001 - a bug in one request must not end the others
            _log.exception("request %d (%s) of session %s failed", header.request, header.type.name, self.session.client)
            await self._error(header.request, KVStoreError("the daemon failed at this request; its log says how"))
        finally:
            self._running.pop(header.request, None)
            self._slots.release()

    @staticmethod
    def _fatal_if_protocol(error: KVStoreError) -> None:
        if isinstance(error, ConnectionLost | ProtocolError):
            raise error

    # --- writing -------------------------------------------------------------------------------------------------------

    async def reply(self, request: int, frame_type: FrameType, message: Message, payload: bytes = b"") -> None:
        """Send one control frame."""
        buffers = encode(frame_type, request, pack(message), payload)
        async with self._write_lock:
            await self._sent_whole(self.channel.send(buffers))

    async def send_pieces(
        self, request: int, meta: bytes, pieces: Sequence[memoryview], promised: Sequence[bytes | None], then: Then | None = None
    ) -> list[bytes]:
        """Send one DATA frame, and what `then`, told the digests computed on the way, has to go behind it. Returns the digests."""
        async with self._write_lock:
            if self._running[request].cancelled:
                raise Cancelled("the request was cancelled")
            frame = FrameType.DATA, request, meta, pieces, promised
            if self._traffic is None or self._running[request].urgent:
                return await self._sent_whole(self.channel.send_pieces(*frame, then=then))
            return await self._sent_whole(self.channel.send_pieces(*frame, self._traffic.turn, self._traffic.step, then))

    async def send_at_once(self, gather: Callable[[], list[bytes | memoryview] | None]) -> bool:
        """Send what `gather` returns, which is called when it can be sent; False if that is nothing."""
        async with self._write_lock:
            buffers = gather()
            if buffers is None:
                return False
            if self._broken:
                raise ConnectionLost("a frame was cut short")
            left = self.channel.send_now(buffers)
            del buffers  # they lie in segments, which could not be given back while a client reads slowly
            if left:
                await self._sent_whole(self.channel.send([left]))
        return True

    async def _sent_whole(self, sending: Coroutine[None, None, T]) -> T:
        """Send a frame. One that is cut short, by time or by a task that ends, spoils the connection: it is given up."""
        if self._broken:
            sending.close()
            raise ConnectionLost("a frame was cut short")
        self.channel.bound_writes(self._timeout_s)
        try:
            return await sending
        except (TimeoutError, asyncio.CancelledError) as error:
            self._broken = True
            raise ConnectionLost("the client does not take what is sent to it") from error
        except ConnectionLost:
            self._broken = True
            raise

    async def _send_reply(self, request: int, reply: Reply) -> None:
        if reply.after is not None:
            await self._reply_first(request, reply, reply.after)
            return
        if not reply.descriptors:
            await self.reply(request, reply.type, reply.message, reply.payload)
            return
        assert isinstance(self.channel, DescriptorChannel)
        buffers = encode(reply.type, request, pack(reply.message), reply.payload)
        try:
            async with self._write_lock:
                await self._sent_whole(self.channel.send_with(buffers, reply.descriptors))
        except Busy:
            if reply.unsent is not None:
                reply.unsent()
            raise
        finally:
            for descriptor in reply.descriptors:
                os.close(descriptor)

    async def _reply_first(self, request: int, reply: Reply, after: Callable[[], None]) -> None:
        """Send a reply, then do what was put off for it; before that if the reply would have to wait."""
        buffers = encode(reply.type, request, pack(reply.message), reply.payload)
        turn = begin(self._write_lock.acquire())
        put_off = turn is None and len(reply.payload) <= _FIRST_BYTES
        if not put_off:
            after()
        if turn is not None:
            await turn
        try:
            if not put_off:
                await self._sent_whole(self.channel.send(buffers))
                return
            try:
                left = b"" if self._broken else self.channel.send_now(buffers)
            finally:
                after()
            if left:
                await self._sent_whole(self.channel.send([left]))
        finally:
            self._write_lock.release()

    async def _error(self, request: int, error: KVStoreError) -> None:
        self._stats.errors[error.code] += 1
        message = ErrorReply(code=error.code, message=error.message, retry_after_ms=error.retry_after_ms)
        await self.reply(request, FrameType.ERROR, message)

    async def _last_words(self, error: KVStoreError) -> None:
        try:
            async with asyncio.timeout(1):
                await self._error(0, error)
        except (ConnectionLost, TimeoutError):
            _log.debug("the client did not wait to hear why it was cut off")
