"""Eviction policies, behind one interface."""

from collections.abc import Callable

from kvstore.tiers.policies.arc import ARC
from kvstore.tiers.policies.lru import LeafLRU
from kvstore.tiers.policies.policy import NO_HINTS, Columns, Pages, Policy, Use, Values, gather, parts, scatter
from kvstore.tiers.policies.s3fifo import S3FIFO

POLICIES: dict[str, Callable[[int], Policy]] = {"lru": lambda _capacity: LeafLRU(), "arc": ARC, "s3fifo": S3FIFO}
"""By name: what makes a policy for a tier of so many pages."""

__all__ = [
    "ARC",
    "NO_HINTS",
    "POLICIES",
    "S3FIFO",
    "Columns",
    "Hints",
    "LeafLRU",
    "Pages",
    "Policy",
    "Use",
    "Values",
    "gather",
    "parts",
    "scatter",
]
