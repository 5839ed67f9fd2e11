"""Verifies again what is at rest, blob by blob, within a budget of bytes a second: disks and memory change bits by themselves.

A bad copy is replaced from a good one in the other tier; a blob without a good copy is lost, with the pages that need it. Where the disk
gives an error instead of bytes, nothing is given up: it may be well again tomorrow. Nothing is promoted and nothing counts as a use.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum

import lmdb

from kvstore.errors import Corrupt, NotFound
from kvstore.kvspec import SliceLayout
from kvstore.store.space import Space
from kvstore.store.stats import Stats
from kvstore.store.writeback import Writeback
from kvstore.tiers.blobs import NO_SLOT, stored_bytes
from kvstore.tiers.ssd import BlobFile, Unreadable, verify_stored

_log = logging.getLogger("kvstore.scrub")
_IDLE_S = 1.0
_LOOK_ROWS = 1024
"""Rows of the blob table looked at before the others get a turn."""


class _Copy(Enum):
    """What a look at a copy of a blob found."""

    GOOD = 0
    BAD = 1
    UNREADABLE = 2


@dataclass(slots=True)
class ScrubProgress:
    """How far the pass under way is, in blobs, and when the last whole one ended (Unix time, 0 if none did)."""

    done: int = 0
    of_about: int = 0
    passes: int = 0
    last_pass: float = 0.0


class Scrubber:
    """`run` is its task. `rate` is in bytes a second, 0 for never."""

    def __init__(
        self, blob_file: BlobFile, writeback: Writeback, readers: Executor, spaces: Callable[[], Iterable[Space]],
        view: Callable[[int], memoryview], discard: Callable[[Space, int], None], stats: Stats, rate: int,
    ) -> None:  # fmt: skip
        self._blob_file = blob_file
        self._writeback = writeback
        self._readers = readers
        self._spaces = spaces
        self._view = view
        self._discard = discard
        self._stats = stats
        self._rate = rate
        self.progress = ScrubProgress()

    async def run(self) -> None:
        """One pass after the other, until cancelled."""
        while self._rate:
            await self.scrub_all()
            await asyncio.sleep(_IDLE_S)

    async def scrub_all(self) -> None:
        """One pass over every blob of every namespace."""
        spaces = list(self._spaces())
        self.progress.done, self.progress.of_about = 0, sum(space.blobs.count for space in spaces)
        for space in spaces:
            for row in range(space.blobs.slots.high):
                if space.dropped:
                    break
                if space.blobs.pages[row]:
                    started = time.monotonic()
                    nbytes = await self._scrub(space, row)
                    self.progress.done += 1
                    await self._pace(nbytes, started)
                elif row % _LOOK_ROWS == 0:
                    await asyncio.sleep(0)
        self.progress.passes += 1
        self.progress.last_pass = time.time()

    async def _pace(self, nbytes: int, started: float) -> None:
        """Keep within the rate, and wait while the disk is not well."""
        await asyncio.sleep(max(0.0, started + nbytes / self._rate - time.monotonic()) if self._rate else 0.0)
        while not self._writeback.state.ok:  # noqa: ASYNC110 - a slow look now and then is all it takes
            await asyncio.sleep(_IDLE_S)

    async def _scrub(self, space: Space, row: int) -> int:
        """Verify the copies of one blob and mend what can be mended. Returns the bytes read."""
        blobs, stored = space.blobs, space.stored_bytes(row)
        loop = asyncio.get_running_loop()
        name, layout = blobs.id_of(row), blobs.layout_of(row)
        space.pin(row)  # so that neither copy goes away meanwhile
        try:
            on_ssd, slot = bool(blobs.on_ssd[row]), int(blobs.slot[row])
            ssd = await loop.run_in_executor(self._readers, self._look_on_ssd, space.number, name, layout) if on_ssd else _Copy.GOOD
            in_memory = slot != NO_SLOT
            memory_good = not in_memory or await loop.run_in_executor(self._readers, _verifies, name, layout, self._view(slot)[:stored])
            self._stats.scrubbed_blobs += 1
            self._stats.scrubbed_stored_bytes += (on_ssd + in_memory) * stored
            if not space.dropped and ssd is not _Copy.GOOD:
                await self._mend_ssd(space, row, ssd, memory_good=memory_good)
            if not space.dropped and not memory_good:
                self._discard(space, row)  # only the copy, unless SSD is known to have none
        finally:
            space.unpin(row)
        return (on_ssd + in_memory) * stored

    def _look_on_ssd(self, number: int, name: bytes, layout: SliceLayout) -> "_Copy":
        try:
            self._blob_file.read(number, name, layout, memoryview(bytearray(stored_bytes(layout))), uncached=True)
        except Unreadable:
            return _Copy.UNREADABLE
        except NotFound:  # or Corrupt, which is one
            return _Copy.BAD
        return _Copy.GOOD

    async def _mend_ssd(self, space: Space, row: int, ssd: "_Copy", *, memory_good: bool) -> None:
        blobs, name = space.blobs, space.blobs.id_of(row).hex()
        self._stats.corrupt_blobs += ssd is _Copy.BAD
        self._stats.scrub_unreadable += ssd is _Copy.UNREADABLE
        slot = int(blobs.slot[row])
        if slot != NO_SLOT and memory_good:
            try:
                await self._writeback.rewrite_blob(space, row, self._view(slot)[: space.stored_bytes(row)])
            except (lmdb.Error, OSError) as error:
                _log.error("the copy of blob %s on SSD is bad, and can't be written anew: %s", name, error)
            else:
                _log.error("the copy of blob %s on SSD was bad: written anew from DRAM", name)
                self._stats.scrub_repaired += 1
            return
        if ssd is _Copy.UNREADABLE:
            return
        blobs.on_ssd[row] = False
        if slot == NO_SLOT:
            _log.error("blob %s is bad on SSD and nowhere else: what needs it is dropped", name)
            space.lose_blob(row)
            self._writeback.poke()


def _verifies(name: bytes, layout: SliceLayout, stored: memoryview) -> bool:
    try:
        verify_stored(name, layout, stored)
    except Corrupt:
        return False
    return True
