"""Which boundaries of a prefix can be used: the rule for models whose components hold different kinds of state. Pure.

Every page has its `full` components. `window` and `state` components are optional on a page and decide at the boundary:
a boundary after `b` pages is usable if the pages that cover the last w tokens before it have their window parts (or all
pages do, back to the root), and if page b - 1 has its state parts. The root is always usable.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.kvspec import KVSpec

Masks = npt.NDArray[np.uint16]
"""For each page, which components it has: bit c for component c, set only where all its layers and heads are there."""

_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Optional:
    """A component that a page may lack. A boundary needs it on the `pages` pages before it (fewer at the root)."""

    component: int
    pages: int

    @property
    def bit(self) -> int:
        """Its bit in a mask."""
        return 1 << self.component


@dataclass(frozen=True, slots=True)
class Lack:
    """A component that keeps the end of a prefix from being usable: it alone would let `pages` be.

    Of the pages that the end needs it on, `missing_pages` lack it, in [first_page, last_page).
    """

    component: int
    pages: int
    first_page: int
    last_page: int
    missing_pages: int


@dataclass(frozen=True, slots=True)
class ComponentRules:
    """The rule of one KV spec. `required` is the mask of the components that every page has."""

    required: int
    optional: tuple[Optional, ...]

    @classmethod
    def of(cls, spec: KVSpec) -> "ComponentRules":
        """The rule for the components of a KV spec."""
        optional = [Optional(i, spec.boundary_pages(i)) for i, component in enumerate(spec.components) if component.kind != "full"]
        required = sum(1 << index for index, component in enumerate(spec.components) if component.kind == "full")
        return cls(required, tuple(optional))

    @property
    def reach(self) -> int:
        """How many pages before a boundary its usability depends on."""
        return max((o.pages for o in self.optional), default=0)

    def usable(self, masks: Masks) -> npt.NDArray[np.bool_]:
        """For each boundary 0 to n of a prefix of n pages, whether it is usable."""
        return self._usable(masks, 0)

    def longest(self, masks: Masks) -> int:
        """The longest usable boundary of a prefix; looks no further back than it must."""
        end = len(masks)
        if not self.optional:
            return end
        while end > 0:
            low = max(end - _CHUNK, 0)
            start = max(low - self.reach, 0)
            good = np.flatnonzero(self._usable(masks[start:end], start)[max(low - start, 1) :])
            if len(good):
                return max(low, start + 1) + int(good[-1])
            end = low
        return 0

    def alone(self, masks: Masks) -> npt.NDArray[np.bool_]:
        """Which pages can be used as prefixes of one page."""
        needed = np.uint16(sum(rule.bit for rule in self.optional if rule.pages))
        found: npt.NDArray[np.bool_] = masks & needed == needed
        return found

    def lacks(self, masks: Masks) -> tuple[Lack, ...]:
        """Which components keep a prefix from being usable to its end, and where they are missing for that."""
        found, end = [], len(masks)
        for rule in self.optional:
            start = max(end - rule.pages, 0)
            missing = start + np.flatnonzero((masks[start:] & np.uint16(rule.bit)) == 0)
            if len(missing):
                alone = ComponentRules(self.required, (rule,)).longest(masks)
                found.append(Lack(rule.component, alone, int(missing[0]), int(missing[-1]) + 1, len(missing)))
        return tuple(found)

    def _usable(self, masks: Masks, start: int) -> npt.NDArray[np.bool_]:
        """As `usable`, for pages from `start` on; boundaries less than `reach` behind a start past the root are not told truly."""
        boundaries = np.arange(start, start + len(masks) + 1)
        good = np.ones(len(boundaries), np.bool_)
        for rule in self.optional:
            missing = np.where(masks & np.uint16(rule.bit), -1, boundaries[:-1])
            last_missing = np.maximum.accumulate(np.concatenate([[start - 1], missing]))
            good &= last_missing < np.maximum(boundaries - rule.pages, 0)
        if start == 0:
            good[0] = True
        return good

    def first_page(self, component: int, boundary: int) -> int:
        """The first page whose part of a component is loaded to go on from a boundary."""
        for rule in self.optional:
            if rule.component == component:
                return max(boundary - rule.pages, 0)
        return 0
