"""What is wanted of pages that are stored alike, as one block: what a page costs is thought out once for all of them. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvstore.api.wire import DIGEST_BYTES, Piece, Run, SliceLayout, cut


class PagePart(NamedTuple):
    """What a wanted range needs of one stored part of a page: a run of its blob, and where that goes in the wanted part."""

    part: int
    layout: SliceLayout
    run: Run
    pieces: tuple[Piece, ...]
    """The run, cut."""
    target: int
    target_stride: int

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return self.run.length * self.run.segments

    def places(self) -> list[tuple[int, int]]:
        """Where each piece goes in the wanted part, and its size."""
        run = self.run
        if run.segments == 1:
            shift = self.target - run.offset
            return [(shift + piece.offset, piece.size) for piece in self.pieces]
        found = []
        for piece in self.pieces:
            segment, inside = divmod(piece.offset - run.offset, run.stride)
            found.append((self.target + segment * self.target_stride + inside, piece.size))
        return found

    def split(self, size: int) -> Iterator["PagePart"]:
        """It as runs of at most about `size` bytes, cut at slices; a strided run stays as it is."""
        run = self.run
        if run.segments > 1 or run.length <= size:
            yield self
            return
        first = 0
        for index, piece in enumerate(self.pieces):
            start = self.pieces[first].offset
            if index > first and piece.offset + piece.size - start > size:
                yield self._pieces_from(first, index)
                first = index
        yield self._pieces_from(first, len(self.pieces))

    def _pieces_from(self, first: int, last: int) -> "PagePart":
        pieces = self.pieces[first:last]
        start, end = pieces[0].offset, pieces[-1].offset + pieces[-1].size
        return PagePart(self.part, self.layout, Run(0, start, end - start), pieces, self.target + start - self.run.offset, 0)


class Item(NamedTuple):
    """One run of one blob, and where its segments go in the caller's buffer."""

    blob: bytes
    layout: SliceLayout
    run: Run
    pieces: tuple[Piece, ...]
    """The run, cut."""
    target: int
    target_stride: int
    group: int = 0
    """Which layer group it belongs to: the caller is told when all of a group is there."""

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return self.run.length * self.run.segments


Span = tuple[int, int, Sequence[int]]
"""Pieces that lie next to each other: offset, size, and the sizes of the pieces."""


class Wholes(NamedTuple):
    """Pieces [first, last) of a page that are whole slices of one part in a row, from `slice` on."""

    part: int
    layout: SliceLayout
    first: int
    last: int
    slice: int


class PageShape:
    """What is wanted of one page: the parts, and their pieces one after the other."""

    def __init__(self, parts: Sequence[PagePart]) -> None:
        self.parts = parts
        self.nbytes = 0
        self.pieces: list[tuple[int, int]] = []
        """Where each goes, counted from where the page goes, and its size."""
        self.wholes: list[Wholes] = []
        for part in parts:
            self._note_wholes(part)
            self.nbytes += part.nbytes
            self.pieces += part.places()
        self.count = len(self.pieces)

    def _note_wholes(self, part: PagePart) -> None:
        first = None
        for index, piece in enumerate(part.pieces, len(self.pieces)):
            if first is not None and piece.whole and piece.slice == first[1] + index - first[0]:
                continue
            if first is not None:
                self.wholes.append(Wholes(part.part, part.layout, first[0], index, first[1]))
            first = (index, piece.slice) if piece.whole else None
        if first is not None:
            self.wholes.append(Wholes(part.part, part.layout, first[0], len(self.pieces) + len(part.pieces), first[1]))

    @cached_property
    def spans(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """All pieces, those merged that lie next to each other: offset, size, and the sizes of the pieces."""
        return self.spans_of(0, self.count)

    def spans_of(self, low: int, high: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """As `spans`, of the pieces [low, high)."""
        found: list[tuple[int, int, tuple[int, ...]]] = []
        first, at = low, 0
        for index in range(low, high):
            offset, size = self.pieces[index]
            if offset != at and index > first:
                found.append(self._merged(first, index))
                first = index
            at = offset + size
        return [*found, self._merged(first, high)]

    def _merged(self, first: int, last: int) -> tuple[int, int, tuple[int, ...]]:
        sizes = tuple(size for _, size in self.pieces[first:last])
        return self.pieces[first][0], sum(sizes), sizes

    def nbytes_of(self, first: int, last: int) -> int:
        """Bytes of the pieces [first, last)."""
        if last - first == self.count:
            return self.nbytes
        return sum(size for _, size in self.pieces[first:last])

    def piece_of(self, number: int) -> tuple[PagePart, int]:
        """The part and the slice of a piece."""
        for part in self.parts:
            if number < len(part.pieces):
                return part, part.pieces[number].slice
            number -= len(part.pieces)
        raise IndexError(number)


@dataclass(eq=False, slots=True)
class PageBlobs:
    """The ids of the stored parts of pages in a row: `width` of them a page, 16 bytes each."""

    ids: bytes
    width: int = 1

    @property
    def pages(self) -> int:
        """How many pages."""
        return len(self.ids) // (DIGEST_BYTES * self.width)

    def id_of(self, page: int, part: int) -> bytes:
        """The id of one part."""
        at = DIGEST_BYTES * (page * self.width + part)
        return self.ids[at : at + DIGEST_BYTES]

    def of_part(self, part: int, first: int, last: int) -> bytes:
        """The ids of one part on the pages [first, last)."""
        if self.width == 1:
            return self.ids[DIGEST_BYTES * first : DIGEST_BYTES * last]
        table = np.frombuffer(self.ids, np.uint8).reshape(-1, self.width, DIGEST_BYTES)
        return table[first:last, part].tobytes()


class Block(NamedTuple):
    """Pages in a row of which the same is wanted; the n-th one's blobs are those of page `first` + n, and it goes to `targets[n]`."""

    shape: PageShape
    blobs: PageBlobs
    first: int
    targets: Sequence[int]
    group: int = 0
    """Which layer group it belongs to: the caller is told when all of a group is there."""

    @property
    def pages(self) -> int:
        """How many pages."""
        return len(self.targets)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.shape.nbytes * len(self.targets)

    @property
    def pieces(self) -> int:
        """How many pieces all pages have."""
        return self.shape.count * len(self.targets)

    def between(self, first: int, last: int) -> "Block":
        """Some of the pages."""
        return Block(self.shape, self.blobs, self.first + first, self.targets[first:last], self.group)

    def split(self, size: int) -> Iterator["Block"]:
        """It as blocks of one page and of at most about `size` bytes each."""
        shapes = [PageShape([piece]) for part in self.shape.parts for piece in part.split(size)]
        for page in range(self.pages):
            for shape in shapes:
                yield Block(shape, self.blobs, self.first + page, self.targets[page : page + 1], self.group)

    def spans(self, first: int, last: int) -> list[Span]:
        """Where all pieces of the pages [first, last) go, as few spans."""
        spans, targets = self.shape.spans, self.targets
        if len(spans) == 1:
            offset, size, sizes = spans[0]
            if isinstance(targets, range) and targets.step == size:
                return [(targets[first] + offset, size * (last - first), sizes * (last - first))]
        return [(target + offset, size, sizes) for target in targets[first:last] for offset, size, sizes in spans]

    def items(self) -> Iterator[Item]:
        """Run by run."""
        for page, target in enumerate(self.targets, self.first):
            for part in self.shape.parts:
                blob = self.blobs.id_of(page, part.part)
                yield Item(blob, part.layout, part.run, part.pieces, target + part.target, part.target_stride, self.group)


def blocks_of(items: Iterable[Item]) -> list[Block]:
    """Items, as blocks that know which of them are of one blob."""
    known: dict[bytes, PageBlobs] = {}
    blocks: list[Block] = []
    for (run, layout, stride), alike in groupby(items, lambda item: (item.run, item.layout, item.target_stride)):
        shape = PageShape([PagePart(0, layout, run, cut(run, layout), 0, stride)])
        for item in alike:
            blobs = known.setdefault(item.blob, PageBlobs(item.blob))
            blocks.append(Block(shape, blobs, 0, (item.target,), item.group))
    return blocks
