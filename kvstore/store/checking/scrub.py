"""Verifies again what is at rest, blob by blob, within a budget of bytes a second: disks and memory change bits by themselves.
Blobs of less than 32 KiB count for so much, or a store of small ones would be busy with nothing else.

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

from kvstore.errors import Busy, NotFound
from kvstore.kvspec import SliceLayout
from kvstore.store.dram.copies import lies_in, verifies
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.stats import Stats
from kvstore.store.waits import finish_despite_cancel
from kvstore.tiers.blobs import NO_SLOT, stored_bytes
from kvstore.tiers.ssd import BlobFile, Unreadable

_log = logging.getLogger("kvstore.scrub")
_IDLE_S = 1.0
_LOOK_ROWS = 1024
"""Rows of the blob table looked at before the others get a turn."""
_BATCH_BYTES = 2 << 20
"""Verified in one go: handing work to a thread costs the loop as much as a small put does."""
_LEAST_BYTES = 32 << 10
"""So much a blob counts for at least, as what it costs the loop does not depend on its size."""


class _Copy(Enum):
    """What a look at a copy of a blob found."""

    GOOD = 0
    BAD = 1
    UNREADABLE = 2


@dataclass(frozen=True, slots=True)
class _Blob:
    """A blob to look at: its row, and where its copies are."""

    row: int
    name: bytes
    layout: SliceLayout
    on_ssd: bool
    memory: memoryview | None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return (self.on_ssd + (self.memory is not None)) * stored_bytes(self.layout)

    @property
    def cost(self) -> int:
        """What it takes of the budget."""
        return max(self.nbytes, _LEAST_BYTES)


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
        view: Callable[[int], memoryview], discard: Callable[[Space, int, memoryview], None], stats: Stats, rate: int,
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
            row = 0
            while row < space.blobs.slots.high and not space.dropped:
                started = time.monotonic()
                batch, row = self._next_batch(space, row)
                await self._pace(await self._scrub(space, batch) if batch else 0, started)
                self.progress.done += len(batch)
        self.progress.passes += 1
        self.progress.last_pass = time.time()

    def _next_batch(self, space: Space, row: int) -> "tuple[list[_Blob], int]":
        """The next blobs to look at from a row on, and the row after them. Those in DRAM are pinned, as their bytes are read in place."""
        blobs, batch, nbytes = space.blobs, list[_Blob](), 0
        end = min(row + _LOOK_ROWS, blobs.slots.high)
        while row < end and nbytes < _BATCH_BYTES:
            if blobs.pages[row]:
                stored, slot = space.stored_bytes(row), int(blobs.slot[row])
                memory = None if slot == NO_SLOT else self._view(slot)[:stored]
                batch.append(_Blob(row, blobs.id_of(row), blobs.layout_of(row), bool(blobs.on_ssd[row]), memory))
                if memory is not None:
                    space.pin(row)
                nbytes += batch[-1].cost
            row += 1
        return batch, row

    async def _pace(self, nbytes: int, started: float) -> None:
        """Keep within the rate, and wait while the disk is not well."""
        await asyncio.sleep(max(0.0, started + nbytes / self._rate - time.monotonic()) if self._rate else 0.0)
        while not self._writeback.state.ok:  # noqa: ASYNC110 - a slow look now and then is all it takes
            await asyncio.sleep(_IDLE_S)

    async def _scrub(self, space: Space, batch: "list[_Blob]") -> int:
        """Verify the copies of some blobs, let them go, and mend what can be mended. Returns what it took of the budget."""
        try:
            for blob, looked in zip(batch, await self._look(space, batch), strict=True):
                self._stats.scrubbed_blobs += 1
                self._stats.scrubbed_stored_bytes += blob.nbytes
                if looked == (_Copy.GOOD, True):
                    continue
                if blob.memory is None:
                    await self._look_again(space, blob)
                else:
                    await self._mend(space, blob, *looked)
        finally:
            for blob in batch:
                if blob.memory is not None:
                    space.unpin(blob.row)
        return sum(blob.cost for blob in batch)

    async def _look(self, space: Space, batch: "list[_Blob]") -> "list[tuple[_Copy, bool]]":
        look = asyncio.get_running_loop().run_in_executor(self._readers, self._look_at, space.number, batch)
        return await finish_despite_cancel(look)  # the thread reads what is pinned until it is done

    async def _look_again(self, space: Space, blob: "_Blob") -> None:
        """A copy on SSD that nothing kept there was not good. It may just have been evicted: pinned, it tells."""
        if space.dropped or space.blobs.find(blob.name) != blob.row or not space.blobs.on_ssd[blob.row]:
            return
        space.pin(blob.row)
        try:
            ((ssd, _),) = await self._look(space, [blob])
            await self._mend(space, blob, ssd, memory_good=True)
        finally:
            space.unpin(blob.row)

    async def _mend(self, space: Space, blob: "_Blob", ssd: "_Copy", memory_good: bool) -> None:
        """Do what can be done about the copies of a pinned blob."""
        row = blob.row
        if not memory_good and blob.memory is not None and (slot := int(space.blobs.slot[row])) != NO_SLOT:
            memory_good = not lies_in(blob.memory, self._view(slot))  # a put has brought a good one since it was looked at
        if not space.dropped and ssd is not _Copy.GOOD and space.blobs.on_ssd[row]:
            await self._mend_ssd(space, row, ssd, memory_good=memory_good)
        if not space.dropped and not memory_good and blob.memory is not None:
            self._discard(space, row, blob.memory)  # only the copy, unless SSD is known to have none

    def _look_at(self, number: int, batch: "list[_Blob]") -> "list[tuple[_Copy, bool]]":
        """In a reader's thread: how the copies of each blob are, on SSD and in memory."""
        return [
            (
                self._look_on_ssd(number, blob.name, blob.layout) if blob.on_ssd else _Copy.GOOD,
                blob.memory is None or verifies(blob.name, blob.layout, blob.memory),
            )
            for blob in batch
        ]

    def _look_on_ssd(self, number: int, name: bytes, layout: SliceLayout) -> "_Copy":
        try:
            self._blob_file.read(number, name, layout, memoryview(bytearray(stored_bytes(layout))), uncached=True)
        except (Unreadable, Busy):
            return _Copy.UNREADABLE
        except NotFound:  # or Corrupt, which is one
            return _Copy.BAD
        return _Copy.GOOD

    async def _mend_ssd(self, space: Space, row: int, ssd: "_Copy", *, memory_good: bool) -> None:
        blobs, name = space.blobs, space.blobs.id_of(row).hex()
        self._stats.corrupt_blobs += ssd is _Copy.BAD
        self._stats.scrub_unreadable += ssd is _Copy.UNREADABLE
        slot = int(blobs.slot[row])
        in_dram = slot != NO_SLOT and row not in space.spoiled  # a reader may have found it bad since it was looked at
        if in_dram and memory_good:
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
        if not in_dram:
            _log.error("blob %s is bad on SSD and nowhere else: what needs it is dropped", name)
            space.lose_blob(row)
            self._writeback.poke()
