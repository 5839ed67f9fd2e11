"""The rival of who is followed, the estimates or leaf-LRU: it plays on with a shadow of the tier, which holds no bytes (see duel.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.columns import nth_least
from kvstore.tiers.policies.policy import Pages, Values, gather, parts
from kvstore.tiers.reuse.duel import Duel
from kvstore.tiers.reuse.states import IN, SHADOW, pages_with

Worth = Callable[[Sequence[Pages]], npt.NDArray[np.float64]]
"""What the estimates say that pages are worth."""
_SLACK = 0.01
"""What leaves a shadow at a time, as a share of it."""


class Rival:
    """Which pages the rival would hold is a bit of their state. To begin with LRU is the rival."""

    def __init__(self) -> None:
        self._duel = Duel()
        self._is_lru = True

    @property
    def follow_lru(self) -> bool:
        """Whether LRU does better than the estimates of late."""
        return self._duel.follow_lru

    def played(self, state: npt.NDArray[np.uint8]) -> None:
        """A path was asked for, `state` is of its known pages: each hits up to the first that it would not hold."""
        self._hits(*((_front(state & IN), _front(state & SHADOW)) if len(state) else (0, 0)))

    def played_apart(self, state: npt.NDArray[np.uint8]) -> None:
        """As `played`, of pages that are each a path of their own."""
        self._hits(int(np.count_nonzero(state & IN)), int(np.count_nonzero(state & SHADOW)))

    def _hits(self, ours: int, rival: int) -> None:
        self._duel.played(*((ours, rival) if self._is_lru else (rival, ours)))

    def keep_up(self, batch: Sequence[Pages], capacity: int, worth: Worth) -> None:
        """Change sides if the other is followed now, and bring what the rival would hold down to the capacity."""
        if self._is_lru == self.follow_lru:
            self._change_sides(batch)
        self._trim(batch, capacity, worth)

    def _change_sides(self, batch: Sequence[Pages]) -> None:
        """Who was followed plays on as the rival, from what is in the tier now."""
        self._is_lru = not self.follow_lru
        for pages in batch:
            state = pages.columns["state"][: pages.high]
            state[:] = state & ~np.uint8(SHADOW) | (state & IN) // IN * SHADOW

    def _trim(self, batch: Sequence[Pages], capacity: int, worth: Worth) -> None:
        """Bring what the rival would hold down to the capacity."""
        count = sum(int(np.count_nonzero(pages.columns["state"][: pages.high] & SHADOW)) for pages in batch)
        if count <= capacity:
            return
        held = [pages_with(pages, SHADOW) for pages in batch]
        recency = gather(held, "recency")
        values: Values = recency
        if not self._is_lru:
            worths = worth(held)
            values = np.concatenate([pages.raised(pages.slots, worths[part]) for pages, part in parts(held)])
        leaving = _least(values, recency, count - capacity + int(_SLACK * capacity))
        gone = np.zeros(count, np.bool_)
        gone[leaving] = True
        for pages, part in parts(held):
            pages.columns["state"][pages.slots[gone[part]]] &= ~np.uint8(SHADOW)


def _front(bits: npt.NDArray[np.integer[Any]]) -> int:
    """How many (of one byte) are set before the first that is not."""
    first = bits.tobytes().find(0)
    return len(bits) if first < 0 else first


def _least(values: Values, recency: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The places of the `count` least values; of equals the least recent, which are the deepest."""
    if count >= len(values):
        return np.arange(len(values))
    low = np.flatnonzero(values <= nth_least(values, count - 1))
    found: npt.NDArray[np.int64] = low[np.lexsort((recency[low], values[low]))[:count]]
    return found
