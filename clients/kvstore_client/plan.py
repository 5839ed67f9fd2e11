"""What to ask for and where it goes: pages and part ranges become strided runs, and runs become stripes. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvstore.api.wire import (
    DIGEST_BYTES,
    STREAM_PAYLOAD,
    BadRequest,
    Corrupt,
    KVSpec,
    KVStoreError,
    PartRange,
    Piece,
    Run,
    SliceLayout,
    blob_id,
    cut,
)

MIN_STRIPE = 1 << 20
MAX_STRIPE = 4 << 20
LONE_STRIPE = 64 << 20


Priority = Literal["interactive", "bulk"]
"""What is interactive goes before what is bulk."""
INTERACTIVE_BYTES = 4 << 20
"""A fetch of up to so many bytes is interactive, if nothing else is said."""


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


class StripePiece(NamedTuple):
    """One piece of a stripe: its place in the caller's buffer, and which item and slice it is."""

    target: int
    size: int
    item: int
    slice: int
    whole: bool


@dataclass(slots=True)
class Stripe:
    """What one connection is asked for at a time."""

    blobs: list[bytes] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    pieces: list[StripePiece] = field(default_factory=list)
    nbytes: int = 0
    counted: int = 0
    """Pieces that have arrived; after a lost connection they come again, and are not counted twice."""


def sub_range(spec: KVSpec, stored: PartRange, wanted: PartRange) -> tuple[Run, int, int] | None:
    """The run of a stored part that a wanted range needs, and its target offset and stride in the wanted part.

    None if they have nothing in common. With axis order layer, plane, head, token, dim a head range of one layer and plane
    is contiguous, so a sub-range is one strided run; all heads make it a single segment.
    """
    layers = range(max(stored.layer_lo, wanted.layer_lo), min(stored.layer_hi, wanted.layer_hi))
    heads = range(max(stored.head_lo, wanted.head_lo), min(stored.head_hi, wanted.head_hi))
    if stored.component != wanted.component or not layers or not heads:
        return None
    planes = spec.components[stored.component].planes
    head_bytes = spec.layer_bytes(stored) // (stored.head_hi - stored.head_lo) // planes
    source_row = head_bytes * (stored.head_hi - stored.head_lo)
    target_row = head_bytes * (wanted.head_hi - wanted.head_lo)
    length = head_bytes * len(heads)
    rows = planes * len(layers)
    source = (layers.start - stored.layer_lo) * planes * source_row + (heads.start - stored.head_lo) * head_bytes
    target = (layers.start - wanted.layer_lo) * planes * target_row + (heads.start - wanted.head_lo) * head_bytes
    if source_row == target_row == length:
        return Run(0, source, length * rows), target, 0
    return Run(0, source, length, source_row, rows), target, target_row


def layer_groups(wanted: PartRange, layers: int) -> list[PartRange]:
    """A range cut into groups of so many layers; whole for 0."""
    if layers < 0:
        raise BadRequest(f"groups of {layers} layers")
    step = layers or wanted.layer_hi - wanted.layer_lo
    return [
        PartRange(wanted.component, low, min(low + step, wanted.layer_hi), wanted.head_lo, wanted.head_hi)
        for low in range(wanted.layer_lo, wanted.layer_hi, step)
    ]


class PagePart(NamedTuple):
    """What a wanted range needs of one stored part of a page: a run of its blob, and where that goes in the wanted part."""

    part: int
    layout: SliceLayout
    run: Run
    pieces: tuple[Piece, ...]
    target: int
    target_stride: int


def page_parts(spec: KVSpec, stored: tuple[PartRange, ...], wanted: PartRange) -> list[PagePart]:
    """What fills the wanted part of a page that is stored so. Raises BadRequest if the stored parts do not cover it."""
    found = [(part, sub_range(spec, stored_part, wanted)) for part, stored_part in enumerate(stored)]
    layouts = [spec.slice_layout(part) for part in stored]
    parts = [
        PagePart(part, layouts[part], needed[0], cut(needed[0], layouts[part]), *needed[1:]) for part, needed in found if needed is not None
    ]
    covered = sum(p.run.length * p.run.segments for p in parts)
    if covered != spec.part_bytes(wanted):
        raise BadRequest(f"the stored parts hold {covered} of the {spec.part_bytes(wanted)} bytes of {wanted}")
    return parts


def page_items(parts: list[PagePart], blobs: list[bytes], target: int, group: int = 0) -> list[Item]:
    """The items that fill one page's wanted part at `target`; `blobs` are those of all its stored parts."""
    return [Item(blobs[p.part], p.layout, p.run, p.pieces, target + p.target, p.target_stride, group) for p in parts]


class FetchPlan:
    """Items cut into stripes, and the check that what arrived is what was named.

    `on_group` is told the number of each layer group once all of it is there, `progress` the bytes so far and in all. The
    blobs of a `provisional` plan are parts of puts under way, which have no id yet. `stripe_bytes` says how large stripes are.
    """

    def __init__(
        self, items: list[Item], connections: int, *, on_group: Callable[[int], None] | None = None,
        progress: Callable[[int, int], None] | None = None, provisional: bool = False, stripe_bytes: int = 0, priority: Priority = "bulk",
    ) -> None:  # fmt: skip
        self.priority = priority
        self.items = items
        self.provisional = provisional
        self.nbytes = 0
        self._arrived = 0
        self._on_group = on_group
        self._progress = progress
        self._missing: dict[int, int] = {}
        for item in items:
            nbytes = item.run.length * item.run.segments
            self.nbytes += nbytes
            self._missing[item.group] = self._missing.get(item.group, 0) + nbytes
        self.frame_bytes = 0
        if provisional or progress is not None:
            self.frame_bytes = STREAM_PAYLOAD
        elif on_group is not None:  # a group is told of when its last frame is whole, so no frame is larger than one
            self.frame_bytes = max(STREAM_PAYLOAD, min(self._missing.values(), default=0))
        self._layouts = {item.blob: item.layout for item in items}
        self._tables = {blob: bytearray(DIGEST_BYTES * layout.count) for blob, layout in self._layouts.items()}
        self._seen: dict[bytes, set[int]] = {blob: set() for blob in self._layouts}
        self.stripes = list(_stripes(items, stripe_bytes or _stripe_bytes(self.nbytes, connections)))

    def arrived(self, stripe: Stripe, first: int, digests: list[bytes], claimed: bytes) -> None:
        """Pieces of a stripe arrived with these digests. Raises Corrupt if they are not what the daemon sent."""
        for index, digest in enumerate(digests):
            piece = stripe.pieces[first + index]
            item = self.items[piece.item]
            if digest != claimed[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
                raise Corrupt(f"blob {item.blob.hex()}, slice {piece.slice}: the bytes that arrived do not verify")
            if piece.whole:
                self._tables[item.blob][piece.slice * DIGEST_BYTES : (piece.slice + 1) * DIGEST_BYTES] = digest
                self._seen[item.blob].add(piece.slice)
        for piece in stripe.pieces[max(first, stripe.counted) : first + len(digests)]:
            self._count(self.items[piece.item].group, piece.size)
        stripe.counted = max(stripe.counted, first + len(digests))
        if self._progress is not None:
            self._progress(self._arrived, self.nbytes)

    def _count(self, group: int, size: int) -> None:
        self._arrived += size
        self._missing[group] -= size
        if not self._missing[group] and self._on_group is not None:
            self._on_group(group)

    def verify(self) -> None:
        """All stripes are there: no byte is missing, and every blob that was fetched whole has the id that it was asked by."""
        if self._arrived != self.nbytes:
            raise KVStoreError(f"a fetch ended with {self._arrived} of {self.nbytes} bytes: this is a bug, do not use the buffer")
        if self.provisional:
            return
        for blob, layout in self._layouts.items():
            if len(self._seen[blob]) == layout.count and blob_id(self._tables[blob]) != blob:
                raise Corrupt(f"what arrived for blob {blob.hex()} is another blob")


def _stripe_bytes(total: int, connections: int) -> int:
    """Small enough that a slow link can take fewer stripes than the others; a single link has nothing to share."""
    if connections == 1:
        return LONE_STRIPE
    return min(MAX_STRIPE, max(MIN_STRIPE, total // (2 * connections)))


def _stripes(items: list[Item], size: int) -> Iterator[Stripe]:
    stripe = Stripe()
    numbers: dict[bytes, int] = {}
    for number, item in enumerate(items):
        for run, pieces in _split(item, number, size):
            nbytes = run.length * run.segments
            if stripe.nbytes and stripe.nbytes + nbytes > size:
                yield stripe
                stripe, numbers = Stripe(), {}
            index = numbers.setdefault(item.blob, len(numbers))
            if index == len(stripe.blobs):
                stripe.blobs.append(item.blob)
            stripe.runs.append(Run(index, run.offset, run.length, run.stride, run.segments))
            stripe.pieces += pieces
            stripe.nbytes += nbytes
    if stripe.nbytes:
        yield stripe


def _split(item: Item, number: int, size: int) -> Iterator[tuple[Run, list[StripePiece]]]:
    """An item as runs of at most about `size` bytes, cut at slices; a strided run stays as it is."""
    run, pieces = item.run, item.pieces
    if len(pieces) == 1:  # a layer group of a page, usually
        piece = pieces[0]
        yield run, [StripePiece(item.target, piece.size, number, piece.slice, piece.whole)]
        return
    if run.segments > 1:
        targets = [item.target + segment * item.target_stride for segment in range(run.segments)]
        yield (
            run,
            [
                StripePiece(
                    targets[(p.offset - run.offset) // run.stride] + (p.offset - run.offset) % run.stride, p.size, number, p.slice, p.whole
                )
                for p in pieces
            ],
        )
        return
    if run.length <= size:  # nearly always
        yield _whole_run(item, number, pieces)
        return
    group: list[Piece] = []
    for piece in pieces:
        if group and piece.offset + piece.size - group[0].offset > size:
            yield _whole_run(item, number, group)
            group = []
        group.append(piece)
    yield _whole_run(item, number, group)


def _whole_run(item: Item, number: int, group: Sequence[Piece]) -> tuple[Run, list[StripePiece]]:
    start, end = group[0].offset, group[-1].offset + group[-1].size
    base = item.target - item.run.offset
    run = item.run if end - start == item.run.length else Run(0, start, end - start)
    return run, [StripePiece(base + offset, size, number, index, whole) for offset, size, index, whole in group]
