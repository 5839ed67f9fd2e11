"""The file of extents: where the bytes of blobs are on SSD. Blocking; reads by any number of threads, writes by one.

What is large is read past the page cache straight into where it belongs, if that is aligned as the file is; else into a buffer, and copied.
What is small, or in the page cache anyway, is read through it.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvstore.errors import Corrupt
from kvstore.folders import sync_folder
from kvstore.tiers.direct import ALIGNMENT, LARGEST_READ, DirectFile
from kvstore.tiers.free_space import Extent

BLOCK_BYTES = 4096
"""Extents are of whole blocks: what file systems read, and what can be read past the page cache."""
_DIRECT_BYTES = 512 << 10
"""What is as large is read past the page cache; what is smaller, with what the system reads ahead."""
_MOST_BUFFERS = 1000
"""Of one call; the system takes 1,024."""
_MOST_WRITTEN = 4 << 20
"""By one call, about: a write holds up those who read the file."""
_PADDING = memoryview(bytes(BLOCK_BYTES))

Stretch = tuple[int, int, int]
"""Bytes [start, end) of a blob that lie together: place in the file, start, end."""


def blocks_for(nbytes: int) -> int:
    """Blocks that so many bytes take."""
    return -(-nbytes // BLOCK_BYTES)


class ExtentFile:
    """The file, made if it is not there, for this user only. With `readonly` it is neither made nor written. Raises OSError."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        flags = os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if not readonly:
                sync_folder(path.parent)  # or a file that was just made might not be there after a power cut
            self._direct = DirectFile(path)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        self._direct.close()

    @property
    def nbytes(self) -> int:
        """Up to the end of the file."""
        return os.fstat(self._fd).st_size

    def write(self, blobs: Sequence[tuple[Sequence[Extent], memoryview]]) -> None:
        """Write blobs into their extents, zeros up to the end of the last block of each. Durable after `sync`. Raises OSError."""
        at = end = 0
        buffers: list[memoryview] = []
        for place, piece in _pieces(blobs):
            if place != end or len(buffers) == _MOST_BUFFERS or end - at >= _MOST_WRITTEN:
                self._write_all(buffers, at)
                buffers, at, end = [], place, place
            buffers.append(piece)
            end += len(piece)
        self._write_all(buffers, at)

    def _write_all(self, buffers: list[memoryview], at: int) -> None:
        while buffers:
            done = os.pwritev(self._fd, buffers, at)
            at += done
            _skip(buffers, done)

    def sync(self) -> None:
        """Return when all that was written is on the disk. Raises OSError, also if the file was deleted: then it ends with the process."""
        os.fdatasync(self._fd)
        if not os.fstat(self._fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file of extents was deleted while it was in use")

    def read(
        self, extents: Sequence[Extent], start: int, end: int, out: memoryview, *, uncached: bool, to_end: bool = False
    ) -> None:  # fmt: skip
        """Fill bytes [start, end) of a blob. With `to_end` they are its last, and what `out` has behind them, up to the end of their
        block, may be written to; else nothing is, as others may have read and verified it.

        With `uncached`, the disk is asked, not the page cache. Raises OSError, and Corrupt if the file ends before.
        """
        for stretch in _stretches(extents, start, end):
            if not self._read_direct(stretch, out, last=to_end and stretch[2] == end, uncached=uncached):
                self._read_cached(stretch, out, uncached=uncached)

    def _read_direct(self, stretch: Stretch, out: memoryview, *, last: bool, uncached: bool) -> bool:
        """Read past the page cache. False, and nothing that counts done, if it is better or only read otherwise."""
        at, start, end = stretch
        size = end - start
        if not self._direct.works or size < _DIRECT_BYTES or (not uncached and self._direct.cached(at, size)):
            return False
        whole = blocks_for(size) * BLOCK_BYTES
        target = out[start : start + whole]
        if at % BLOCK_BYTES == 0 and (whole == size or (last and len(target) == whole)) and _address(target) % ALIGNMENT == 0:
            return self._direct.read_into(at, target) >= size  # a read may come short; through the page cache it goes on
        for part in range(0, size, LARGEST_READ):
            count = min(size - part, LARGEST_READ)
            with self._direct.read(at + part, count) as raw:
                if raw is None or len(raw) < count:
                    return False
                np.copyto(np.frombuffer(out, np.uint8, count, start + part), np.frombuffer(raw, np.uint8))  # the GIL is free meanwhile
        return True

    def _read_cached(self, stretch: Stretch, out: memoryview, *, uncached: bool) -> None:
        at, start, end = stretch
        if uncached:
            os.posix_fadvise(self._fd, at, end - start, os.POSIX_FADV_DONTNEED)
        while start < end:
            got = os.preadv(self._fd, [out[start:end]], at)
            if not got:
                raise Corrupt(f"the file of extents ends at {at}, in a blob")
            at, start = at + got, start + got


def _pieces(blobs: Sequence[tuple[Sequence[Extent], memoryview]]) -> Iterator[tuple[int, memoryview]]:
    """What is to be written where."""
    for extents, data in blobs:
        for at, start, end in _stretches(extents, 0, len(data)):
            yield at, data[start:end]
        if padding := -len(data) % BLOCK_BYTES:
            yield at + end - start, _PADDING[:padding]


def _stretches(extents: Sequence[Extent], start: int, end: int) -> Iterator[Stretch]:
    """Where bytes [start, end) of a blob lie, in order."""
    begin = 0
    for first, count in extents:
        low, high = max(start, begin), min(end, begin + count * BLOCK_BYTES)
        if low < high:
            yield first * BLOCK_BYTES + low - begin, low, high
        begin += count * BLOCK_BYTES


def _skip(buffers: list[memoryview], nbytes: int) -> None:
    """Take so many bytes from the front."""
    while buffers and nbytes >= len(buffers[0]):
        nbytes -= len(buffers.pop(0))
    if nbytes:
        buffers[0] = buffers[0][nbytes:]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
