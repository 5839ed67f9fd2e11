"""Write-behind and group commit: makes pages durable, and deletes on disk what is gone.

One batch at a time: records of deleted pages go first, then blobs, then the records that name them, each durable before
the next. A page is only made durable with all its ancestors. A crash between the steps leaves at most blobs that no record
names; they are swept at the next start.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import lmdb

from kvstore.errors import KVStoreError, NoSpace
from kvstore.radix.journal import Journal, JournalBatch, encode_page
from kvstore.radix.pages import DURABLE
from kvstore.store.quotas import SsdBudget
from kvstore.store.space import Space, Trash
from kvstore.store.stats import Stats
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.ssd import BlobBatch, BlobFile

_log = logging.getLogger("kvstore.writeback")


@dataclass(slots=True)
class _Request:
    space: Space
    key: bytes
    rewrite: bool
    done: asyncio.Future[bool] | None


@dataclass(slots=True)
class _Batch:
    """One group commit: what to write, and what to do in memory once it is durable."""

    blobs: BlobBatch = field(default_factory=BlobBatch)
    records: JournalBatch = field(default_factory=JournalBatch)
    pages: list[tuple[Space, bytes, bytes, list[int]]] = field(default_factory=list)
    """(space, page key, version, the blob rows that its record names) to be marked durable."""
    outdated: list[tuple[Space, bytes, list[int]]] = field(default_factory=list)
    """Records that named blobs which their pages no longer have: (space, page key, blob rows)."""
    rows: list[tuple[Space, int]] = field(default_factory=list)
    """(space, blob row) being written."""
    pinned: list[tuple[Space, int]] = field(default_factory=list)
    """Every row of every page of the batch: none may lose its SSD copy while the record that names it is written."""


class Writeback:
    """The only writer of both LMDB files. `run` is its task; `executor` must have one thread."""

    def __init__(
        self, blob_file: BlobFile, journal: Journal, executor: Executor, trash: Trash, stats: Stats,
        make_ssd_room: Callable[[int, str | None], int], view: Callable[[int], memoryview], batch_bytes: int, now: Callable[[], float],
        budget: Callable[[Callable[[int, str], int]], SsdBudget],
    ) -> None:  # fmt: skip
        self._blob_file = blob_file
        self.journal = journal
        self._executor = executor
        self._trash = trash
        self._stats = stats
        self._make_ssd_room = make_ssd_room
        self._view = view
        self._batch_bytes = batch_bytes
        self.now = now
        self._budget = budget
        self._queue: deque[_Request] = deque()
        self._under_way: list[_Request] = []
        self._barriers: list[asyncio.Future[bool]] = []
        self._stopped = False
        self._wake = asyncio.Event()
        self.lock = asyncio.Lock()

    @property
    def backlog(self) -> int:
        """Pages waiting to be written."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting and no batch is under way."""
        return not (self._queue or self._trash or self.lock.locked())

    def poke(self) -> None:
        """There may be something to delete."""
        self._wake.set()

    def queue(self, space: Space, key: bytes, *, rewrite: bool = False) -> None:
        """Make a page and its ancestors durable in the background, if that is possible."""
        self._queue.append(_Request(space, key, rewrite, None))
        self._wake.set()

    async def make_durable(self, space: Space, keys: Iterable[bytes], *, rewrite: bool = False) -> int:
        """Wait until pages (and their ancestors) are durable. Returns how many are.

        `rewrite` writes the records of these pages even if they have one, because what it says has changed.
        Raises NoSpace if the SSD tier can't take them: everything on it is leased or retained.
        """
        if self._stopped:
            raise KVStoreError("write-behind has stopped; nothing can be made durable any more")
        loop = asyncio.get_running_loop()
        futures = []
        for key in keys:
            future: asyncio.Future[bool] = loop.create_future()
            futures.append(future)
            self._queue.append(_Request(space, key, rewrite, future))
        self._wake.set()
        results = await asyncio.gather(*futures, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return sum(result is True for result in results)

    async def emptied(self) -> None:
        """Wait until what is in the trash now is deleted on disk. Raises NoSpace if the disk refuses."""
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._barriers.append(waiting)
        self._wake.set()
        await waiting

    async def run(self) -> None:
        """Commit batches until cancelled. However it ends, nobody is left waiting."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self.drain()
        finally:
            self._stopped = True
            for request in (*self._under_way, *self._queue):
                if request.done is not None and not request.done.done():
                    request.done.set_exception(KVStoreError("write-behind has stopped; the page is only in DRAM"))
            for barrier in self._barriers:
                if not barrier.done():
                    barrier.set_exception(KVStoreError("write-behind has stopped"))

    async def drain(self) -> None:
        """Commit until nothing is waiting."""
        while self._queue or self._trash or self._barriers:
            async with self.lock:
                await self._commit_once()

    async def _commit_once(self) -> None:
        self._under_way = requests = self._take()
        barriers, self._barriers = self._barriers, []
        batch = self._build(requests)
        failure: KVStoreError | None = None
        try:
            if batch.blobs or batch.records:
                # Shielded: a commit under way can't be called back, and memory must learn how it ended.
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, self._write, batch))
        except (lmdb.Error, OSError) as error:
            self._stats.ssd_errors += 1
            _log.error("a group commit failed, its %d pages stay in DRAM: %s", len(batch.pages), error)
            failure = NoSpace(f"the SSD tier refused a write: {error}")
            self._trash.records += batch.records.delete_pages
            self._trash.blobs += batch.blobs.delete
            self._trash.blobs += [(number, blob, len(stored)) for number, blob, stored in batch.blobs.put]
            self._trash.outdated += batch.outdated
            batch.outdated = []
            await asyncio.sleep(0.2)  # a failing disk is not to be hammered
        self._finish(batch, failure)
        for barrier in barriers:
            if not barrier.done():
                barrier.set_exception(failure) if failure is not None else barrier.set_result(True)
        for request in requests:
            if request.done is not None and not request.done.done():
                self._answer(request, request.done, failure)

    def _write(self, batch: _Batch) -> None:
        if batch.records.delete_pages:
            self.journal.commit(JournalBatch(delete_pages=batch.records.delete_pages))
        if batch.blobs:
            self._blob_file.commit(batch.blobs)
        if batch.records.put_pages:
            self.journal.commit(JournalBatch(put_pages=batch.records.put_pages))

    def _take(self) -> list[_Request]:
        """The requests of the next batch: each brings at most a path, and their own blobs fit into it."""
        requests: list[_Request] = []
        expected = 0
        while self._queue and expected < self._batch_bytes:
            request = self._queue.popleft()
            requests.append(request)
            expected += request.space.spec.page_bytes
        return requests

    def _build(self, requests: list[_Request]) -> _Batch:
        batch = _Batch()
        wanted: dict[tuple[int, bytes], Space] = {}
        requests = [request for request in requests if not request.space.dropped]
        estimate = self._plan_within_quotas(requests, wanted)
        refused = self._fit(estimate, {request.space.number: request.space for request in requests}.values())
        if refused is None:
            self._fill(batch, wanted)
        else:
            for request in requests:
                if request.done is not None and not request.done.done():
                    request.done.set_exception(refused)
        self._rewrite_outdated(batch)
        batch.records.delete_pages, batch.blobs.delete = self._trash.records, self._trash.blobs
        self._trash.records, self._trash.blobs = [], []
        return batch

    def _rewrite_outdated(self, batch: _Batch) -> None:
        """Write anew the records that name too much; those in the batch already are right anyway."""
        batch.outdated, self._trash.outdated = self._trash.outdated, []
        done = {(number, key) for number, key, _ in batch.records.put_pages}
        now = self.now()
        for space, key, _ in batch.outdated:
            slot = -1 if space.dropped else space.tree.pages.find_key(key)
            if slot >= 0 and space.tree.pages.flags[slot] & DURABLE and (space.number, key) not in done:
                done.add((space.number, key))
                record = encode_page(space.digest, space.page_record(slot, now, only_named=True))
                batch.records.put_pages.append((space.number, key, record))

    def _plan_within_quotas(self, requests: list[_Request], wanted: dict[tuple[int, bytes], Space]) -> int:
        """Plan each request that its tenant has room for; the others are answered. Returns the SSD bytes of the batch."""
        budget, estimate = self._budget(self._make_ssd_room), 0
        counted: dict[tuple[int, int], None] = {}
        for request in requests:
            pages, rows = len(wanted), len(counted)
            footprint = self._plan(request, wanted, counted)
            over = budget.refuses(request.space.settings.tenant, footprint)
            if over is None:
                estimate += footprint
                continue
            for planned, before in ((wanted, pages), (counted, rows)):
                while len(planned) > before:
                    planned.popitem()
            if request.done is not None and not request.done.done():
                request.done.set_exception(over)
        return estimate

    def _plan(self, request: _Request, wanted: dict[tuple[int, bytes], Space], counted: dict[tuple[int, int], None]) -> int:
        """Add the page and those ancestors that are not durable yet, ancestors first. Returns their SSD bytes."""
        space, tree = request.space, request.space.tree
        slot = tree.pages.find_key(request.key)
        if slot < 0:
            return 0
        slots = tree.path_slots(tree.path_to(slot))
        space.mark_wanted(slots)
        fresh = space.unwritten(slots)
        fresh[-1] |= request.rewrite
        footprint = 0
        for page in slots[fresh].tolist():
            name = (space.number, tree.pages.key_bytes(page))
            if name not in wanted:
                wanted[name] = space
                for row in space.rows_of(page):
                    if (space.number, row) not in counted:
                        counted[space.number, row] = None
                        footprint += self._cost(space, row)
        return footprint

    def _cost(self, space: Space, row: int) -> int:
        return 0 if space.blobs.on_ssd[row] else self._blob_file.footprint(space.stored_bytes(row))

    def _fill(self, batch: _Batch, wanted: dict[tuple[int, bytes], Space]) -> None:
        """Take up pages and blobs as they are now that room was made (which may have moved pages)."""
        now, taken = self.now(), set()
        for (number, key), space in wanted.items():
            slot = space.tree.pages.find_key(key)
            if slot < 0:
                continue
            while lost := [row for row in space.rows_of(slot) if not space.blobs.on_ssd[row] and space.blobs.slot[row] == NO_SLOT]:
                space.lose_blob(lost[0])
                if (slot := space.tree.pages.find_key(key)) < 0:
                    break
            if slot < 0:
                continue
            record = space.page_record(slot, now)
            batch.records.put_pages.append((number, key, encode_page(space.digest, record)))
            named = space.rows_of(slot)
            batch.pages.append((space, key, record.version, named))
            for row in named:
                space.pin(row)
                batch.pinned.append((space, row))
                if space.blobs.on_ssd[row] or (number, row) in taken:
                    continue
                taken.add((number, row))
                batch.rows.append((space, row))
                stored = self._view(int(space.blobs.slot[row]))[: space.stored_bytes(row)]
                batch.blobs.put.append((number, space.blobs.id_of(row), stored))

    def _fit(self, needed: int, spaces: Iterable[Space]) -> NoSpace | None:
        """Make room on SSD for the batch, among pages that it does not need."""
        usage = self._blob_file.usage()
        free = usage.capacity - usage.used + sum(self._blob_file.footprint(stored) for _, _, stored in self._trash.blobs)
        missing = needed - free
        if missing > 0:
            missing -= self._make_ssd_room(missing, None)
        for space in spaces:
            space.clear_wanted()
        if missing > 0:
            return NoSpace("the SSD tier is full, and what is there is leased or retained")
        return None

    def _finish(self, batch: _Batch, failure: KVStoreError | None) -> None:
        if failure is None:
            self._stats.group_commits += bool(batch.pages)
            for space, row in batch.rows:
                space.blobs.on_ssd[row] = not space.dropped  # of a dropped namespace, what was just written is deleted next
                self._stats.demoted_stored_bytes += space.stored_bytes(row)
            for space, key, version, named in batch.pages:
                slot = -1 if space.dropped else space.tree.pages.find_key(key)
                if slot >= 0 and space.tree.version_of(slot) == version:
                    self._stats.demoted_pages += not space.is_durable(slot)
                    space.mark_durable(slot, named)
                elif not space.dropped:
                    self._trash.records.append((space.number, key))
        for space, _, rows in batch.outdated:
            for row in rows:
                space.blobs.durable_pages[row] -= 1
                space.unpin(row)
        for space, row in batch.pinned:
            space.unpin(row)

    @staticmethod
    def _answer(request: _Request, done: asyncio.Future[bool], failure: KVStoreError | None) -> None:
        if failure is not None:
            done.set_exception(failure)
            return
        slot = request.space.tree.pages.find_key(request.key)
        done.set_result(slot >= 0 and request.space.is_durable(slot))

    async def stop(self, task: asyncio.Task[None]) -> None:
        """End the task after the batch under way."""
        async with self.lock:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
