"""A loop of its own, in a thread: where the store's client lives, for engines that call from threads of theirs."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstore_client import KVStoreError
from kvstore_client.match import Match

T = TypeVar("T")

log = logging.getLogger(__name__)

_JOIN_S = 5.0


class LinkLoop:
    """What is submitted is owned: it ends by itself, or when this is closed. `release_s`: how long the end of a lease is waited for."""

    def __init__(self, name: str, release_s: float) -> None:
        self._closed = False
        self._release_s = release_s
        self._running: set[asyncio.Task[Any]] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=f"kvstore-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def made(self, what: Callable[[], T]) -> T:
        """What a function makes that is to be called on the loop. If it raises, the loop is closed."""

        async def make() -> T:
            return what()

        try:
            return asyncio.run_coroutine_threadsafe(make(), self.loop).result()
        except BaseException:
            self._stop()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the loop. The future of one that is not to run any more is cancelled."""
        if self._closed:
            work.close()
            gone: Future[T] = Future()
            gone.cancel()
            return gone
        return asyncio.run_coroutine_threadsafe(self._owned(work), self.loop)

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
        if self._closed:
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._end(last), self.loop).result(timeout=seconds)
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
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_JOIN_S)
        if not self._thread.is_alive():
            self.loop.close()
