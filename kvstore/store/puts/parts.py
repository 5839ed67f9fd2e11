"""What the parts of a put are in its namespace, thought out once for all puts that bring the same. Pure."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import BadRequest
from kvstore.kvspec import KVSpec, PartRange, SliceLayout
from kvstore.store.puts.pending import whole_components
from kvstore.tiers.dram import Arena


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts that a page may have, in the order in which a put names them."""

    layouts: tuple[SliceLayout, ...]
    slice_base: tuple[int, ...]
    """Where the slices of each begin among those of a page; then how many a page has."""
    stored_sizes: tuple[int, ...]
    """Bytes of the stored form of each."""
    slot_bytes: tuple[int, ...]
    """Bytes that each takes in DRAM."""
    components: int
    """The mask of those components of which they are all layers and heads."""
    overlapping: bool
    """Whether any two have something in common: then no page may have both."""


_KEPT = 256
_KEPT_SLICES = 1024
"""What has more of them is thought out each time: a client can name any number of such, and each takes a lot of memory."""
_kept: dict[tuple[KVSpec, tuple[PartRange, ...]], Parts] = {}


def parts_of(spec: KVSpec, ranges: tuple[PartRange, ...]) -> Parts:
    """Parts of these ranges. Raises BadRequest unless they lie inside the spec."""
    parts = _kept.get((spec, ranges))
    if parts is None:
        parts = _think_out(spec, ranges)
        if parts.slice_base[-1] <= _KEPT_SLICES:
            if len(_kept) >= _KEPT:
                _kept.pop(next(iter(_kept)))
            _kept[spec, ranges] = parts
    return parts


def _think_out(spec: KVSpec, ranges: tuple[PartRange, ...]) -> Parts:
    if not 1 <= len(ranges) <= 256:
        raise BadRequest(f"a page has 1 to 256 parts, not {len(ranges)}")
    for part in ranges:
        spec.check_range(part)
    layouts = tuple(spec.slice_layout(part) for part in ranges)
    stored = tuple(layout.payload_bytes + DIGEST_BYTES * layout.count for layout in layouts)
    return Parts(
        layouts, tuple(accumulate((layout.count for layout in layouts), initial=0)), stored,
        tuple(Arena.slot_class("", size).slot_bytes for size in stored), whole_components(spec, ranges),
        bool(overlaps(ranges).any()),
    )  # fmt: skip


def overlaps(ranges: tuple[PartRange, ...]) -> npt.NDArray[np.bool_]:
    """Which (number, other number) of some ranges have something in common, the higher number first."""
    known = np.array([(r.component, r.layer_lo, r.layer_hi, r.head_lo, r.head_hi) for r in ranges], np.int64)
    component, layer_lo, layer_hi, head_lo, head_hi = known.T
    meet = (component[:, np.newaxis] == component) & (layer_lo[:, np.newaxis] < layer_hi) & (layer_lo < layer_hi[:, np.newaxis])
    meet &= (head_lo[:, np.newaxis] < head_hi) & (head_lo < head_hi[:, np.newaxis])
    return np.tril(meet, -1)
