"""The connections of a client: opened when needed, joined into one session, restored with backoff."""

import asyncio
import math
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from kvstore.api.wire import PROTOCOL_VERSION, BadRequest, Busy, Conflict, ConnectionLost, FrameType, KVStoreError, NotFound
from kvstore.api.wire.messages import Close, Empty, Hello
from kvstore_client.connection import Connection
from kvstore_client.links import DIAL_S, Link, dial, make_links
from kvstore_client.opening import open_connection
from kvstore_client.waiting import blame

T = TypeVar("T")

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_FORGET_S = _MAX_BACKOFF_S + DIAL_S
"""Who waits for a daemon tries some link that often: if none was tried for longer, it may have been back since."""
_CLOSE_S = 2.0
_ANSWER_S = 1.0
_EXPRESS_RETRY_S = 5.0


class Pool:
    """`size` connections to one daemon, dealt out to its links in turn. Callers bound every wait with their own deadline."""

    def __init__(
        self, endpoint: str | Sequence[str], size: int, *, client: str, token: str, tls: ssl.SSLContext | None = None,
        local_addresses: Sequence[str] = (), reconnect_s: float = math.inf,
    ) -> None:  # fmt: skip
        self.links = make_links(endpoint, local_addresses)
        self.endpoint = self.links[0].endpoint
        self.size = size = max(size, len(self.links))
        self.session = b""
        self.epoch = 0
        self.put_bytes = 0
        """How large puts had best be, as stored, by what the daemon says of itself; 0 if it does not."""
        self._store = b""
        self._client = client
        self._token = token
        self._tls = tls
        self._reconnect_s = reconnect_s
        count = size + len(self.links)  # behind the others, an express connection for each link
        self._slots: list[Connection | None] = [None] * count
        self._locks = [asyncio.Lock() for _ in range(count)]
        self._bulk = 0
        self._no_express_before = 0.0
        self._no_more_before = 0.0
        self._session_lock = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self.closed = False
        """Whether `close` was called: no connection is made any more."""

    @property
    def several(self) -> bool:
        """Whether there are several links."""
        return len(self.links) > 1

    @property
    def spread(self) -> int:
        """Connections that one transfer is spread over. On the daemon's machine it is one.

        There is no link that several would fill, and each is more to do for the same two threads.
        """
        return 1 if self.local else self.size

    @property
    def local(self) -> bool:
        """Whether it leads to this machine, by one link."""
        return not self.several and any(c is not None and c.lost is None and c.local for c in self._slots)

    def link(self, slot: int) -> Link:
        """The link of a slot's connection."""
        return self.links[(slot if slot < self.size else slot - self.size) % len(self.links)]

    @contextmanager
    def bulk(self, really: bool = True) -> Iterator[None]:
        """While bulk is under way on the connections: what is interactive takes others meanwhile."""
        self._bulk += really
        try:
            yield
        finally:
            self._bulk -= really

    def at_hand(self) -> Connection | None:
        """A connection that nothing uses just now, for what is interactive; None if there is none, or several links to choose from."""
        if not self._bulk and not self.several:
            for connection in self._slots[: self.size]:
                if connection is not None and connection.lost is None and not connection.in_flight:
                    return connection
        return None

    async def ready_express(self) -> list[int]:
        """The slots for what is interactive: while bulk is under way those that nothing else uses, if they can be had."""
        now = time.monotonic()
        if not self._bulk or now < self._no_express_before:
            return self.usable()
        express = [slot for slot in range(self.size, len(self._slots)) if not self.link(slot).resting] or [self.size]
        missing = [slot for slot in express if (c := self._slots[slot]) is None or c.lost is not None]
        if missing:
            results = await asyncio.gather(*map(self.connection, missing), return_exceptions=True)
            failed = {slot for slot, result in zip(missing, results, strict=True) if isinstance(result, BaseException)}
            express = [slot for slot in express if slot not in failed]
            if not express:  # a quota of connections, perhaps
                self._no_express_before = now + _EXPRESS_RETRY_S
        return express or self.usable()

    async def for_requests(self) -> Connection:
        """The connection for a request by itself: not one on which bulk is under way, if possible."""
        return self.at_hand() or await self.connection(self.least_busy(await self.ready_express()))

    async def close(self) -> None:
        """Close all connections."""
        self.closed = True
        open_ones = [connection for connection in self._slots if connection is not None]
        self._slots = [None] * len(self._slots)
        await asyncio.gather(*(connection.close() for connection in open_ones))
        await asyncio.gather(*self._closing, return_exceptions=True)  # some of them were cancelled

    def drop(self) -> None:
        """As `close`, where the event loop of the connections does not run any more."""
        self.closed = True
        for connection in self._slots:
            if connection is not None:
                connection.drop()
        self._slots = [None] * len(self._slots)

    async def connection(self, slot: int = 0) -> Connection:
        """The live connection in a slot, opened if need be (one attempt); another one if the daemon takes no more of them just now.

        Raises Busy if there is no other, or the slot is one for what is interactive.
        """
        async with self._locks[slot]:
            connection = self._slots[slot]
            if connection is not None and connection.lost is None:
                return connection
            if connection is not None:
                self._slots[slot] = None
                await self._close_whole(connection)
            other = None if slot >= self.size or self.several else next(filter(_alive, self._slots), None)
            if other is not None and time.monotonic() < self._no_more_before:
                return other
            link = self.link(slot)
            try:
                connection = await self._open(link)
            except Busy as busy:
                if other is None or other.lost is not None:
                    raise
                self._no_more_before = time.monotonic() + max(busy.retry_after_ms or 0, _EXPRESS_RETRY_S * 1000) / 1000
                return other
            except ConnectionLost:
                if slot < self.size:
                    link.failed()
                raise
            link.works()
            self._slots[slot] = connection
            return connection

    async def first(self) -> Connection:
        """The connection for requests that are to go one after the other: always the same, as long as its link works."""
        return await self.connection(self.usable()[0])

    def usable(self) -> list[int]:
        """The slots whose links are not known to be down; all if every one is."""
        return [slot for slot in range(self.size) if not self.link(slot).resting] or list(range(self.size))

    async def open_links(self) -> None:
        """Connect by every link. Raises what is wrong if none works, and Conflict if they lead to different daemons."""
        results = await asyncio.gather(*map(self.connection, range(len(self.links))), return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        for error in errors:
            if not isinstance(error, ConnectionLost) or len(errors) == len(results):
                raise error

    def adopt(self, work: "asyncio.Task[None]") -> None:
        """Take over a task that ends by itself; `close` waits for it."""
        self._closing.add(work)
        work.add_done_callback(self._closing.discard)

    async def disown(self, slot: int, connection: Connection, why: str) -> bool:
        """Give a connection up, on the daemon's side too: what it had under way there has ended when this returns True."""
        connection.give_up(why)
        if self._slots[slot] is connection:
            self._slots[slot] = None
            await self._close_whole(connection)
        number = connection.welcome.connection
        other = next((c for c in self._slots if c is not None and c.lost is None), None)
        if other is None or not number or connection.welcome.session != other.welcome.session:
            return False
        try:
            async with asyncio.timeout(_CLOSE_S):
                await other.call(FrameType.CLOSE, Close(connection=number), Empty)
        except (KVStoreError, TimeoutError):
            return False
        return True

    async def end_there(self, broken: Connection, by: Connection) -> None:
        """Have the daemon end a connection that broke: what it has not read of it yet would come after what is said over another one."""
        number = broken.welcome.connection
        if number and broken.welcome.session == by.welcome.session:
            await by.call(FrameType.CLOSE, Close(connection=number), Empty)

    async def _close_whole(self, connection: Connection) -> None:
        """Close a connection to the end, even if the caller is cancelled meanwhile."""
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        await asyncio.shield(task)

    async def _open(self, link: Link) -> Connection:
        if self.closed:
            raise BadRequest("this client was closed")
        self._forget_absences()
        sock = await dial(link, alone=not self.several)  # not in turn: one link that does not answer must not hold up the others
        async with self._session_lock:
            try:
                connection = await self._connect(link, self.session, sock)
            except NotFound:
                connection = await self._connect(link, b"", await dial(link, alone=not self.several))
                await self._renewed(link, connection)  # the daemon was restarted, or all our connections broke: begin anew
            self.session, self.epoch = connection.welcome.session, connection.welcome.epoch
            self._store = link.store = connection.welcome.store
            self.put_bytes = connection.welcome.put_bytes
            return connection

    async def _renewed(self, link: Link, connection: Connection) -> None:
        """The daemon there knows nothing of our session. Raises Conflict if that is because it is another one."""
        right = await self._another(link, connection) if self.several else None
        if right is not None:
            await connection.close()
            raise Conflict(f"{link.endpoint} is another daemon than {right.endpoint}: give addresses of one, or a client for each")
        self.session = b""

    async def _another(self, link: Link, connection: Connection) -> Link | None:
        """A link to our daemon, if this connection leads to another one."""
        if connection.welcome.epoch != self.epoch:
            for slot, other in enumerate(self._slots):
                if other is not None and other.lost is None and other.welcome.epoch == self.epoch and await _answers(other):
                    return self.link(slot)
        if connection.welcome.store == self._store or link.store == self._store:
            return None  # with the second, our daemon has got an empty data directory
        return next((other for other in self.links if other.store == self._store), None)

    def hello(self) -> Hello:
        """What a further connection of this session begins with."""
        return Hello(versions=[PROTOCOL_VERSION], client=self._client, token=self._token, session=self.session)

    async def _connect(self, link: Link, session: bytes, sock: socket.socket) -> Connection:
        return await open_connection(link.endpoint, session=session, client=self._client, token=self._token, tls=self._tls, connected=sock)

    @property
    def encrypted(self) -> bool:
        """Whether it speaks TLS."""
        return self._tls is not None

    async def open_beside(self, endpoint: str) -> Connection:
        """A connection of this session that can carry descriptors; to our own endpoint if that is a Unix socket."""
        return await open_connection(self.beside(endpoint), session=self.session, client=self._client, token=self._token, descriptors=True)

    def beside(self, endpoint: str) -> str:
        """Where such a connection leads to."""
        return self.endpoint if self.endpoint.startswith("unix:") else endpoint

    def least_busy(self, among: Sequence[int] = ()) -> int:
        """The slot, of all usable ones or those given, whose connection has the fewest requests in flight; open ones are preferred."""

        def load(slot: int) -> tuple[int, int]:
            connection = self._slots[slot]
            return (1, slot) if connection is None or connection.lost is not None else (0, connection.in_flight)

        return min(among or self.usable(), key=load)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent attempt while the connection is lost, with backoff, until the caller's deadline or as nobody is there."""
        backoff = _FIRST_BACKOFF_S
        last: ConnectionLost | None = None
        try:
            while True:
                try:
                    return await attempt()
                except ConnectionLost as lost:
                    last = lost
                    if not self.epoch:
                        raise  # it was never reached: more likely a wrong address than a restart
                    gone_s = self.gone_s()
                    if gone_s >= self._reconnect_s:
                        raise ConnectionLost(f"{lost.message}. It has been away for {gone_s:.0f} s") from lost
                    await asyncio.sleep(max(min(backoff, self._reconnect_s - gone_s), _FIRST_BACKOFF_S) * random.uniform(0.5, 1.0))
                    backoff = min(2 * backoff, _MAX_BACKOFF_S)
        except asyncio.CancelledError as cancelled:
            blame(cancelled, last)
            raise

    def _forget_absences(self) -> None:
        """An absence that nobody has watched to its end tells nothing of the next one."""
        if time.monotonic() - max(link.refused_last for link in self.links) > _FORGET_S:
            for link in self.links:
                link.refused_since = 0.0

    def gone_s(self) -> float:
        """For how long it has been known that nobody listens at any of the addresses; 0 if it is not."""
        since = [link.refused_since for link in self.links]
        return time.monotonic() - max(since) if all(since) else 0.0


def _alive(connection: Connection | None) -> bool:
    return connection is not None and connection.lost is None


async def _answers(connection: Connection) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_S):
            await connection.call(FrameType.PING, Empty(), Empty)
    except (KVStoreError, TimeoutError):
        return False
    return True
