"""Memory files (memfds) mapped where huge pages fit, and put onto them.

A map of small pages costs a fault and an entry in the page table for every 4 KiB, in every process that has it, and copies walk
through all of them; a huge page is 2 MiB. As a rule the system gives shared memory none by itself (`shmem_enabled` is `never`), but
from Linux 6.1 on a process may ask for them (MADV_COLLAPSE), if the map begins at a multiple of their size.
"""

import ctypes
import errno
import mmap
import os

import numpy as np

HUGE_PAGE = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 22, 23, 25
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_memfd(descriptor: int, nbytes: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE) -> tuple[mmap.mmap, memoryview]:
    """The first `nbytes` of a memory file: the map, to be closed, and its bytes. The descriptor may be closed.

    Raises OSError if there is no address space, or the file may not be mapped so.
    """
    # Addresses only, with room to choose from. The file is put over them, and goes with them.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, nbytes + (HUGE_PAGE if nbytes >= HUGE_PAGE else 0), flags=flags, prot=prot)
    except OverflowError as too_many:
        raise OSError(errno.ENOMEM, str(too_many)) from None
    first = int(np.frombuffer(memory, np.uint8).ctypes.data)
    skipped = -first % HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    if _libc.mmap(first + skipped, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) == _FAILED:
        error = ctypes.get_errno()
        memory.close()
        raise OSError(error, os.strerror(error))
    return memory, memoryview(memory)[skipped : skipped + nbytes]


def populate(view: memoryview) -> bool:
    """Have the memory of a map that can be written there, on huge pages as far as they can be had. False if it is not all there. Blocking.

    What is in it stays.
    """
    first = int(np.frombuffer(view, np.uint8).ctypes.data)
    make_huge(view)
    return not _libc.madvise(first, len(view), _MADV_POPULATE_WRITE)


def prefault(view: memoryview) -> None:
    """Have the memory of a map at hand for reading, so that nobody waits for it page by page later. Blocking."""
    _libc.madvise(int(np.frombuffer(view, np.uint8).ctypes.data), len(view), _MADV_POPULATE_READ)


def make_huge(view: memoryview) -> bool:
    """Put the memory of a map that can be written onto huge pages, what there is of whole ones. False if that can't be done. Blocking.

    What is in it stays. A page of 16 MiB of zeros takes 0.8 ms so, and 9 by small pages (measured).
    """
    first = int(np.frombuffer(view, np.uint8).ctypes.data)
    whole = len(view) // HUGE_PAGE * HUGE_PAGE
    if not whole or first % HUGE_PAGE:
        return False
    _libc.madvise(first, whole, _MADV_HUGEPAGE)  # where the system gives them so, the next lines take them
    for start in range(first, first + whole, HUGE_PAGE):
        if _libc.madvise(start, mmap.PAGESIZE, _MADV_POPULATE_WRITE):  # of nothing at all nothing is collapsed
            return False
    return not _libc.madvise(first, whole, _MADV_COLLAPSE)
