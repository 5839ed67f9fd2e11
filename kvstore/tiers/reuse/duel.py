"""Whether the estimates are worth following: they and leaf-LRU each play on, with a tier of their own that holds no bytes.

Both see every request. Who of late had more hits, by more than chance explains, is followed. So an estimate that does not fit the
traffic costs what it takes to notice, and no more (compare set dueling: M. Qureshi et al., ISCA '07).
"""

import math

_SLOW, _FAST = 4000.0, 500.0
"""Half-lives, in requests, of the two averages."""


class Duel:
    """LRU is followed from a slow statistic under -1 until it is over 0, or the fast one over 1. To begin with the estimates are."""

    def __init__(self) -> None:
        self._slow = _Average(_SLOW)
        self._fast = _Average(_FAST)
        self.follow_lru = False

    def played(self, estimates: int, lru: int) -> None:
        """Pages that each would have hit with a request."""
        slow, fast = self._slow.add(estimates - lru), self._fast.add(estimates - lru)
        self.follow_lru = slow < 0 and fast < 1 if self.follow_lru else slow < -1

    @property
    def lead(self) -> float:
        """How far the estimates are ahead of LRU, in standard deviations."""
        return self._slow.statistic


class _Average:
    """A decaying sum of gains beside what chance alone would make of it."""

    def __init__(self, half_life: float) -> None:
        self._keep = 2.0 ** (-1 / half_life)
        self._gain, self._variance = 0.0, 1.0

    @property
    def statistic(self) -> float:
        """The sum in its standard deviations."""
        return self._gain / math.sqrt(self._variance)

    def add(self, gain: int) -> float:
        """Take a gain in. Returns the statistic."""
        self._gain = self._gain * self._keep + gain
        self._variance = self._variance * self._keep + gain * gain
        return self.statistic
