"""What to ask for and where it goes: pages and part ranges become strided runs, and runs become stripes. Pure."""

from collections.abc import Callable, Sequence
from typing import Literal

from kvstore.api.wire import DIGEST_BYTES, MAX_BULK_PAYLOAD, STREAM_PAYLOAD, BadRequest, Corrupt, KVSpec, KVStoreError, PartRange, Run, cut
from kvstore_client.blocks import Block, PagePart
from kvstore_client.ledger import Ledger
from kvstore_client.stripes import Stripe, one_stripe, stripes_of

MIN_STRIPE = 1 << 20
MAX_STRIPE = 4 << 20
LONE_STRIPE = 64 << 20


Priority = Literal["interactive", "bulk"]
"""What is interactive goes before what is bulk."""
INTERACTIVE_BYTES = 4 << 20
"""A fetch of up to so many bytes is interactive, if nothing else is said."""


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
    if not layers:
        return [wanted]
    step = layers
    return [
        PartRange(wanted.component, low, min(low + step, wanted.layer_hi), wanted.head_lo, wanted.head_hi)
        for low in range(wanted.layer_lo, wanted.layer_hi, step)
    ]


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


class FetchPlan:
    """Blocks cut into stripes, and the check that what arrived is what was named.

    `on_group` is told the number of each layer group once all of it is there, `progress` the bytes so far and in all. The
    blobs of a `provisional` plan are parts of puts under way, which have no id yet. `stripe_bytes` says how large stripes are,
    `frame_bytes` how large frames may be where nobody is told of what arrives, `ahead` (ids of 16 bytes) what will be asked for next.
    """

    def __init__(
        self, blocks: Sequence[Block], connections: int, *, on_group: Callable[[int], None] | None = None,
        progress: Callable[[int, int], None] | None = None, provisional: bool = False, stripe_bytes: int = 0, priority: Priority = "bulk",
        frame_bytes: int = 0, ahead: bytes = b"",
    ) -> None:  # fmt: skip
        self.priority = priority
        self._ahead = ahead
        self.provisional = provisional
        self.nbytes = 0
        self._arrived = 0
        self._on_group = on_group
        self._progress = progress
        self._missing: dict[int, int] = {}
        for block in blocks:
            self.nbytes += block.nbytes
            self._missing[block.group] = self._missing.get(block.group, 0) + block.nbytes
        self.frame_bytes = frame_bytes
        if provisional or progress is not None:
            self.frame_bytes = STREAM_PAYLOAD
        elif on_group is not None:  # a group is told of when its last frame is whole, so no frame is larger than one
            self.frame_bytes = min(max(STREAM_PAYLOAD, min(self._missing.values(), default=0)), MAX_BULK_PAYLOAD)
        self._ledger = None if provisional else Ledger()
        size = stripe_bytes or _stripe_bytes(self.nbytes, connections)
        self.stripes = [one_stripe(blocks)] if 0 < self.nbytes <= size else list(stripes_of(blocks, size))

    def arrived(self, stripe: Stripe, first: int, digests: Sequence[bytes], claimed: bytes) -> None:
        """Pieces of a stripe arrived with these digests. Raises Corrupt if they are not what the daemon sent."""
        if b"".join(digests) != claimed:
            raise _corrupt(stripe, first, digests, claimed)
        count, at = len(digests), 0
        stretches = list(stripe.stretches(first, count))
        if self._ledger is not None:
            for stretch in stretches:
                size = DIGEST_BYTES * stretch.pieces
                self._ledger.note(stretch, claimed[at : at + size])
                at += size
        if stripe.counted > first:
            stretches = list(stripe.stretches(stripe.counted, first + count - stripe.counted))
        stripe.counted = max(stripe.counted, first + count)
        for stretch in stretches:
            self._count(stretch.block.group, stretch.nbytes)
        if self._progress is not None:
            self._progress(self._arrived, self.nbytes)

    def _count(self, group: int, size: int) -> None:
        self._arrived += size
        self._missing[group] -= size
        if not self._missing[group] and self._on_group is not None:
            self._on_group(group)

    def take_ahead(self) -> bytes:
        """What the daemon is to read ahead: it is told once."""
        ahead, self._ahead = self._ahead, b""
        return ahead

    def verify(self) -> None:
        """All stripes are there: no byte is missing, and every blob that was fetched whole has the id that it was asked by."""
        if self._arrived != self.nbytes:
            raise KVStoreError(f"a fetch ended with {self._arrived} of {self.nbytes} bytes: this is a bug, do not use the buffer")
        if self._ledger is not None and (wrong := self._ledger.wrong()) is not None:
            raise Corrupt(f"what arrived for blob {wrong.hex()} is another blob")


def _corrupt(stripe: Stripe, first: int, digests: Sequence[bytes], claimed: bytes) -> Corrupt:
    """Says which piece did not verify."""
    wrong = [digest != claimed[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i, digest in enumerate(digests)]
    for block, page, _, low, _ in stripe.stretches(first + wrong.index(True), 1):
        part, number = block.shape.piece_of(low)
        blob = block.blobs.id_of(block.first + page, part.part)
        return Corrupt(f"blob {blob.hex()}, slice {number}: the bytes that arrived do not verify")
    return Corrupt("bytes that arrived do not verify")


def _stripe_bytes(total: int, connections: int) -> int:
    """Small enough that a slow link can take fewer stripes than the others; a single link has nothing to share."""
    if connections == 1:
        return LONE_STRIPE
    return min(MAX_STRIPE, max(MIN_STRIPE, total // (2 * connections)))
