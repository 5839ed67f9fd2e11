"""Which blobs of a namespace leased pages need: looked for in turns of the loop, and then followed. Bookkeeping on the loop's thread.

What is found is never too little: a page that is leased, moved or given parts after it was looked at is looked at again (`Pages.touched`).
It may be too much, as a lease that ends meanwhile still counts.
"""

import asyncio
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.radix.pages import Slots
from kvstore.radix.tables import ROOT
from kvstore.store.space import Space

_SLOTS_AT_ONCE = 1 << 16
_LEASED_AT_ONCE = 2048
"""Leased pages that are looked at in one turn: well under a millisecond for those of one part, a few for those of 16."""


class LeasedBlobs:
    """See the module's text. Nobody else may look in the same namespace until `close`."""

    def __init__(self, space: Space) -> None:
        assert space.tree.pages.touched is None, "somebody looks for leased pages already"
        self._space = space
        self._found = np.zeros(space.blobs.slots.capacity, np.bool_)
        self._touched: list[slice | Slots] = []
        space.tree.pages.touched = self._touched

    @classmethod
    async def of(cls, space: Space) -> Self:
        """Those of a namespace as it is at the end."""
        leased = cls(space)
        try:
            pages = space.tree.pages
            for first in range(0, pages.ranges.high, _SLOTS_AT_ONCE):  # what comes above it meanwhile is touched
                await leased._look(first + np.flatnonzero(pages.leases[first : first + _SLOTS_AT_ONCE]))
                await asyncio.sleep(0)
            await leased.follow()
        except BaseException:
            leased.close()
            raise
        return leased

    async def follow(self) -> None:
        """Look at most of what was touched, in turns of the loop, so that little is left for `needs`."""
        for _ in range(len(self._touched)):
            await self._look(self._slots_of(self._touched.pop(0)))

    def needs(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these blobs a leased page needs now."""
        while self._touched:
            self._add(self._slots_of(self._touched.pop()))
        return self._found[rows]

    def close(self) -> None:
        """Follow no more."""
        self._space.tree.pages.touched = None

    @staticmethod
    def _slots_of(some: slice | Slots) -> Slots:
        return np.arange(some.start, some.stop, dtype=np.int32) if isinstance(some, slice) else some

    async def _look(self, slots: npt.NDArray[np.integer]) -> None:
        for at in range(0, len(slots), _LEASED_AT_ONCE):
            self._add(slots[at : at + _LEASED_AT_ONCE])
            if at + _LEASED_AT_ONCE < len(slots):
                await asyncio.sleep(0)

    def _add(self, slots: npt.NDArray[np.integer]) -> None:
        tree = self._space.tree
        leased = (tree.pages.leases[slots] > 0) & (
            tree.pages.node[slots] > ROOT
        )  # a place that a run was moved from still says what it did
        part = tree.pages.part[slots[leased]]
        while len(part := part[part >= 0]):
            rows = tree.parts.blob[part]
            self._found[rows[rows >= 0]] = True
            part = tree.parts.next[part]
