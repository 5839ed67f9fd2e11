"""The asynchronous client: one daemon, reached over several connections."""

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any

from kvstore.api.wire import BadRequest, Busy, ConnectionLost, DeadlineExceeded, FrameType, KVSpec, KVStoreError
from kvstore.api.wire.messages import (
    CreateNamespace,
    Empty,
    Leased,
    LeaseRequest,
    NamespaceInfo,
    NamespaceList,
    NamespaceName,
)
from kvstore_client.arguments import ADDRESSES, BOUND, ENDPOINT, FLAG, TEXT, TIMEOUT, TLS, WHOLE, checked, instance
from kvstore_client.buffers import Buffers, SharedBuffer
from kvstore_client.connection import Connection
from kvstore_client.direct import current
from kvstore_client.endpoints import tls_for
from kvstore_client.estimate import Costs
from kvstore_client.links import Link
from kvstore_client.namespace import Namespace
from kvstore_client.pool import Pool
from kvstore_client.same_host import SameHost
from kvstore_client.spent import taken
from kvstore_client.times import milliseconds
from kvstore_client.waiting import blamed

_log = logging.getLogger("kvstore.client")

DEFAULT_ENDPOINT = "127.0.0.1:7421"
RECONNECT_S = 10.0
"""How long a daemon that refuses connections is waited for: more than a start takes."""
_RELEASE_S = 5.0
"""How long it is tried to give a lease back."""
_OWED_S = 1.0
"""How long the end of a client waits for what failed calls still do."""


class Deadline:
    """Bounds what is waited for in its block, by a timer or by the line. Not a generator: it is in the way of every small request."""

    __slots__ = ("_client", "_seconds", "_timeout")

    def __init__(self, client: "AsyncClient", seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        seconds = self._seconds - taken()
        if (line := current()) is not None:
            line.bound(seconds)
        else:
            if self._client.loop is not (loop := asyncio.get_running_loop()):
                self._client.take_loop(loop)
            self._timeout = await asyncio.timeout(seconds).__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timeout is not None:
            try:
                await self._timeout.__aexit__(kind, error, trace)
            except TimeoutError as over:
                error = over
        if isinstance(error, TimeoutError):
            why = blamed(error)
            raise DeadlineExceeded(_over(self._client.pool.endpoint, self._seconds, why)) from why


def _over(endpoint: str, seconds: float, why: KVStoreError | None) -> str:
    """What is said at the end of a deadline: a busy daemon has answered."""
    if isinstance(why, Busy):
        return f"the daemon at {endpoint} was still busy after {seconds:g} s: {why.message}"
    return f"no answer from {endpoint} within {seconds:g} s" + (f": {why.code}: {why.message}" if why is not None else "")


class AsyncClient:
    """A client of one daemon. Use it as an async context manager, or call `close`. It is of the event loop that it is first used in.

    Without an `endpoint` it is that of `KVSTORE_ENDPOINT` in the environment, else 127.0.0.1:7421.
    `connections` carry stripes in parallel. `timeout` (seconds) bounds every call that gives none; when it passes, the
    call raises DeadlineExceeded, which says what was wrong meanwhile. Lost connections are restored with backoff within that time. A
    daemon whose address refuses connections may be starting again: it is waited for until `reconnect` seconds after it was first found so;
    from then on each call tries once, and raises ConnectionLost, until nobody has tried for some seconds: then it may have been back.
    `token` is the bearer token, `KVSTORE_TOKEN` of the environment if not given, without white space at its ends.
    An endpoint `tls://HOST:PORT`, or `tls`, asks for TLS: with the context given, or one that trusts the certificates in the file
    `KVSTORE_TLS_CA`, or the system's. With a daemon on this machine bytes go through shared memory where that is possible, unless
    `shared_memory` is False.

    Several endpoints, all of one daemon, or several addresses of this machine in `local_addresses`, are several links (docs/links.md):
    there is at least one connection for each, stripes go to whichever is free, and a link that slows or dies loses them to the others.
    """

    @checked(
        endpoint=ENDPOINT, local_addresses=ADDRESSES, connections=WHOLE, timeout=TIMEOUT, token=instance(str, "text"), tls=TLS,
        shared_memory=FLAG, reconnect=BOUND, name=TEXT,
    )  # fmt: skip
    def __init__(
        self,
        endpoint: str | Sequence[str] | None = None,
        *,
        local_addresses: Sequence[str] = (),
        connections: int = 2,
        timeout: float = 30.0,
        name: str = "",
        token: str | None = None,
        tls: ssl.SSLContext | bool | None = None,
        shared_memory: bool = True,
        reconnect: float = RECONNECT_S,
    ) -> None:
        if not 1 <= connections <= 64:
            raise BadRequest(f"{connections} connections: give 1 to 64")
        self.timeout = timeout
        secret = (os.environ.get("KVSTORE_TOKEN", "") if token is None else token).strip()
        endpoint = os.environ.get("KVSTORE_ENDPOINT", DEFAULT_ENDPOINT) if endpoint is None else endpoint
        names = [endpoint] if isinstance(endpoint, str) else list(endpoint)
        contexts = [tls_for(one, tls) for one in names]
        if len({context is None for context in contexts}) > 1:
            raise BadRequest("some of the endpoints speak TLS and some do not")
        self._pool = Pool(
            names, connections, client=name or f"pid {os.getpid()}", token=secret, tls=contexts[0] if contexts else None,
            local_addresses=local_addresses, reconnect_s=reconnect,
        )  # fmt: skip
        self._same_host = SameHost(self._pool, wanted=shared_memory)
        self._buffers = Buffers()
        self._told: set[Connection] = set()
        """What was told over them the daemon may not have got to yet."""
        self._telling: set[asyncio.Task[None]] = set()
        """Leases that are being given back, where that could not be told at once."""
        self._owed: set[asyncio.Task[None]] = set()
        """What calls that have failed still do, for a while."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """That its connections are of, once it was used."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.described()}>"

    def described(self) -> str:
        """Of which daemon it is a client, and whether it is."""
        where = ", ".join(dict.fromkeys(link.endpoint for link in self._pool.links))
        return f"{where}, {'closed' if self._pool.closed else 'connected' if self._pool.session else 'not connected yet'}"

    async def __aenter__(self) -> "AsyncClient":
        try:
            async with self.deadline(None):
                if self._pool.several:
                    await self._pool.open_links()
                await self.ping()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; the daemon ends this client's leases and puts."""
        if self.loop not in (None, asyncio.get_running_loop()):
            await self._close_elsewhere()
            return
        if self._owed:
            await asyncio.wait(set(self._owed), timeout=_OWED_S)
        ending = self._owed | self._telling  # the session ends, and its leases with it
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._same_host.close()
        self._buffers.close()
        await self._pool.close()

    async def _close_elsewhere(self) -> None:
        """Close in the loop that the connections are of; if it does not run any more, nobody is left there to be waited for."""
        if self.loop is not None and self.loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.close(), self.loop))
            return
        self._same_host.drop()
        self._buffers.close()
        self._pool.drop()

    def take_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Be a client of this event loop. Raises BadRequest if it is one of another."""
        if self.loop is not None and self.loop is not loop:
            how = "has ended" if self.loop.is_closed() else "is not this one"
            raise BadRequest(f"this client is of an event loop that {how}: make a client in this one")
        self.loop = loop

    def buffer(self, nbytes: int) -> SharedBuffer:
        """Memory to compute pages in: what lies in its `array` is put without being sent, if the daemon is on this machine.

        The first 64 MiB of its memory are made here, which holds up the loop for some hundredths of a second; the rest is made as it is
        touched, or by `await asyncio.to_thread(buffer.populate)` (see SharedBuffer). It lasts until nobody has it, or a view of it, any
        more, or until `drop_buffer`. Raises NoSpace if more is asked for than is available, or no descriptor is left.
        """
        if self._pool.closed:
            raise BadRequest("this client was closed")
        return self._buffers.make(nbytes)

    async def drop_buffer(self, buffer: SharedBuffer) -> None:
        """Give a buffer up now; the end of the client does that, too. Its `array` is gone then; views of it keep their memory."""
        await self._buffers.drop(buffer)

    @property
    def buffers(self) -> Buffers:
        """What puts are made from."""
        return self._buffers

    @property
    def same_host(self) -> SameHost:
        """What there is of shared memory."""
        return self._same_host

    @property
    def links(self) -> tuple[Link, ...]:
        """The links to the daemon, and what went over each so far."""
        return tuple(self._pool.links)

    def line_endpoint(self) -> str | None:
        """Where a connection leads to that the calling thread waits on by itself; None if there can be none."""
        if self._pool.several or self._pool.closed or not self._pool.session:
            return None
        if self._same_host.now is not None:
            return self._same_host.endpoint
        return None if self._pool.encrypted else self._pool.endpoint

    @property
    def pool(self) -> Pool:
        """The connections."""
        return self._pool

    def deadline(self, timeout: float | None) -> "Deadline":
        """Bound a call: `async with`. Raises DeadlineExceeded."""
        return Deadline(self, self.timeout if timeout is None else timeout)

    async def call(
        self, frame_type: FrameType, message: Any, reply: type[Any], payload: bytes | memoryview = b"", timeout: float | None = None,
        before: Callable[[], None] | None = None,
    ) -> tuple[Any, bytes]:  # fmt: skip
        """One idempotent control request, repeated if the connection breaks; `before` each time the message is brought up to date."""
        async with self.deadline(timeout):
            return await self.ask(frame_type, message, reply, payload, before)

    async def ask(
        self, frame_type: FrameType, message: Any, reply: type[Any], payload: bytes | memoryview = b"",
        before: Callable[[], None] | None = None,
    ) -> tuple[Any, bytes]:  # fmt: skip
        """As `call`, for who has a deadline."""
        if (line := current()) is not None:
            return await line.call(frame_type, message, reply, payload)

        async def attempt() -> tuple[Any, bytes]:
            connection = await self.for_requests()
            if before is not None:
                before()
            return await connection.call(frame_type, message, reply, payload)

        return await self._pool.retry(attempt)

    def owe(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what a call that fails owes the daemon, without its caller, who has waited long enough; `close` waits a little for it."""
        task = asyncio.create_task(work, name="kvstore-client-owed")
        self._owed.add(task)
        task.add_done_callback(self._owed.discard)

    async def for_requests(self) -> Connection:
        """The connection for a request by itself. What was told over others is done before."""
        if self._telling:
            await asyncio.wait(set(self._telling))
        connection = self._same_host.now or await self._pool.for_requests()
        for told in self._told - {connection}:
            with contextlib.suppress(ConnectionLost):
                await told.call(FrameType.PING, Empty(), Empty)
            self._told.discard(told)
        return connection

    @checked()
    async def ping(self, timeout: float | None = None) -> None:
        """Wait until the daemon answers."""
        await self.call(FrameType.PING, Empty(), Empty, timeout=timeout)

    @checked(retention_s=WHOLE, ttl_s=WHOLE, costs=instance(Costs), rebuild=TEXT, name=TEXT)
    async def namespace(
        self, name: str, fingerprint: str | None = None, spec: KVSpec | None = None, *, recipes: bool = False, retention_s: int = 86_400,
        ttl_s: int = 0, costs: Costs | None = None, rebuild: str = "exact", lossy: bool = False,
    ) -> "Namespace":  # fmt: skip
        """Open a namespace by name or id; with a fingerprint and a KV spec, create it if it is not there.

        `retention_s` is how long durable pages are kept at least, `ttl_s` after how long without use pages are removed (0: never).
        `recipes` keeps on disk what it takes to compute a page again (its token ids), `rebuild` says what counts as the same page then:
        `exact`, `tolerant`, or `never` for what can't be computed again and is never discarded; `lossy` lets pages go without a recipe.
        `costs` are what computing its pages takes, for estimates; they can be given again.
        Raises UnknownNamespace, or Conflict if the name stands for another model or spec.
        """
        if (fingerprint is None) != (spec is None):
            missing = "fingerprint" if fingerprint is None else "spec"
            raise BadRequest(f"{missing} is missing: give a model fingerprint and a KV spec to create a namespace, or neither to open it")
        if fingerprint is None or spec is None:
            info, _ = await self.call(FrameType.NAMESPACE_GET, NamespaceName(namespace=name), NamespaceInfo)
        else:
            costs = costs or Costs()
            wanted = CreateNamespace(
                name=name, fingerprint=fingerprint, spec=spec.to_dict(), recipes=recipes, retention_s=retention_s, ttl_s=ttl_s,
                prefill_us=costs.prefill_us, prefill_ns_per_position=costs.prefill_ns_per_position, rebuild=rebuild, lossy=lossy,
            )  # fmt: skip
            info, _ = await self.call(FrameType.NAMESPACE_CREATE, wanted, NamespaceInfo)
        return Namespace(self, info)

    async def namespaces(self) -> list["Namespace"]:
        """All namespaces of this tenant."""
        found, _ = await self.call(FrameType.NAMESPACE_LIST, Empty(), NamespaceList)
        return [Namespace(self, info) for info in found.items]

    async def release(self, lease: int) -> None:
        """End a lease. Harmless if it is over already, or the daemon can't be reached: then it ends with the session, or by its time.

        It is not waited for, but the daemon does it before any other request of this client by itself.
        """
        if self._pool.closed:
            return
        message = LeaseRequest(lease=lease, quiet=True, **self._same_host.copied.take())
        if (line := current()) is not None:
            line.bound(min(self.timeout, _RELEASE_S))
            try:
                await line.tell(FrameType.LEASE_RELEASE, message)
            except TimeoutError:
                _log.debug("lease %d was not given back in time", lease)
            return
        if self.loop is not (loop := asyncio.get_running_loop()):
            self.take_loop(loop)
        connection = self._same_host.now or self._pool.at_hand()
        if connection is not None and connection.tell_soon(FrameType.LEASE_RELEASE, message):
            self._told.add(connection)
            return
        task = asyncio.create_task(self._give_back(message), name="kvstore-client-release")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _give_back(self, message: LeaseRequest) -> None:
        """Tell of the end of a lease over whichever connection can be had, for a while."""

        async def attempt() -> None:
            connection = await self._pool.for_requests()
            await connection.tell(FrameType.LEASE_RELEASE, message)
            self._told.add(connection)

        try:
            async with self.deadline(min(self.timeout, _RELEASE_S)):
                await self._pool.retry(attempt)
        except KVStoreError as error:
            _log.debug("lease %d was not given back: %s", message.lease, error)

    async def renew(self, lease: int, lease_s: float) -> None:
        """Let a lease last `lease_s` seconds from now. Raises NotFound if it is over."""
        message = LeaseRequest(lease=lease, lease_ms=milliseconds("lease_s", lease_s), quiet=False, **self._same_host.copied.take())
        await self.call(FrameType.LEASE_RENEW, message, Leased)
