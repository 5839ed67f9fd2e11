"""Tiers without bytes: for each page of a tree whether it is in DRAM and on SSD, and who leaves when a tier is full."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec
from kvstore.radix.leaf_first import depth_of, in_order, least, raised
from kvstore.radix.pages import Slots
from kvstore.radix.tree import ROOT, RadixTree
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

    @property
    def place(self) -> npt.NDArray[np.uint8]:
        """Where pages are."""
        return self.tree.pages.kept[PLACE.name]


def specs_of(policies: dict[int, Policy]) -> list[ColumnSpec]:
    """The columns that a tree keeps for its tiers' policies: each tier's have its own names, unless one policy serves both."""
    specs = {PLACE.name: PLACE}
    for tier, policy in policies.items():
        for spec in policy.columns:
            name = _kept_name(policies, tier, spec.name)
            specs[name] = ColumnSpec(name, spec.dtype)
    return list(specs.values())


def columns_of(tree: RadixTree, policies: dict[int, Policy], tier: int) -> Columns:
    """What the policy of a tier sees of a tree's pages."""
    own = {spec.name: tree.pages.kept[_kept_name(policies, tier, spec.name)] for spec in policies[tier].columns}
    return {"recency": tree.pages.recency, **own}


def _kept_name(policies: dict[int, Policy], tier: int, name: str) -> str:
    owner = next(other for other, policy in policies.items() if policy is policies[tier])
    return f"{owner}.{name}"


@dataclass(slots=True)
class Tier:
    """One tier of all namespaces, `capacity` in bytes. When it is over, a batch leaves: at least what is needed, and `batch` of it all."""

    bit: int
    capacity: int
    policy: Policy
    spaces: list[LabSpace]
    batch: float
    used: int = 0
    entered_pages: int = 0

    def enter(self, space: LabSpace, slots: Slots, now: float) -> None:
        """Pages of one path, from the root on, that are not in the tier come in."""
        space.place[slots] |= self.bit
        self.used += len(slots) * space.page_bytes
        self.entered_pages += len(slots)
        self.policy.entered(space.columns[self.bit], slots, now)

    def shrink(self, now: float, gone: Callable[[LabSpace, Slots], None]) -> None:
        """If the tier is over its capacity, let the least valuable go. `gone` is told of them, by namespace."""
        if self.used <= self.capacity:
            return
        wanted = max(self.used - self.capacity, int(self.capacity * self.batch))
        spaces = [space for space in self.spaces if space.tree.page_count]
        batch = [self.pages(space, self.resident(space)) for space in spaces]
        if self.policy.wants_survey():
            self.policy.survey([self.pages(space, known_slots(space.tree)) for space in spaces], now)
        bounds = np.cumsum([0, *(len(pages.slots) for pages in batch)]).tolist()
        sizes = np.repeat([space.page_bytes for space in spaces], np.diff(bounds))
        likely = min(len(sizes), -(-wanted // int(sizes.min())))
        values = self.policy.values(batch, likely, now)
        if not self.policy.leaf_first:
            values = np.concatenate([pages.raised(pages.slots, values[part]) for pages, part in parts(batch)])
        chosen = least(values, likely)
        near = [
            (space, pages.slots[chosen[(chosen >= low) & (chosen < high)] - low])
            for space, pages, low, high in zip(spaces, batch, bounds[:-1], bounds[1:], strict=True)
        ]
        recency = np.concatenate([space.tree.pages.recency[slots] for space, slots in near])
        depth = np.concatenate([depth_of(space.tree, slots) for space, slots in near])
        chosen = chosen[in_order(values[chosen], recency, depth)]
        chosen = chosen[: int(np.searchsorted(np.cumsum(sizes[chosen]), wanted)) + 1]
        for space, pages, low, high in zip(spaces, batch, bounds[:-1], bounds[1:], strict=True):
            slots = pages.slots[chosen[(chosen >= low) & (chosen < high)] - low]
            if len(slots):
                self._leave(space, slots, now)
                gone(space, slots)

    def _leave(self, space: LabSpace, slots: Slots, now: float) -> None:
        space.place[slots] &= ~np.uint8(self.bit)
        self.used -= len(slots) * space.page_bytes
        self.policy.left(space.columns[self.bit], slots, now)

    def pages(self, space: LabSpace, slots: Slots) -> Pages:
        """Pages as the tier's policy sees them."""
        return Pages(space.columns[self.bit], slots, space.tree.pages.ranges.high, partial(raised, space.tree))

    def resident(self, space: LabSpace) -> Slots:
        """The slots of a namespace's pages in the tier, ascending."""
        place = space.place[: space.tree.pages.ranges.high]
        return np.flatnonzero((place & self.bit) != 0).astype(np.int32)


def known_slots(tree: RadixTree) -> Slots:
    """The slots of all pages and ghosts, ascending."""
    return np.flatnonzero(tree.pages.node[: tree.pages.ranges.high] > ROOT).astype(np.int32)
