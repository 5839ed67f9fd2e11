"""Which blocks of a file are free, as extents: runs of blocks that follow each other. Pure.

First fit: a blob goes to the first free extent that holds all of it, so what is put together lies together, and the file grows only
when nothing before its end fits. Only where no extent is large enough is a blob cut, into the largest there are; so as long as there are
blocks enough, there is room, however they lie. Columns in numpy, 16 bytes a free extent.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]
_CHUNK = 4096


class Extent(NamedTuple):
    """So many blocks of a file from block `first` on."""

    first: int
    blocks: int


class FreeSpace:
    """The free blocks among the first `limit` of a file, of which those in `used` are not; these must not overlap."""

    def __init__(self, limit: int, used: Blocks | None = None) -> None:
        self.limit = limit
        used = np.zeros((0, 2), np.int64) if used is None else used[np.argsort(used[:, 0], kind="stable")]
        ends = np.concatenate([[0], used[:, 0] + used[:, 1]])
        self._set(ends, np.append(used[:, 0], max(limit, ends[-1])) - ends)

    def _set(self, first: Blocks, count: Blocks) -> None:
        """Take free extents in order, nothing of them beyond the limit."""
        count = np.minimum(count, self.limit - first)
        some = count > 0
        self._first, self._count = first[some], count[some]
        self.blocks = int(self._count.sum())
        """That are free."""

    def extents(self) -> list[Extent]:
        """All free extents, in order."""
        return [Extent(*one) for one in zip(self._first.tolist(), self._count.tolist(), strict=True)]

    def allocate(self, counts: Sequence[int]) -> list[list[Extent]] | None:
        """Extents for blobs of so many blocks each, mostly one a blob; None, and nothing taken, if there are not enough blocks."""
        if sum(counts) > self.blocks:
            return None
        looked: dict[int, int] = {}  # within one call free extents only get smaller: where a size does not fit, it will not
        taken = [self._take(count, looked) for count in counts]
        self._set(self._first, self._count)
        return taken

    def _take(self, count: int, looked: dict[int, int]) -> list[Extent]:
        at = looked[count] = self._first_of(count, looked.get(count, 0))
        if at < len(self._count):
            return [self._cut(at, count)]
        found: list[Extent] = []
        while count:
            at = int(self._count.argmax())
            found.append(self._cut(at, min(count, int(self._count[at]))))
            count -= found[-1].blocks
        return found

    def _first_of(self, count: int, at: int) -> int:
        """The first free extent of at least so many blocks, from `at` on; or how many there are."""
        while at < len(self._count):
            fits = self._count[at : at + _CHUNK] >= count
            if (found := int(fits.argmax())) or fits[0]:
                return at + found
            at += _CHUNK
        return len(self._count)

    def _cut(self, at: int, count: int) -> Extent:
        extent = Extent(int(self._first[at]), count)
        self._first[at] += count
        self._count[at] -= count
        return extent

    def free(self, extents: Iterable[Extent]) -> None:
        """Give blocks back that were allocated."""
        given = np.array(list(extents), np.int64).reshape(-1, 2)
        if not len(given):
            return
        first, count = np.concatenate([self._first, given[:, 0]]), np.concatenate([self._count, given[:, 1]])
        order = np.argsort(first, kind="stable")
        first, count = first[order], count[order]
        begins = np.append(True, first[1:] != (first + count)[:-1])  # those that do not go on where the one before ends
        self._set(first[begins], np.add.reduceat(count, np.flatnonzero(begins)))
