"""From the journal to namespaces in memory: what a start finds, and what it does about damage.

The namespaces are known at once; their pages are read in the background, parents first, while what is there is served. Until
a namespace is complete it takes no puts, so that nothing of its journal can be doubled or lost.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.digests import DIGEST_BYTES, KEY_BYTES
from kvstore.errors import KVStoreError
from kvstore.kvspec import PartRange
from kvstore.radix.journal import Journal, NamespaceRecord, RecordBatch, RecordGroup, merge_groups
from kvstore.radix.load_plan import LoadPlan, plan_load
from kvstore.radix.loading import TreeLoad
from kvstore.radix.pages import DURABLE, Slots
from kvstore.store.settings import NamespaceSettings
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.stats import Stats

_log = logging.getLogger("kvstore.recovery")
_REWRITE_PAGES = 256
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Pages that are back in memory, of about so many in the journal."""

    pages: int
    of_about: int


class Recovery:
    """Loads every namespace. A record that does not verify costs its subtree; a damaged file is salvaged and read again."""

    def __init__(
        self, journal: Journal, writeback: Writeback, readers: Executor, writer: Executor, stats: Stats, not_before: Callable[[float], None]
    ) -> None:
        self._journal = journal
        self._writeback = writeback
        self._readers = readers
        self._writer = writer
        self._stats = stats
        self._not_before = not_before
        self._spaces: list[Space] = []
        self._expected = 0

    @property
    def progress(self) -> LoadProgress | None:
        """How far loading is; None once it is done."""
        if not any(space.loading for space in self._spaces):
            return None
        return LoadProgress(sum(space.tree.page_count for space in self._spaces), self._expected)

    async def find(self, new_space: Callable[[int, NamespaceSettings], Space]) -> tuple[list[Space], int]:
        """The namespaces, still empty, and the next free namespace number."""
        loop = asyncio.get_running_loop()
        try:
            records, bad = await self._namespaces()
        except lmdb.Error as error:
            await self._salvage(error)
            records, bad = await self._namespaces()
        self._spaces = [new_space(record.number, NamespaceSettings.from_dict(record.settings)) for record in records]
        for space in self._spaces:
            space.loading = True
        self._expected = await loop.run_in_executor(self._writer, lambda: self._journal.entries) - len(records)
        return list(self._spaces), max([0, *(r.number for r in records), *bad]) + 1

    async def _namespaces(self) -> tuple[list[NamespaceRecord], list[int]]:
        loop = asyncio.get_running_loop()
        records, bad = await loop.run_in_executor(self._writer, self._journal.namespaces)
        for number in bad:
            self._stats.corrupt_records += 1
            _log.error("the record of namespace number %d does not verify: it is dropped", number)
            await loop.run_in_executor(self._writer, self._journal.drop_namespace, number)
        known = {record.number for record in records} | set(bad)
        for number in await loop.run_in_executor(self._writer, self._journal.page_numbers):
            if number not in known:
                self._stats.corrupt_records += 1
                _log.error("the page records of namespace number %d have no namespace: they are dropped", number)
                await loop.run_in_executor(self._writer, self._journal.drop_namespace, number)
                bad.append(number)
        return records, bad

    async def run(self) -> None:
        """Load all namespaces, one after the other."""
        started, interval = time.monotonic(), sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)  # the executor's thread must not hold up the loop's, which serves
        try:
            await self._load_all()
        finally:
            sys.setswitchinterval(interval)
        if self._spaces:
            pages = sum(space.tree.page_count for space in self._spaces)
            _log.info("journal loaded: %d pages in %.2f s", pages, time.monotonic() - started)
        self._writeback.poke()

    async def _load_all(self) -> None:
        for space in self._spaces:
            try:
                groups = await self._read(space)
            except lmdb.Error as error:
                async with self._writeback.lock:
                    await self._salvage(error)
                await self._restore_lost_records([s for s in self._spaces if not s.loading])
                groups = await self._read(space)
            await self._fill(space, groups)
            space.loading = False

    async def _salvage(self, error: lmdb.Error) -> None:
        _log.error("the journal is damaged (%s): saving what can be read of it", error)
        self._stats.corrupt_records += 1
        await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.salvage)

    async def _read(self, space: Space) -> list[RecordGroup]:
        """All records of a namespace that verify. The others are deleted."""
        groups: list[RecordGroup] = []
        bad: list[bytes] = []
        async for batch in self._scan(space):
            groups += batch.groups
            bad += batch.bad
        for group in groups:
            self._not_before(float(group.head["created_ms"].max()) / 1000)
        if bad:
            self._stats.corrupt_records += len(bad)
            _log.error("namespace %s: %d page records do not verify: dropped", space.id, len(bad))
            space.forget_records(bad)
        return groups

    async def _scan(self, space: Space) -> AsyncIterator[RecordBatch]:
        loop, after = asyncio.get_running_loop(), None
        while not space.dropped:
            batch = await loop.run_in_executor(self._readers, self._journal.scan, space.number, space.digest, _label_bytes(space), after)
            yield batch
            if (after := batch.resume) is None:
                return

    async def _fill(self, space: Space, groups: list[RecordGroup]) -> None:
        plan, blob = await asyncio.get_running_loop().run_in_executor(self._readers, prepare, space, groups)
        load = TreeLoad(space.tree, plan, blob)
        while not space.dropped and load.step():  # noqa: ASYNC110 - a turn for the others, nothing to wait for
            await asyncio.sleep(0)
        if space.dropped:
            return
        space.forget_records(plan.orphans)
        if load.lost:
            lost = np.array(load.lost, np.int64)
            rows = np.concatenate([blob[plan.part_start[at] : plan.part_start[at + 1]] for at in lost])
            space.forget_records([plan.keys[at].tobytes() for at in lost], rows)
        space.lose_again()
        if plan.left_out:  # a smaller `max_pages` than before: serve what fits, and keep the rest for a larger one
            space.incomplete = True
            _log.error("namespace %s: %d pages do not fit into max_pages and are left out: raise it", space.id, plan.left_out)
        if plan.orphans:
            _log.error("namespace %s: %d pages hang from records that are gone: dropped", space.id, len(plan.orphans))
        _log.info("namespace %s (%s): %d pages", space.settings.name, space.id, space.tree.page_count)

    async def _restore_lost_records(self, spaces: list[Space]) -> None:
        """Write again what salvage could not read of namespaces that were loaded before the damage was met."""
        for space in spaces:
            there: set[bytes] = set()
            async for batch in self._scan(space):
                for group in batch.groups:
                    there.update(row.tobytes() for row in group.keys)
            live = space.tree.live_slots()
            durable = live[(space.tree.pages.flags[live] & DURABLE) != 0].tolist()
            missing = [key for key in map(space.tree.pages.key_bytes, durable) if key not in there]
            _log.error("namespace %s: %d page records were lost and are written again", space.id, len(missing))
            try:
                for first in range(0, len(missing), _REWRITE_PAGES):
                    await self._writeback.make_durable(space, missing[first : first + _REWRITE_PAGES], rewrite=True)
            except KVStoreError as error:
                _log.error("namespace %s: its lost records can't be written: %s", space.id, error.message)


def _label_bytes(space: Space) -> int:
    return space.spec.label_words * 4 + KEY_BYTES


def prepare(space: Space, groups: list[RecordGroup]) -> tuple[LoadPlan, Slots]:
    """The plan, and the blob row of each of its parts; their blobs, taken to be on SSD, are in the table then. Blocking."""
    tree = space.tree
    groups = merge_groups(groups)
    plan = plan_load(groups, space.digest, tree.capacity, min(tree.parts.slots.capacity, space.blobs.slots.capacity))
    if not len(plan.parts):
        return plan, np.empty(0, np.int32)
    words = np.ascontiguousarray(plan.parts["blob"]).view("<u8").reshape(-1, 2)
    order = np.lexsort((words[:, 1], words[:, 0]))
    first = np.append(True, (words[order[1:]] != words[order[:-1]]).any(axis=1))
    blob = np.empty(len(words), np.int32)
    blob[order] = np.cumsum(first) - 1
    chosen = plan.parts[order[first]]
    geometry, layout = _geometries(chosen)
    layouts = [space.spec.slice_layout(part_range) for part_range in geometry]
    space.blobs.adopt(
        np.ascontiguousarray(chosen["blob"]).view(np.uint8).reshape(-1, DIGEST_BYTES), layout, layouts,
        np.bincount(blob, minlength=len(chosen)).astype(np.int32),
    )  # fmt: skip
    return plan, blob


def _geometries(parts: npt.NDArray[np.void]) -> tuple[list[PartRange], npt.NDArray[np.uint16]]:
    """The geometries that occur, and which of them each part has."""
    ranges = np.ascontiguousarray(parts["ranges"]).view(np.uint64)[:, 0]
    shapes, number = np.unique(ranges, return_inverse=True)
    codes, which = np.unique(number * 256 + parts["component"], return_inverse=True)
    rows = shapes[codes // 256].reshape(-1, 1).view(np.uint16)
    found = [PartRange(int(code) % 256, *(int(x) for x in row)) for code, row in zip(codes, rows, strict=True)]
    return found, which.astype(np.uint16)
