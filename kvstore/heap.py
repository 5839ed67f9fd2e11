"""How the C library's heap gives freed memory back to the kernel: not with every request.

A match of a long context makes some megabytes of arrays and buffers, and frees them. By default glibc gives such memory back at once, and
the next request pays a page fault for each 4 KiB of it: about half of what a match of 500,000 tokens took.
"""

import ctypes

KEPT = 16 << 20
"""Bytes at the end of the heap that are kept though they are free."""
LARGE = 4 << 20
"""Allocations from this size on are mapped by themselves, and given back when they are freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep up to `KEPT` bytes of freed memory in a heap. False where the C library has no such choice."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_M_MMAP_THRESHOLD, LARGE))
