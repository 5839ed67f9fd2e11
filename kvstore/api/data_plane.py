"""Listeners of the data plane: TCP and Unix sockets, and the connections they accept."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvstore.api.connection import CLIENT_TIMEOUT_S, Connection
from kvstore.api.guard import Guard
from kvstore.api.priority import Traffic
from kvstore.api.request_stats import RequestStats
from kvstore.api.same_host import SameHost
from kvstore.api.sessions import Sessions
from kvstore.api.wire import Channel, FrameType, TlsChannel, encode, pack
from kvstore.api.wire.messages import ErrorReply
from kvstore.errors import BadRequest, Busy, Conflict
from kvstore.loop import Loop
from kvstore.store import Store

_log = logging.getLogger("kvstore.data_plane")

_BACKLOG = 512
_LARGE_PAYLOADS = 16
_REFUSED = 32
"""So many that are one too many are heard, and then told so, at a time; the others are told without being heard."""
_FULL = "this daemon has as many connections as it takes: close clients that are not needed, or raise its max_connections"
"""To whom is not known by a token: how many those are is not for everybody."""
_RETRY_MS = 1000
_RESOLVE_S = 10.0
"""How long a name is looked up."""


class DataPlane:
    """Accepts connections until closed, those over TCP with `tls`. `max_connections` bounds them; who comes then is told so, and closed.

    `client_timeout_s` bounds how long a client may take over a frame that has begun, in either direction; `max_in_flight` the bytes
    of fetches that it has under way.
    """

    def __init__(
        self, store: Store, guard: Guard, *, tls: ssl.SSLContext | None = None, max_connections: int = 1024,
        client_timeout_s: float = CLIENT_TIMEOUT_S, host: SameHost | None = None,
        max_in_flight: int | None = None,
    ) -> None:  # fmt: skip
        self._tls = tls
        self._host = host or SameHost()
        self._guard = guard
        self.sessions = Sessions(store, max_in_flight)
        self._store = store
        self._max_connections = max_connections
        self._client_timeout_s = client_timeout_s
        self._connections: set[asyncio.Task[None]] = set()
        self._refusing: set[asyncio.Task[None]] = set()
        self._serving: dict[Connection, asyncio.Task[None]] = {}
        self._traffic = Traffic()
        self.request_stats = RequestStats()
        loop = asyncio.get_running_loop()
        self._expect = loop.expect if isinstance(loop, Loop) else lambda nbytes: None
        self._large_payloads = asyncio.Semaphore(_LARGE_PAYLOADS)

    @property
    def connection_count(self) -> int:
        """Open connections."""
        return len(self._connections)

    def expel(self) -> None:
        """Close the connections whose token is over."""
        for connection, task in list(self._serving.items()):
            if connection.grant is not None and not self._guard.holds(connection.grant):
                _log.info("a connection of tenant %s is closed: its token is over", connection.grant.tenant)
                connection.expel(task)

    @asynccontextmanager
    async def listen(self, sockets: list[tuple[socket.socket, str]]) -> AsyncIterator[None]:
        """Serve the given listening sockets, each with the endpoint that clients know it by. At the end all are closed."""
        acceptors = [asyncio.create_task(self._accept(s, endpoint), name=f"kvstore-accept {endpoint}") for s, endpoint in sockets]
        try:
            yield
        finally:
            tasks = (*acceptors, *self._connections, *self._refusing)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._host.close)  # it waits for copies, and for memory to be freed
            for listener, _ in sockets:
                listener.close()

    async def _accept(self, listener: socket.socket, endpoint: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.error("can't accept connections on %s: %s", endpoint, error)
                await asyncio.sleep(0.1)
                continue
            if not self._host.admits(sock):
                _log.warning("a user that the Unix socket is not for is refused")
                sock.close()
                continue
            full = len(self._connections) >= self._max_connections
            if full:
                _log.warning("more than %d connections: one is refused", self._max_connections)
            if full and len(self._refusing) >= _REFUSED:
                self._refuse_unheard(sock)
                continue
            tasks = self._refusing if full else self._connections
            task = asyncio.create_task(
                self._serve(sock, endpoint, self._too_many() if full else None), name=f"kvstore-connection {endpoint}"
            )
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _too_many(self) -> Busy:
        return Busy(
            f"this daemon has {self._max_connections} connections open, as many as it takes: close clients that are not needed, "
            "or raise its max_connections",
            retry_after_ms=_RETRY_MS,
        )

    def _refuse_unheard(self, sock: socket.socket) -> None:
        """Say that there are too many connections, if that takes no TLS handshake, and close: nothing is read, and nobody waits."""
        with sock:
            if self._tls is None or sock.family == socket.AF_UNIX:
                said = ErrorReply(code=Busy.code, message=_FULL, retry_after_ms=_RETRY_MS)
                with contextlib.suppress(OSError):
                    sock.sendmsg(encode(FrameType.ERROR, 0, pack(said)))
                    sock.shutdown(socket.SHUT_WR)
                self.request_stats.errors[Busy.code] += 1

    async def _serve(self, sock: socket.socket, endpoint: str, refusal: Busy | None = None) -> None:
        channel = self._channel(sock)
        connection = Connection(
            channel,
            self._store,
            self.sessions,
            endpoint,
            self._large_payloads,
            self._guard,
            self.request_stats,
            self._client_timeout_s,
            self._host,
            self._traffic.of(sock),
            self._expect,
            refusal,
        )
        task = asyncio.current_task()
        assert task is not None
        self._serving[connection] = task
        try:
            await connection.serve()
        except Exception:  # noqa: BLE001 - a bug in one connection must not end the others
            _log.exception("a connection failed in a way it should not")
        finally:
            del self._serving[connection]
            channel.close()

    def _channel(self, sock: socket.socket) -> Channel:
        if sock.family == socket.AF_UNIX:
            return self._host.channel(sock)
        return Channel(sock) if self._tls is None else TlsChannel(sock, self._tls)


async def bind_tcp(setting: str, host: str, port: int) -> tuple[socket.socket, str]:
    """A listening TCP socket and its endpoint, `host:port` (port 0 takes a free one).

    Raises BadRequest if what the `setting` says is neither an address of this machine nor a name of one, and Conflict if it is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = await _resolved(setting, host, port, family)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        by = " (by a daemon that runs already? `kvstore status` asks it)" if error.errno == errno.EADDRINUSE else ""
        raise Conflict(f"can't listen on {host}:{port}: {error.strerror}{by}; choose others with --host, --port and --http-port") from error
    name = f"[{host}]" if ":" in host else host
    return listener, f"{name}:{listener.getsockname()[1]}"


async def _resolved(setting: str, host: str, port: int, family: socket.AddressFamily) -> Any:
    """Where to bind. A name is looked up beside the loop, which others may be served by already."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except TimeoutError:
        raise BadRequest(
            f"{setting}: nobody said within {_RESOLVE_S:g} s what address {host!r} is of: mend the name service, or give the address"
        ) from None
    except (OSError, UnicodeError) as error:
        raise BadRequest(f"{setting}: {host!r} is no address, and no name of one: {error}") from error
    return found[0][4]


def bind_unix(path: Path, *, for_others: bool = False) -> tuple[socket.socket, str]:
    """A listening Unix socket, for this user only, and its endpoint, `unix:PATH`. A dead daemon's socket is replaced.

    Its folder is made, for this user only, if that is missing. Raises Conflict.
    With `for_others` every user can connect, and who may stay is for `SameHost.admits` to say.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
        path.parent.mkdir(mode=0o700, exist_ok=True)  # not its parents too: they would be open to others
        mask = os.umask(0o111 if for_others else 0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except FileNotFoundError as error:
        listener.close()
        raise Conflict(
            f"can't listen on {path}: the folder {path.parent.parent} is not there: make it, or choose another --unix-socket"
        ) from error
    except OSError as error:
        listener.close()
        raise Conflict(f"can't listen on {path}: {error}; choose another --unix-socket") from error
    return listener, f"unix:{path}"
