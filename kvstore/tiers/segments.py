"""Segments of the DRAM tier: memfds cut into slots of one size, made and closed with their memory.

`make_segment` and `close_segments` can block, as they zero and free memory: call them in an executor.
"""

import contextlib
import gc
import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.memfds import map_memfd, populate
from kvstore.tiers.sharing import RETIRED, STATE, Words, seal, tail_bytes, words_of

NO_OWNER = -1
_SLOT_ALIGN = 256
"""Slots are multiples of so many bytes."""
_LARGE_BYTES, _LARGE_ALIGN = 256 << 10, 4096
"""Large ones of pages, so that SSD can be read straight into each (see extent_file.py)."""
_COLLECT_EVERY_S = 5.0
"""A look for cycles takes the whole process some hundredths of a second."""


@dataclass(frozen=True, slots=True)
class SlotClass:
    """What a segment is made for: whose bytes, and how many a slot (as asked for, before rounding)."""

    tenant: str
    slot_bytes: int


def slot_bytes_for(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes of the slots that so many bytes each are put into."""
    align = np.where(nbytes < _LARGE_BYTES, _SLOT_ALIGN, _LARGE_ALIGN)
    return -(-nbytes // align) * align


def slot_bytes_of(nbytes: int) -> int:
    """As `slot_bytes_for`, of one."""
    align = _SLOT_ALIGN if nbytes < _LARGE_BYTES else _LARGE_ALIGN
    return -(-nbytes // align) * align


@dataclass(slots=True)
class Segment:
    """One memfd. `free` holds the numbers of its free slots, `owner` who says that a slot is theirs (-1 for nobody).

    `words` lie behind its slots: what those who have it mapped learn of them (see kvstore/tiers/sharing.py).
    """

    slot_class: SlotClass
    slots: int
    fd: int
    memory: mmap.mmap
    view: memoryview
    free: list[int]
    owner: npt.NDArray[np.int64]
    words: Words
    shut: bool = False
    """Being vacated: its free slots are not handed out."""

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return self.slots * self.slot_class.slot_bytes

    @property
    def empty(self) -> bool:
        """Whether none of its slots is taken."""
        return len(self.free) == self.slots


@dataclass(frozen=True, slots=True)
class Room:
    """Room set aside for a new segment of `slots` slots. `retired` are the segments to close before it is made."""

    slot_class: SlotClass
    slots: int
    retired: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the new segment."""
        return self.slots * self.slot_class.slot_bytes

    @property
    def held(self) -> int:
        """Bytes that are taken from the budget until the segment is there."""
        return max(self.nbytes, sum(segment.nbytes for segment in self.retired))


def create_segment(slot_class: SlotClass, slots: int) -> Segment:
    """Make a segment with its memory already there, so that nobody waits for the kernel to zero it later. Blocking.

    Raises OSError if the machine has no memory for it.
    """
    slot_bytes = slot_class.slot_bytes * slots
    size = slot_bytes + tail_bytes(slot_bytes, slots)
    fd = os.memfd_create("kvstore-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        memory, view = map_memfd(fd, size)
        if not populate(view):
            os.posix_fallocate(fd, 0, size)
        with contextlib.suppress(OSError):  # a kernel before 5.1: then nobody gets it
            seal(fd)
    except BaseException:
        os.close(fd)
        raise
    free, owner = list(range(slots - 1, -1, -1)), np.full(slots, NO_OWNER, np.int64)
    return Segment(slot_class, slots, fd, memory, view, free, owner, words_of(view, slots))


def close_segments(segments: Iterable[Segment]) -> None:
    """Give the memory of segments back to the system. Views still held elsewhere stay readable until they are dropped. Blocking."""
    held = []
    for segment in segments:
        segment.words[STATE] = RETIRED
        segment.words = np.zeros(0, np.uint64)  # or the mapping could not be closed
        segment.view.release()
        try:
            segment.memory.close()
        except BufferError:
            held.append(segment.memory)
        os.close(segment.fd)
    if held and _collector.due():
        gc.collect()  # a request that broke leaves its views in a cycle with its error: the memory would stay until that is found
        for memory in held:
            with contextlib.suppress(BufferError):
                memory.close()


class _Collector:
    """Says now and then that it is time to look for cycles, which takes the whole process some hundredths of a second."""

    def __init__(self) -> None:
        self._last = -_COLLECT_EVERY_S

    def due(self) -> bool:
        """Whether the last time is long enough ago."""
        now = time.monotonic()
        if now - self._last < _COLLECT_EVERY_S:
            return False
        self._last = now
        return True


_collector = _Collector()


def make_segment(room: Room) -> Segment:
    """Make the segment that room was set aside for, once what was there is closed. Blocking; raises OSError."""
    close_segments(room.retired)
    return create_segment(room.slot_class, room.slots)
