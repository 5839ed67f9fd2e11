"""Write-behind and group commit: makes pages durable, and deletes on disk what is gone.

One batch at a time: records of deleted pages go first, then blobs, then the records that name them, each durable before
the next. A page is only made durable with all its ancestors. A crash between the steps leaves at most blobs that no record
names; they are swept at the next start.
"""

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor

import lmdb

from kvstore.errors import Busy, KVStoreError, NoSpace
from kvstore.radix.journal import Journal, JournalBatch
from kvstore.store.quotas import SsdBudget
from kvstore.store.space import Space
from kvstore.store.ssd.backlog import Backlog, WriteRequest
from kvstore.store.ssd.batches import Batch, Batches
from kvstore.store.ssd.mending import Mending
from kvstore.store.ssd.state import SsdState
from kvstore.store.stats import Stats
from kvstore.store.trash import Trash
from kvstore.tiers.ssd import BlobBatch, BlobFile

_log = logging.getLogger("kvstore.writeback")

_BACKLOG_BATCHES = 4
_RECORD_BYTES = 512
_SLOW_S = 5.0
"""A write that takes longer means that the disk is failing."""
_PROBE_S = 1.0
_MAX_PROBE_BYTES = 8 << 20


class Writeback:
    """The only writer of both LMDB files. `run` is its task; `executor` must have one thread."""

    def __init__(
        self, blob_file: BlobFile, journal: Journal, executor: Executor, trash: Trash, stats: Stats,
        make_ssd_room: Callable[[int, str | None], int], view: Callable[[int], memoryview], batch_bytes: int, now: Callable[[], float],
        budget: Callable[[Callable[[int, str], int]], SsdBudget], wait_s: float, before_room: Callable[[], Awaitable[None]],
        is_full: Callable[[str], NoSpace],
    ) -> None:  # fmt: skip
        self._blob_file = blob_file
        self.journal = journal
        self._executor = executor
        self._trash = trash
        self._stats = stats
        self._batches = Batches(blob_file, trash, stats, make_ssd_room, view, now, budget, is_full)
        self._batch_bytes = batch_bytes
        self.now = now
        self._wait_s = wait_s
        self._before_room = before_room
        """To be awaited before `make_ssd_room` may be called."""
        self.state = SsdState()
        self._mending = Mending(self.rewrite_blob, view)
        self.backlog = Backlog(_BACKLOG_BATCHES * batch_bytes)
        self._refused = 0
        self._under_way: list[WriteRequest] = []
        self._barriers: list[asyncio.Future[bool]] = []
        self._barriers_under_way: list[asyncio.Future[bool]] = []
        self._stopped = False
        self._wake = asyncio.Event()
        self.lock = asyncio.Lock()

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting and no batch is under way."""
        return not (self.backlog or self._trash or self._mending or self.lock.locked())

    def poke(self) -> None:
        """There may be something to delete."""
        self._wake.set()

    def mend(self, space: Space, row: int) -> None:
        """The copy of a blob on SSD is bad, and DRAM has a good one: have it written anew, before anything else is."""
        self._mending.add(space, row)
        self._wake.set()

    def failed(self, error: Exception) -> KVStoreError:
        """Somebody else's write failed, made under `lock`: probe the disk from now on. Returns what the caller gets."""
        self._wake.set()
        return self.state.failed(error)

    async def disk_is_well(self) -> bool:
        """Whether the disk takes a write now. One that does not, and gave an error for a read, says nothing of what was to be read."""
        if self.state.ok:
            async with self.lock:
                if self.state.ok:
                    try:
                        await self._in_executor(self._write_probe)
                    except (lmdb.Error, OSError) as error:
                        self.failed(error)
        return self.state.ok

    def queue(self, space: Space, key: bytes, *, rewrite: bool = False) -> None:
        """Make a page and its ancestors durable in the background, if that is possible and not too much is waiting already."""
        nbytes = self._cost_of(space, key)
        if (waiting := self.backlog.of_page(space, key)) is not None:
            waiting.rewrite |= rewrite
        elif self.state.ok and not self._stopped and self.backlog.has_room(nbytes):
            self.backlog.add(WriteRequest(space, key, rewrite, nbytes))
            self._wake.set()

    def promised(self, space: Space) -> list[bytes]:
        """The keys of a namespace's pages that wait to be made durable, with their ancestors."""
        return [request.key for request in (*self._under_way, *self.backlog.waiting()) if request.space is space]

    async def make_durable(self, space: Space, keys: Iterable[bytes], *, rewrite: bool = False, wait_s: float | None = None) -> int:
        """Wait until pages (and their ancestors) are durable. Returns how many are.

        `rewrite` writes the records of these pages even if they have one, because what it says has changed. Raises NoSpace if the
        SSD tier can't take them (everything on it is leased or retained, or the disk is full), DiskFailing if it refuses writes,
        Busy if it takes longer than `wait_s`: then the pages may still become durable. The error's `done_pages` are those at the front
        that are.
        """
        wait_s = self._wait_s if wait_s is None else wait_s
        deadline = time.monotonic() + wait_s
        waiting: list[asyncio.Future[bool]] = []
        try:
            for key in keys:
                request = await self._request(space, key, rewrite=rewrite, deadline=deadline)
                waiting.append(request.join())
            if waiting:
                _, late = await asyncio.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if late:
                    raise Busy(f"{len(late)} pages are not durable after {wait_s:g} s: the SSD is slow", retry_after_ms=1000)
            return sum(done.result() for done in waiting)
        except KVStoreError as error:
            raise error.after(_done_at_the_front(waiting)) from error
        finally:
            for done in waiting:
                if not done.cancel():
                    done.exception()  # seen

    async def _request(self, space: Space, key: bytes, *, rewrite: bool, deadline: float) -> WriteRequest:
        """Queue a page, or find that it waits already. One that is being written is queued anew: its record may be encoded."""
        if (waiting := self.backlog.of_page(space, key)) is None:
            nbytes = self._cost_of(space, key)
            await self.backlog.wait_for_room(nbytes, deadline - time.monotonic())
            waiting = self.backlog.of_page(space, key)  # others may have asked for it meanwhile
        if self._stopped:
            raise KVStoreError("write-behind has stopped; nothing can be made durable any more")
        if not self.state.ok:
            raise self.state.error()
        if waiting is None:
            waiting = WriteRequest(space, key, rewrite, nbytes)
            self.backlog.add(waiting)
            self._wake.set()
        waiting.rewrite |= rewrite
        return waiting

    def _cost_of(self, space: Space, key: bytes) -> int:
        """About the bytes that making a page durable writes: those of all pages of its path that are not."""
        slot = space.tree.pages.find_key(key)
        if slot < 0:
            return _RECORD_BYTES
        slots = space.tree.path_slots(space.tree.path_to(slot))
        return _RECORD_BYTES + int(space.unwritten(slots).sum()) * (space.spec.page_bytes + _RECORD_BYTES)

    async def emptied(self) -> None:
        """Wait until what is in the trash now is deleted on disk. Raises NoSpace or DiskFailing if the disk refuses."""
        if not self.state.ok:
            raise self.state.error()
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._barriers.append(waiting)
        self._wake.set()
        await waiting

    async def run(self) -> None:
        """Commit batches until cancelled. However it ends, nobody is left waiting."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if self.state.ok else _PROBE_S):
                        await self._wake.wait()
                self._wake.clear()
                if not self.state.ok:
                    await self._probe()
                await self.drain()
        finally:
            self._stopped = True
            self._fail_all(KVStoreError("write-behind has stopped; the page is only in DRAM"))

    def _fail_all(self, error: KVStoreError) -> None:
        for request in (*self._under_way, *self.backlog.take(1 << 62)):
            request.fail(error)
        self._end_barriers([*self._barriers_under_way, *self._barriers], error)
        self._barriers = []

    @staticmethod
    def _end_barriers(barriers: list[asyncio.Future[bool]], error: KVStoreError | None) -> None:
        for barrier in barriers:
            if not barrier.done():
                barrier.set_exception(error) if error is not None else barrier.set_result(True)

    async def drain(self) -> None:
        """Commit until nothing is waiting, or the disk is not well."""
        while (self.backlog or self._trash or self._barriers or self._mending) and self.state.ok:
            if (error := await self._mending.mend()) is not None:  # what relies on that copy must not be called durable
                self._stats.ssd_errors += 1
                self._fail_all(self.state.failed(error))
                return
            async with self.lock:
                if self.backlog:
                    await self._before_room()
                await self._commit_once()

    async def _probe(self) -> None:
        """See whether the disk takes as much again as it refused."""
        try:
            async with self.lock:
                await self._in_executor(self._write_probe)
        except (lmdb.Error, OSError) as error:
            self.state.failed(error)
            await asyncio.sleep(_PROBE_S)  # not to be hammered
        else:
            self.state.recovered()

    def _write_probe(self) -> None:
        self._blob_file.probe(min(self._refused, _MAX_PROBE_BYTES))
        self.journal.probe()

    def _tell_full_from_failing(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except (lmdb.Error, OSError) as error:
            if self._blob_file.no_room():
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({error})") from error
            raise

    async def _commit_once(self) -> None:
        self._under_way = requests = self.backlog.take(self._batch_bytes)
        self._barriers_under_way, self._barriers = self._barriers, []
        batch = self._batches.build(requests)
        failure: KVStoreError | None = None
        try:
            if batch.blobs or batch.records or batch.dropped:
                await self._in_executor(self._write, batch)
                self.state.recovered()
        except (lmdb.Error, OSError) as error:
            self._stats.ssd_errors += 1
            self._refused = sum(len(stored) for _, _, stored in batch.blobs.put)
            failure = self.state.failed(error)
            _log.debug("a group commit failed, its %d pages stay in DRAM: %s", len(batch.pages), error)
            self._batches.put_back(batch)
        self._batches.finish(batch, durable=failure is None)
        self._end_barriers(self._barriers_under_way, failure)
        if failure is not None:
            self._fail_all(failure)
        for request in requests:
            self._answer(request)

    async def rewrite_blob(self, space: Space, row: int, stored: memoryview) -> None:
        """Write a blob's copy on SSD anew, durably; the caller holds its bytes. Raises lmdb.Error or OSError."""
        async with self.lock:
            if not space.dropped and space.blobs.on_ssd[row]:
                put = [(space.number, space.blobs.id_of(row), stored)]
                await self._in_executor(self._blob_file.commit, BlobBatch(put=put))

    async def _in_executor(self, call: Callable[..., None], *arguments: object) -> None:
        """Run a write to its end: it can't be called back, and memory must learn how it ended. If it takes long, say so meanwhile."""
        write = asyncio.get_running_loop().run_in_executor(self._executor, self._tell_full_from_failing, call, *arguments)
        _, late = await asyncio.wait([write], timeout=_SLOW_S)
        if late:
            self._fail_all(self.state.failed(f"a write has not ended after {_SLOW_S:g} s"))
            await asyncio.wait([write])
        write.result()

    def _write(self, batch: Batch) -> None:
        if batch.records.delete_pages:
            self.journal.commit(JournalBatch(delete_pages=batch.records.delete_pages))
        for number in batch.dropped:
            self.journal.drop_namespace(number)
        if batch.blobs:
            self._blob_file.commit(batch.blobs)
        for number in batch.dropped:
            self._blob_file.drop_namespace(number)
        if batch.records.put_pages:
            self.journal.commit(JournalBatch(put_pages=batch.records.put_pages))

    @staticmethod
    def _answer(request: WriteRequest) -> None:
        slot = request.space.tree.pages.find_key(request.key)
        request.answer(slot >= 0 and request.space.is_durable(slot))

    async def stop(self, task: asyncio.Task[None], wait_s: float) -> bool:
        """End the task after the batch under way. False if a write does not end within `wait_s`: its thread is then left behind."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self.lock:
                pass
        stuck = self.lock.locked()
        task.cancel()
        await asyncio.wait([task])
        return not stuck


def _done_at_the_front(waiting: list[asyncio.Future[bool]]) -> int:
    for number, done in enumerate(waiting):
        if not done.done() or done.cancelled() or done.exception() is not None or not done.result():
            return number
    return len(waiting)
