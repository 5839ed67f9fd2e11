"""S3-FIFO: a small queue that most pages pass through once, a main one for those used meanwhile, and ghosts of the small one.

J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP '23, with its parameters: a tenth for the small queue, more than one
use to get into the main one, uses counted up to three, as many ghosts as pages in the main queue.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec
from kvstore.tiers.policies.ghost_queue import GhostQueue
from kvstore.tiers.policies.policy import Columns, Pages, Policy, Slots, Use, Values, gather, scatter

_USES = 3
_ENOUGH = 2
_SMALL, _MAIN, _GHOST, _ASKED = 4, 8, 16, 32
_SMALL_SHARE = 0.1
_CLASS = 2.0**34
_LOOK = 64
"""At least so many of a queue's head are looked at together."""

_Column = npt.NDArray[Any]
_Line = npt.NDArray[np.int64]
"""Places in a batch, in the order of a queue."""


class S3FIFO(Policy):
    """For a tier of `capacity` pages."""

    columns = (ColumnSpec("queue", "u1"), ColumnSpec("number", "u4"))
    """The queue and the uses counted; the place in the queue, or the ghost's number."""

    def __init__(self, capacity: int) -> None:
        self._small = int(capacity * _SMALL_SHARE)
        self._main = capacity - self._small
        self._next = 0
        self._ghosts = GhostQueue()

    def resize(self, pages: int) -> None:
        """Take the sizes of the queues from what the tier holds."""
        self._small = int(pages * _SMALL_SHARE)
        self._main = pages - self._small

    def used(self, columns: Columns, use: Use) -> None:
        """Count the use of what is in the tier."""
        slots = use.slots[use.counted :]
        queue = columns["queue"][slots]
        counts = ((queue & (_SMALL | _MAIN)) != 0) & ((queue & _USES) < _USES)
        columns["queue"][slots[counts]] += 1

    def entered(self, columns: Columns, slots: Slots, now: float) -> None:
        """New pages go to the small queue, ghosts that come back to the main one; the deepest is the first in line."""
        ghosts = (columns["queue"][slots] & _GHOST) != 0
        ghosts[ghosts] = self._ghosts.take(columns["number"][slots[ghosts]])
        columns["queue"][slots] = np.where(ghosts, np.uint8(_MAIN), np.uint8(_SMALL))
        columns["number"][slots] = self._places(len(slots))[::-1]

    def left(self, columns: Columns, slots: Slots, now: float) -> None:
        """What leaves the small queue is remembered."""
        small = slots[(columns["queue"][slots] & _SMALL) != 0]
        columns["queue"][slots] = 0
        columns["queue"][small] = _GHOST
        columns["number"][small] = self._ghosts.push(len(small))
        self._ghosts.trim(self._main)

    def forgotten(self, columns: Columns, slots: Slots, now: float) -> None:
        """They can't come back."""
        queue = columns["queue"][slots]
        self._ghosts.take(columns["number"][slots[(queue & _GHOST) != 0]])
        columns["queue"][slots] = 0

    def values(self, batch: Sequence[Pages], wanted: int, now: float) -> Values:
        """Go through both queues as if `wanted` pages left one by one: those go first, in that order; what is passed over moves."""
        queue = gather(batch, "queue")
        values = -(np.uint32(self._next & 0xFFFFFFFF) - gather(batch, "number")).astype(np.float64)  # the age; wraps round
        small_first = int(((queue & _SMALL) != 0).sum()) > self._small
        victims = self._from_small(batch, queue, values, wanted)
        if len(victims) < wanted:
            victims = np.concatenate([victims, self._from_main(batch, queue, values, wanted - len(victims))])
        queue[victims] |= _ASKED
        scatter(batch, "queue", queue)
        # Who is kept for another page's sake is replaced by who would have been next.
        unused = ((queue & _SMALL) != 0) & ((queue & _USES) < _ENOUGH)
        values += np.where(unused, 0 if small_first else _USES + 1, queue & _USES) * _CLASS
        values[victims] = np.arange(len(victims)) - 2 * _CLASS
        return values

    def _from_small(self, batch: Sequence[Pages], queue: _Column, values: _Column, wanted: int) -> _Line:
        """Take the head of the small queue until it is short enough. What was used more than once goes to the main one.

        So does what was to go before, and was kept because a page below it was worth more.
        """
        line = np.flatnonzero((queue & _SMALL) != 0)
        surplus = max(0, len(line) - self._small)
        looked_at = min(surplus, 2 * wanted + _LOOK)
        while True:
            head = _oldest(line, values, looked_at)
            goes = ((queue[head] & _USES) < _ENOUGH) & ((queue[head] & _ASKED) == 0)
            if looked_at == surplus or goes.sum() >= wanted:
                break
            looked_at = min(surplus, 4 * looked_at)
        last = int(np.searchsorted(np.cumsum(goes), wanted))
        line, goes = head[: last + 1], goes[: last + 1]
        promoted = line[~goes]
        if len(promoted):
            queue[promoted] = _MAIN
            self._requeue(batch, queue, promoted)
            values[promoted] = np.arange(len(promoted))
        victims: _Line = line[goes]
        return victims

    def _from_main(self, batch: Sequence[Pages], queue: _Column, values: _Column, wanted: int) -> _Line:
        """Take unused pages from the head of the main queue; used ones go to its end with one use less."""
        line = np.flatnonzero((queue & _MAIN) != 0)
        victims: list[_Line] = []
        place_after = float(self._next)  # behind all that is in line now
        while wanted > 0 and len(line):
            head = _oldest(line, values, min(len(line), 2 * wanted + _LOOK))
            goes = (queue[head] & _USES) == 0
            last = int(np.searchsorted(np.cumsum(goes), wanted))
            head, goes = head[: last + 1], goes[: last + 1]
            victims.append(head[goes])
            wanted -= int(goes.sum())
            passed = head[~goes]
            queue[passed] -= 1
            self._requeue(batch, queue, passed)
            values[passed] = place_after + np.arange(len(passed))
            place_after += len(passed)
            line = line[np.isin(line, victims[-1], invert=True)]
        return np.concatenate(victims) if victims else np.empty(0, np.int64)

    def _requeue(self, batch: Sequence[Pages], queue: _Column, line: _Line) -> None:
        """Put pages, whose `queue` was changed, at the end of the line."""
        number = gather(batch, "number")
        number[line] = self._places(len(line))
        scatter(batch, "queue", queue)
        scatter(batch, "number", number)

    def _places(self, count: int) -> npt.NDArray[np.uint32]:
        first, self._next = self._next, self._next + count
        return np.arange(first, first + count).astype(np.uint32)


def _oldest(line: _Line, values: _Column, count: int) -> _Line:
    """The `count` first of a queue, in order."""
    ages = values[line]
    if count < len(line):
        line = line[np.argpartition(ages, count)[:count]]
        ages = values[line]
    found: _Line = line[np.argsort(ages, kind="stable")]
    return found
