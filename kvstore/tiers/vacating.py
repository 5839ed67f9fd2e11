"""Which segments to vacate, and how much may be moved for that. Pure.

A segment is vacated by moving what is in it to free slots of the same class elsewhere, which turns slots that are free here
and there into room for a segment of any class. If the free slots of a class add up to one of its segments, one can be vacated.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment: `used` of its `slots` slots are taken. `slot_class` says where its blobs may go."""

    number: int
    slot_class: Hashable
    slot_bytes: int
    slots: int
    used: int

    @property
    def nbytes(self) -> int:
        """Bytes that vacating it gives."""
        return self.slots * self.slot_bytes

    @property
    def cost(self) -> int:
        """Bytes to move for that, at most."""
        return self.used * self.slot_bytes


def choose(candidates: Iterable[Candidate], wanted: int, most_moved: int, movable: Callable[[int], bool]) -> list[int]:
    """The segments to vacate so that at least `wanted` bytes become free, the sparsest first; none if that can't be done.

    At most `most_moved` bytes are to be moved. `movable` says whether all that is in a segment may be moved; it is asked
    last, for as few segments as possible.
    """
    candidates = list(candidates)
    free: Counter[Hashable] = Counter()
    for segment in candidates:
        free[segment.slot_class] += segment.slots - segment.used
    chosen: list[Candidate] = []
    gained = moved = 0
    for segment in sorted(candidates, key=lambda s: (s.used / s.slots, s.slots)):
        if gained >= wanted:
            break
        # What its class has free once it is gone itself, and its blobs have found a place.
        left = free[segment.slot_class] - segment.slots
        if left >= 0 and moved + segment.cost <= most_moved and movable(segment.number):
            free[segment.slot_class] = left
            chosen.append(segment)
            gained += segment.nbytes
            moved += segment.cost
    if gained < wanted:
        return []
    for segment in sorted(chosen, key=lambda s: s.cost, reverse=True):  # the last one may have made some of the others needless
        if gained - segment.nbytes >= wanted:
            chosen.remove(segment)
            gained -= segment.nbytes
    return [segment.number for segment in chosen]


class MoveBudget:
    """Bytes that may be moved: `share` of the bytes that are asked for, saved up to `most`, starting with `start`."""

    def __init__(self, share: float, start: int, most: int) -> None:
        self._share = share
        self._most = most if share else 0
        self._available = float(min(start, self._most))

    @property
    def available(self) -> int:
        """Bytes that may be moved now."""
        return int(self._available)

    def earn(self, asked: int) -> None:
        """Somebody asked for a place for so many bytes."""
        self._available = min(self._most, self._available + self._share * asked)

    def spend(self, moved: int) -> None:
        """So many bytes were moved."""
        self._available -= moved
