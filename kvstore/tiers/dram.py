"""The DRAM tier: memfd segments cut into slots of one size each.

`Arena` is bookkeeping on the loop's thread; what can block (making a segment, which zeroes its memory) is the function
`create_segment`, to be called in an executor. A segment holds one slot size and one tenant's bytes, and is given back
when its last slot is freed and its memory is wanted.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass, field

from kvstore.tiers import Usage

_SLOT_ALIGN = 256
_HUGE = 2 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_SEGMENT_SHIFT = 32
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class SlotClass:
    """What a segment is made for: whose bytes, and how many a slot (as asked for, before rounding)."""

    tenant: str
    slot_bytes: int


@dataclass(slots=True)
class Segment:
    """One memfd. `free` holds the numbers of its free slots."""

    slot_class: SlotClass
    slots: int
    fd: int
    memory: mmap.mmap
    view: memoryview
    free: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return self.slots * self.slot_class.slot_bytes


def create_segment(slot_class: SlotClass, slots: int) -> Segment:
    """Make a segment with its memory already there, so that nobody waits for the kernel to zero it later. Blocking.

    Raises OSError if the machine has no memory for it.
    """
    size = slot_class.slot_bytes * slots
    fd = os.memfd_create("kvstore-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_HUGEPAGE)
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
            os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return Segment(slot_class, slots, fd, memory, memoryview(memory), list(range(slots - 1, -1, -1)))


class Arena:
    """Slots of all segments. A slot is named by one int: segment number and slot number."""

    def __init__(self, capacity: int, segment_bytes: int = 64 << 20) -> None:
        self.capacity = capacity
        self.segment_bytes = min(segment_bytes, max(capacity // 8, 1))
        self._segments: dict[int, Segment] = {}
        self._open: dict[SlotClass, list[int]] = {}
        self._reserved = 0
        self._used = 0
        self._next = 0

    def usage(self) -> Usage:
        """Capacity, and the bytes of slots in use."""
        return Usage(self.capacity, self._used)

    @property
    def segment_count(self) -> int:
        """Segments that exist."""
        return len(self._segments)

    @staticmethod
    def slot_class(tenant: str, nbytes: int) -> SlotClass:
        """The class whose slots hold `nbytes`."""
        return SlotClass(tenant, -(-nbytes // _SLOT_ALIGN) * _SLOT_ALIGN)

    def allocate(self, slot_class: SlotClass) -> int | None:
        """A free slot, or None: then a segment has to be added first, or something freed."""
        numbers = self._open.get(slot_class)
        if not numbers:
            return None
        number = numbers[-1]
        segment = self._segments[number]
        slot = segment.free.pop()
        if not segment.free:
            numbers.pop()
        self._used += slot_class.slot_bytes
        return number << _SEGMENT_SHIFT | slot

    def reserve_segment(self, slot_class: SlotClass) -> int:
        """Set room aside for a new segment and return how many slots it may have; 0 if there is no room for one.

        Empty segments of other classes are given back first. Follow with `add_segment` or `cancel_segment`.
        """
        slots = max(1, self.segment_bytes // slot_class.slot_bytes)
        wanted = slots * slot_class.slot_bytes
        if self._reserved + wanted > self.capacity:
            self._give_back_empty(slot_class)
        slots = min(slots, (self.capacity - self._reserved) // slot_class.slot_bytes)
        self._reserved += slots * slot_class.slot_bytes
        return slots

    def cancel_segment(self, slot_class: SlotClass, slots: int) -> None:
        """Undo `reserve_segment`."""
        self._reserved -= slots * slot_class.slot_bytes

    def add_segment(self, segment: Segment) -> None:
        """Take in a segment whose room was reserved."""
        self._segments[self._next] = segment
        self._open.setdefault(segment.slot_class, []).append(self._next)
        self._next += 1

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, writable."""
        segment = self._segments[slot >> _SEGMENT_SHIFT]
        size = segment.slot_class.slot_bytes
        start = (slot & 0xFFFFFFFF) * size
        return segment.view[start : start + size]

    def free(self, slot: int) -> None:
        """Give a slot back."""
        number = slot >> _SEGMENT_SHIFT
        segment = self._segments[number]
        if not segment.free:
            self._open.setdefault(segment.slot_class, []).append(number)
        segment.free.append(slot & 0xFFFFFFFF)
        self._used -= segment.slot_class.slot_bytes

    def slot_bytes(self, slot: int) -> int:
        """Bytes a slot takes up."""
        return self._segments[slot >> _SEGMENT_SHIFT].slot_class.slot_bytes

    def _give_back_empty(self, keep: SlotClass | None) -> None:
        for number, segment in list(self._segments.items()):
            if len(segment.free) == segment.slots and segment.slot_class != keep:
                self._open[segment.slot_class].remove(number)
                del self._segments[number]
                self._reserved -= segment.nbytes
                os.close(segment.fd)

    def close(self) -> None:
        """Give back every segment. Views still held elsewhere stay readable until they are dropped."""
        for segment in self._segments.values():
            os.close(segment.fd)
        self._segments.clear()
        self._open.clear()
        self._reserved = self._used = 0
