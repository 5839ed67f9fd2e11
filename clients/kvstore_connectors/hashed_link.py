"""The store as an engine needs it: it may be down, slow or full, and then it is a miss, said once.

A loop in a thread of its own holds the asynchronous client. Every wait is bounded. When the store does not answer, nobody waits for it
again until a probe in the background has heard from it: the engine goes on as if there were no store.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore_client import (
    DEFAULT_ENDPOINT,
    AsyncClient,
    BadRequest,
    Busy,
    ConnectionLost,
    DeadlineExceeded,
    KVSpec,
    KVStoreError,
    MissingParent,
    NoSpace,
    NotFound,
    UnknownNamespace,
)
from kvstore_client.namespace import Namespace
from kvstore_connectors.link_loop import LinkLoop

T = TypeVar("T")

_FIRST_PROBE_S = 1.0
_MAX_PROBE_S = 30.0
_CLOSE_S = 10.0
_SAY_AGAIN_S = 600.0
"""How long nothing is said again of the same trouble."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How the store is reached. Times in seconds."""

    endpoint: str = DEFAULT_ENDPOINT
    token: str | None = None
    connections: int = 2
    lookup_timeout_s: float = 2.0
    """For what an engine waits for before it computes."""
    transfer_timeout_s: float = 20.0
    """For pages on their way."""
    lease_s: float = 60.0
    """How long pages that were found are kept from going."""
    durable: bool = False
    retention_s: int = 86_400
    shared_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("lookup_timeout_s", "transfer_timeout_s", "lease_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 86_400:
                raise BadRequest(f"{name} is {value!r}: give seconds, more than 0 and at most a day")
        if not isinstance(self.endpoint, str) or not isinstance(self.token, str | None):
            raise BadRequest("endpoint and token are strings")
        if type(self.retention_s) is not int or self.retention_s < 0:
            raise BadRequest(f"retention_s is {self.retention_s!r}: give whole seconds")
        for name in ("durable", "shared_memory"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} is {getattr(self, name)!r}: give true or false")

    @classmethod
    def take(cls, given: dict[str, Any]) -> "LinkOptions":
        """Those of some settings that are about the link, taken out of them. Raises BadRequest."""
        return cls(**{name: given.pop(name) for name in cls.__dataclass_fields__ if name in given})


class StoreLink(LinkLoop):
    """One store, shared by the threads of an engine. Make it, use it, `close` it. Nothing here raises what the store says."""

    def __init__(self, options: LinkOptions, name: str, log: logging.Logger) -> None:
        super().__init__(name, options.lookup_timeout_s)
        self.options = options
        self._log = log
        self._said: dict[str, float] = {}
        self._namespaces: dict[str, asyncio.Task[Namespace]] = {}
        self._away = False
        self._probe: asyncio.Task[None] | None = None
        self._probe_s = _FIRST_PROBE_S
        self._back_since = 0.0
        self.client = self.made(
            lambda: AsyncClient(
                options.endpoint, connections=options.connections, timeout=options.transfer_timeout_s, name=name, token=options.token,
                shared_memory=options.shared_memory,
            )
        )  # fmt: skip

    def greet(self) -> None:
        """Say whether the store is there, before anything is wanted of it. Nobody waits for that, and nothing else comes of it."""
        self.submit(self._greet())

    async def _greet(self) -> None:
        try:
            await self.client.ping(self.options.lookup_timeout_s)
        except (ConnectionLost, DeadlineExceeded) as error:
            self._say_away(str(error))
        except (KVStoreError, OSError) as error:
            self.refused(error)
        else:
            self._log.info("kvstore at %s answers", self.options.endpoint)

    @property
    def away(self) -> bool:
        """Whether the store did not answer when it was last asked."""
        return self._away

    def wait(self, work: Coroutine[Any, Any, T], otherwise: T) -> T:
        """Run a coroutine that bounds itself, and wait for it; `otherwise` if `close` comes first. An interrupt cancels it."""
        job = self.submit(work)
        try:
            return job.result()
        except asyncio.CancelledError:
            return otherwise
        except BaseException:
            job.cancel()
            raise

    async def attempt(self, work: Callable[[], Awaitable[T]], otherwise: T, timeout: float) -> T:
        """What `work` brings; `otherwise` if the store is away, does not answer in time or says no. On the loop."""
        if self._away:
            return otherwise
        try:
            async with asyncio.timeout(timeout):
                found = await work()
        except (TimeoutError, DeadlineExceeded, ConnectionLost) as error:
            self._lost(str(error) or f"no answer within {timeout:g} s")
        except (NotFound, MissingParent):
            pass  # a miss
        except UnknownNamespace:
            self._namespaces.clear()  # another store behind the same endpoint: it gets its namespaces when it is asked next
        except (KVStoreError, OSError) as error:
            self.refused(error)
        else:
            return found
        return otherwise

    def refused(self, error: Exception) -> None:
        """The store says no, if only to some pages: that is said once in a while."""
        if isinstance(error, NoSpace | Busy):
            self.say("full", f"kvstore has no room, and pages are not kept: {error}")
        else:
            self.say(type(error).__name__, f"kvstore refuses, and the engine goes on without it: {error}")

    def say(self, what: str, words: str) -> None:
        """Say something once in a while."""
        now = time.monotonic()
        if now - self._said.get(what, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said[what] = now
            self._log.warning("%s", words)

    def _lost(self, reason: str) -> None:
        self._away = True
        if time.monotonic() - self._back_since > 2 * self._probe_s:
            self._probe_s = _FIRST_PROBE_S
        self._say_away(reason)
        if self._probe is None or self._probe.done():
            self._probe = self.keep(self._watch())

    def _say_away(self, reason: str) -> None:
        self.say("away", f"kvstore at {self.options.endpoint} is away, and the engine goes on without it: {reason}")

    async def _watch(self) -> None:
        """Ask until the store answers as fast as it should; less and less often."""
        while self._away:
            await asyncio.sleep(self._probe_s)
            self._probe_s = min(2 * self._probe_s, _MAX_PROBE_S)
            try:
                async with asyncio.timeout(self.options.lookup_timeout_s):
                    await self.client.ping(self.options.lookup_timeout_s)
            except (KVStoreError, OSError, TimeoutError):
                continue
            self._away, self._back_since = False, time.monotonic()
            self.say("back", f"kvstore at {self.options.endpoint} answers again")

    async def namespace(self, name: str, fingerprint: str, spec: KVSpec) -> Namespace:
        """A namespace, made if it is not there; asked for once. On the loop. Raises what the SDK raises."""
        task = self._namespaces.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            opening = self.client.namespace(name, fingerprint, spec, retention_s=self.options.retention_s)
            task = self._namespaces[name] = self.keep(opening)
        return await asyncio.shield(task)

    async def opened(self) -> list[Namespace]:
        """The namespaces that were asked for. On the loop."""
        tasks = list(self._namespaces.values())
        return [found for found in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(found, Namespace)]

    def forget(self) -> None:
        """Ask for namespaces anew when they are used next."""
        self.soon(self._namespaces.clear)

    def close(self) -> None:
        """End what is under way, the connections and the thread. Harmless if it was done before."""
        self.end(self.client.close, _CLOSE_S)
