"""Reading blobs: those in DRAM where they are, those on SSD by bringing them up, or around DRAM where it has no room."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import Busy, Cancelled, Corrupt, NoSpace, NotFound
from kvstore.kvspec import SliceLayout
from kvstore.store.dram.arriving import Arriving
from kvstore.store.dram.copies import lies_in
from kvstore.store.dram.read_ahead import ReadAhead
from kvstore.store.matching.rates import Meter
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.stats import Stats
from kvstore.store.waits import finish_despite_cancel
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.dram import Arena
from kvstore.tiers.ssd import BlobFile, Unreadable

_log = logging.getLogger("kvstore.reading")
_STAGING_BLOBS = 4
_ROOM_WAIT_S = 0.1
"""So long a reader waits for room in DRAM, at most; then it reads around it."""
_NO_ROOM_S = 1.0
"""For so long after one has waited in vain, the next don't wait: a prefix larger than DRAM, leased, is read around it blob by blob."""
_STOPS = "the daemon stops reading"


@dataclass(eq=False, slots=True)
class Held:
    """A blob's stored form in memory, until `release`."""

    space: Space
    row: int
    view: memoryview
    _staging: asyncio.Semaphore | None = None
    _arriving: Arriving | None = None

    def has(self, number: int) -> bool:
        """Whether a slice is there; always, but for a blob that was held while it was still being read."""
        return self._arriving is None or self._arriving.has(number)

    async def wait_for(self, number: int) -> None:
        """Return once a slice is there. Raises what `hold` would have raised, had it waited for all of the blob."""
        if self._arriving is not None:
            await self._arriving.wait_for(number)

    def release(self) -> None:
        """Let the blob go."""
        self.space.unpin(self.row)
        if self._staging is not None:
            self._staging.release()
        if self._arriving is not None:
            self._arriving.leave()


class Reading:
    """Holds blobs for whoever reads them. `allocate` finds a DRAM slot for so many bytes within so many seconds, as Residency does.

    Whatever was waited for, a blob may have come to DRAM meanwhile, and its copy on SSD may have gone: that is looked at again each time.
    """

    def __init__(
        self, arena: Arena, blob_file: BlobFile, readers: Executor, stats: Stats, allocate: Callable[[Space, int, float], Awaitable[int]],
        wait_s: float, writeback: Writeback, reads: Meter,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._blob_file = blob_file
        self._readers = readers
        self._stats = stats
        self._allocate = allocate
        self._room_wait_s = min(_ROOM_WAIT_S, wait_s)
        self._no_room_until: dict[str, float] = {}
        """By tenant (monotonic): each may have a quota of its own."""
        self._writeback = writeback
        self._reads = reads
        self._loading: dict[tuple[int, int], tuple[Arriving, asyncio.Task[None]]] = {}
        self._staging = asyncio.Semaphore(_STAGING_BLOBS)
        self._under_way: set[asyncio.Future[None]] = set()
        """Reads from SSD, also those around DRAM."""
        self.ahead = ReadAhead(self.promote, self._idle, stats)
        self._stopped = False

    def find(self, space: Space, blob_id: bytes) -> int:
        """The row of a blob; NotFound if the namespace has no such blob."""
        row = space.blobs.find(blob_id) if len(blob_id) == DIGEST_BYTES else -1
        if row < 0 and space.loading:
            raise Busy(f"namespace {space.settings.name!r} is still being read from the journal", retry_after_ms=100)
        if row < 0:
            self._stats.fetch_misses += 1
            raise NotFound(f"blob {blob_id.hex()} is not in this namespace: it was evicted, or never there")
        return row

    def find_many(self, space: Space, names: bytes) -> npt.NDArray[np.int32]:
        """As `find`, of several blobs; ids of 16 bytes, one after the other."""
        if len(names) == DIGEST_BYTES:
            return np.array([self.find(space, names)], np.int32)
        rows = space.blobs.find_many(names)
        if rows.min() < 0:
            missing = DIGEST_BYTES * int(rows.argmin())
            self.find(space, names[missing : missing + DIGEST_BYTES])
        return rows

    def fronts(self, space: Space, rows: npt.NDArray[np.int32], layout: SliceLayout) -> tuple[list[memoryview], bytes] | None:
        """The payloads of several blobs of one layout, and their digest tables, one after the other; None if one of them is not in DRAM."""
        slots = space.blobs.slot[rows]
        if slots.min() == NO_SLOT or (space.spoiled and not space.spoiled.isdisjoint(rows.tolist())):
            return None
        return self._arena.fronts(slots, layout.payload_bytes, DIGEST_BYTES * layout.count)

    def hold_resident(self, space: Space, row: int) -> Held | None:
        """Pin a blob that is in DRAM; None if it is not."""
        view = self.resident(space, row)
        if view is None:
            return None
        space.pin(row)
        return Held(space, row, view)

    def resident(self, space: Space, row: int) -> memoryview | None:
        """The stored form of a blob in DRAM, to be looked at while it is pinned; None if it is not there, or was found bad."""
        slot = int(space.blobs.slot[row])
        if slot == NO_SLOT or row in space.spoiled:
            return None
        return self._arena.view(slot)[: space.stored_bytes(row)]

    def residents(self, space: Space, rows: Sequence[int]) -> list[memoryview | None]:
        """As `resident`, of several blobs."""
        if len(rows) == 1:
            return [self.resident(space, rows[0])]
        view, spoiled = self._arena.view, space.spoiled
        places = zip(rows, space.blobs.slot[rows].tolist(), space.blobs.stored_of(rows).tolist(), strict=True)
        return [None if slot == NO_SLOT or row in spoiled else view(slot)[:stored] for row, slot, stored in places]

    async def hold(self, space: Space, row: int, turn: asyncio.Event | None = None, *, early: bool = False) -> Held:
        """Pin a blob in memory, promoting it from SSD if need be.

        It is only read around DRAM, through one of a few buffers, once it is its `turn`. With `early` its first slices are enough:
        ask `Held.has` before a slice is read. Raises NotFound (Corrupt if the bytes did not verify) when no tier has it.
        """
        space.pin(row)
        try:
            held = self.hold_resident(space, row)
            if held is None and space.blobs.slot[row] == NO_SLOT:
                held = await self._hold_promoted(space, row, early=early)
            return held or await self._stage(space, row, turn)
        finally:
            space.unpin(row)

    async def _hold_promoted(self, space: Space, row: int, *, early: bool) -> Held | None:
        """Hold a blob as it comes up from SSD. None if there is no room, or if what came was found to be bad in memory meanwhile."""
        try:
            arriving = await self._promote(space, row, early=early)
        except Busy:
            return None
        if arriving.ended or arriving.bad:
            return self.hold_resident(space, row)
        space.pin(row)
        arriving.join()
        return Held(space, row, arriving.view, _arriving=arriving)

    async def promote(self, space: Space, row: int) -> None:
        """Bring a pinned blob up into DRAM. Raises Busy if there is no room, NotFound if no tier has it."""
        if space.blobs.slot[row] == NO_SLOT:
            await self._promote(space, row)

    async def _promote(self, space: Space, row: int, *, early: bool = False) -> Arriving:
        """Have a blob read into DRAM. Returns when it is there, or with `early` when its first slice is."""
        name = (space.number, row)
        if name not in self._loading:
            if self._stopped:
                raise Cancelled(_STOPS)
            arriving = Arriving()
            task = asyncio.create_task(self._load(space, row, arriving), name="kvstore-read")
            self._loading[name] = arriving, task
            task.add_done_callback(lambda done: self._loaded(name, done))
        arriving, task = self._loading[name]
        if early:
            await arriving.wait_for(0)
        if not early or arriving.ended:
            await asyncio.wait([task])
            if task.cancelled():
                raise Cancelled(_STOPS)
            task.result()
        return arriving

    def _loaded(self, name: tuple[int, int], done: "asyncio.Future[None]") -> None:
        arriving, _ = self._loading.pop(name)
        if done.cancelled():
            arriving.end(Cancelled(_STOPS))  # also if it had not begun
        else:
            done.exception()  # seen: those who waited for it may all be gone

    async def _idle(self) -> None:
        while under_way := [*(task for _, task in self._loading.values()), *self._under_way]:
            await asyncio.wait(under_way)

    async def stop(self, wait_s: float) -> bool:
        """End what is being read into DRAM; nothing more will be. False if a read does not end within `wait_s`."""
        self._stopped = True
        await self.ahead.stop()
        tasks = [task for _, task in self._loading.values()]
        for task in tasks:
            task.cancel()
        return not tasks or not (await asyncio.wait(tasks, timeout=wait_s))[1]

    async def _load(self, space: Space, row: int, arriving: Arriving) -> None:
        space.pin(row)
        try:
            await self._load_into_slot(space, row, arriving)
        except BaseException as error:
            arriving.end(error)
            raise
        else:
            arriving.end()
        finally:
            space.unpin(row)

    async def _load_into_slot(self, space: Space, row: int, arriving: Arriving) -> None:
        stored = space.stored_bytes(row)
        tenant = space.settings.tenant
        wait_s = self._room_wait_s if time.monotonic() >= self._no_room_until.get(tenant, 0.0) else 0.0
        try:
            slot = await self._allocate(space, stored, wait_s)
        except (Busy, NoSpace) as error:
            if wait_s:
                self._no_room_until[tenant] = time.monotonic() + _NO_ROOM_S
            if space.blobs.slot[row] != NO_SLOT:
                return
            raise Busy(error.message, retry_after_ms=error.retry_after_ms or 1000) from error  # it is read around DRAM then
        if space.blobs.slot[row] != NO_SLOT:  # a put brought it while this waited for room; its copy on SSD may be gone
            self._arena.free(slot)
            return
        place = self._arena.view(slot)
        arriving.view = place[:stored]
        try:
            if not await self._read(space, row, place, arriving.came) and arriving.used:
                await self._copy_resident(space, row, arriving.view)
        except BaseException:
            arriving.unused(lambda: self._arena.free(slot))
            raise
        if space.blobs.slot[row] != NO_SLOT or arriving.bad:  # a put brought the same bytes meanwhile, or these are not the blob's any more
            arriving.unused(lambda: self._arena.free(slot))
            return
        space.set_slot(row, slot)
        self._stats.promoted_blobs += 1
        self._stats.promoted_stored_bytes += stored

    async def _copy_resident(self, space: Space, row: int, target: memoryview) -> None:
        """Fill the view of those who read a blob while it arrived, from where a put has brought it. It is pinned."""
        here = self.resident(space, row)
        assert here is not None, "a blob left DRAM at once"
        await finish_despite_cancel(asyncio.get_running_loop().run_in_executor(self._readers, _copy, here, target))

    async def _read(self, space: Space, row: int, target: memoryview, came: Callable[[int], None] | None = None) -> bool:
        """Read the stored form of a blob that is not in DRAM from SSD; `came` is told how many of its slices are there, until all are.

        False if it could not be read, but a put has brought it to DRAM meanwhile.
        """
        blobs = space.blobs
        if not blobs.on_ssd[row]:
            self._lose(space, row)
            raise NotFound(f"blob {blobs.id_of(row).hex()} is in no tier")
        self._reads.begin()
        nbytes = 0
        loop = asyncio.get_running_loop()
        arrived = None if came is None else lambda slices: loop.call_soon_threadsafe(came, slices)
        read = loop.run_in_executor(
            self._readers, partial(self._blob_file.read, space.number, blobs.id_of(row), blobs.layout_of(row), target, arrived=arrived)
        )
        self._under_way.add(read)
        read.add_done_callback(self._under_way.discard)
        try:
            # Shielded: the thread writes into `target` until it is done, so the slot must not be freed before.
            await finish_despite_cancel(read)
            nbytes = space.stored_bytes(row)
        except NotFound as error:
            self._stats.corrupt_blobs += isinstance(error, Corrupt)
            away = isinstance(error, Unreadable) and not await self._writeback.disk_is_well()
            if self.resident(space, row) is not None:
                if blobs.on_ssd[row]:  # else the copy went while it was read, as it was not needed any more
                    _log.error("a copy on SSD is bad, and DRAM has a good one: %s", error.message)
                    self._writeback.mend(space, row)
                return False
            if away:  # it may give all of it another time
                raise
            _log.error("dropping the pages of a lost blob: %s", error.message)
            blobs.on_ssd[row] = False
            self._lose(space, row)
            raise
        finally:
            self._reads.end(nbytes, spoiled=not nbytes)
        return True

    async def _stage(self, space: Space, row: int, turn: asyncio.Event | None) -> Held:
        """Read around DRAM, through a few bounded buffers: what a fetch does when everything in DRAM is leased.

        Fetches that held buffers for later blobs while each waits for one for its next would wait for each other for ever.
        """
        if turn is not None:
            await turn.wait()
        await self._staging.acquire()
        try:
            if (held := self.hold_resident(space, row)) is None:  # else it came while this waited; its copy on SSD may be gone
                target = memoryview(bytearray(space.stored_bytes(row)))
                if await self._read(space, row, target):
                    space.pin(row)
                    return Held(space, row, target, self._staging)
                held = self.hold_resident(space, row)
        except BaseException:
            self._staging.release()
            raise
        self._staging.release()
        assert held is not None, "a blob left DRAM at once"
        return held

    def _lose(self, space: Space, row: int) -> None:
        """No tier has a blob: what needs it goes, and is deleted on SSD."""
        space.lose_blob(row)
        self._writeback.poke()

    def discard_bad_copy(self, space: Space, row: int, seen: memoryview) -> None:
        """A copy in memory of a pinned blob did not verify where it was `seen`: drop it, once nobody has it in use.

        Without another on SSD the pages that need it go too. Another copy that has taken its place meanwhile stays.
        """
        blobs = space.blobs
        self._stats.corrupt_blobs += 1
        _log.error("a DRAM copy of blob %s did not verify, dropping it", blobs.id_of(row).hex())
        slot, loading = int(blobs.slot[row]), self._loading.get((space.number, row))
        if slot != NO_SLOT and lies_in(seen, self._arena.view(slot)):
            if blobs.on_ssd[row]:
                space.spoil(row)
            else:
                space.lose_blob(row)
        elif loading is not None and len(loading[0].view) and lies_in(seen, loading[0].view):
            loading[0].bad = True  # it is not in DRAM yet, and will not be
        self._writeback.poke()


def _copy(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
