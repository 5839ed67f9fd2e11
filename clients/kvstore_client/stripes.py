"""Stripes: what one connection is asked for at a time, as blocks of pages. Pure."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvstore.api.wire import pack_alike
from kvstore_client.blocks import Block, Span


class Stretch(NamedTuple):
    """Pieces [low, high) of each of the pages [first, last) of a block: all of them, or of one page."""

    block: Block
    first: int
    last: int
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return (self.last - self.first) * self.block.shape.nbytes_of(self.low, self.high)

    @property
    def pieces(self) -> int:
        """How many."""
        return (self.last - self.first) * (self.high - self.low)

    def spans(self) -> list[Span]:
        """Where they go."""
        shape = self.block.shape
        if self.high - self.low == shape.count:
            return self.block.spans(self.first, self.last)
        target = self.block.targets[self.first]
        return [(target + offset, size, sizes) for offset, size, sizes in shape.spans_of(self.low, self.high)]


class Stripe:
    """What one connection is asked for at a time."""

    __slots__ = ("blocks", "counted", "nbytes", "pieces")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.nbytes = 0
        self.pieces = 0
        """How many pieces there are in all."""
        self.counted = 0
        """Pieces that have arrived; after a lost connection they come again, and are not counted twice."""

    def add(self, block: Block) -> None:
        """Ask for a block, too."""
        self.blocks.append(block)
        self.nbytes += block.nbytes
        self.pieces += block.pieces

    def asked(self) -> tuple[int, bytes]:
        """How many blobs it names, and their ids and the runs as a FETCH carries them."""
        names, runs, count = [], [], 0
        known: dict[tuple[int, int], tuple[int, int, int]] = {}
        for shape, blobs, first, targets, _ in self.blocks:
            last, numbers = first + len(targets), []
            for part in shape.parts:
                low, high, number = known.get((id(blobs), part.part), (0, 0, 0))
                if not low <= first < last <= high:
                    low, high, number = known[id(blobs), part.part] = first, last, count
                    names.append(blobs.of_part(part.part, first, last))
                    count += last - first
                numbers.append(number + first - low)
            runs.append(pack_alike([part.run for part in shape.parts], numbers, len(targets)))
        return count, b"".join(names + runs)

    def stretches(self, first: int, count: int) -> Iterator[Stretch]:
        """Which pieces those from number `first` on are, as far as there are any."""
        at, end = 0, first + count
        if not first and count == self.pieces:
            for block in self.blocks:
                yield Stretch(block, 0, block.pages, 0, block.shape.count)
            return
        for block in self.blocks:
            size, each = block.pieces, block.shape.count
            low, high = max(first - at, 0), min(end - at, size)
            at += size
            if low >= high:
                continue
            (page, low), (last, high) = divmod(low, each), divmod(high, each)
            if low:
                upto = each if page < last else high
                yield Stretch(block, page, page + 1, low, upto)
                page += 1
            if page < last:
                yield Stretch(block, page, last, 0, each)
            if high and page <= last:
                yield Stretch(block, last, last + 1, 0, high)

    def spans(self, first: int, count: int) -> list[Span]:
        """Where pieces go, in order; those that lie next to each other are one span."""
        stretches = list(self.stretches(first, count))
        if len(stretches) == 1 and isinstance(stretches[0].block.targets, range):
            return stretches[0].spans()  # nothing is left to merge
        found: list[tuple[int, int, list[int]]] = []
        for stretch in stretches:
            for offset, size, sizes in stretch.spans():
                if found and found[-1][1] == offset:
                    start, end, before = found[-1]
                    before += sizes
                    found[-1] = start, end + size, before
                else:
                    found.append((offset, offset + size, list(sizes)))
        return [(start, end - start, sizes) for start, end, sizes in found]

    def reach(self, first: int, count: int) -> tuple[int, int]:
        """How many of the pieces from number `first` on there are, up to `count`, and their bytes."""
        if not first and count == self.pieces:
            return count, self.nbytes
        stretches = list(self.stretches(first, count))
        return sum(stretch.pieces for stretch in stretches), sum(stretch.nbytes for stretch in stretches)

    def into(self, target: memoryview, packed: memoryview) -> None:
        """Copy all pieces, which lie one after the other, to where they go."""
        at = 0
        for offset, size, _ in self.spans(0, self.pieces):
            target[offset : offset + size] = packed[at : at + size]
            at += size


class PackedStripe(Stripe):
    """The same pieces, but one after the other in a buffer of their own."""

    def __init__(self, original: Stripe) -> None:
        super().__init__()
        self.blocks, self.nbytes, self.pieces = original.blocks, original.nbytes, original.pieces

    def spans(self, first: int, count: int) -> list[Span]:
        """Where pieces go: one span."""
        sizes = [size for _, _, its in super().spans(first, count) for size in its]
        start = sum(stretch.nbytes for stretch in self.stretches(0, first))
        return [(start, sum(sizes), sizes)]


def one_stripe(blocks: Iterable[Block]) -> Stripe:
    """Blocks as one stripe."""
    stripe = Stripe()
    for block in blocks:
        if block.targets:
            stripe.add(block)
    return stripe


def stripes_of(blocks: Iterable[Block], size: int) -> Iterator[Stripe]:
    """Blocks as stripes of about `size` bytes, cut between pages, or at slices where a page is more."""
    stripe = Stripe()
    for block in _no_larger(blocks, size):
        first, page_bytes = 0, block.shape.nbytes
        while first < block.pages:
            room = (size - stripe.nbytes) // page_bytes
            if room < 1 and stripe.nbytes:
                yield stripe
                stripe = Stripe()
                continue
            last = min(first + max(room, 1), block.pages)
            stripe.add(block if last - first == block.pages else block.between(first, last))
            first = last
    if stripe.nbytes:
        yield stripe


def _no_larger(blocks: Iterable[Block], size: int) -> Iterator[Block]:
    for block in blocks:
        if block.shape.nbytes > size:
            yield from block.split(size)
        else:
            yield block
