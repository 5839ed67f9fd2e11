"""At the start and at the end: blobs that a crash left behind, and pages that are only in DRAM."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

import lmdb
import numpy as np

from kvstore.errors import KVStoreError
from kvstore.radix.pages import DURABLE
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.trash import Trash
from kvstore.tiers.ssd import BlobFile

_log = logging.getLogger("kvstore.store")

_SWEEP_BLOBS = 2048
_ROWS_AT_ONCE = 1024


async def give_back(space: Space) -> None:
    """Free what a dropped namespace has in the tiers, giving way to others in between; what is pinned goes with its last pin."""
    blobs = space.blobs
    for first in range(0, blobs.slots.high, _ROWS_AT_ONCE):  # of pages still to be loaded, too
        rows = first + np.flatnonzero(blobs.pages[first : min(first + _ROWS_AT_ONCE, blobs.slots.high)])
        blobs.pages[rows] = blobs.durable_pages[rows] = 0
        blobs.on_ssd[rows] = False
        for row in rows.tolist():
            space.settle(row)
        await asyncio.sleep(0)


class Orphans:
    """Deletes blobs on SSD that no page names: what a crash between a blob and its record leaves."""

    def __init__(
        self,
        blob_file: BlobFile,
        writeback: Writeback,
        readers: Executor,
        writer: Executor,
        spaces: Callable[[], Iterable[Space]],
        trash: Trash,
    ) -> None:
        self._blob_file = blob_file
        self._writeback = writeback
        self._readers = readers
        self._writer = writer
        self._spaces = spaces
        self._trash = trash

    async def sweep(self) -> None:
        """Look through all namespaces once; a damaged file is marked, and salvaged at the next start."""
        try:
            await self._sweep()
        except lmdb.Error as error:
            self._blob_file.mark_damaged()
            _log.error("the blob file is damaged (%s): what can be read of it will be saved at the next start", error)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._readers, self._blob_file.namespace_numbers)
        known = {space.number for space in self._spaces()}  # as of now: what was found may be of one that was made meanwhile
        for number in found:
            if number not in known:
                async with self._writeback.lock:
                    if all(space.number != number for space in self._spaces()):  # a new one may have been given that number
                        await loop.run_in_executor(self._writer, self._blob_file.drop_namespace, number)
        for space in list(self._spaces()):
            await self._find_orphans_of(space)
        self._writeback.poke()

    async def _find_orphans_of(self, space: Space) -> None:
        loop, after, swept = asyncio.get_running_loop(), b"", 0
        while not (space.incomplete or space.dropped):
            found = await loop.run_in_executor(self._readers, self._blob_file.stored_blobs, space.number, after, _SWEEP_BLOBS)
            orphans = [(space.number, blob, nbytes) for blob, nbytes in found if space.blobs.find(blob) < 0]
            self._trash.blobs += orphans if not space.dropped else []
            swept += len(orphans)
            if len(found) < _SWEEP_BLOBS:
                break
            after = found[-1][0]
        if swept:
            _log.info("namespace %s: sweeping %d blobs that no page names", space.id, swept)


async def flush(spaces: Iterable[Space], writeback: Writeback, shutdown_s: float) -> None:
    """Write what is only in DRAM, the most recently used first, as far as `shutdown_s` allows."""
    dirty: list[tuple[int, Space, bytes]] = []
    for space in spaces:
        slots = space.tree.live_slots()
        slots = slots[(space.tree.pages.flags[slots] & DURABLE) == 0]
        recency = space.tree.pages.recency[slots].tolist()
        dirty += [(r, space, space.tree.pages.key_bytes(s)) for r, s in zip(recency, slots.tolist(), strict=True)]
    dirty.sort(key=lambda item: item[0], reverse=True)
    deadline = time.monotonic() + shutdown_s
    done = written = 0
    while done < len(dirty) and time.monotonic() < deadline:
        chunk = dirty[done : done + 64]
        for space in {id(s): s for _, s, _ in chunk}.values():
            keys = [key for _, s, key in chunk if s is space]
            try:
                await writeback.make_durable(space, keys, wait_s=deadline - time.monotonic())
            except KVStoreError as error:
                _log.error("can't flush: %s", error.message)
                deadline = 0.0
                break
            written += len(keys)
        done += len(chunk)
    _log.info("flushed %d pages, dropped %d that were only in DRAM", written, len(dirty) - written)
