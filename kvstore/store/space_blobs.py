"""The blobs of a namespace: where their bytes are, who has them in use, and when they go.

Of pages it knows only how many need a blob. Bookkeeping on the loop's thread: no await, no I/O. What has to be deleted on disk is queued
in `Trash`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.kvspec import SliceLayout
from kvstore.store.trash import Trash
from kvstore.store.watchers import Follower
from kvstore.tiers.blobs import NO_SLOT, BlobTable, stored_bytes
from kvstore.tiers.dram import Arena
from kvstore.tiers.extent_file import BLOCK_BYTES

OWNER_SHIFT = 32
OWNER_ROW = (1 << OWNER_SHIFT) - 1
"""A DRAM slot's owner, as the arena notes it: the namespace's number, then the blob's row."""


class SpaceBlobs:
    """The part of a `Space` that is about blobs, by their rows in its table."""

    def __init__(self, number: int, max_blobs: int, arena: Arena, trash: Trash) -> None:
        self.number = number
        self.blobs = BlobTable(max_blobs)
        self.follower: Follower | None = None
        """Set by the store if somebody follows where pages are."""
        self.resident_bytes = 0
        self.spoiled: set[int] = set()
        """Blob rows whose DRAM copy did not verify, and is still in use by somebody."""
        self._replaced: dict[int, list[int]] = {}
        """By blob row, the DRAM slots that were its own before a good copy took their place: kept for those who have them in use."""
        self._arena = arena
        self._trash = trash

    def ssd_bytes(self) -> int:
        """Bytes of the blocks that the namespace's blobs take up on SSD. Looks at every blob."""
        stored = self.blobs.stored_of(np.flatnonzero(self.blobs.on_ssd[: self.blobs.slots.high]).astype(np.int32))
        blocks: int = (-(-stored // BLOCK_BYTES)).sum()
        return int(blocks) * BLOCK_BYTES

    def stored_bytes(self, row: int) -> int:
        """Bytes of a blob's stored form."""
        return stored_bytes(self.blobs.layout_of(row))

    def slot_bytes(self, slot: int) -> int:
        """Bytes that a DRAM slot takes up."""
        return self._arena.slot_bytes(slot)

    def set_slot(self, row: int, slot: int) -> None:
        """Record that a blob is in a DRAM slot."""
        self.blobs.slot[row] = slot
        self._arena.set_owner(slot, self.number << OWNER_SHIFT | row)
        self.resident_bytes += self._arena.slot_bytes(slot)
        if self.follower is not None:
            self.follower.moved(row)

    def take_new(self, names: Sequence[bytes], layouts: Sequence[SliceLayout], slots: Sequence[int]) -> list[int]:
        """The rows of blobs, all different and none of them there, that are in these DRAM slots, each pinned once. Raises NoSpace."""
        blobs = self.blobs
        if len(names) == 1:  # several numpy calls cost more than all else of a small put
            rows = [blobs.add(names[0], layouts[0])]
            blobs.pins[rows[0]], blobs.slot[rows[0]] = 1, slots[0]
        else:
            taken = blobs.add_many(names, layouts)
            blobs.pins[taken], blobs.slot[taken] = 1, slots
            rows = taken.tolist()
        for row, slot in zip(rows, slots, strict=True):
            self._arena.set_owner(slot, self.number << OWNER_SHIFT | row)
            self.resident_bytes += self._arena.slot_bytes(slot)
            if self.follower is not None:
                self.follower.moved(row)
        return rows

    def replace_slot(self, row: int, slot: int) -> None:
        """Put a good copy in the place of a bad one. The bad one goes with the last who has the blob in use: the caller has it pinned."""
        bad = int(self.blobs.slot[row])
        self.spoiled.discard(row)
        self._replaced.setdefault(row, []).append(bad)
        self.resident_bytes -= self._arena.slot_bytes(bad)
        self.set_slot(row, slot)

    def clear_slot(self, row: int) -> int:
        """Free a blob's DRAM slot, if it has one. Returns the bytes freed."""
        slot = int(self.blobs.slot[row])
        self.spoiled.discard(row)
        if slot == NO_SLOT:
            return 0
        freed = self._arena.slot_bytes(slot)
        self._arena.free(slot)
        self.blobs.slot[row] = NO_SLOT
        self.resident_bytes -= freed
        if self.follower is not None:
            self.follower.moved(row)
        return freed

    def spoil(self, row: int) -> None:
        """The DRAM copy of a blob that is on SSD is bad: nobody gets it any more, and it goes with the last who has it."""
        self.spoiled.add(row)
        self.settle(row)

    def needed(self, rows: npt.NDArray[np.int32]) -> None:
        """Pages need these blobs, one more for each time that it is named; -1 is none."""
        if rows.size == 1:
            for row in rows.ravel().tolist():
                self.blobs.pages[row] += row >= 0
        else:
            np.add.at(self.blobs.pages, rows[rows >= 0], 1)

    def pin(self, row: int) -> None:
        """Keep a blob's bytes where they are until `unpin`."""
        self.blobs.pins[row] += 1

    def unpin(self, row: int) -> None:
        """Undo one `pin`; a blob nobody needs any more goes with the last one."""
        self.blobs.pins[row] -= 1
        self.settle(row)

    def settle(self, row: int) -> None:
        """Give up what nobody needs: the SSD copy without durable pages, and the whole blob without pages.

        Pinned is where the bytes are now: of a blob in DRAM, the copy on SSD may go meanwhile, and who waits for room gets it.
        """
        blobs, pinned = self.blobs, bool(self.blobs.pins[row])
        if not pinned and row in self._replaced:
            for slot in self._replaced.pop(row):
                self._arena.free(slot)
        if row in self.spoiled and not pinned:
            self.clear_slot(row)
        if blobs.on_ssd[row] and not blobs.durable_pages[row]:
            in_dram = blobs.slot[row] != NO_SLOT and row not in self.spoiled
            if in_dram or not (pinned or blobs.pages[row]):
                blobs.on_ssd[row] = False
                self._trash.blobs.append((self.number, blobs.id_of(row), self.stored_bytes(row)))
        if not pinned and not blobs.pages[row]:
            self.clear_slot(row)
            blobs.remove(row)
