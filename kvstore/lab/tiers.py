"""Tiers without bytes: for each page of a tree whether it is in DRAM and on SSD, and who leaves when a tier is full."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec
from kvstore.radix.leaf_first import depth_of, in_order, least, raised
from kvstore.radix.pages import Slots
from kvstore.radix.tree import RadixTree
from kvstore.tiers.policies import Columns, Pages, Policy, parts

DRAM, SSD = 1, 2
PLACE = ColumnSpec("place", "u1")
"""The column of the tiers that hold a page, as bits."""


@dataclass(slots=True)
class LabSpace:
    """A namespace: its tree, and the bytes of a page."""

    tree: RadixTree
    page_bytes: int
    columns: dict[int, Columns] = field(default_factory=dict)
    """By tier: what its policy sees."""
    place: npt.NDArray[np.uint8] = field(init=False)
    """Where pages are."""

    def __post_init__(self) -> None:
        self.place = self.tree.pages.kept[PLACE.name]


@dataclass(slots=True)
class Tier:
    """One tier of all namespaces, `capacity` in bytes. When it is over, a batch leaves: at least what is needed, and `batch` of it all."""

    bit: int
    capacity: int
    policy: Policy
    spaces: list[LabSpace]
    batch: float
    used: int = 0

    def enter(self, space: LabSpace, slots: Slots, now: float) -> None:
        """Pages of one path, from the root on, that are not in the tier come in."""
        space.place[slots] |= self.bit
        self.used += len(slots) * space.page_bytes
        self.policy.entered(space.columns[self.bit], slots, now)

    def shrink(self, now: float, gone: Callable[[LabSpace, Slots], None]) -> None:
        """If the tier is over its capacity, let the least valuable go. `gone` is told of them, by namespace."""
        if self.used <= self.capacity:
            return
        for space, slots in self._victims(max(self.used - self.capacity, int(self.capacity * self.batch)), now):
            space.place[slots] &= ~np.uint8(self.bit)
            self.used -= len(slots) * space.page_bytes
            self.policy.left(space.columns[self.bit], slots, now)
            gone(space, slots)

    def _victims(self, wanted: int, now: float) -> list[tuple[LabSpace, Slots]]:
        """The pages worth least that together have `wanted` bytes, by namespace."""
        batch = [self.pages(space, self.resident(space)) for space in self.spaces]
        smallest = min(space.page_bytes for space, pages in zip(self.spaces, batch, strict=True) if len(pages.slots))
        likely = min(sum(len(pages.slots) for pages in batch), -(-wanted // smallest))
        values = self.policy.values(batch, likely, now)
        if not self.policy.leaf_first:
            lifted = [pages.raised(pages.slots, values[part]) for pages, part in parts(batch)]
            values = lifted[0] if len(lifted) == 1 else np.concatenate(lifted)
        chosen = least(values, likely)
        near = self._split(batch, chosen)
        recency = np.concatenate([space.tree.pages.recency[slots] for space, slots in near])
        depth = np.concatenate([depth_of(space.tree, slots) for space, slots in near])
        chosen = chosen[in_order(values[chosen], recency, depth)][:likely]
        if len({space.page_bytes for space in self.spaces}) > 1:
            sizes = np.repeat([space.page_bytes for space in self.spaces], [len(pages.slots) for pages in batch])
            chosen = chosen[: int(np.searchsorted(np.cumsum(sizes[chosen]), wanted)) + 1]
        return [(space, slots) for space, slots in self._split(batch, chosen) if len(slots)]

    def _split(self, batch: list[Pages], places: npt.NDArray[np.int64]) -> list[tuple[LabSpace, Slots]]:
        """The slots at some places of a batch, by namespace."""
        if len(batch) == 1:
            return [(self.spaces[0], batch[0].slots[places])]
        inside = [places[(places >= part.start) & (places < part.stop)] - part.start for _, part in parts(batch)]
        return [(space, pages.slots[mine]) for space, pages, mine in zip(self.spaces, batch, inside, strict=True)]

    def pages(self, space: LabSpace, slots: Slots) -> Pages:
        """Pages as the tier's policy sees them."""
        return Pages(space.columns[self.bit], slots, space.tree.pages.ranges.high, partial(raised, space.tree))

    def resident(self, space: LabSpace) -> Slots:
        """The slots of a namespace's pages in the tier, ascending."""
        place = space.place[: space.tree.pages.ranges.high]
        slots: Slots = ((place & self.bit) != 0).nonzero()[0].astype(np.int32)
        return slots
