"""Blocks of the file of extents that may be written to: free, and not being read any more. Any thread.

What was freed stays as it is until all who read when it was freed have ended: they may have looked it up before. Epochs, as in K. Fraser,
Practical lock-freedom (2004), with a lock, as everything here is short.
"""

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.tiers.free_space import Extent, FreeSpace


class Blocks:
    """`space` says what is free at first; nobody else has it."""

    def __init__(self, space: FreeSpace) -> None:
        self._space = space
        self._lock = threading.Lock()
        self._epoch = 0
        self._readers: Counter[int] = Counter()
        self._retired: deque[tuple[int, list[Extent]]] = deque()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is looked up within is not written over before the end."""
        with self._lock:
            epoch = self._epoch
            self._readers[epoch] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[epoch] -= 1
                if not self._readers[epoch]:
                    del self._readers[epoch]

    def allocate(self, counts: Sequence[int]) -> list[list[Extent]] | None:
        """Extents for blobs of so many blocks each; None if there are not enough that may be written to now."""
        with self._lock:
            self._reclaim()
            return self._space.allocate(counts)

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Nothing names these after all."""
        with self._lock:
            self._space.free(extents)

    def retire(self, extents: list[Extent]) -> None:
        """Nothing names these any more, durably; who reads may still have them."""
        if extents:
            with self._lock:
                self._retired.append((self._epoch, extents))
                self._epoch += 1

    def _reclaim(self) -> None:
        oldest = min(self._readers, default=self._epoch)
        freed: list[Extent] = []
        while self._retired and self._retired[0][0] < oldest:
            freed += self._retired.popleft()[1]
        self._space.free(freed)
