"""What waits to be written: a queue that is bounded in bytes and requests, whatever clients do, and its smoothed size."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.errors import Busy, KVStoreError
from kvstore.store.space import Space

_SMOOTH_S = 10.0
MAX_REQUESTS = 16_384


@dataclass(slots=True)
class WriteRequest:
    """A page to be made durable with its ancestors, for any number of those who wait. `nbytes` is about what that writes."""

    space: Space
    key: bytes
    rewrite: bool
    nbytes: int
    waiting: list[asyncio.Future[bool]] = field(default_factory=list)

    def join(self) -> asyncio.Future[bool]:
        """Wait for it: for whether the page is durable. Each has a future of its own, and may cancel it."""
        self.waiting = [one for one in self.waiting if not one.done()]  # who gave up: there is no end to those while the disk hangs
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]

    def answer(self, durable: bool) -> None:
        """Tell those who still wait and have not been told."""
        for one in self.waiting:
            if not one.done():
                one.set_result(durable)

    def fail(self, error: KVStoreError) -> None:
        """As `answer`, that it can't be."""
        for one in self.waiting:
            if not one.done():
                one.set_exception(error)


class Backlog:
    """Who finds no room waits, for a bounded time."""

    def __init__(self, max_bytes: int, max_requests: int = MAX_REQUESTS) -> None:
        self.max_bytes = max_bytes
        self.max_requests = max_requests
        self.nbytes = 0
        self._queue: deque[WriteRequest] = deque()
        self._by_page: dict[tuple[int, bytes], WriteRequest] = {}
        self._room = asyncio.Event()
        self._smoothed, self._smoothed_at = 0.0, time.monotonic()

    def __len__(self) -> int:
        return len(self._queue)

    def waiting(self) -> Iterator[WriteRequest]:
        """All requests, the oldest first."""
        return iter(self._queue)

    @property
    def smoothed_bytes(self) -> float:
        """The bytes waiting, averaged over about ten seconds: what slow controls should look at, never one event."""
        now = time.monotonic()
        self._smoothed += (self.nbytes - self._smoothed) * (1 - math.exp((self._smoothed_at - now) / _SMOOTH_S))
        self._smoothed_at = now
        return self._smoothed

    def has_room(self, nbytes: int) -> bool:
        """Whether a request may join. One that is larger than the bound may, alone."""
        return not self._queue or (self.nbytes + nbytes <= self.max_bytes and len(self._queue) < self.max_requests)

    async def wait_for_room(self, nbytes: int, wait_s: float) -> None:
        """Return once `add` is allowed; raises Busy if that takes longer than `wait_s`."""
        deadline = time.monotonic() + wait_s
        while not self.has_room(nbytes):
            self._room.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._room.wait()
            except TimeoutError:
                raise Busy(
                    f"{self.nbytes} bytes of {len(self._queue)} pages wait to be written to SSD already",
                    retry_after_ms=max(100, int(1000 * wait_s)),
                ) from None

    def of_page(self, space: Space, key: bytes) -> WriteRequest | None:
        """The request of a page that waits already: who asks for it again joins that."""
        return self._by_page.get((space.number, key))

    def add(self, request: WriteRequest) -> None:
        """Queue a request of a page that has none; there must be room."""
        _ = self.smoothed_bytes
        self._queue.append(request)
        self._by_page[request.space.number, request.key] = request
        self.nbytes += request.nbytes

    def take(self, nbytes: int) -> list[WriteRequest]:
        """The oldest requests of about so many bytes in all, at least one."""
        _ = self.smoothed_bytes
        taken: list[WriteRequest] = []
        while self._queue and nbytes > 0:
            taken.append(self._queue.popleft())
            del self._by_page[taken[-1].space.number, taken[-1].key]
            nbytes -= taken[-1].nbytes
            self.nbytes -= taken[-1].nbytes
        self._room.set()
        return taken
