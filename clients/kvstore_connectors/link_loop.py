"""A loop of its own, in a thread: where the store's client lives, for engines that call from threads of theirs."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kvstore_client import KVStoreError
from kvstore_client.job import Bell, Gone, Job
from kvstore_client.match import Match
from kvstore_client.turn import Taken, Turn

T = TypeVar("T")

log = logging.getLogger(__name__)

_JOIN_S = 5.0


class LinkLoop:
    """What is submitted is owned: it ends by itself, or when this is closed. `release_s`: how long the end of a lease is waited for.

    A fork of the process that made it has no such thread: to it this is closed.
    """

    def __init__(self, name: str, release_s: float) -> None:
        self._entering = threading.RLock()  # a signal's handler may come in between, and end this
        self._closing = Turn()
        self._closed = False
        self._process = os.getpid()
        self._release_s = release_s
        self._running: set[asyncio.Task[Any]] = set()
        self._over = False
        self._ended = Bell()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name=f"kvstore-{name}", daemon=True).start()

    def _serve(self) -> None:
        self.loop.run_forever()
        self.loop.close()
        self._over = True
        self._ended.ring()

    @property
    def alive(self) -> bool:
        """Whether the loop runs. A thread's own `is_alive` takes it for dead ever after if it is interrupted there (Python 3.11)."""
        return not self._over and os.getpid() == self._process

    def made(self, what: Callable[[], T]) -> T:
        """What a function makes that is to be called on the loop. If it raises, the loop is closed."""

        async def make() -> T:
            return what()

        try:
            return Job(self.loop, make()).result()
        except BaseException:
            self._stop()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Job[T]:
        """Run a coroutine on the loop. One that is not to run any more is cancelled."""
        if not self.alive:
            return Gone(work)
        with self._entering:  # nothing is begun that nobody would end
            return Gone(work) if self._closed else Job(self.loop, self._owned(work))

    async def _owned(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        finally:
            self._running.discard(task)

    def keep(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine without anybody waiting for it. Only on the loop."""
        task = self.loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def soon(self, what: Callable[..., object], *arguments: object) -> None:
        """Call a function on the loop; nothing if that is closed."""
        if not self.alive:
            return
        try:
            self.loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:
            pass  # it is closed: nobody will miss it

    def release(self, match: Match) -> None:
        """End a lease without waiting for it. Only on the loop."""
        self.keep(self._release(match))

    async def _release(self, match: Match) -> None:
        try:
            if match.valid:
                async with asyncio.timeout(self._release_s):
                    await match.release()
        except (KVStoreError, OSError, TimeoutError):
            pass  # it ends by itself

    def end(self, last: Callable[[], Awaitable[None]], seconds: float) -> None:
        """End what is under way, then run `last`, for so many seconds at most, and stop. Raises nothing; harmless if done before."""
        if not self.alive:
            return
        with suppress(Taken):  # another thread does it, and takes its time
            self._closing.alone(lambda: self._end_now(last, seconds), seconds + _JOIN_S)

    def _end_now(self, last: Callable[[], Awaitable[None]], seconds: float) -> None:
        with self._entering:
            self._closed = True
        try:
            if self.alive:
                Job(self.loop, self._end(last)).result(seconds)
        except asyncio.CancelledError:
            pass  # the loop is closed: this was interrupted before
        except TimeoutError:
            log.warning("kvstore: the connections did not close within %g s", seconds)
        except Exception:
            log.exception("kvstore: the connections were not closed")
        finally:
            self._stop()

    async def _end(self, last: Callable[[], Awaitable[None]]) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last()

    def _stop(self) -> None:
        with suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        if self.alive:
            self._ended.wait(_JOIN_S)
