"""Requests that wait for pages to be computed again: until their jobs end, for a bounded time, and within a bound of memory."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.errors import Busy
from kvstore.store.rebuilding.jobs import Job, RebuildQueue

MAX_WAITING_BYTES = 256 << 20
"""Of tokens of requests that wait."""


class Waits:
    """Who waits for which jobs of a queue; it is told of each job that has `ended`."""

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}
        self._bytes = 0

    @contextmanager
    def keeping(self, tokens: bytes) -> Iterator[None]:
        """Somebody waits, and keeps these tokens meanwhile. Raises Busy if that is too much memory."""
        if self._bytes + len(tokens) > MAX_WAITING_BYTES:
            raise Busy("requests that wait for pages to be computed again hold too much memory", retry_after_ms=1000)
        self._bytes += len(tokens)
        try:
            yield
        finally:
            self._bytes -= len(tokens)

    async def until_ended(self, queue: RebuildQueue, jobs: Sequence[Job], deadline: float) -> bool:
        """Wait for jobs to end. False if the time is over before. Raises the error of one that failed."""
        queue.join(jobs)
        try:
            for job in jobs:
                while not job.ended:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    event = self._events.setdefault(job.id, asyncio.Event())
                    try:
                        async with asyncio.timeout(left):
                            await event.wait()
                    except TimeoutError:
                        return job.ended
                if job.error is not None:
                    raise job.error
            return True
        finally:
            queue.leave(jobs, time.monotonic())

    def ended(self, job: Job) -> None:
        """A job is done, or has failed."""
        if (event := self._events.pop(job.id, None)) is not None:
            event.set()
