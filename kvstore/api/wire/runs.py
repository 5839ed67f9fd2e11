"""Scatter reads: strided runs over blobs, and how both sides cut them into pieces. Pure."""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvstore.errors import BadRequest
from kvstore.kvspec import SliceLayout

_RUN = struct.Struct("<IIQQQ")
RUN_BYTES = _RUN.size
_BLOB = np.dtype("<u4")
"""The first field of a run."""
MAX_RUNS = 1 << 16
MAX_SEGMENTS = 1 << 20
_CACHED_PIECES = 64
_KEPT_RUNS = 256
_MOST_BLOBS = 1 << 16


class Run(NamedTuple):
    """`segments` segments of `length` bytes in blob number `blob`, the first at `offset`, the next `stride` bytes on each."""

    blob: int
    offset: int
    length: int
    stride: int = 0
    segments: int = 1


class Piece(NamedTuple):
    """The largest stretch of a segment inside one slice: the unit that is sent with a digest of its own."""

    offset: int
    size: int
    slice: int
    whole: bool
    """Whether it is all of its slice."""


_PROVISIONAL = struct.Struct("<QII")
"""Put handle, page, part: names a part of a followed put in 16 bytes, as a blob id names a blob."""


def pack_provisional(handle: int, page: int, part: int) -> bytes:
    """The 16-byte name of a part of a put that is followed."""
    return _PROVISIONAL.pack(handle, page, part)


def unpack_provisional(name: bytes | memoryview) -> tuple[int, int, int]:
    """Put handle, page and part from a name."""
    handle, page, part = _PROVISIONAL.unpack(name)
    return handle, page, part


def pack_runs(runs: list[Run]) -> bytes:
    """Runs as bytes, 32 each."""
    return b"".join(_RUN.pack(r.blob, r.segments, r.offset, r.length, r.stride) for r in runs)


def pack_alike(runs: Sequence[Run], numbers: Sequence[int], pages: int) -> bytes:
    """The runs of pages that are alike, page by page: run `i` of the first page is of blob `numbers[i]`, then of the next blob each."""
    if pages * len(runs) <= _KEPT_RUNS:
        return _pack_few(tuple(runs), tuple(numbers), pages)
    return _pack_alike(runs, numbers, pages)


def _pack_alike(runs: Sequence[Run], numbers: Sequence[int], pages: int) -> bytes:
    once = b"".join([_RUN.pack(number, r.segments, r.offset, r.length, r.stride) for r, number in zip(runs, numbers, strict=True)])
    if pages == 1:
        return once
    packed = bytearray(once * pages)
    blobs = np.frombuffer(packed, _BLOB).reshape(pages, len(runs), -1)[:, :, 0]
    blobs += np.arange(pages, dtype=_BLOB)[:, None]
    return bytes(packed)


_pack_few = lru_cache(maxsize=256)(_pack_alike)
"""Few fetches differ in their runs: only in their blobs."""


class Alike(NamedTuple):
    """Runs in a row that differ in nothing but their blobs."""

    run: Run
    """The first of them."""
    blobs: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.run.length * self.run.segments * len(self.blobs)

    @property
    def segments(self) -> int:
        """Segments of all of them."""
        return self.run.segments * len(self.blobs)

    def each(self) -> Iterator[Run]:
        """One after the other."""
        for blob in self.blobs:
            yield Run(blob, *self.run[1:])


def unpack_alike(data: bytes | memoryview) -> list[Alike]:
    """Runs from bytes, in order. Raises BadRequest for a torn or overlong list, and for a run of nothing."""
    if len(data) % RUN_BYTES or len(data) > MAX_RUNS * RUN_BYTES:
        raise BadRequest(f"{len(data)} bytes of runs: they are {RUN_BYTES} bytes each, and at most {MAX_RUNS}")
    if len(data) == RUN_BYTES:
        blob, segments, offset, length, stride = _RUN.unpack(data)
        return _bounded([Alike(Run(blob, offset, length, stride, segments), [blob])])
    if RUN_BYTES < len(data) <= _KEPT_RUNS * RUN_BYTES:
        blob, segments, offset, length, stride = _RUN.unpack_from(data)
        run, count = Run(blob, offset, length, stride, segments), len(data) // RUN_BYTES
        if blob + count <= _MOST_BLOBS and bytes(data) == _pack_few((run,), (blob,), count):
            return _bounded([Alike(run, range(blob, blob + count))])
    words = np.frombuffer(data, _BLOB).reshape(-1, RUN_BYTES // _BLOB.itemsize)
    blobs, starts = words[:, 0].tolist(), [0]
    if len(blobs) > 1:
        starts += (np.flatnonzero((words[1:, 1:] != words[:-1, 1:]).any(axis=1)) + 1).tolist()
    found = []
    for first, last in zip(starts, [*starts[1:], len(blobs)], strict=True):
        if first < last:
            blob, segments, offset, length, stride = _RUN.unpack_from(data, first * RUN_BYTES)
            found.append(Alike(Run(blob, offset, length, stride, segments), blobs[first:last]))
    return _bounded(found)


def _bounded(found: list[Alike]) -> list[Alike]:
    if sum(alike.segments for alike in found) > MAX_SEGMENTS:
        raise BadRequest(f"a fetch of more than {MAX_SEGMENTS} segments: split it")
    for alike in found:
        _check_not_empty(alike.run)
    return found


def _check_not_empty(run: Run) -> None:
    """A run of nothing counts for no bytes, whatever it names."""
    if run.segments < 1 or run.length < 1:
        raise BadRequest(f"a run of {run.segments} segments of {run.length} bytes")


def unpack_runs(data: bytes | memoryview) -> list[Run]:
    """As `unpack_alike`, run by run."""
    return [run for alike in unpack_alike(data) for run in alike.each()]


def check_run(run: Run, layout: SliceLayout) -> None:
    """Raise BadRequest unless every segment lies inside the blob."""
    size = layout.payload_bytes
    _check_not_empty(run)
    if run.segments > 1 and run.stride < run.length:
        raise BadRequest(f"segments of {run.length} bytes overlap at a stride of {run.stride}")
    end = run.offset + (run.segments - 1) * run.stride + run.length
    if end > size:
        raise BadRequest(f"a run ends at byte {end} of a blob of {size}")


def cut(run: Run, layout: SliceLayout) -> tuple[Piece, ...]:
    """The pieces of a run in the order in which they are sent. The run must have passed `check_run`.

    Most runs of a fetch are alike but for their blob, so those of few pieces are cut once.
    """
    if run.segments * layout.count <= _CACHED_PIECES:
        return _cut_alike(run.offset, run.length, run.stride, run.segments, layout)
    return tuple(_cut(run, layout))


def cut_lazily(run: Run, layout: SliceLayout) -> Iterable[Piece]:
    """As `cut`, one after the other where they are many."""
    return cut(run, layout) if run.segments * layout.count <= _CACHED_PIECES else _cut(run, layout)


def whole_slices(run: Run, layout: SliceLayout) -> list[tuple[int, int, int]]:
    """The slices of a run, as (number, start, end), if it has one segment of a few whole ones; else nothing."""
    offsets = layout.offsets
    first, last = bisect_right(offsets, run.offset) - 1, bisect_right(offsets, run.offset + run.length) - 1
    if run.segments > 1 or last - first > _CACHED_PIECES or (offsets[first], offsets[last]) != (run.offset, run.offset + run.length):
        return []
    return [(number, offsets[number], offsets[number + 1]) for number in range(first, last)]


@lru_cache(maxsize=1024)
def _cut_alike(offset: int, length: int, stride: int, segments: int, layout: SliceLayout) -> tuple[Piece, ...]:
    return tuple(_cut(Run(0, offset, length, stride, segments), layout))


def _cut(run: Run, layout: SliceLayout) -> Iterator[Piece]:
    offsets = layout.offsets
    for segment in range(run.segments):
        at = run.offset + segment * run.stride
        end = at + run.length
        index = bisect_right(offsets, at) - 1
        while at < end:
            stop = min(end, offsets[index + 1])
            yield Piece(at, stop - at, index, at == offsets[index] and stop == offsets[index + 1])
            at, index = stop, index + 1
