"""Leaf-LRU: the least recently used goes first, and of one use the deepest page."""

from collections.abc import Sequence

from kvstore.tiers.policies.policy import Pages, Policy, Values, gather


class LeafLRU(Policy):
    """Needs nothing but the tree's own recency."""

    leaf_first = True

    @property
    def follows_lru(self) -> bool:
        """Always."""
        return True

    def values(self, batch: Sequence[Pages], wanted: int, now: float) -> Values:
        """The order of last use."""
        return gather(batch, "recency")

    def peek(self, pages: Pages, now: float) -> Values:
        """The same."""
        return pages.of("recency")
