"""What a put says about itself, whether that can be, and how it ended."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvstore.errors import BadRequest
from kvstore.hints import NO_HINTS, Hints
from kvstore.kvspec import KVSpec, PartRange
from kvstore.radix.tree import Extras
from kvstore.store.puts.parts import overlaps, parts_of


class Ack(Enum):
    """When a put is acknowledged: once its pages can be read, or once they would survive a power cut."""

    MEMORY = "memory"
    DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class PutRequest:
    """What a put says about itself. `tokens` (uint32 bytes) are the prefix, or what follows the lease it builds on.

    Pages from `first_page` (counted from the root) on are put, each as parts of the given `ranges`; `spans` are the pages
    [first, last) that carry each part, all pages of the put if empty.
    """

    put_id: bytes
    tokens: bytes
    extras: Extras
    first_page: int
    ranges: tuple[PartRange, ...]
    ack: Ack
    spans: tuple[tuple[int, int], ...] = ()
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class PutResult:
    """How a put ended: pages in its range that are new, that had a version already (`exists`), and that still lack other shards.

    In a flat namespace `existing` says which had one, as half-open runs. `gained_pages` of them got windows or states that they lacked.
    """

    new_pages: int
    existing_pages: int
    pending_pages: int = 0
    existing: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    gained_pages: int = field(default=0, compare=False)


def check_parts(spec: KVSpec, request: PutRequest, total_pages: int) -> None:
    """Raise BadRequest unless the parts of a put lie inside the spec, and no two of one page overlap."""
    ranges, spans = request.ranges, request.spans
    parts = parts_of(spec, ranges)
    if spans and len(spans) != len(ranges):
        raise BadRequest(f"{len(spans)} page spans for {len(ranges)} parts")
    for first, last in spans:
        if not request.first_page <= first < last <= total_pages:
            raise BadRequest(f"a part on the pages [{first}, {last}) of a put of the pages [{request.first_page}, {total_pages})")
    if not parts.overlapping:
        return
    both = overlaps(ranges)
    if spans:
        first, last = np.array(spans).T
        both &= np.maximum(first[:, np.newaxis], first) < np.minimum(last[:, np.newaxis], last)
    if both.any():
        raise BadRequest(f"two parts of component {ranges[int(both.any(axis=1).argmax())].component} overlap")
