"""Columns: fixed-width slots in flat arrays, so that a page costs bytes and not Python objects.

A column reserves address space for its full capacity at once; the kernel commits memory only for slots that were
written. So columns never grow by copying, and views of them stay valid.
"""

import mmap
from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import NoSpace

_MAP_NORESERVE = 0x4000
_SAMPLE = 1024


def reserve(nbytes: int) -> mmap.mmap:
    """Zeroed private memory of `nbytes` that costs nothing until it is touched."""
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def column(capacity: int, dtype: npt.DTypeLike, width: int = 1) -> npt.NDArray[Any]:
    """An array of `capacity` slots (rows of `width` items if `width` is over 1) of reserved memory."""
    item = np.dtype(dtype)
    flat = np.frombuffer(reserve(capacity * width * item.itemsize), dtype=item, count=capacity * width)
    return flat if width == 1 else flat.reshape(capacity, width)


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The different values, ascending. `np.unique` hashes them since numpy 2.3, which takes ten to twenty times as long for many."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def runs_of(*columns: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Runs of rows that are equal in all columns: where they start, and how long they are."""
    count = len(columns[0])
    if not count:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    differ = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        differ |= column[1:] != column[:-1]
    ends = differ.nonzero()[0]
    starts, lengths = np.zeros(len(ends) + 1, np.int64), np.empty(len(ends) + 1, np.int64)
    np.add(ends, 1, out=starts[1:])
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1] = count - starts[-1]
    return starts, lengths


def nth_least(values: npt.NDArray[Any], number: int) -> Any:
    """The value that so many others come before in order. Of a small part of many values it looks for those that a sample lets expect."""
    if len(values) > _SAMPLE * 4 and number < len(values) // 8:
        sample = values[:: len(values) // _SAMPLE]
        limit = np.partition(sample, among := number * 3 * len(sample) // (2 * len(values)) + 8)[among]
        low = values[values <= limit]
        if len(low) > number:
            values = low
    return np.partition(values, number)[number]


def nth_least_of_many(values: npt.NDArray[Any], counts: npt.NDArray[np.int64], number: int) -> Any:
    """As `nth_least`, where each value stands for so many that are equal to it; of all these there must be more than `number`."""
    likely = 2 * number * len(values) // int(counts.sum()) + 1
    if likely < len(values) // 2:
        low = values <= nth_least(values, likely)
        if counts[low].sum() > number:
            values, counts = values[low], counts[low]
    order = np.argsort(values)
    return values[order[counts[order].cumsum().searchsorted(number, side="right")]]


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column that somebody else wants kept beside the rows of a table: one number of this type a row, at first 0."""

    name: str
    dtype: str


class SlotAllocator:
    """Hands out single slots of a column; freed slots are used again first."""

    def __init__(self, capacity: int, what: str) -> None:
        self.capacity = capacity
        self._what = what
        self._next = 0
        self._free = array("i")

    @property
    def used(self) -> int:
        """Slots handed out now."""
        return self._next - len(self._free)

    @property
    def high(self) -> int:
        """One past the highest slot ever handed out."""
        return self._next

    @property
    def available(self) -> int:
        """Slots that can still be handed out."""
        return self.capacity - self.used

    def allocate(self) -> int:
        """One free slot; NoSpace if there is none."""
        if self._free:
            return self._free.pop()
        if self._next >= self.capacity:
            raise NoSpace(f"the table of {self._what} is full ({self.capacity})")
        self._next += 1
        return self._next - 1

    def allocate_many(self, count: int) -> npt.NDArray[np.int32]:
        """`count` free slots as an int32 array; NoSpace (and none taken) if there are not so many."""
        if count > self.available:
            raise NoSpace(f"the table of {self._what} is full ({self.capacity})")
        reused = min(count, len(self._free))
        out = np.empty(count, dtype=np.int32)
        if reused:
            out[:reused] = self._free[len(self._free) - reused :]
            del self._free[len(self._free) - reused :]
        out[reused:] = np.arange(self._next, self._next + count - reused, dtype=np.int32)
        self._next += count - reused
        return out

    def allocate_few(self, count: int) -> list[int]:
        """As `allocate_many`, as a list: for few that is cheaper than an array."""
        if count > self.available:
            raise NoSpace(f"the table of {self._what} is full ({self.capacity})")
        return [self.allocate() for _ in range(count)]

    def free(self, slot: int) -> None:
        """Give one slot back."""
        self._free.append(slot)

    def free_many(self, slots: npt.NDArray[np.int32]) -> None:
        """Give slots back."""
        self._free.frombytes(np.ascontiguousarray(slots, dtype=np.int32).tobytes())


class RangeAllocator:
    """Hands out runs of consecutive slots, best fit, neighbours coalesced when freed.

    Any part of a run may be freed alone, which is what a split or a trim of a radix node needs.
    """

    def __init__(self, capacity: int, what: str) -> None:
        self.capacity = capacity
        self._what = what
        self._next = 0
        self._free_total = 0
        self._length_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._starts_of_length: dict[int, set[int]] = {}
        self._lengths: list[int] = []

    @property
    def used(self) -> int:
        """Slots handed out now."""
        return self._next - self._free_total

    @property
    def high(self) -> int:
        """One past the highest slot ever handed out."""
        return self._next

    @property
    def free_ranges(self) -> dict[int, int]:
        """Start to length of every free range below `high` (a copy, for invariant checks)."""
        return dict(self._length_at)

    def allocate(self, length: int) -> int:
        """The start of a free run of `length` slots; NoSpace if there is none."""
        at = bisect_left(self._lengths, length)
        if at < len(self._lengths):
            found = self._lengths[at]
            start = next(iter(self._starts_of_length[found]))
            self._take_range(start, found)
            if found > length:
                self._put_range(start + length, found - length)
            return start
        if self._next + length > self.capacity:
            raise NoSpace(f"the table of {self._what} is full ({self.capacity})")
        start = self._next
        self._next += length
        return start

    def extend(self, end: int, length: int) -> bool:
        """Take the `length` slots right after a run that ends at `end`, if they are free."""
        if end == self._next:
            if end + length > self.capacity:
                return False
            self._next += length
            return True
        found = self._length_at.get(end, 0)
        if found < length:
            return False
        self._take_range(end, found)
        if found > length:
            self._put_range(end + length, found - length)
        return True

    def free(self, start: int, length: int) -> None:
        """Give a run, or any part of one, back."""
        if length == 0:
            return
        before = self._start_of_end.get(start)
        if before is not None:
            self._take_range(before, start - before)
            start, length = before, length + start - before
        after = self._length_at.get(start + length)
        if after is not None:
            self._take_range(start + length, after)
            length += after
        if start + length == self._next:
            self._next = start
        else:
            self._put_range(start, length)

    def _put_range(self, start: int, length: int) -> None:
        self._free_total += length
        self._length_at[start] = length
        self._start_of_end[start + length] = start
        starts = self._starts_of_length.get(length)
        if starts is None:
            self._starts_of_length[length] = {start}
            insort(self._lengths, length)
        else:
            starts.add(start)

    def _take_range(self, start: int, length: int) -> None:
        self._free_total -= length
        del self._length_at[start]
        del self._start_of_end[start + length]
        starts = self._starts_of_length[length]
        starts.discard(start)
        if not starts:
            del self._starts_of_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
