"""Uses that the eviction policies are still to be told of, the oldest first, and about how long that takes."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.hints import Hints
from kvstore.radix.pages import GHOST, Slots
from kvstore.radix.tables import ROOT
from kvstore.store.space import Space

A_USE = 1024
"""So many pages of a path cost about as much to tell of as a use does at all: 0.15 ms on the machine it was measured on."""
APART = 4
"""So many pages of a path cost about as much to tell of as one that stands alone."""
MOST = 1 << 18
"""Most that waits, in pages and `A_USE` for each use: some 40 ms. Where more comes, the request itself tells of the oldest."""
MANY = 1 << 16
"""Of more, it is told without waiting for quiet."""
A_TURN = 4 * A_USE
"""About what is told in a row, half a millisecond or one: requests that come meanwhile wait for it, turn by turn."""
APART_AT_A_TIME = 1 << 12
"""Of pages that stand alone, so many are told of in a row."""


@dataclass(frozen=True, slots=True)
class PathUse:
    """A use of a path: where its path ends, and how it was found.

    `keys` are those of the last page and of pages before it, at doubling distances up to the first: some may be gone when it is told.
    """

    space: Space
    keys: bytes
    counted: int
    known: int
    hits: int
    missing: npt.NDArray[np.bool_]
    """Which pages were not in DRAM."""
    asked: int
    hints: Hints
    now: float


@dataclass(frozen=True, slots=True)
class Placed:
    """Pages by their slots, and their keys: they may have moved, or be gone, when somebody looks again."""

    slots: Slots
    keys: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, space: Space, slots: Slots) -> "Placed":
        """Pages or ghosts that are there now."""
        return cls(slots.copy(), space.tree.pages.key[slots])

    def now(self, space: Space) -> Slots:
        """The slots of all, in their order, those of ghosts included; -1 for those that are forgotten."""
        if space.dropped:
            return np.full(len(self.slots), -1, np.int32)
        pages, slots = space.tree.pages, self.slots
        # A slot that was given back keeps the key of who had it, but has no node.
        here = (pages.key[slots] == self.keys).all(1) & (pages.node[slots] != ROOT)
        if not here.all():
            slots = slots.copy()
            away = np.flatnonzero(~here)
            slots[away] = [pages.find_any(self.keys[at].tobytes()) for at in away.tolist()]
        return slots


@dataclass(frozen=True, slots=True)
class ApartUse:
    """A use of pages that each stand alone: first those that the policies were told of before, then the others."""

    space: Space
    pages: Placed
    known: int
    hits: int
    missing: npt.NDArray[np.bool_]
    """Which were not in DRAM."""
    hints: Hints
    now: float


@dataclass(frozen=True, slots=True)
class Cooled:
    """Pages that nobody is expected to come back to."""

    space: Space
    pages: Placed
    now: float

    def live(self) -> Slots:
        """Those that are still there."""
        slots = self.pages.now(self.space)
        slots = slots[slots >= 0]
        live: Slots = slots[(self.space.tree.pages.flags[slots] & GHOST) == 0]
        return live


Note = PathUse | ApartUse | Cooled


class Untold:
    """Notes in their order, each with its weight."""

    def __init__(self) -> None:
        self._notes: deque[tuple[Note, int]] = deque()
        self.noted = 0
        """How many there ever were."""
        self.weight = 0
        """About how long it takes to tell of all, in pages of a path."""

    def __len__(self) -> int:
        return len(self._notes)

    @property
    def told(self) -> int:
        """How many were taken."""
        return self.noted - len(self._notes)

    @property
    def many(self) -> bool:
        """Whether it is time to tell, quiet or not."""
        return self.weight > MANY

    @property
    def too_many(self) -> bool:
        """Whether the oldest are to be told before anything else is done. One that is over the bound by itself may wait, alone."""
        return self.weight > MOST and len(self._notes) > 1

    def add(self, note: Note, pages: int) -> None:
        """Note something about so many pages."""
        weight = A_USE + (pages if isinstance(note, PathUse) else APART * pages)
        self._notes.append((note, weight))
        self.noted += 1
        self.weight += weight

    def take(self) -> tuple[Note, int]:
        """The oldest, and its weight."""
        note, weight = self._notes.popleft()
        self.weight -= weight
        return note, weight


def pieces(pages: int) -> range:
    """Where to cut pages that stand alone, so that each piece is told in a row."""
    return range(0, pages, APART_AT_A_TIME)
