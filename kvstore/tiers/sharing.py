"""What makes a segment fit to be mapped by others: its seals, and the words behind its slots. No arena here.

Whoever gets the descriptor can map the segment for reading, and do nothing else with it: not write, not through a mapping
made writable later, not resize. Behind the slots lies a word for the segment's state and one generation for each slot,
which the arena raises as the slot is freed, before anything else can be written there. So a reader that was told a place
with its generation, and finds the same generation after it has read, has read what it was told of. A segment's memory is
never used again once the segment is retired: who keeps it mapped sees old bytes, and old generations that were raised.
"""

import fcntl

import numpy as np
import numpy.typing as npt

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
READ_ONLY = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE

NOWHERE = 0xFFFF_FFFF
"""In place of a segment's number: the bytes are not in DRAM."""
PLACE = np.dtype([("segment", "<u4"), ("slot", "<u4"), ("offset", "<u8"), ("generation", "<u8")])
"""Where bytes lie: segment, slot in it, offset of the slot, and the slot's generation."""
STATE = 0
"""Index of the segment's state among its words; the slots' generations follow."""
RETIRED = np.uint64(1)
"""State of a segment that was given back: unmap it."""

Words = npt.NDArray[np.uint64]
_WORD = 8


def tail_bytes(slot_bytes: int, slots: int) -> int:
    """Bytes behind `slot_bytes` of slots: up to the next multiple of a word, then state and generations."""
    return -slot_bytes % _WORD + _WORD * (1 + slots)


def words_of(segment: memoryview, slots: int) -> Words:
    """State and generations, at the end of a mapped segment."""
    return np.frombuffer(segment, np.uint64, 1 + slots, len(segment) - _WORD * (1 + slots))


def seal(fd: int) -> None:
    """From now on others can only read it; mappings made before stay writable. Raises OSError where the kernel can't (before 5.1)."""
    fcntl.fcntl(fd, F_ADD_SEALS, READ_ONLY)


def is_sealed(fd: int) -> bool:
    """Whether `seal` has been there."""
    return fcntl.fcntl(fd, F_GET_SEALS) & READ_ONLY == READ_ONLY
