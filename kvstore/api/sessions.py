"""Sessions: one client over several connections. When its last connection is gone, so is all it held."""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.errors import BadRequest, Busy, NotFound
from kvstore.store import Store
from kvstore.store.matching.rates import ClientLink, Rates

SESSION_BYTES = 16
_RETRY_MS = 1000
_FETCH_RETRY_MS = 20
_CLOSE_S = 10.0
MAX_RUNS_UNDER_WAY = 1 << 18
"""Of the fetches of one client, runs that differ in more than their blob: each is some 250 bytes of memory until it is sent."""


@dataclass(slots=True)
class Session:
    """`owner` is what the store knows it by; `id` (16 random bytes) is the secret by which connections join."""

    id: bytes
    owner: int
    tenant: str
    client: str
    connections: int = 0
    max_in_flight: int | None = None
    in_flight: int = 0
    """Bytes of its fetches under way."""
    runs: int = 0
    """What they name, as the daemon keeps it."""
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    """Of its connections."""
    serving: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)
    """The task of each connection, by its number."""
    link: ClientLink = field(default_factory=lambda: ClientLink(Rates(), ""))
    """How fast its fetches are."""

    @contextmanager
    def fetching(self, nbytes: int, runs: int = 1) -> Iterator[None]:
        """While a fetch of so many bytes, in so many runs, is under way. One larger than the limit may be, alone. Raises Busy."""
        if self.max_in_flight is not None and self.in_flight and self.in_flight + nbytes > self.max_in_flight:
            raise Busy(
                f"this client has {self.in_flight} bytes of fetches under way; {self.max_in_flight} are the limit",
                retry_after_ms=_FETCH_RETRY_MS,
            )
        self.check_runs(runs)
        self.in_flight += nbytes
        self.runs += runs
        try:
            yield
        finally:
            self.in_flight -= nbytes
            self.runs -= runs

    def check_runs(self, runs: int) -> None:
        """Whether a fetch of so many runs may come in beside the others. Raises Busy."""
        if self.runs and self.runs + runs > MAX_RUNS_UNDER_WAY:
            raise Busy(
                f"the fetches that this client has under way are of {self.runs} runs; {MAX_RUNS_UNDER_WAY} are the limit",
                retry_after_ms=_FETCH_RETRY_MS,
            )

    def serve(self, task: "asyncio.Task[None]") -> int:
        """Number a connection that this task serves."""
        number = next(self.numbers)
        self.serving[number] = task
        task.add_done_callback(lambda _: self.serving.pop(number, None))
        return number

    async def close(self, number: int, own: int) -> None:
        """End a connection, not one's own, and wait until what it had under way has ended. Harmless if it is gone.

        Raises BadRequest, or Busy if it takes too long.
        """
        if number == own:
            raise BadRequest("a connection can't close itself: hang up")
        task = self.serving.get(number)
        if task is None:
            return
        task.cancel()
        _, still = await asyncio.wait([task], timeout=_CLOSE_S)
        if still:
            raise Busy(f"connection {number} has not ended within {_CLOSE_S:g} s", retry_after_ms=_RETRY_MS)


class Sessions:
    """All sessions of a daemon."""

    def __init__(self, store: Store, max_in_flight: int | None = None) -> None:
        self._store = store
        self._max_in_flight = max_in_flight
        self._by_id: dict[bytes, Session] = {}
        self._connections: Counter[str] = Counter()
        self._owners = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_id)

    def join(self, session_id: bytes, tenant: str, client: str) -> Session:
        """The session to which a new connection belongs; a fresh one for an empty id. Follow with `leave`.

        Raises NotFound if the tenant has no such session, and Busy if it has as many connections as its quota allows.
        """
        limit = self._store.quotas.of(tenant).connections
        if limit is not None and self._connections[tenant] >= limit:
            raise Busy(
                f"the quota of {limit} connections (`connections` of {tenant}) is full: close clients that are not needed",
                retry_after_ms=_RETRY_MS,
            )
        if session_id:
            session = self._by_id.get(session_id)
            if session is None or session.tenant != tenant:
                raise NotFound("this session is over: all its connections were closed, or the daemon was restarted")
        else:
            session = Session(
                secrets.token_bytes(SESSION_BYTES),
                next(self._owners),
                tenant,
                client,
                link=ClientLink(self._store.rates, tenant),
                max_in_flight=self._max_in_flight,
            )
            self._by_id[session.id] = session
        session.connections += 1
        self._connections[tenant] += 1
        return session

    def of(self, tenant: str) -> tuple[int, int]:
        """How many sessions and connections a tenant has."""
        return sum(s.tenant == tenant for s in self._by_id.values()), self._connections[tenant]

    def clients(self) -> dict[int, str]:
        """What clients call themselves, by what the store knows them by."""
        return {session.owner: session.client for session in self._by_id.values()}

    def leave(self, session: Session) -> None:
        """A connection of the session was closed."""
        session.connections -= 1
        self._connections[session.tenant] -= 1
        if not self._connections[session.tenant]:
            del self._connections[session.tenant]
        if session.connections == 0:
            del self._by_id[session.id]
            self._store.release_owner(session.owner)
