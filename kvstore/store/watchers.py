"""Who is told what becomes of the pages of a namespace."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvstore.columns import ColumnSpec
from kvstore.radix.pages import Slots

if TYPE_CHECKING:
    from kvstore.store.space import Space


class Watcher(Protocol):
    """Who is told where pages go, in the loop's thread. `specs` are the columns that it keeps beside those of the tree's pages."""

    specs: Sequence[ColumnSpec]

    def written(self, space: "Space", slot: int) -> None:
        """A page is on SSD now."""
        return

    def loaded(self, space: "Space") -> None:
        """All pages are back from the journal: what is durable is on SSD."""
        return

    def unwritten(self, space: "Space", slot: int) -> None:
        """A page is not on SSD any more."""
        return

    def buried(self, space: "Space", slots: Slots) -> None:
        """Pages were given up in all tiers, and are ghosts now."""
        return

    def forgotten(self, space: "Space", slots: Slots) -> None:
        """Ghosts are about to be removed for good."""
        return


class TextTier(Protocol):
    """Who writes the recipes of a namespace."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written."""

    def entered(self, space: "Space", keys: bytes) -> None:
        """Consecutive pages have entered the tree, or gained parts."""


class Follower(Protocol):
    """Who is told what becomes of the pages of a namespace in DRAM."""

    def entered(self, keys: bytes, blobs: Slots) -> None:
        """Consecutive pages have entered the tree, with these blob rows."""

    def moved(self, row: int) -> None:
        """A blob came to DRAM, or left it."""


class Nobody(Watcher):
    """Nobody is told."""

    specs = ()
