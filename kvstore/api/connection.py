"""One client connection of the data plane: handshake, the frame loop, and replies.

Quick requests are answered in the loop; those that may wait (fetches, commits, drops, and puts that do wait) run as tasks of the
connection, at most `MAX_REQUESTS` at a time. The loop stops reading while there are more: that is the back-pressure.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from kvstore import __version__
from kvstore.api.auth import Grant, forbidden
from kvstore.api.guard import Guard
from kvstore.api.outbox import Outbox
from kvstore.api.priority import INTERACTIVE, LinkTraffic
from kvstore.api.rebuilds import slow_match, waits
from kvstore.api.receiving import receive_slices
from kvstore.api.request_stats import RequestStats
from kvstore.api.request_tables import ACCESS, QUICK, SLOW
from kvstore.api.request_tasks import RequestTasks, fatal_if_protocol
from kvstore.api.requests import Slow, commit_now
from kvstore.api.same_host import SameHost, SameHostPeer
from kvstore.api.sending import Then
from kvstore.api.sessions import Session, Sessions
from kvstore.api.small_fetch import fetch_small
from kvstore.api.streaming import Asked, read_fetch, stream_fetch
from kvstore.api.wire import PROTOCOL_VERSION, Channel, FrameType, Header, unpack, unpack_request
from kvstore.api.wire.messages import Cancel, Hello, Message, Welcome
from kvstore.api.wire.put_messages import Commit
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

_log = logging.getLogger("kvstore.connection")

_YIELD_EVERY = 8
_TURN_NS = 1_000_000
"""A connection whose requests, of those answered at once, have taken so long lets others have a turn: a match of 8,000 pages is a ms."""
_HANDSHAKE_S = 10.0
LARGE_PAYLOAD = 1 << 20
"""Control payloads over this size are received by a few connections at a time, so that their memory is bounded."""
MAX_HELLO = 8 << 10
"""Bytes of meta of a HELLO: what somebody unknown can make the daemon read."""
CLIENT_TIMEOUT_S = 30.0
"""How long the rest of a frame may take once its first byte is there, and a frame to be taken by the client."""


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
        self._outbox = Outbox(channel, request_stats, timeout_s)
        self.reply, self.send_at_once = self._outbox.reply, self._outbox.send_at_once
        self._tasks: RequestTasks
        self._turn_ns = 0

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
            await self._outbox.last_words(error)
        except asyncio.CancelledError:
            if self._over is None:
                raise
            await self._outbox.last_words(self._over)

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
            await self._outbox.error(
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
            await self._outbox.error(header.request, error)
            return False
        task = asyncio.current_task()
        assert task is not None
        self.number = self.session.serve(task)
        self._tasks = RequestTasks(self._outbox, self._stats, self.session.client)
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
                    self.channel.offer_frames(partial(self._offered, group), bulk=True)
                    while (frame := await self._next_frame()) is not None:
                        await self._dispatch(group, *frame)
                        frames += 1
                        if frames % _YIELD_EVERY == 0:
                            await asyncio.sleep(0)  # a client that never lets the socket run dry must not starve the others
                finally:
                    self._tasks.stop()
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
            await self._receive(header, meta)
        return header, meta, payload

    async def _receive(self, header: Header, meta: bytes) -> None:
        error: KVStoreError | None = self._refusal(header.type)
        if error is None:
            error = await receive_slices(self, header, meta)
        else:
            await self.channel.skip(header.payload_bytes + header.trailer_bytes)
        if error is not None:
            await self._outbox.error(header.request, error)

    async def _offered(self, group: asyncio.TaskGroup, header: Header, meta: bytes, payload: bytes) -> None:
        """Deal with a frame that is all there."""
        if header.type is FrameType.SLICES:
            await self._receive(header, meta)
        else:
            await self._dispatch(group, header, meta, payload)

    async def _dispatch(self, group: asyncio.TaskGroup, header: Header, meta: bytes, payload: bytes) -> None:
        kind = header.type
        if kind is FrameType.SLICES:
            return
        began = time.perf_counter_ns()
        refused = self._refusal(kind)
        if refused is not None:
            await self._outbox.error(header.request, refused)
        elif kind is FrameType.CANCEL:
            self._tasks.cancel(unpack(Cancel, meta).target)
        elif kind in QUICK:
            message_type, quick = QUICK[kind]
            try:
                message = unpack_request(message_type, meta)
                if waits(self, kind, message):
                    await self._tasks.start(group, header, began, partial(self._slow, header.request, slow_match, message, payload))
                else:
                    if (reply := quick(self, message, payload)) is not None:
                        await self._outbox.send_reply(header.request, reply)
                    self._stats.answered(kind.name, began)
                    self._expect(0)
                    await self._give_way(began)
            except KVStoreError as error:
                fatal_if_protocol(error)
                await self._outbox.error(header.request, error)
        elif kind is FrameType.FETCH:
            await self._fetch(group, header, began, meta, payload)
        elif kind in SLOW:
            message_type, slow = SLOW[kind]
            try:
                message = unpack_request(message_type, meta)
                if isinstance(message, Commit) and await self._committed(header, began, message, payload):
                    return
            except KVStoreError as error:
                fatal_if_protocol(error)
                await self._outbox.error(header.request, error)
                return
            put = kind is FrameType.PUT
            ended = await self._tasks.start(group, header, began, partial(self._slow, header.request, slow, message, payload), here=put)
            if ended:
                await self._give_way(began)
            elif put:
                await asyncio.sleep(0)  # it has begun, nearly always, when its slices follow at once
        else:
            raise ProtocolError(f"a {kind.name} frame from a client")

    async def _committed(self, header: Header, began: int, message: Commit, payload: bytes) -> bool:
        """Answer a COMMIT at once, if there is nothing to wait for."""
        if header.request in self._tasks.under_way or (reply := commit_now(self, message, payload)) is None:
            return False
        await self._outbox.send_reply(header.request, reply)
        self._stats.answered(header.type.name, began)
        await self._give_way(began)
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
            self.session.check_runs(len(asked.runs))  # here, as a task that is refused keeps them until its client reads that
            crowded = self._traffic if self._traffic is not None and self._traffic.crowded else None
            with nullcontext() if crowded is None else crowded.fetching(self.channel, asked.priority, self.session.link.bytes_s):
                answered = header.request not in self._tasks.under_way and await fetch_small(self, header.request, asked)
        except KVStoreError as error:
            fatal_if_protocol(error)
            await self._outbox.error(header.request, error)
        else:
            if answered:
                self._stats.answered(header.type.name, began)
                self._expect(asked.nbytes)
            else:
                await self._tasks.start(group, header, began, partial(self._stream, header.request, asked))
                if asked.priority == INTERACTIVE:
                    self._tasks.under_way[header.request].urgent = True

    async def _stream(self, request: int, asked: Asked) -> None:
        session, traffic = self.session, self._traffic
        with (
            session.fetching(asked.nbytes, len(asked.runs)),
            nullcontext() if traffic is None else traffic.fetching(self.channel, asked.priority, session.link.bytes_s),
        ):
            await stream_fetch(self, request, asked)

    def _refusal(self, kind: FrameType) -> Forbidden | None:
        """Why the token does not allow a frame; None if it does. Raises ProtocolError for what no client sends."""
        needed = ACCESS.get(kind)
        if needed is None:
            raise ProtocolError(f"a {kind.name} frame from a client")
        assert self.grant is not None
        return None if self.grant.access >= needed else forbidden(self.grant, needed)

    async def _slow(self, request: int, slow: Slow, message: Message, payload: bytes) -> None:
        reply = await slow(self, message, payload)
        self._tasks.under_way[request].answering = True
        if reply is not None:
            await self._outbox.send_reply(request, reply)

    def interruptible(self, request: int) -> AbstractContextManager[None]:
        """While a fetch waits for something that is not its own frame, it can be stopped at once."""
        return self._tasks.interruptible(request)

    async def send_pieces(
        self, request: int, meta: bytes, pieces: Sequence[memoryview], promised: Sequence[bytes | None], then: Then | None = None
    ) -> list[bytes]:
        """Send one DATA frame, and what `then`, told the digests computed on the way, has to go behind it. Returns the digests."""
        async with self._outbox.lock:
            if self._tasks.under_way[request].cancelled:
                raise Cancelled("the request was cancelled")
            frame = FrameType.DATA, request, meta, pieces, promised
            if self._traffic is None or self._tasks.under_way[request].urgent:
                return await self._outbox.whole(self.channel.send_pieces(*frame, then=then))
            return await self._outbox.whole(self.channel.send_pieces(*frame, self._traffic.turn, self._traffic.step, then))
