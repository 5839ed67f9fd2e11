"""An event loop in a thread of its own, for those who block."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from kvstore.api.wire import BadRequest, ConnectionLost
from kvstore_client.direct import apart
from kvstore_client.job import Bell, Job
from kvstore_client.turn import Taken, Turn

T = TypeVar("T")

_LOOP_DESCRIPTORS = 3
_END_S = 5.0
"""How long a close waits for what others had under way: it was cancelled, and ends at once unless a thread holds it up."""


class LoopThread:
    """An event loop that runs in a thread until `stop`."""

    def __init__(self) -> None:
        try:
            _check_descriptors()
            self._loop = asyncio.new_event_loop()
        except OSError as error:
            raise ConnectionLost(f"there is no event loop to be had for a client: {error.strerror}; see `ulimit -n`") from error
        self._entering = threading.RLock()  # a signal's handler may come in between, and call, too
        self._stopping = Turn()
        self._ending = False
        self._over = False
        self._ended = Bell()
        self._thread = threading.Thread(target=self._serve, name="kvstore-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()
        self._over = True
        self._ended.ring()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; an interrupt of the caller cancels it. Raises BadRequest after `stop`."""
        with self._entering:  # nothing is begun that nobody would end
            if self._ending:
                work.close()
                raise BadRequest("this client was closed")
            future = self._begin(work)
        try:
            return future.result()
        except asyncio.CancelledError:
            raise BadRequest("this client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> Job[T]:
        return apart(lambda: Job(self._loop, work))

    @property
    def over(self) -> bool:
        """Whether the loop is closed: there is nothing left to be stopped."""
        return self._over

    @property
    def stopped(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._ending

    def stop(self) -> None:
        """End the loop and its thread. Who still waits for something there is told that the client was closed. Harmless if done before."""
        with suppress(Taken):  # another thread does it, and takes its time
            self._stopping.alone(self._stop_now, 2 * _END_S)

    def _stop_now(self) -> None:
        with self._entering:
            self._ending = True
        if self._over:
            return
        try:
            with suppress(asyncio.CancelledError):  # the loop is closed: this was interrupted before
                self._begin(_end_all()).result()
        finally:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._loop.stop)
        while not self._over:  # a thread's own `join` takes it for dead ever after if it is interrupted there (Python 3.11)
            self._ended.wait()

    def leave(self, last: Coroutine[Any, Any, None]) -> None:
        """As `stop`, after a last coroutine, for whom nobody waits."""
        self._ending = True
        self._begin(self._finish(last))

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            await asyncio.wait_for(last, _END_S)
            await _end_all()
        finally:
            self._loop.stop()


def _check_descriptors() -> None:
    """Raise OSError if there are none for an event loop: one that is half made ends in a traceback of asyncio's."""
    with ExitStack() as opened:
        for _ in range(_LOOP_DESCRIPTORS):
            opened.enter_context(Path(os.devnull).open("rb", buffering=0))


async def _end_all() -> None:
    """Cancel all other tasks of this loop, and wait for their ends, for a while."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    ended = asyncio.gather(*others, return_exceptions=True)
    await asyncio.wait([ended], timeout=_END_S)
