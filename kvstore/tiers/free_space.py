"""Which blocks of a file are free, as extents: runs of blocks that follow each other. Pure.

First fit: a blob goes to the first free extent that holds all of it, so what is put together lies together, and the file grows only
when nothing before its end fits. Only where no extent is large enough is a blob cut, into the largest there are, once what fits whole has
its place; so as long as there are blocks enough, there is room, however they lie. Columns in numpy, 16 bytes a free extent.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]
_CHUNK = 4096
_FEW = 64


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
        self._emptied = 0
        """Extents of which nothing is left: they are taken out once they are some of all, as that looks at all."""

    def extents(self) -> list[Extent]:
        """All free extents, in order."""
        return [Extent(first, count) for first, count in zip(self._first.tolist(), self._count.tolist(), strict=True) if count]

    def allocate(self, counts: Sequence[int]) -> list[list[Extent]] | None:
        """Extents for blobs of so many blocks each, mostly one a blob; None, and nothing taken, if there are not enough blocks."""
        if sum(counts) > self.blocks:
            return None
        taken = self._take_whole(counts)
        if cut := [place for place, extents in enumerate(taken) if not extents]:
            for place, extents in zip(cut, self._take_cut([counts[place] for place in cut]), strict=True):
                taken[place] = extents
        self.blocks -= sum(counts)
        if self._emptied > _FEW + len(self._count) // 8:
            self._set(self._first, self._count)
        return taken

    def _take_whole(self, counts: Sequence[int]) -> list[list[Extent]]:
        """For each blob the first extent that holds all of it; nothing where none does."""
        looked: dict[int, int] = {}  # within one call free extents only get smaller: where a size does not fit, it will not
        end, too_large = len(self._count), max(counts, default=0) + 1
        taken: list[list[Extent]] = []
        for count in counts:
            at = looked[count] = self._first_of(count, looked.get(count, 0)) if count < too_large else end
            too_large = min(too_large, count) if at == end else too_large
            taken.append([self._cut(at, count)] if at < end else [])
        return taken

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
        self._emptied += not self._count[at]
        return extent

    def _take_cut(self, counts: list[int]) -> list[list[Extent]]:
        """Extents for blobs that are larger than any, one blob after the other, from the largest extents on."""
        places = self._largest(sum(counts))
        largest = zip(self._first[places].tolist(), self._count[places].tolist(), strict=True)
        taken: list[list[Extent]] = []
        first = left = 0
        for count in counts:
            found: list[Extent] = []
            while count:
                if not left:
                    first, left = next(largest)
                found.append(Extent(first, min(count, left)))
                first, left, count = first + found[-1].blocks, left - found[-1].blocks, count - found[-1].blocks
            taken.append(found)
        self._first[places] += self._count[places]
        self._count[places] = 0
        self._first[places[-1]], self._count[places[-1]] = first, left
        self._emptied += len(places) - bool(left)
        return taken

    def _largest(self, blocks: int) -> Blocks:
        """Which extents are the largest, as many as hold so many blocks, the largest first; without sorting all there are."""
        of_size = np.bincount(self._count)
        held = np.cumsum((of_size * np.arange(len(of_size)))[::-1])  # by those of at least a size, from the largest size down
        size = len(of_size) - 1 - int(np.searchsorted(held, blocks))
        larger = np.flatnonzero(self._count > size)
        missing = blocks - int(self._count[larger].sum())
        some = np.flatnonzero(self._count == size)[: -(-missing // size)]
        return np.concatenate([larger[np.argsort(-self._count[larger], kind="stable")], some])

    def free(self, extents: Iterable[Extent]) -> None:
        """Give blocks back that were allocated."""
        given = np.array(list(extents), np.int64).reshape(-1, 2)
        if not len(given):
            return
        some = self._count > 0
        first, count = np.concatenate([self._first[some], given[:, 0]]), np.concatenate([self._count[some], given[:, 1]])
        order = np.argsort(first, kind="stable")
        first, count = first[order], count[order]
        begins = np.append(True, first[1:] != (first + count)[:-1])  # those that do not go on where the one before ends
        self._set(first[begins], np.add.reduceat(count, np.flatnonzero(begins)))
