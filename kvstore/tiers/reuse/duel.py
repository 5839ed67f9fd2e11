"""Whether the estimates are worth following: they and leaf-LRU each play on, with a tier of their own that holds no bytes.

Both see every request. Who of late had more hits, by more than chance explains, is followed. So an estimate that does not fit the
traffic costs what it takes to notice, and no more (compare set dueling: M. Qureshi et al., ISCA '07).
"""

import math

import numpy as np

_SLOW, _FAST = 4000.0, 500.0
"""Half-lives, in requests, of the two averages."""


class Duel:
    """LRU is followed from a slow statistic under -1 until it is over 0, or the fast one over 1. To begin with the estimates are."""

    def __init__(self) -> None:
        self._keep = np.exp2(-1 / np.array([_SLOW, _FAST]))
        self._gain = np.zeros(2)
        self._variance = np.ones(2)
        self.follow_lru = False

    def played(self, estimates: int, lru: int) -> None:
        """Pages that each would have hit with a request."""
        gain = estimates - lru
        self._gain = self._gain * self._keep + gain
        self._variance = self._variance * self._keep + gain * gain
        slow, fast = (float(value) for value in self._gain / np.sqrt(self._variance))
        self.follow_lru = slow < 0 and fast < 1 if self.follow_lru else slow < -1

    @property
    def lead(self) -> float:
        """How far the estimates are ahead of LRU, in standard deviations."""
        return float(self._gain[0]) / math.sqrt(float(self._variance[0]))
