"""The blob table of one namespace: which blobs exist, in which tiers, and who needs them. Pure bookkeeping in columns.

Stored form of a blob, in a DRAM slot and on SSD alike: the payload, then its digest table (16 bytes a slice). The blob id
is the digest of the table, so whoever holds the id can verify everything.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.columns import SlotAllocator, column, reserve
from kvstore.digests import DIGEST_BYTES
from kvstore.hash_index import HashIndex
from kvstore.kvspec import SliceLayout

NO_SLOT = -1
_FEW = 8


class BlobTable:
    """One row a blob: `pages` and `durable_pages` count the pages (with a journal record) that need it, `pins` the
    transfers that use it; `slot` is its DRAM slot or -1, `on_ssd` whether its bytes are durably there.
    """

    def __init__(self, capacity: int) -> None:
        self.slots = SlotAllocator(capacity, "blobs")
        self._id_memory = reserve(capacity * DIGEST_BYTES)
        self._index = HashIndex()
        self.pages: npt.NDArray[np.int32] = column(capacity, np.int32)
        self.durable_pages: npt.NDArray[np.int32] = column(capacity, np.int32)
        self.pins: npt.NDArray[np.int32] = column(capacity, np.int32)
        self.slot: npt.NDArray[np.int64] = column(capacity, np.int64)
        self.on_ssd: npt.NDArray[np.bool_] = column(capacity, np.bool_)
        self._layout: npt.NDArray[np.uint16] = column(capacity, np.uint16)
        self._layouts: list[SliceLayout] = []
        self._layout_numbers: dict[SliceLayout, int] = {}

    ROW_BYTES = DIGEST_BYTES + 4 + 4 + 4 + 8 + 1 + 2

    @property
    def count(self) -> int:
        """Blobs in the table."""
        return self.slots.used

    def memory(self) -> int:
        """Bytes in use, the index included."""
        return self.slots.high * self.ROW_BYTES + self._index.nbytes

    def find(self, blob_id: bytes) -> int:
        """The row of a blob, or -1."""
        for row in self._index.candidates(int.from_bytes(blob_id[:8], "little")):
            if self.id_of(row) == blob_id:
                return row
        return -1

    def find_many(self, names: bytes) -> npt.NDArray[np.int32]:
        """The row of each blob, or -1; ids of 16 bytes, one after the other."""
        if not names:
            return np.zeros(0, np.int32)
        if (first := self._find_run(names)) >= 0:
            return np.arange(first, first + len(names) // DIGEST_BYTES, dtype=np.int32)
        rows = np.array(self._index.first_many(np.frombuffer(names, "<u8")[:: DIGEST_BYTES // 8].tolist()), np.int32)
        if rows.max() < 0 or (rows.min() >= 0 and self.ids_of(rows) == names):
            return rows
        return np.array([self.find(names[at : at + DIGEST_BYTES]) for at in range(0, len(names), DIGEST_BYTES)], np.int32)

    def find_each(self, names: Sequence[bytes]) -> list[int]:
        """As `find_many`. Few are looked up one by one: behind bulk nothing is in the caches, and each thing asked of numpy takes 20 µs."""
        if len(names) <= _FEW:
            return [self.find(name) for name in names]
        found: list[int] = self.find_many(b"".join(names)).tolist()
        return found

    def _find_run(self, names: bytes) -> int:
        """The first of the rows of some blobs if those lie in a row, as what was put at once does, and all of it is in DRAM; else -1.

        One comparison in place of a look-up each. A row that was given back still has its id, but no slot.
        """
        first = self.find(names[:DIGEST_BYTES])
        last = first + len(names) // DIGEST_BYTES
        if first < 0 or last > self.slots.high or self._id_memory[first * DIGEST_BYTES : last * DIGEST_BYTES] != names:
            return -1
        return first if self.slot[first:last].min() != NO_SLOT else -1

    def id_of(self, row: int) -> bytes:
        """The blob id in a row."""
        return self._id_memory[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]

    def ids_of(self, rows: npt.NDArray[np.int32] | Sequence[int]) -> bytes:
        """Blob ids of several rows, 16 bytes each."""
        table = np.frombuffer(self._id_memory, np.uint8, self.slots.high * DIGEST_BYTES).reshape(-1, DIGEST_BYTES)
        return np.take(table, rows, axis=0).tobytes()

    def layout_of(self, row: int) -> SliceLayout:
        """How the blob's payload is cut into slices."""
        return self._layouts[int(self._layout[row])]

    def common_layout(self, rows: npt.NDArray[np.int32]) -> SliceLayout | None:
        """As `layout_of`, of several rows that have the same; None if they don't."""
        numbers = self._layout[rows]
        return self._layouts[int(numbers[0])] if numbers.min() == numbers.max() else None

    def layouts_of(self, rows: Sequence[int]) -> list[SliceLayout]:
        """As `layout_of`, of several rows."""
        if len(rows) == 1:
            return [self.layout_of(rows[0])]
        layouts = self._layouts
        return [layouts[number] for number in self._layout[rows].tolist()]

    def stored_of(self, rows: npt.NDArray[np.int32] | Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes of the stored form of several blobs."""
        sizes = np.array([stored_bytes(layout) for layout in self._layouts], np.int64)
        return sizes[self._layout[rows]]

    def ssd_sizes(self) -> dict[int, int]:
        """How many blobs are on SSD, by the bytes of their stored form. May run in another thread, for an estimate."""
        high, layouts = self.slots.high, list(self._layouts)
        counts = np.bincount(self._layout[:high][self.on_ssd[:high]], minlength=len(layouts))
        sizes: Counter[int] = Counter()
        for layout, count in zip(layouts, counts.tolist(), strict=False):
            sizes[stored_bytes(layout)] += count
        return sizes

    def add(self, blob_id: bytes, layout: SliceLayout) -> int:
        """A new row, in no tier and needed by nobody."""
        row = self.slots.allocate()
        self._id_memory[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES] = blob_id
        self.pages[row] = self.durable_pages[row] = self.pins[row] = 0
        self.slot[row] = NO_SLOT
        self.on_ssd[row] = False
        self._layout[row] = self._number_of(layout)
        self._index.add(int.from_bytes(blob_id[:8], "little"), row)
        return row

    def add_many(self, blob_ids: Sequence[bytes], layouts: Sequence[SliceLayout]) -> npt.NDArray[np.int32]:
        """As `add`, of several, none of which is there. Raises NoSpace, with none added."""
        rows = self.slots.allocate_many(len(blob_ids))
        ids = np.frombuffer(b"".join(blob_ids), np.uint8).reshape(-1, DIGEST_BYTES)
        np.frombuffer(self._id_memory, np.uint8, self.slots.high * DIGEST_BYTES).reshape(-1, DIGEST_BYTES)[rows] = ids
        self.pages[rows] = self.durable_pages[rows] = self.pins[rows] = 0
        self.slot[rows] = NO_SLOT
        self.on_ssd[rows] = False
        self._layout[rows] = [self._number_of(layout) for layout in layouts]
        self._index.add_many(ids[:, :8].copy().view("<u8")[:, 0].tolist(), rows.tolist())
        return rows

    def _number_of(self, layout: SliceLayout) -> int:
        number = self._layout_numbers.get(layout)
        if number is None:
            number = self._layout_numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return number

    def adopt(
        self, ids: npt.NDArray[np.uint8], layout: npt.NDArray[np.uint16], layouts: list[SliceLayout], pages: npt.NDArray[np.int32]
    ) -> None:
        """Fill an empty table with blobs that are on SSD: rows of 16-byte ids, layouts by number, pages that need each.

        May run in another thread while nobody adds to the table: the blobs are found only once everything is in place.
        """
        count = len(ids)
        if self.slots.high:
            raise AssertionError("the table is not empty")
        self.slots.allocate_many(count)
        np.frombuffer(self._id_memory, np.uint8, count * DIGEST_BYTES).reshape(-1, DIGEST_BYTES)[:] = ids
        self.pages[:count] = self.durable_pages[:count] = pages
        self.slot[:count] = NO_SLOT
        self.on_ssd[:count] = True
        self._layouts = list(dict.fromkeys(layouts))
        self._layout_numbers = {known: number for number, known in enumerate(self._layouts)}
        self._layout[:count] = np.array([self._layout_numbers[known] for known in layouts], np.uint16)[layout]
        self._index = HashIndex.built(ids[:, :8].copy().view("<u8")[:, 0], np.arange(count, dtype=np.int32))

    def remove(self, row: int) -> None:
        """Forget a blob that is in no tier, needed and used by nobody."""
        if self.pages[row] or self.pins[row] or self.slot[row] != NO_SLOT or self.on_ssd[row]:
            raise AssertionError(f"blob row {row} is still in use")
        self._index.remove(int.from_bytes(self.id_of(row)[:8], "little"), row)
        self.slots.free(row)


def stored_bytes(layout: SliceLayout) -> int:
    """Bytes of a blob's stored form: payload and digest table."""
    return layout.payload_bytes + DIGEST_BYTES * layout.count
