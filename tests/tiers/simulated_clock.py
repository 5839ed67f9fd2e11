"""A clock that stands until it is told to go on, in place of the event loop's."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Timer:
    """A call that was asked for."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class SimulatedClock:
    """Timers are called in their order when `advance` passes them; tasks get their turn after each."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, Timer, Callable[..., Any], tuple[Any, ...]]] = []
        self._numbers = count()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Timer:
        timer = Timer()
        heapq.heappush(self._heap, (when, next(self._numbers), timer, callback, args))
        return timer

    @property
    def pending(self) -> int:
        """Timers that are not cancelled."""
        return sum(not entry[2].cancelled for entry in self._heap)

    async def settle(self) -> None:
        """Let all tasks go as far as they can without time passing."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        await self.settle()
        until = self._now + seconds
        while self._heap and self._heap[0][0] <= until:
            when, _, timer, callback, args = heapq.heappop(self._heap)
            if not timer.cancelled:
                self._now = max(self._now, when)
                callback(*args)
                await self.settle()
        self._now = until
        await self.settle()
