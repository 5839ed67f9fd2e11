"""The connections of a client: opened when needed, joined into one session, restored with backoff."""

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvstore.api.wire import ConnectionLost, NotFound
from kvstore_client.connection import Connection

T = TypeVar("T")

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0


class Pool:
    """`size` connections to one endpoint. Callers bound every wait with their own deadline."""

    def __init__(self, endpoint: str, size: int, *, client: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        self.endpoint = endpoint
        self.size = size
        self.session = b""
        self.epoch = 0
        self._client = client
        self._token = token
        self._tls = tls
        self._slots: list[Connection | None] = [None] * size
        self._locks = [asyncio.Lock() for _ in range(size)]
        self._session_lock = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close all connections."""
        open_ones = [connection for connection in self._slots if connection is not None]
        self._slots = [None] * self.size
        await asyncio.gather(*(connection.close() for connection in open_ones), *self._closing)

    async def connection(self, slot: int = 0) -> Connection:
        """The live connection in a slot, opened if need be (one attempt)."""
        async with self._locks[slot]:
            connection = self._slots[slot]
            if connection is not None and connection.lost is None:
                return connection
            if connection is not None:
                self._slots[slot] = None
                await self._close_whole(connection)
            connection = await self._open()
            self._slots[slot] = connection
            return connection

    async def _close_whole(self, connection: Connection) -> None:
        """Close a connection to the end, even if the caller is cancelled meanwhile."""
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        await asyncio.shield(task)

    async def _open(self) -> Connection:
        async with self._session_lock:
            try:
                connection = await self._connect(self.session)
            except NotFound:
                self.session = b""  # the daemon was restarted, or all our connections broke: begin anew
                connection = await self._connect(b"")
            self.session, self.epoch = connection.welcome.session, connection.welcome.epoch
            return connection

    async def _connect(self, session: bytes) -> Connection:
        return await Connection.open(self.endpoint, session=session, client=self._client, token=self._token, tls=self._tls)

    async def open_beside(self, endpoint: str) -> Connection:
        """A connection of this session that can carry descriptors; to our own endpoint if that is a Unix socket."""
        mine = self.endpoint if self.endpoint.startswith("unix:") else endpoint
        return await Connection.open(mine, session=self.session, client=self._client, token=self._token, descriptors=True)

    def least_busy(self) -> int:
        """The slot whose connection has the fewest requests in flight; open ones are preferred."""

        def load(slot: int) -> tuple[int, int]:
            connection = self._slots[slot]
            return (1, slot) if connection is None or connection.lost is not None else (0, connection.in_flight)

        return min(range(self.size), key=load)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent attempt while the connection is lost, with backoff; the caller's deadline ends it."""
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                return await attempt()
            except ConnectionLost:
                if not self.epoch:
                    raise  # it was never reached: more likely a wrong address than a restart
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(2 * backoff, _MAX_BACKOFF_S)
