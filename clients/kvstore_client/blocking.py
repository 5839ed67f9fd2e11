"""The blocking client: the asynchronous one on an event loop of its own, in a thread of its own."""

import contextlib
import os
import ssl
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from kvstore.api.wire import BadRequest, Hints, KVSpec, PartRange
from kvstore_client.blocking_match import Match
from kvstore_client.blocking_streams import Follower, PutStream, Session
from kvstore_client.blocking_text import BlockingTextCalls
from kvstore_client.buffers import SharedBuffer
from kvstore_client.client import RECONNECT_S, AsyncClient
from kvstore_client.direct import Direct, Elsewhere
from kvstore_client.estimate import Costs, Estimate
from kvstore_client.fetching import OnGroup
from kvstore_client.links import Link
from kvstore_client.loop_thread import LoopThread
from kvstore_client.namespace import Namespace as AsyncNamespace
from kvstore_client.plan import Priority
from kvstore_client.put import PutResult
from kvstore_client.put_layout import by_default
from kvstore_client.spent import having_spent
from kvstore_client.text import Given
from kvstore_client.times import FOR_EVER_S
from kvstore_client.tokens import Extras, Tokens
from kvstore_client.transfer import Progress
from kvstore_client.view import LocalView

T = TypeVar("T")

SMALL_BYTES = 1 << 20
"""A fetch into no more than this is made by the calling thread."""


class Client:
    """As AsyncClient, but every call blocks. Safe to share between threads. Use as a context manager, or call `close`."""

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
        self._process = os.getpid()
        self._thread = LoopThread()
        try:
            self._client = self._thread.run(
                self._opened(
                    lambda: AsyncClient(
                        endpoint, local_addresses=local_addresses, connections=connections, timeout=timeout, name=name, token=token,
                        tls=tls, shared_memory=shared_memory, reconnect=reconnect,
                    )
                )
            )  # fmt: skip
            self._direct = Direct(self._client)
        except BaseException:
            self._thread.stop()
            raise

    @staticmethod
    async def _opened(make: Callable[[], AsyncClient]) -> AsyncClient:
        return await make().__aenter__()

    def __repr__(self) -> str:
        return f"<Client of {self._client.described()}>"

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; the daemon ends this client's leases and puts. Once is enough. After a fork only its maker can."""
        if not self._thread.over and os.getpid() == self._process:
            self._direct.close()
            with contextlib.suppress(BadRequest):  # it is closed already, or by another thread meanwhile
                self._thread.run(self._client.close())
            self._thread.stop()

    def __del__(self) -> None:
        """Nobody has this client any more, and it was not closed: say so, and end its thread and connections without waiting."""
        thread = getattr(self, "_thread", None)
        if thread is None or thread.stopped or os.getpid() != self._process:
            return
        warnings.warn("a kvstore client was not closed: use it in a `with`, or call close()", ResourceWarning, stacklevel=2, source=self)
        self._direct.close()
        thread.leave(self._client.close())

    @property
    def closed(self) -> bool:
        """Whether `close` was called; all leases are over then."""
        return self._thread.stopped

    @property
    def inner(self) -> AsyncClient:
        """The asynchronous client, to be used on this client's loop."""
        return self._client

    @property
    def links(self) -> tuple[Link, ...]:
        """The links to the daemon, and what went over each so far."""
        return self._client.links

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None, began: float = 0.0) -> T:
        """Run a coroutine on this client's loop. Raises BadRequest if that is in another process, as after a fork.

        `timeout` is the call's own (the client's, if it has none), and counts from when it `began` (monotonic; by default now).
        """
        if os.getpid() != self._process:
            work.close()
            raise self._forked()
        began = began or time.monotonic()
        self._direct.settle(began + self._bound_of(timeout))
        return having_spent(time.monotonic() - began, lambda: self._thread.run(work))

    def _bound_of(self, timeout: Any) -> float:
        """Seconds that a call has; what is no number is for the call itself to refuse."""
        return min(timeout, FOR_EVER_S) if isinstance(timeout, int | float) else self._client.timeout

    def quickly(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None, *, answered: bool = True) -> T:
        """Run what `work` makes, a coroutine of small requests, in the calling thread if that is possible, else on this client's loop.

        For one that is not `answered` nothing else is waited for: no connection, and nothing that was told before.
        """
        if os.getpid() != self._process:
            raise self._forked()
        began = time.monotonic()
        with contextlib.suppress(Elsewhere):
            return self._direct.run(work, self._bound_of(timeout), began, opening=answered)
        return self.run(work(), timeout, began) if answered else self._thread.run(work())

    def _forked(self) -> BadRequest:
        return BadRequest(f"this client is of process {self._process}, and this is a fork of it: make a client here")

    def buffer(self, nbytes: int) -> SharedBuffer:
        """Memory to put from (see AsyncClient.buffer), all of it made here: 0.1 to 1.6 s a GiB."""
        if os.getpid() != self._process:
            raise self._forked()
        if self.closed:
            raise BadRequest("this client was closed")
        buffer = self._client.buffer(nbytes)
        buffer.populate()
        return buffer

    def drop_buffer(self, buffer: SharedBuffer) -> None:
        """Give a buffer up now (see AsyncClient.drop_buffer)."""
        self.run(self._client.drop_buffer(buffer))

    def ping(self, timeout: float | None = None) -> None:
        """Wait until the daemon answers."""
        self.quickly(partial(self._client.ping, timeout), timeout)

    def namespace(
        self, name: str, fingerprint: str | None = None, spec: KVSpec | None = None, *, recipes: bool = False, retention_s: int = 86_400,
        ttl_s: int = 0, costs: Costs | None = None, rebuild: str = "exact", lossy: bool = False,
    ) -> "Namespace":  # fmt: skip
        """Open a namespace; with a fingerprint and a KV spec, create it if it is not there (see AsyncClient.namespace)."""
        opening = self._client.namespace(
            name, fingerprint, spec, recipes=recipes, retention_s=retention_s, ttl_s=ttl_s, costs=costs, rebuild=rebuild, lossy=lossy
        )
        return Namespace(self, self.run(opening))

    def namespaces(self) -> list["Namespace"]:
        """All namespaces of this tenant."""
        return [Namespace(self, n) for n in self.run(self._client.namespaces())]


class Namespace(BlockingTextCalls):
    """As the asynchronous Namespace."""

    def __init__(self, client: Client, inner: AsyncNamespace) -> None:
        self._client = client
        self.inner = inner
        self.id = inner.id
        self.name = inner.name
        self.info = inner.info
        self.spec = inner.spec

    def __repr__(self) -> str:
        return repr(self.inner)

    def drop(self) -> None:
        """Forget the namespace and everything in it."""
        self._client.run(self.inner.drop())

    def match(
        self, tokens: Tokens, *, lease_s: float = 30.0, parts: bool = True, boundaries: bool = False, base: Match | None = None,
        extras: Extras | None = None, hints: Hints | None = None, estimate: Costs | bool = False, rebuildable: bool = False,
        rebuild_s: float = 0.0, holes: bool = False, timeout: float | None = None,
    ) -> Match:  # fmt: skip
        """The longest usable prefix in the store (see the asynchronous Namespace.match)."""
        work = partial(
            self.inner.match, tokens, lease_s=lease_s, parts=parts, boundaries=boundaries, base=_inner(base),
            extras=extras, hints=hints, estimate=estimate, rebuildable=rebuildable, rebuild_s=rebuild_s, holes=holes, timeout=timeout,
        )  # fmt: skip
        waits = rebuildable or rebuild_s
        return Match(self._client, self._client.run(work(), timeout) if waits else self._client.quickly(work, timeout))

    def fetch(
        self, match: Match, out: Any, *, pages: tuple[int, int] | None = None, wanted: PartRange | None = None, group_layers: int = 0,
        on_group: OnGroup | None = None, progress: Progress | None = None, plan: Estimate | None = None, priority: Priority | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Fetch matched pages into `out` (see the asynchronous Namespace.fetch). Callbacks run in the client's thread."""
        work = partial(
            self.inner.fetch, _inner(match), out, pages=pages, wanted=wanted, group_layers=group_layers, on_group=on_group,
            progress=progress, plan=plan, priority=priority, timeout=timeout,
        )  # fmt: skip
        small = on_group is None and progress is None and (_bytes_of(out) <= SMALL_BYTES or (isinstance(match, Match) and match.inner.near))
        return self._client.quickly(work, timeout) if small else self._client.run(work(), timeout)

    def view(self, match: Match, *, component: int = 0, pages: tuple[int, int] | None = None, timeout: float | None = None) -> LocalView:
        """Matched pages where they lie in the daemon's memory (see the asynchronous Namespace.view)."""
        view = self.inner.view_now(_inner(match), component=component, pages=pages)
        if view is not None:
            return view
        return self._client.quickly(partial(self.inner.view, _inner(match), component=component, pages=pages, timeout=timeout), timeout)

    def put(
        self, tokens: Tokens, data: Any, *, first_page: int = 0, parts: tuple[PartRange, ...] | None = None,
        spans: tuple[tuple[int, int], ...] | None = None, durable: bool = False, whole_s: float = 0.0,
        base: Match | None = None, extras: Extras | None = None, put_id: bytes | None = None, hints: Hints | None = None,
        progress: Progress | None = None, recipe: Given | None = None, timeout: float | None = None,
    ) -> PutResult:  # fmt: skip
        """Put pages (see the asynchronous Namespace.put)."""
        parts = by_default(self.spec, parts, put_id)
        putting = self.inner.put(
            tokens, data, first_page=first_page, parts=parts, spans=spans, durable=durable, whole_s=whole_s, extras=extras,
            base=_inner(base), put_id=put_id, hints=hints, progress=progress, recipe=recipe, timeout=timeout,
        )  # fmt: skip
        return self._client.run(putting, timeout)

    def stream_put(
        self, tokens: Tokens, *, first_page: int = 0, part: PartRange | None = None, durable: bool = False, whole_s: float = 0.0,
        extras: Extras | None = None, put_id: bytes | None = None, hints: Hints | None = None, timeout: float | None = None,
    ) -> PutStream:  # fmt: skip
        """A put whose layers are sent as they are computed (see the asynchronous Namespace.stream_put)."""
        inner = self.inner.stream_put(
            tokens, first_page=first_page, part=part, durable=durable, whole_s=whole_s, extras=extras, put_id=put_id, hints=hints,
            timeout=timeout,
        )  # fmt: skip
        return PutStream(self._client.run, inner)

    def follow(self, put_id: bytes, *, wanted: PartRange | None = None, timeout: float | None = None) -> Follower:
        """Read what a computation is putting while it does (see the asynchronous Namespace.follow)."""
        return Follower(self._client.run, self.inner.follow(put_id, wanted=wanted, timeout=timeout))

    def session(self, *, lease_s: float = 60.0, hints: Hints | None = None, costs: Costs | bool = False) -> Session:
        """A conversation that grows: only new tokens travel (see the asynchronous Session)."""
        return Session(self._client.run, self.inner.session(lease_s=lease_s, hints=hints, costs=costs))

    def prefetch(
        self, tokens: Tokens, *, pages: tuple[int, int] | None = None, extras: Extras | None = None, rebuild: bool = False,
        within_s: float = 0.0, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Bring pages into the daemon's DRAM (see the asynchronous Namespace.prefetch)."""
        return self._client.run(
            self.inner.prefetch(tokens, pages=pages, extras=extras, rebuild=rebuild, within_s=within_s, timeout=timeout), timeout
        )

    def pin(self, tokens: Tokens, ttl_s: float, *, extras: Extras | None = None, timeout: float | None = None) -> tuple[int, int]:
        """Keep a prefix from being evicted (see the asynchronous Namespace.pin)."""
        return self._client.run(self.inner.pin(tokens, ttl_s, extras=extras, timeout=timeout), timeout)

    def unpin(self, pin: int, timeout: float | None = None) -> None:
        """End a pin."""
        self._client.run(self.inner.unpin(pin, timeout), timeout)

    def abandon(
        self, tokens: Tokens, *, from_page: int = 0, from_token: int | None = None, extras: Extras | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Say that a context will not be used again (see the asynchronous Namespace.abandon)."""
        return self._client.run(
            self.inner.abandon(tokens, from_page=from_page, from_token=from_token, extras=extras, timeout=timeout), timeout
        )

    def abandon_session(self, session: str | bytes, timeout: float | None = None) -> int:
        """Say that a session is over (see the asynchronous Namespace.abandon_session)."""
        return self._client.run(self.inner.abandon_session(session, timeout), timeout)

    def delete(
        self, tokens: Tokens, *, from_page: int = 0, from_token: int | None = None, extras: Extras | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Delete a prefix from a page, or a token, on (see the asynchronous Namespace.delete)."""
        return self._client.run(
            self.inner.delete(tokens, from_page=from_page, from_token=from_token, extras=extras, timeout=timeout), timeout
        )


def _inner(match: Any) -> Any:
    """The match that the asynchronous calls take; anything else is for them to refuse."""
    return match.inner if isinstance(match, Match) else match


def _bytes_of(out: Any) -> int:
    """The size of a buffer; of anything else it is not known to be small."""
    try:
        return memoryview(out).nbytes
    except (TypeError, ValueError):
        return SMALL_BYTES + 1
