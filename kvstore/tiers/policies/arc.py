"""ARC: a list of pages used once and one of pages used again, whose shares follow from which ghosts come back.

N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03. Decisions are taken for a batch at a time: the target
moves once for all pages of a use, and what leaves is taken from the list of pages used once down to the target, then from the other.
"""

from collections.abc import Sequence

import numpy as np

from kvstore.columns import ColumnSpec
from kvstore.tiers.policies.ghost_queue import GhostQueue
from kvstore.tiers.policies.policy import Columns, Pages, Policy, Slots, Use, Values, gather

_ONCE, _AGAIN, _ONCE_GHOST, _AGAIN_GHOST = 1, 2, 3, 4
_CLASS_SHIFT = 61
"""Above all bits of the recency."""


class ARC(Policy):
    """For a tier of `capacity` pages."""

    columns = (ColumnSpec("list", "u1"), ColumnSpec("number", "u4"))

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        """How many pages used once are to stay, when pages must go."""
        self._once = 0
        self._again = 0
        self._once_ghosts = GhostQueue()
        self._again_ghosts = GhostQueue()

    def resize(self, pages: int) -> None:
        """Take the capacity from what the tier holds."""
        self._capacity = pages

    def used(self, columns: Columns, use: Use) -> None:
        """Pages in the tier are used again."""
        slots = use.slots[use.counted :]
        first = slots[columns["list"][slots] == _ONCE]
        columns["list"][first] = _AGAIN
        self._once -= len(first)
        self._again += len(first)

    def entered(self, columns: Columns, slots: Slots, now: float) -> None:
        """New pages are used once; ghosts that come back move the target and are used again."""
        lists, numbers = columns["list"][slots], columns["number"][slots]
        once_back = slots[lists == _ONCE_GHOST][self._once_ghosts.take(numbers[lists == _ONCE_GHOST])]
        again_back = slots[lists == _AGAIN_GHOST][self._again_ghosts.take(numbers[lists == _AGAIN_GHOST])]
        back = len(once_back) + len(again_back)
        if back:
            once, again = len(self._once_ghosts) + len(once_back), len(self._again_ghosts) + len(again_back)
            self._target += len(once_back) * max(1.0, again / max(once, 1)) - len(again_back) * max(1.0, once / max(again, 1))
            self._target = min(max(self._target, 0.0), float(self._capacity))
        columns["list"][slots] = _ONCE
        columns["list"][once_back] = columns["list"][again_back] = _AGAIN
        self._once += len(slots) - back
        self._again += back

    def left(self, columns: Columns, slots: Slots, now: float) -> None:
        """Pages become ghosts of their list."""
        lists = columns["list"][slots]
        once, again = slots[lists == _ONCE], slots[lists == _AGAIN]
        columns["number"][once] = self._once_ghosts.push(len(once))
        columns["number"][again] = self._again_ghosts.push(len(again))
        columns["list"][once], columns["list"][again] = _ONCE_GHOST, _AGAIN_GHOST
        self._once -= len(once)
        self._again -= len(again)
        self._once_ghosts.trim(self._capacity - self._once)
        self._again_ghosts.trim(2 * self._capacity - self._once - self._again - len(self._once_ghosts))

    def forgotten(self, columns: Columns, slots: Slots, now: float) -> None:
        """They can't come back."""
        lists, numbers = columns["list"][slots], columns["number"][slots]
        self._once_ghosts.take(numbers[lists == _ONCE_GHOST])
        self._again_ghosts.take(numbers[lists == _AGAIN_GHOST])
        columns["list"][slots] = 0

    def values(self, batch: Sequence[Pages], wanted: int, now: float) -> Values:
        """First the oldest of those used once that are beyond the target, then those used again, then the rest."""
        values = gather(batch, "recency").copy()
        again = gather(batch, "list") == _AGAIN
        once = np.flatnonzero(~again)
        self._once, self._again = len(once), len(again) - len(once)
        beyond = max(0, len(once) - int(self._target))
        if beyond < len(once):
            once = once[np.argpartition(values[once], beyond)[beyond:]]
            values[once] |= 2 << _CLASS_SHIFT
        values[again] |= 1 << _CLASS_SHIFT
        return values
