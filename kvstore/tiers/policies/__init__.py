"""Eviction policies, behind one interface. `make` knows them by name."""

from kvstore.tiers.policies.arc import ARC
from kvstore.tiers.policies.lru import LeafLRU
from kvstore.tiers.policies.policy import Columns, Explanation, Pages, Policy, Use, Values, gather, parts, scatter
from kvstore.tiers.policies.s3fifo import S3FIFO

__all__ = ["ARC", "S3FIFO", "Columns", "Explanation", "LeafLRU", "Pages", "Policy", "Use", "Values", "gather", "parts", "scatter"]
