"""The threads that the recipes' file is written and read in: one writer at a time, and no write that goes on unseen."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import lmdb

from kvstore.errors import DiskFailing
from kvstore.lmdb_files import STRUCTURAL
from kvstore.threads import started_pool

T = TypeVar("T")


class RecipeThreads:
    """See the module's text. `damaged` is called when a read finds that the file's structure is."""

    def __init__(self, readers: Executor, damaged: Callable[[], None]) -> None:
        self._readers = readers
        self._damaged = damaged
        self._writer = started_pool(1, "kvstore-recipes")
        self._lock = asyncio.Lock()
        self._left: asyncio.Future[Any] | None = None
        """A write whose caller was cancelled, and which may go on."""

    @property
    def busy(self) -> bool:
        """Whether somebody writes."""
        return self._lock.locked()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Nobody else writes, nor does a write go on whose caller was cancelled."""
        async with self._lock:
            if self._left is not None:
                await asyncio.wait([self._left])
                self._left = None
            yield

    async def write(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a write to its end. If the caller is cancelled it goes on, and who is `alone` next waits for it.

        The caller does not: a write that never ends would keep the daemon from stopping.
        """
        work = asyncio.get_running_loop().run_in_executor(self._writer, call, *arguments)
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._left = work
            raise
        return work.result()

    async def read(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a read in the readers' threads. Raises DiskFailing; damage is mended by the task then."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, call, *arguments)
        except (lmdb.Error, OSError) as error:
            if isinstance(error, STRUCTURAL):
                self._damaged()
            raise DiskFailing(f"the recipes can't be read: {error}", retry_after_ms=1000) from error

    def leave(self) -> None:
        """Take no more writes, and leave behind one that does not end."""
        self._writer.shutdown(wait=False)

    async def end(self) -> None:
        """Take no more writes, and wait for the last."""
        await asyncio.to_thread(self._writer.shutdown)
