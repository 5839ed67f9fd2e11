"""Checks a store while it serves: its trees in slices of the loop's time, its blobs in the readers' threads. Changes nothing.

Every rule checked here is true between any two changes, so what is under way does not matter. One batch of blobs is read at a
time, into a buffer for the largest of them; a blob is pinned while it is looked at.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.errors import Cancelled, NotFound
from kvstore.radix.check import check_links, check_place, check_run, is_node
from kvstore.radix.pages import RECIPE
from kvstore.radix.tables import ROOT
from kvstore.store.checking.check import check_counts, unneeded
from kvstore.store.checking.verify import CheckProgress, CheckReport, NamespaceChecked, check_recipes, needed_by, note_losses
from kvstore.store.dram.reading import Held
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.ssd import BlobFile
from kvstore.tiers.stored import verify_stored

_SLICE_S = 0.002
_RUN = 64
"""Pages looked at between two looks at the clock."""
_BATCH_BYTES = 4 << 20
_BATCH_BLOBS = 16
"""Pinned blobs can't be moved: a batch is small beside any DRAM tier."""
_LINKED = 256
"""The children of a node are looked at together up to so many; beyond, each only at its own turn."""
_FLAGGED = 2048
_ROWS = 16_384
_COUNTED_PAGES = 50_000
"""Counts are compared in one go, which takes milliseconds up to here; beyond, it is left to a check of the stopped store."""
_TELL_S = 0.2


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy of a blob to verify: in DRAM if `held`, else on SSD."""

    row: int
    blob: bytes
    stored: int
    held: Held | None


@dataclass(frozen=True, slots=True)
class _Bad:
    copy: _Copy
    what: str


async def check_running(
    store: Store, spaces: list[Space], running: Callable[[], bool], bytes_per_s: int | None = None
) -> AsyncGenerator[CheckProgress | CheckReport, None]:
    """Progress, and at last a report. Raises Cancelled when `running` says that the daemon stops.

    `bytes_per_s` bounds how fast blobs are read. Close the iterator to end the check early.
    """
    check = _Check(store, running, bytes_per_s)
    check.total = sum(_stored(space) for space in spaces)
    for space in spaces:
        checked = NamespaceChecked(space.id, space.settings.name, space.tree.page_count, space.blobs.count)
        check.report.namespaces.append(checked)
        yield check.progress(space)
        await check.tree(space)
        async with contextlib.aclosing(check.blobs(space, checked)) as steps:
            async for told in steps:
                yield told
        await check.recipes(space, checked)
    check.report.seconds = round(time.monotonic() - check.started, 3)
    yield check.report


def _stored(space: Space) -> int:
    """Bytes of all copies of a namespace's blobs."""
    blobs = space.blobs
    rows = np.flatnonzero(blobs.pages[: blobs.slots.high] > 0).astype(np.int32)
    copies = (blobs.slot[rows] != NO_SLOT).astype(np.int64) + blobs.on_ssd[rows]
    return int((blobs.stored_of(rows) * copies).sum()) if len(rows) else 0


class _Check:
    def __init__(self, store: Store, running: Callable[[], bool], bytes_per_s: int | None) -> None:
        self.report = CheckReport()
        self.total = 0
        self.started = time.monotonic()
        self._store = store
        self._running = running
        self._rate = bytes_per_s
        self._told = 0.0

    def progress(self, space: Space) -> CheckProgress:
        """How far it is. What was put meanwhile may be looked at too, so the end can lie past the total of the beginning."""
        done = self.report.checked_bytes
        return CheckProgress(space.settings.name, done, max(done, self.total))

    def _go_on(self) -> None:
        if not self._running():
            raise Cancelled("the check ended early: the daemon is stopping")

    # --- trees ---------------------------------------------------------------------------------------------------------

    async def tree(self, space: Space) -> None:
        """Look at every node that is there when its turn comes."""
        try:
            await self._walk(space)
            await self._rows(space)
            if space.tree.page_count <= _COUNTED_PAGES:
                check_counts(space)
            else:
                self.report.notes.append(f"{space.settings.name}: too many pages to compare the counts while it serves; check it stopped")
        except AssertionError as error:
            if space.dropped:  # its counts are no more: it is being taken apart
                return
            self.report.add("tree", space.id, f"the tree breaks a rule, restart the daemon: {error}")

    async def _walk(self, space: Space) -> None:
        tree, slice_end = space.tree, time.perf_counter() + _SLICE_S
        node = first = 0
        while node < tree.nodes.slots.high:
            if is_node(tree, node):
                if first == 0 and tree.nodes.children[node] <= _LINKED:
                    check_links(tree, node)
                elif first == 0 and node != ROOT:
                    check_place(tree, node)
                if node != ROOT:
                    check_run(tree, node, first, first + _RUN)
                first += _RUN
            if not is_node(tree, node) or node == ROOT or first >= tree.nodes.count[node]:
                node, first = node + 1, 0
            if time.perf_counter() >= slice_end:
                await asyncio.sleep(0)
                self._go_on()
                slice_end = time.perf_counter() + _SLICE_S

    async def _rows(self, space: Space) -> None:
        """See whether blobs are kept that no page needs: their room is lost until the next start."""
        blobs, first, count, in_dram, on_ssd = space.blobs, 0, 0, 0, 0
        while first < blobs.slots.high and not space.dropped:
            rows = unneeded(blobs, first, min(first + _ROWS, blobs.slots.high))
            slots = blobs.slot[rows]
            count += len(rows)
            in_dram += sum(map(space.slot_bytes, slots[slots != NO_SLOT].tolist()))
            on_ssd += sum(map(space.stored_bytes, rows[blobs.on_ssd[rows]].tolist()))
            first += _ROWS
            await asyncio.sleep(0)
            self._go_on()
        if count and not space.dropped:
            kept = f"{count} blob{'s are' if count > 1 else ' is'} kept, and no page needs {'them' if count > 1 else 'it'}"
            self.report.add(
                "tree", space.id, f"{kept} ({in_dram} bytes of DRAM, {on_ssd} on SSD): restart the daemon to have the room back"
            )

    async def recipes(self, space: Space, checked: NamespaceChecked) -> None:
        """Verify every recipe."""
        if space.text is None or space.dropped:
            return
        try:
            found = self._store.readers.submit(check_recipes, self.report, self._store.recipes.file, space, checked)
        except RuntimeError:  # the store has closed its threads
            raise Cancelled("the check ended early: the daemon is stopping") from None
        await asyncio.wrap_future(found)
        self._go_on()
        await self._flagged(space, checked)

    async def _flagged(self, space: Space, checked: NamespaceChecked) -> None:
        """See whether the pages that may be discarded for their recipes have them."""
        pages, first = space.tree.pages, 0
        while first < pages.ranges.high and not space.dropped:
            slots = np.arange(first, min(first + _FLAGGED, pages.ranges.high))
            keys = [pages.key_bytes(slot) for slot in slots[(pages.flags[slots] & RECIPE) != 0].tolist()]
            for key, has in zip(keys, await self._store.recipes.have(space, keys), strict=True):
                if not has and (slot := pages.find_key(key)) >= 0 and pages.flags[slot] & RECIPE:  # still so
                    checked.lost_recipes += 1
                    self.report.add("recipe", space.id, f"the recipe of page {key.hex()[:16]}… is gone; a restart writes it again")
            first += _FLAGGED
            self._go_on()

    # --- blobs ---------------------------------------------------------------------------------------------------------

    async def blobs(self, space: Space, checked: NamespaceChecked) -> AsyncGenerator[CheckProgress, None]:
        """Verify every copy of every blob."""
        good_elsewhere: dict[bytes, bool] = {}
        for copies in self._batches(space):
            bad = await self._verify(space, copies)
            if space.dropped:
                return
            self._note(space, bad, good_elsewhere)
            self.report.checked_blobs += len({copy.row for copy in copies})
            self.report.checked_bytes += sum(copy.stored for copy in copies)
            await self._pace()
            self._go_on()
            if time.monotonic() - self._told >= _TELL_S:
                self._told = time.monotonic()
                yield self.progress(space)
        lost = [space.blobs.find(blob) for blob, good in good_elsewhere.items() if not good]
        if lost:
            note_losses(space, checked, lost)

    def _note(self, space: Space, found: list[_Bad], good_elsewhere: dict[bytes, bool]) -> None:
        """Write down what did not verify, and whether another copy of it may be good. A copy on SSD may just have been evicted."""
        blobs = space.blobs
        found = [bad for bad in found if bad.copy.held or (blobs.find(bad.copy.blob) == bad.copy.row and blobs.on_ssd[bad.copy.row])]
        if not found:
            return
        words = needed_by(space, [bad.copy.row for bad in found])
        for bad in found:
            row, blob, in_dram = bad.copy.row, bad.copy.blob, bad.copy.held is not None
            self.report.add("blob", space.id, f"{'DRAM' if in_dram else 'SSD'}: {bad.what}; {words[row]}")
            other = space.blobs.on_ssd[row] if in_dram else space.blobs.slot[row] != NO_SLOT
            good_elsewhere[blob] = bool(other) and blob not in good_elsewhere

    def _batches(self, space: Space) -> Iterator[list[_Copy]]:
        """Copies to verify together, pinned. Each batch is made when it is asked for, from what is there then."""
        blobs, row = space.blobs, 0
        while row < blobs.slots.high and not space.dropped:
            batch: list[_Copy] = []
            rows = nbytes = 0
            while row < blobs.slots.high and nbytes < _BATCH_BYTES and rows < _BATCH_BLOBS:
                if blobs.pages[row]:
                    copies = self._copies(space, row)
                    batch += copies
                    rows += 1
                    nbytes += sum(copy.stored for copy in copies)
                row += 1
            if batch:
                yield batch

    def _copies(self, space: Space, row: int) -> list[_Copy]:
        blob, stored = space.blobs.id_of(row), space.stored_bytes(row)
        found = []
        if (held := self._store.reading.hold_resident(space, row)) is not None:
            found.append(_Copy(row, blob, stored, held))
        if space.blobs.on_ssd[row]:
            space.pin(row)
            found.append(_Copy(row, blob, stored, None))
        return found

    async def _verify(self, space: Space, copies: list[_Copy]) -> list[_Bad]:
        """What does not verify. The pins end with the thread's work, even if nobody waits for it any more."""

        def unpin(_: object) -> None:
            for copy in copies:
                if copy.held is not None:
                    copy.held.release()
                else:
                    space.unpin(copy.row)

        try:
            work = asyncio.get_running_loop().run_in_executor(self._store.readers, _verify_copies, self._store.blob_file, space, copies)
        except RuntimeError:  # the store has closed its threads
            unpin(None)
            raise Cancelled("the check ended early: the daemon is stopping") from None
        work.add_done_callback(unpin)
        return await asyncio.shield(work)

    async def _pace(self) -> None:
        """Keep to the rate, in steps, so that a stop is noticed."""
        while self._rate and (ahead := self.report.checked_bytes / self._rate - (time.monotonic() - self.started)) > 0:
            await asyncio.sleep(min(ahead, 0.2))
            self._go_on()


def _verify_copies(blob_file: BlobFile, space: Space, copies: list[_Copy]) -> list[_Bad]:
    """In a reader's thread: the layouts and ids of pinned rows don't change."""
    bad = []
    buffer = np.empty(max(copy.stored for copy in copies), np.uint8).data
    for copy in copies:
        layout = space.blobs.layout_of(copy.row)
        try:
            if copy.held is not None:
                verify_stored(copy.blob, layout, copy.held.view)
            else:
                blob_file.read(space.number, copy.blob, layout, buffer[: copy.stored])
        except NotFound as error:
            bad.append(_Bad(copy, error.message))
    return bad
