"""Reading a file past the page cache (O_DIRECT), where the bytes belong or into buffers that are made for it. Blocking.

The disk writes into the memory itself. What that costs depends on how many places in memory that is: a huge page is one. DRAM segments
are on huge pages where the system gives them (decision 0031), and so are the buffers, which are used again and again.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
ALIGNMENT = 512
"""Of memory that a disk writes to, at least; one that wants more says so, and is read otherwise."""
BUFFER_BYTES = 2 * _HUGE
"""One read can have so many, less two pages."""
LARGEST_READ = BUFFER_BYTES - 2 * _PAGE
_NOT_SO = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_KEPT = 8
"""Buffers that are kept for the next reads."""


class DirectFile:
    """A file that is read past the page cache, by any number of threads. Unless the file system can't, then `works` is false."""

    def __init__(self, path: Path) -> None:
        self._buffers: list[memoryview] = []
        self._seen: mmap.mmap | None = None
        """The file mapped, to be asked about and never to be read."""
        self._cached_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_SO:
                os.close(self._cached_fd)
                raise
            self._fd = -1
        self.works = self._fd >= 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._cached_fd)
        if self._fd >= 0:
            os.close(self._fd)
        self._buffers.clear()
        self._seen = None

    def cached(self, at: int, nbytes: int) -> bool:
        """Whether the page cache has all of the bytes from `at` on. Nothing is read for it."""
        seen = self._seen
        if seen is None or at + nbytes > len(seen):
            try:
                seen = self._seen = mmap.mmap(self._cached_fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            except (OSError, ValueError):  # an empty file, for one
                return False
            if at + nbytes > len(seen):
                return False
        return _resident(seen, at, 1) and _resident(seen, at, nbytes)

    @contextmanager
    def read(self, at: int, nbytes: int) -> Iterator[memoryview | None]:
        """The bytes from `at` on, to be copied; None if the file system does not read so after all, or there is no memory to read into.

        Fewer than `nbytes` where the file ends before, or where the system gave a part of a page: so nothing can be read behind that.
        Raises OSError.
        """
        start = at & -_PAGE
        size = -(-(at + nbytes - start) // _PAGE) * _PAGE
        buffer = self._buffer()
        if buffer is None:
            yield None
            return
        try:
            got = self._fill(buffer[:size], start)
            yield None if got is None else buffer[at - start : min(got, at - start + nbytes)]
        finally:
            if len(self._buffers) < _KEPT:
                self._buffers.append(buffer)

    def read_into(self, at: int, target: memoryview) -> int:
        """Fill memory from place `at` on. Both are at, and of, whole blocks of the file, the memory at a multiple of ALIGNMENT.

        Returns how many bytes are there: fewer where the file ends, and where it is better read otherwise. Raises OSError.
        """
        return self._fill(target, at) or 0

    def _buffer(self) -> memoryview | None:
        try:
            return self._buffers.pop()
        except IndexError:
            pass
        try:
            return _make_buffer()
        except OSError:  # the system gives no memory now
            return None

    def _fill(self, buffer: memoryview, at: int) -> int | None:
        filled = 0
        try:
            while filled < len(buffer) and not filled % _PAGE:
                got = os.preadv(self._fd, [buffer[filled:]], at + filled)
                if not got:
                    break
                filled += got
        except OSError as error:
            if error.errno not in _NOT_SO:
                raise
            self.works = False
            return None
        return filled


def _resident(mapped: mmap.mmap, at: int, nbytes: int) -> bool:
    """Whether all pages of a part of a mapped file are in the page cache."""
    start = at & -_PAGE
    size = at + nbytes - start
    pages = np.zeros(-(-size // _PAGE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data + start
    failed = _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
    return not failed and bool((pages & 1).all())


def _make_buffer() -> memoryview:
    """Aligned, on huge pages if there are any, and not shared with processes that are forked while the disk writes into it."""
    memory = mmap.mmap(-1, BUFFER_BYTES + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        try:
            memory.madvise(advice)
        except OSError:  # a kernel without
            pass
    skipped = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE
    return memoryview(memory)[skipped : skipped + BUFFER_BYTES]
