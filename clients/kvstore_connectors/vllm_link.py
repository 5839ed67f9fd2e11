"""The store as an engine sees it: calls run on a loop of their own, and a store that fails is left alone for a while."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvstore_client import (
    AsyncClient,
    Busy,
    Corrupt,
    DeadlineExceeded,
    KVSpec,
    KVStoreError,
    MissingParent,
    Namespace,
    NoSpace,
    NotFound,
    UnknownNamespace,
)
from kvstore_connectors.link_loop import LinkLoop
from kvstore_connectors.vllm_settings import Settings

T = TypeVar("T")

# A child of the engine's logger, so that its lines are seen where the engine's are.
log = logging.getLogger("vllm.kvstore_connectors")

_ANSWERS = (NotFound, Corrupt, MissingParent, Busy, NoSpace)
"""Errors that a store in good health gives."""
_SLOW_IN_A_ROW = 2
_LONGEST_REST = 12
_CLOSE_S = 2.0


class Unavailable(Exception):
    """The store is not asked just now: it failed a moment ago."""


class Breaker:
    """Leaves a store that fails alone for a while, and says so once. Not thread-safe: for one loop."""

    def __init__(self, endpoint: str, retry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._retry_s = retry_s
        self._clock = clock
        self._rest_s = retry_s
        self._until = 0.0
        self._slow = 0
        self._said = False

    @property
    def resting(self) -> bool:
        """Whether the store is to be left alone."""
        return self._clock() < self._until

    def worked(self) -> None:
        """A call was answered."""
        self._slow, self._until, self._rest_s = 0, 0.0, self._retry_s
        if self._said:
            self._said = False
            log.warning("kvstore at %s answers again", self._endpoint)

    def failed(self, error: KVStoreError) -> None:
        """A call was not answered, or in a way that asking again will not mend. One slow call is forgiven."""
        if isinstance(error, DeadlineExceeded):
            self._slow += 1
            if self._slow < _SLOW_IN_A_ROW:
                return
        if not self.resting:
            self._until = self._clock() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST * self._retry_s)
        if not self._said:
            self._said = True
            log.warning("serving without kvstore at %s until it answers: %s", self._endpoint, error)


class StoreLink(LinkLoop):
    """One namespace of a store, opened when it is first needed. Methods are coroutines for the link's loop, run by `submit`."""

    def __init__(self, settings: Settings, *, name: str, fingerprint: str, spec: KVSpec, who: str) -> None:
        super().__init__(who, settings.lookup_timeout_s)
        self.settings = settings
        self.spec = spec
        self.name = name
        self.fingerprint = fingerprint
        self._breaker = Breaker(settings.endpoint, settings.retry_s)
        self._full_said = False
        self.namespace: Namespace | None = None
        self._opening = asyncio.Lock()
        self.client = self.made(
            lambda: AsyncClient(
                settings.endpoint, connections=settings.connections, timeout=settings.call_timeout_s, name=f"vllm {who}",
                shared_memory=settings.shared_memory,
            )
        )  # fmt: skip

    def close(self, last: Coroutine[Any, Any, object] | None = None, wait_s: float = _CLOSE_S) -> None:
        """Run `last` for `wait_s` at most, then close the connections and end the thread. Raises nothing."""
        if last is not None:
            job = self.submit(last)
            try:
                job.result(wait_s)
            except (Exception, asyncio.CancelledError):  # noqa: BLE001 - the engine is ending: there is nobody to tell
                job.cancel()
        self.end(self.client.close, _CLOSE_S)

    async def warm(self) -> None:
        """Open the namespace ahead of need; a store that can't be reached is met again when it is needed."""
        try:
            await self.call(self._nothing)
        except (KVStoreError, Unavailable):
            pass  # the breaker has said so

    async def _nothing(self, namespace: Namespace) -> None:
        await namespace.client.ping()

    async def _opened(self) -> Namespace:
        async with self._opening:
            if self.namespace is None:
                self.namespace = await self.client.namespace(
                    self.name, self.fingerprint, self.spec, recipes=self.settings.recipes, rebuild=self.settings.rebuild
                )
            return self.namespace

    @property
    def resting(self) -> bool:
        """Whether the store is left alone just now."""
        return self._breaker.resting

    async def call(self, work: Callable[[Namespace], Awaitable[T]], *, patient: bool = False) -> T:
        """Do something with the namespace. Raises Unavailable while the store is left alone, and what the SDK raises.

        That a `patient` call takes long says nothing about the store: it may be waiting for room.
        """
        if self._breaker.resting:
            raise Unavailable
        try:
            try:
                done = await work(await self._opened())
            except UnknownNamespace:  # somebody dropped it, or the daemon began anew
                self.namespace = None
                done = await work(await self._opened())
        except _ANSWERS:
            self._breaker.worked()
            raise
        except KVStoreError as error:
            if not (patient and isinstance(error, DeadlineExceeded)):
                self._breaker.failed(error)
            raise
        self._breaker.worked()
        return done

    def slow(self, seconds: float, what: str) -> None:
        """The caller gave up waiting. Only on the link's loop."""
        self._breaker.failed(DeadlineExceeded(f"{what} took more than {seconds:g} s"))

    def full(self, error: Exception | str) -> None:
        """Something could not be saved, for lack of room as a rule; said once."""
        if not self._full_said:
            self._full_said = True
            log.warning("kvstore at %s: pages are not saved just now: %s", self.settings.endpoint, error)
