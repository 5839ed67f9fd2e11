"""A bounded first-in-first-out list of ghosts, from whose middle some come back."""

import numpy as np
import numpy.typing as npt

_FIRST_SIZE = 1024


class GhostQueue:
    """Gives each ghost a number (uint32, going round) for its page to keep; whether a number is still in the list is one look-up."""

    def __init__(self) -> None:
        self._there = np.zeros(_FIRST_SIZE, np.bool_)
        """From the oldest number on."""
        self._oldest = 0
        self._length = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, count: int) -> npt.NDArray[np.uint32]:
        """Add so many ghosts at the new end. Returns their numbers, the oldest first."""
        if self._length + count > len(self._there):
            grown = np.zeros(2 * (self._length + count), np.bool_)
            grown[: self._length] = self._there[: self._length]
            self._there = grown
        first = self._oldest + self._length
        self._there[self._length : self._length + count] = True
        self._length += count
        self._count += count
        return np.arange(first, first + count).astype(np.uint32)

    def take(self, numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Remove ghosts by their numbers (no number twice). Returns which were in the list."""
        at = (numbers - np.uint32(self._oldest & 0xFFFFFFFF)).astype(np.int64)
        found = at < self._length
        found[found] = self._there[at[found]]
        self._there[at[found]] = False
        self._count -= int(found.sum())
        return found

    def trim(self, most: int) -> None:
        """Forget the oldest until at most `most` are left."""
        surplus = self._count - max(most, 0)
        if surplus <= 0:
            return
        cut = int(np.flatnonzero(self._there[: self._length])[surplus - 1]) + 1
        self._there[: self._length - cut] = self._there[cut : self._length]
        self._there[self._length - cut : self._length] = False
        self._oldest += cut
        self._length -= cut
        self._count -= surplus
