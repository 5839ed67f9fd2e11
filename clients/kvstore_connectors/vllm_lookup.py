"""Look-ups of the scheduler: what of a prompt can be loaded, asked without holding the engine up, and leased until it is loaded."""

import asyncio
import logging
import time
from dataclasses import dataclass

import numpy as np

from kvstore_client import KVStoreError, Match, Namespace
from kvstore_connectors.vllm_link import StoreLink, Unavailable

log = logging.getLogger("vllm.kvstore_connectors")

_MISS_S = 1.0
"""How long a miss is believed: a request that waits longer for room asks again."""
_SPARE = 0.25
"""A lease of which less than this fraction is left is not enough to begin a load with."""


@dataclass(slots=True)
class Found:
    """What a look-up brought: pages that can be loaded now, and their lease. `asked` says whether the store answered at all."""

    pages: int
    asked: bool
    match: Match | None = None


_NOTHING = Found(0, False)


class Lookup:
    """One request's look-up. Made and polled in the scheduler's thread; its coroutine runs on the link's loop."""

    def __init__(self, link: StoreLink, tokens: bytes, pages: int, extras: dict[int, bytes]) -> None:
        self.tokens = tokens
        self.pages = pages
        self.extras = extras
        self._link = link
        self._given_up = False
        self._match: Match | None = None
        self._started = time.monotonic()
        self._job = link.submit(self._look())

    async def _look(self) -> Found:
        s = self._link.settings

        async def match(namespace: Namespace) -> Match:
            ids = np.frombuffer(self.tokens, np.uint32)
            return await namespace.match(ids, extras=self.extras or None, lease_s=s.lease_s, timeout=s.lookup_timeout_s)

        try:
            found = await self._link.call(match)
        except (KVStoreError, Unavailable) as error:  # the link has said so: it is a miss
            log.debug("kvstore: a look-up brought nothing: %r", error)
            return _NOTHING
        except Exception:
            log.exception("kvstore: a look-up failed")
            return _NOTHING
        if self._given_up or not found.pages:
            self._link.release(found)
            return Found(0, True)
        self._match = found
        return Found(found.pages, True, found)

    def poll(self, wait_s: float) -> Found | None:
        """What was found; None while that is not known. After the look-up's time is over, nothing was."""
        try:
            if self._job.wait(wait_s):
                return self._job.result()
        except asyncio.CancelledError:
            return _NOTHING  # the link is closed
        spent = time.monotonic() - self._started
        if spent < self._link.settings.lookup_timeout_s:
            return None
        if not self._given_up:
            log.debug("kvstore: no answer to a look-up within %.3f s", spent)
            self._given_up = True  # should it come after all, its lease is released
            self._link.soon(self._link.slow, spent, "a look-up")
        return _NOTHING

    @property
    def stale(self) -> bool:
        """Whether it is to be asked anew: the lease is nearly over, or the miss was some time ago."""
        if self._given_up or not self._job.done:
            return self._given_up and time.monotonic() - self._started > self._link.settings.lookup_timeout_s + _MISS_S
        found = self.poll(0) or _NOTHING
        age = time.monotonic() - self._started
        if found.match is None:
            return age > _MISS_S
        return not found.match.valid or age > (1 - _SPARE) * self._link.settings.lease_s

    def release(self) -> None:
        """Give the lease up, also one that is still to come."""
        self._given_up = True
        self._link.soon(self._let_go)

    def _let_go(self) -> None:
        match, self._match = self._match, None
        if match is not None:
            self._link.release(match)
