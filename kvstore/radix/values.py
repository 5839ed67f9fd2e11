"""What a tree is given and what it gives: paths, pages to insert, and what a removal took out."""

from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_

import numpy as np
import numpy.typing as npt

from kvstore.kvspec import PartRange
from kvstore.radix.components import Masks
from kvstore.radix.pages import Slots


@dataclass(frozen=True, slots=True)
class Path:
    """A matched prefix: the nodes from below the root, and how many pages of the last one belong to it.

    Valid until the tree changes.
    """

    nodes: list[int]
    pages: int
    tail: int


EMPTY_PATH = Path([], 0, 0)


@dataclass(frozen=True, slots=True)
class NewPages:
    """Pages to insert: keys (32 bytes each), version (put id), and parts: blobs (pages, parts) with one geometry a part.

    A blob of -1 says that the page lacks the part; what a page has of a component must be all of it.
    """

    keys: bytes
    version: bytes
    blobs: Slots
    ranges: tuple[PartRange, ...]

    def masks(self) -> Masks:
        """Which components each page has."""
        if len(self.blobs) == 1:
            parts = zip(self.blobs[0].tolist(), self.ranges, strict=True)
            return np.array([reduce(or_, (1 << part.component for blob, part in parts if blob >= 0), 0)], np.uint16)
        found = np.zeros(len(self.blobs), np.uint16)
        for part, part_range in enumerate(self.ranges):
            found[self.blobs[:, part] >= 0] |= np.uint16(1 << part_range.component)
        return found


@dataclass(slots=True)
class Removed:
    """What a removal took out: the blobs of all parts, with repeats; the keys of durable pages, and the blobs their records name."""

    slots: list[Slots] = field(default_factory=list)
    """Where the pages are, if they are ghosts now."""
    blobs: list[Slots] = field(default_factory=list)
    durable_keys: list[bytes] = field(default_factory=list)
    durable_blobs: list[Slots] = field(default_factory=list)
    pages: int = 0


@lru_cache(maxsize=256)
def geometry(ranges: tuple[PartRange, ...]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    """The components and the ranges of parts, as columns."""
    component = np.array([r.component for r in ranges], np.uint8)
    return component, np.array([(r.layer_lo, r.layer_hi, r.head_lo, r.head_hi) for r in ranges], np.uint16).reshape(-1, 4)
