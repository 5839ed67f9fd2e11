"""Reading extents out of the file that LMDB keeps them in. Blocking; any number of threads.

A blob's extents mostly follow each other, LMDB's header before each, and now and then an index page between. What is large is read
past the page cache, into a buffer, and copied without the headers; what is small, or in the page cache anyway, where it belongs at once.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from kvstore.errors import Corrupt, DataDirError
from kvstore.lmdb_files import is_marked, open_readonly
from kvstore.lmdb_find import Place
from kvstore.tiers.direct import LARGEST_READ, DirectFile

PAGE_HEADER = 16
"""LMDB's header on a run of overflow pages: an extent and its header fill whole pages."""
_MOST_AT_ONCE = 32
"""Extents that are read by one call, if they follow each other: 2 MiB."""
_DIRECT_BYTES = 512 << 10
"""What is as large is read past the page cache; what is smaller, with what the system reads ahead."""
_GAP = 64 << 10
"""So much that belongs to others is read with what lies around it."""

Stretch = tuple[int, int, int]
"""Bytes [start, end) of a stored form with nothing but headers between: place in the file, start, end."""


def check_unopened(path: Path, extent_bytes: int) -> None:
    """As `check_extent`, before what opens the environment takes many larger extents for damage. What can't be read is for that to see."""
    if is_marked(path):
        return
    try:
        env = open_readonly(path)
    except (lmdb.Error, OSError, DataDirError):
        return
    try:
        check_extent(env, path, extent_bytes)
    finally:
        env.close()


def check_extent(env: lmdb.Environment, path: Path, extent_bytes: int) -> None:
    """Raise DataDirError if an environment has extents of another size: none of its blobs would verify.

    Where the first and the last say two things, one of them is damaged.
    """
    try:
        with env.begin(buffers=True) as txn, txn.cursor() as cursor:
            sizes = {len(cursor.value()) for there in (cursor.first, cursor.last) if there()}
    except lmdb.Error:  # it is met again, by who reads it
        return
    if len(sizes) == 1 and extent_bytes not in sizes:
        (size,) = sizes
        raise DataDirError(
            f"{path} has extents of {size} bytes, which is fixed as long as there is something in it, and `extent` is {extent_bytes}: "
            f"set extent = {size}, or give an empty data directory"
        )


@dataclass(slots=True)
class Span:
    """Bytes [at, end) of the file that are read at once, and the stretches in them."""

    at: int
    end: int
    stretches: list[Stretch]
    nbytes: int = 0
    """Of the stored form."""


class ExtentFile:
    """The file, opened for reading extents of one size."""

    def __init__(self, path: Path, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        """For who reads anything else of it."""
        try:
            self._direct = DirectFile(path)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)
        self._direct.close()

    def read(self, places: Sequence[Place], start: int, end: int, out: memoryview, *, uncached: bool) -> None:
        """Fill bytes [start, end) of a stored form whose extents lie at `places`. With `uncached`, the disk is asked, not the page cache.

        Raises OSError, and Corrupt if the file ends before.
        """
        for span in self._spans(places, start, end):
            if not self._read_direct(span, out, uncached=uncached):
                for stretch in span.stretches:
                    self._read_stretch(stretch, out, uncached=uncached)

    def _spans(self, places: Sequence[Place], start: int, end: int) -> Iterator[Span]:
        span: Span | None = None
        for stretch in self._stretches(places, start, end):
            at, low, high = stretch
            stop = at + self._length(low, high)
            if span is None or not 0 <= at - span.end <= _GAP or stop - span.at > LARGEST_READ:
                if span is not None:
                    yield span
                span = Span(at, stop, [])
            span.end = stop
            span.stretches.append(stretch)
            span.nbytes += high - low
        if span is not None:
            yield span

    def _stretches(self, places: Sequence[Place], start: int, end: int) -> Iterator[Stretch]:
        """Where bytes [start, end) of a stored form lie, one after the other."""
        begun: tuple[int, int] | None = None
        for extent in range(start // self._extent_bytes, -(-end // self._extent_bytes)):
            offset = max(start, extent * self._extent_bytes)
            at = places[extent].at + offset - extent * self._extent_bytes
            if begun is not None:
                first, since = begun
                headers = (extent - since // self._extent_bytes) * PAGE_HEADER
                if at == first + offset - since + headers and headers < _MOST_AT_ONCE * PAGE_HEADER:
                    continue
                yield first, since, offset
            begun = at, offset
        if begun is not None:
            yield *begun, end

    def _length(self, start: int, end: int) -> int:
        """Of a stretch in the file: with the headers between its extents."""
        return end - start + ((end - 1) // self._extent_bytes - start // self._extent_bytes) * PAGE_HEADER

    def _read_direct(self, span: Span, out: memoryview, *, uncached: bool) -> bool:
        """Read a span past the page cache. False, and nothing done, if it is better or only read otherwise."""
        size = span.end - span.at
        if not self._direct.works or span.nbytes < _DIRECT_BYTES or (not uncached and self._direct.cached(span.at, size)):
            return False
        with self._direct.read(span.at, size) as raw:
            if raw is None or len(raw) < size:  # a read may come short; through the page cache it goes on, or the file does end
                return False
            for at, start, end in span.stretches:
                self._copy_out(raw[at - span.at :], out, start, end)
        return True

    def _copy_out(self, raw: memoryview, out: memoryview, start: int, end: int) -> None:
        """Copy bytes [start, end) of a stored form without the headers; the GIL is free meanwhile."""
        size, at = self._extent_bytes, 0
        while start < end:
            count = (end - start) // size if not start % size else 0
            rows, width = (count, size) if count else (1, min(end, (start // size + 1) * size) - start)
            source = np.ndarray((rows, width), np.uint8, raw, at, (size + PAGE_HEADER, 1))
            np.copyto(np.ndarray((rows, width), np.uint8, out, start), source)
            start += rows * width
            at += rows * (width + PAGE_HEADER)

    def _read_stretch(self, stretch: Stretch, out: memoryview, *, uncached: bool) -> None:
        """One preadv for all of it; the headers go nowhere."""
        at, start, end = stretch
        header = memoryview(bytearray(PAGE_HEADER))
        buffers: list[memoryview] = []
        while start < end:
            stop = min(end, (start // self._extent_bytes + 1) * self._extent_bytes)
            buffers += [out[start:stop], header]
            start = stop
        buffers.pop()
        left = sum(map(len, buffers))
        if uncached:
            os.posix_fadvise(self.fd, at, left, os.POSIX_FADV_DONTNEED)
        while True:
            got = os.preadv(self.fd, buffers, at)
            if not got:
                raise Corrupt(f"the file of blobs ends at {at}, in a blob")
            at, left = at + got, left - got
            if not left:
                return
            while got >= len(buffers[0]):
                got -= len(buffers.pop(0))
            buffers[0] = buffers[0][got:]
