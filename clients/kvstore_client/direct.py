"""Small requests of the blocking client, sent and awaited by the calling thread itself, over one more connection of the session.

Two threads, an event loop and its tasks cost several times what a small request does. The same coroutines run here as on the loop: down
at the bottom they meet a `Line` in place of the pool (`current`), whose waits are system calls, so that they never give way and can be
run to their end at once. What a line can't do raises `Elsewhere` before anything has happened, and is done on the loop.
"""

import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.api.wire import Busy, ConnectionLost, DeadlineExceeded, FrameType, KVStoreError, ProtocolError, encode, pack, unpack
from kvstore.api.wire.blocking import BlockingChannel
from kvstore.api.wire.eager import at_once
from kvstore.api.wire.messages import Empty, Fetched, Hello, Message
from kvstore_client.answers import Answers, Call, Slot, fetch_request
from kvstore_client.endpoints import parse_endpoint
from kvstore_client.plan import FetchPlan
from kvstore_client.spent import having_spent
from kvstore_client.stripes import Stripe
from kvstore_client.turn import Taken, Turn

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_AFTER = 4
"""So many small requests go by the loop first: a connection is not worth its while for fewer."""
_CONNECT_S = 1.0
_RETRY_S = 5.0
"""How long it is left alone after it could not be had (a quota, perhaps), or an answer did not come in time."""
_SETTLE_S = 1.0
"""How long a call by the loop waits at most for what was not waited for before."""
_CLOSE_S = 5.0
"""How long the end of a request under way is waited for as the client is closed; it was interrupted."""
_CURRENT: "ContextVar[Line | None]" = ContextVar("kvstore_line", default=None)


class Elsewhere(Exception):
    """It can't be done over a line. Nothing has happened yet, or nothing that would not happen again just so."""


def current() -> "Line | None":
    """The line over which what is under way here goes; None on an event loop."""
    return _CURRENT.get()


def apart(begin: Callable[[], T]) -> T:
    """What `begin` returns; what it begins goes by no line, also if this comes in between what does, as in a signal's handler."""
    if _CURRENT.get() is None:
        return begin()
    context = copy_context()
    context.run(_CURRENT.set, None)
    return context.run(begin)


class Line(Answers[Slot]):
    """One connection, for one thread at a time. After an error of its own it is closed: nothing more is read or written."""

    def __init__(self, channel: BlockingChannel, *, near: bool) -> None:
        super().__init__(channel)
        self._ends = channel.ends
        self.unheard = False
        """Whether something was told that the daemon may not have got to yet."""
        self.near = near
        """Whether it is over a Unix socket, where the daemon tells places."""

    @classmethod
    def open(cls, endpoint: str, hello: Hello, seconds: float) -> "Line":
        """Connect, and shake hands. Blocking. Raises OSError, TimeoutError, ConnectionLost, or why the daemon refuses."""
        family, address = parse_endpoint(endpoint)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            until = time.monotonic() + seconds
            sock.settimeout(seconds)
            sock.connect(address)
            line = cls(BlockingChannel(sock), near=family == socket.AF_UNIX)
            line.bound(until - time.monotonic())
            at_once(line._greet(hello))
        except BaseException:
            sock.close()
            raise
        return line

    def interrupt(self) -> None:
        """Wake another thread that waits: its connection is lost."""
        self._ends.close()

    def close(self, why: str) -> None:
        """Close it."""
        self._fail(ConnectionLost(why))
        self._channel.close()

    def bound(self, seconds: float) -> None:
        """Let everything from now on take so long. Raises TimeoutError there."""
        self._ends.until = time.monotonic() + seconds

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine by this line. In a context of its own: whatever interrupts it, nothing else goes by this line after it."""
        return copy_context().run(self._run, work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        _CURRENT.set(self)
        return at_once(work)

    async def call(self, frame_type: FrameType, message: Message, reply: type[M], payload: bytes | memoryview = b"") -> tuple[M, bytes]:
        """Send a control request and wait for its reply. Raises the daemon's typed error."""
        _, meta, body = await self._request(frame_type, message, payload, Call(Slot()))
        return unpack(reply, meta), body

    async def fetch(self, namespace: str, stripe: Stripe, target: memoryview, plan: FetchPlan) -> Fetched:
        """Fetch a stripe of a plan straight into `target`. Raises Elsewhere if it would have to wait for other fetches."""
        message, payload = fetch_request(namespace, stripe, plan)
        try:
            _, meta, _ = await self._request(FrameType.FETCH, message, payload, Call(Slot(), stripe, target, plan.arrived))
        except Busy:
            raise Elsewhere from None
        return unpack(Fetched, meta)

    async def tell(self, frame_type: FrameType, message: Message) -> None:
        """Send a request that is not answered. The daemon does it before what is sent over this line next."""
        await self._send(frame_type, message, b"", next(self._numbers))
        self.unheard = True

    async def settle(self) -> None:
        """Wait until what was told is done."""
        if self.unheard:
            await self.call(FrameType.PING, Empty(), Empty)

    async def _request(self, frame_type: FrameType, message: Message, payload: bytes | memoryview, call: Call[Slot]) -> Any:
        number = next(self._numbers)
        try:
            await self._send(frame_type, message, payload, number, call)
            while not call.done.done():
                await self._next()
        except BaseException:
            if number in self._calls and not call.done.done():  # interrupted in between: what comes of it yet is nobody's any more
                self.close("an answer was not waited for")
            raise
        self.unheard = False
        return call.done.result()

    async def _send(
        self, frame_type: FrameType, message: Message, payload: bytes | memoryview, number: int, call: Call[Slot] | None = None
    ) -> None:
        self._raise_if_lost()
        buffers = encode(frame_type, number, pack(message), payload)
        if call is not None:
            self._calls[number] = call
        try:
            await self._channel.send(buffers)
        except BaseException as error:
            self.close("a frame was cut short")
            _raise_if_late(error)
            raise

    async def _next(self) -> None:
        """Read one frame. Who interrupts this, or has no more time, ends the connection: the frame may be half read."""
        try:
            found = await self._channel.read_header()
            if found is None:
                raise ConnectionLost("the daemon closed the connection")
            header, raw = found
            await self._receive(header, *await self._channel.read_body(header, raw))
        except BaseException as error:
            self.close("an answer was not waited for")
            _raise_if_late(error)
            if isinstance(error, KVStoreError) and not isinstance(error, ProtocolError):
                raise ConnectionLost(error.message) from error  # the daemon's last words, say: they are not about this request
            raise


def _raise_if_late(error: BaseException) -> None:
    """Raise TimeoutError where a channel has taken it for a connection that broke: it is an OSError, too."""
    if isinstance(error, ConnectionLost) and isinstance(error.__cause__, TimeoutError):
        raise TimeoutError from error


class Direct:
    """A client's line: opened when it is worth it, and again when it broke. For any thread."""

    def __init__(self, client: "AsyncClient") -> None:
        self._client = client
        self._turn = Turn()
        self._line: Line | None = None
        self._asked = 0
        self._not_before = 0.0
        self._closed = False

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float, began: float, *, opening: bool = True) -> T:
        """Run what `work` makes by the line, which is opened if need be, within `timeout` seconds of when it `began` (monotonic).

        Raises Elsewhere if that can't be: there is no line, or another thread has it.
        """
        self._asked += 1
        if self._asked <= _AFTER:
            raise Elsewhere
        try:
            return self._turn.alone(lambda: self._run(work, timeout, began, opening=opening))
        except Taken:
            raise Elsewhere from None

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float, began: float, *, opening: bool) -> T:
        line = self._ready(timeout, opening=opening)
        if line is None:
            raise Elsewhere
        try:
            return having_spent(time.monotonic() - began, lambda: line.run(work()))
        except ConnectionLost:
            raise Elsewhere from None
        except DeadlineExceeded:
            self._not_before = time.monotonic() + _RETRY_S
            raise

    def settle(self, end: float) -> None:
        """Wait until the daemon has done what was not waited for: what goes over another connection now may depend on it.

        For a moment only, and not after `end` (monotonic): the daemon may stand still, or another thread wait for it over the line.
        """
        line = self._line
        if line is None or not line.unheard:
            return
        until = min(time.monotonic() + _SETTLE_S, end)

        def settle() -> None:
            if line.lost is None:
                line.bound(until - time.monotonic())
                with suppress(KVStoreError, TimeoutError):  # then it ends with the session, or by its time
                    at_once(line.settle())

        with suppress(Taken):
            self._turn.alone(settle, max(until - time.monotonic(), 0))

    def close(self) -> None:
        """Close the line. A request under way ends."""
        self._closed = True
        if (line := self._line) is not None:
            line.interrupt()
        try:
            self._turn.alone(self._close_line, _CLOSE_S)
        except Taken:  # a signal's handler closes the client whose request it interrupts, say
            self._close_line()

    def _close_line(self) -> None:
        if self._line is not None:
            self._line.close("this client was closed")

    def _ready(self, seconds: float, *, opening: bool) -> Line | None:
        pool, line = self._client.pool, self._line
        near = self._client.same_host.now is not None
        if line is not None and line.lost is None and line.near >= near and line.welcome.session == pool.session:
            return line
        if not opening:
            return None
        if line is not None:
            line.close("there is a better one")
            self._line = None
        if self._closed or time.monotonic() < self._not_before or (where := self._client.line_endpoint()) is None:
            return None
        try:
            self._line = Line.open(where, pool.hello(), seconds if 0 < seconds < _CONNECT_S else _CONNECT_S)
        except (OSError, TimeoutError, KVStoreError):
            self._not_before = time.monotonic() + _RETRY_S
        return self._line
