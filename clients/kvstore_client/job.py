"""What a thread waits for that others do: it may be interrupted (Ctrl-C, a signal's handler that raises) anywhere in between.

A future of `concurrent.futures`, a condition or an event has a lock for both sides: an interrupt just as it is taken leaves it to nobody,
and the loop waits for it for ever. Here only who waits takes one, and the others let go of it.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LOOK_S = 0.5
"""So often who waits looks whether the loop still runs: one that is closed ends nothing, and tells nobody."""


class Bell:
    """Wakes the one thread that waits for what others change: change it, ring, and it looks again."""

    def __init__(self) -> None:
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def ring(self) -> None:
        """Wake who waits, or who does so next. Waits for nothing."""
        try:
            self._quiet.release()
        except RuntimeError:
            pass  # it has been rung already

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is rung, or was since it was last waited for; so long at most."""
        self._quiet.acquire(timeout=-1 if seconds is None else min(max(seconds, 0), threading.TIMEOUT_MAX))


class Job(Generic[T]):
    """A coroutine that runs in a loop, for one other thread that may wait for it. With the loop it is over, too: cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._work = work
        self._over = Bell()
        self._task: asyncio.Task[T] | None = None
        self._given_up = False
        try:
            loop.call_soon_threadsafe(self._start)
        except RuntimeError:
            if not loop.is_closed():
                raise
            work.close()

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._ended)
        if self._given_up:
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[T]") -> None:
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits any more
        self._over.ring()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return (self._task is not None and self._task.done()) or self._loop.is_closed()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, so long at most. Returns whether it has. Blocking."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self.done:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._over.wait(_LOOK_S if left is None else min(left, _LOOK_S))
        return True

    def result(self, seconds: float | None = None) -> T:
        """What came of it. Blocking. Raises TimeoutError after so many seconds, asyncio.CancelledError, and what the coroutine raised."""
        if not self.wait(seconds):
            raise TimeoutError
        if self._task is None:
            self._work.close()  # it was never begun
        if self._task is None or not self._task.done():
            raise asyncio.CancelledError
        return self._task.result()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._given_up = True
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:
            pass  # the loop is closed, and it has ended with that

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Gone(Job[T]):
    """One that is not to run any more."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        work.close()

    @property
    def done(self) -> bool:
        """It has ended."""
        return True

    def result(self, seconds: float | None = None) -> T:
        """Raises asyncio.CancelledError."""
        raise asyncio.CancelledError

    def cancel(self) -> None:
        """Nothing is to be done."""
