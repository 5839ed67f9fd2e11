"""Consecutive pages of which only some parts are here, and how what several shards bring is put together. Pure."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES
from kvstore.kvspec import KVSpec, PartRange
from kvstore.radix.components import Masks
from kvstore.radix.pages import Slots
from kvstore.radix.tree import Extras


@dataclass(slots=True)
class Pending:
    """Pages [first, end) of a prefix, and those of their parts that are here: `rows` is (pages, parts), -1 for none.

    `parent` is the key of the page before the first; `labels` are the pages' token bytes, `extras` their extra digests by
    page of the prefix.
    """

    first: int
    parent: bytes
    keys: bytes
    labels: bytes
    ranges: tuple[PartRange, ...]
    rows: Slots
    extras: Extras = field(default_factory=dict)
    waits: bool = False
    """Whether its front is whole, and only the page before it is missing."""

    @property
    def end(self) -> int:
        """The page after the last."""
        return self.first + len(self.rows)

    def key(self, page: int) -> bytes:
        """The key of a page; the one before the first is the parent."""
        if page < self.first:
            return self.parent
        return self.keys[(page - self.first) * KEY_BYTES : (page - self.first + 1) * KEY_BYTES]

    def chosen(self, pages: list[int]) -> "Pending":
        """Some of its pages, where each stands alone."""
        width = len(self.labels) // len(self.rows)
        keys = b"".join(self.key(page) for page in pages)
        labels = b"".join(self.labels[page * width : (page + 1) * width] for page in pages)
        extras = {number: self.extras[page] for number, page in enumerate(pages) if page in self.extras}
        return Pending(0, self.parent, keys, labels, self.ranges, self.rows[pages], extras)

    def alone(self, page: int) -> "Pending":
        """One of its pages, where each stands alone."""
        return self.chosen([page])

    def holds(self, page: int, key: bytes) -> bool:
        """Whether a page is among them."""
        return self.first <= page < self.end and self.key(page) == key

    def extras_of(self, first: int, count: int) -> Extras:
        """The extra digests of some of its pages, by page counted from `first`."""
        return {page - first: extra for page, extra in self.extras.items() if first <= page < first + count}

    def meets(self, other: "Pending") -> bool:
        """Whether both speak of one chain of pages, overlapping or one right after the other."""
        low, high = max(self.first, other.first), min(self.end, other.end)
        if low > high:
            return False
        if low == high:
            before, after = (self, other) if self.end == low else (other, self)
            return before.key(before.end - 1) == after.parent
        return self.key(low) == other.key(low) and self.key(high - 1) == other.key(high - 1)

    def joined(self, other: "Pending") -> "tuple[Pending, list[int]]":
        """Both in one, and the rows of `other` that are not needed, because their parts are here already. They must meet."""
        assert self.meets(other), "two branches were about to be joined"
        first, end = min(self.first, other.first), max(self.end, other.end)
        front, back = (self, other) if self.first <= other.first else (other, self)
        places = {r: place for place, r in enumerate(self.ranges)}
        for part_range in other.ranges:
            places.setdefault(part_range, len(places))
        ranges = tuple(places)
        rows = np.full((end - first, len(ranges)), -1, np.int32)
        rows[self.first - first : self.end - first, : len(self.ranges)] = self.rows
        spare: list[int] = []
        for part, part_range in enumerate(other.ranges):
            ours = rows[other.first - first : other.end - first, places[part_range]]
            theirs = other.rows[:, part]
            spare += theirs[(ours >= 0) & (theirs >= 0)].tolist()
            ours[:] = np.where(ours >= 0, ours, theirs)
        shared = min(front.end - back.first, len(back.rows))
        width = len(back.labels) // len(back.rows)
        keys, labels = front.keys + back.keys[shared * KEY_BYTES :], front.labels + back.labels[shared * width :]
        return Pending(first, front.parent, keys, labels, ranges, rows, {**other.extras, **self.extras}), spare

    def announced(self) -> set[tuple[PartRange, int, int]]:
        """Each part that is here, and the pages [first, last) between which it is."""
        found = set()
        for part, part_range in enumerate(self.ranges):
            pages = np.flatnonzero(self.rows[:, part] >= 0)
            if len(pages):
                found.add((part_range, self.first + int(pages[0]), self.first + int(pages[-1]) + 1))
        return found

    def masks(self, spec: KVSpec) -> Masks:
        """Which components are whole on each page."""
        present = self.rows >= 0
        if present.all():
            return np.full(len(present), whole_components(spec, self.ranges), np.uint16)
        patterns, which = np.unique(present, axis=0, return_inverse=True)
        found = [whole_components(spec, tuple(r for r, here in zip(self.ranges, p, strict=True) if here)) for p in patterns]
        return np.array(found, np.uint16)[which.reshape(-1)]


@lru_cache(maxsize=4096)
def whole_components(spec: KVSpec, ranges: tuple[PartRange, ...]) -> int:
    """The mask of the components of which these parts hold all layers and heads."""
    found = 0
    for index, component in enumerate(spec.components):
        mine = [part for part in ranges if part.component == index]
        # Between the parts' edges only: a spec may have more layers and heads than there is memory to mark them in.
        layers = sorted({0, component.layers, *(edge for part in mine for edge in (part.layer_lo, part.layer_hi))})
        heads = sorted({0, component.kv_heads, *(edge for part in mine for edge in (part.head_lo, part.head_hi))})
        seen: npt.NDArray[np.bool_] = np.zeros((len(layers) - 1, len(heads) - 1), np.bool_)
        for part in mine:
            rows = slice(layers.index(part.layer_lo), layers.index(part.layer_hi))
            seen[rows, heads.index(part.head_lo) : heads.index(part.head_hi)] = True
        found |= int(seen.all()) << index
    return found
