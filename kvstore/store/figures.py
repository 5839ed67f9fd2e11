"""What onlookers ask of a store: how full it is, what is under way, and how the disk is doing."""

import numpy as np

from kvstore.store.dram.replacement import DRAM, Replacement
from kvstore.store.files import Files
from kvstore.store.puts.pending import Pending
from kvstore.store.puts.putting import Puts
from kvstore.store.quotas import Quotas
from kvstore.store.space import Space
from kvstore.store.spaces import Spaces
from kvstore.store.ssd.backlog import Backlog
from kvstore.store.ssd.recovery import LoadProgress, Recovery
from kvstore.store.ssd.state import SsdHealth
from kvstore.store.ssd.writeback import Writeback
from kvstore.tiers import Usage
from kvstore.tiers.dram import Arena, SegmentUsage


class Figures:
    """Reads, and changes nothing."""

    def __init__(
        self, arena: Arena, files: Files, spaces: Spaces, quotas: Quotas, puts: Puts, writeback: Writeback, recovery: Recovery,
        replacement: Replacement,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._files = files
        self._spaces = spaces
        self._quotas = quotas
        self._puts = puts
        self._writeback = writeback
        self._recovery = recovery
        self._replacement = replacement

    def usage(self) -> dict[str, Usage]:
        """Usage by tier."""
        return {"dram": self._arena.usage(), "ssd": self._files.blobs.usage(), "text": self._files.recipes.usage()}

    @property
    def loading(self) -> LoadProgress | None:
        """How far loading is; None once everything is back."""
        return self._recovery.progress

    @property
    def pages(self) -> int:
        """Pages of all namespaces; while they are loading, about so many there will be."""
        loading = self.loading
        return sum(space.tree.page_count for space in self._spaces) if loading is None else loading.of_about

    @property
    def dram_segments(self) -> SegmentUsage:
        """How many DRAM segments there are, and their bytes."""
        return self._arena.segments()

    def usage_of(self, tenant: str) -> dict[str, Usage]:
        """A tenant's own usage by tier, out of its quota, or of the tier if it has none, or a larger one."""
        quota = self._quotas.of(tenant)
        return {
            "dram": Usage(min(quota.dram or self._arena.capacity, self._arena.capacity), self._arena.used_by(tenant)),
            "ssd": Usage(min(quota.ssd or self._files.blobs.capacity, self._files.blobs.capacity), self._spaces.ssd_bytes_of(tenant)),
        }

    def puts_open_of(self, tenant: str) -> int:
        """A tenant's puts under way."""
        return self._puts.open.of_tenant(tenant)

    @property
    def puts_open(self) -> int:
        """Puts under way."""
        return len(self._puts.open)

    def pending_of(self, space: Space) -> list[Pending]:
        """What waits for other shards in a namespace."""
        return [pending for assembly in self._puts.assemblies.of_space(space) for pending in assembly.pending]

    @property
    def pending_pages(self) -> int:
        """Pages of which other shards are still to come."""
        return self._puts.assemblies.pages

    @property
    def pinned_blobs(self) -> int:
        """Blobs that transfers and group commits hold in place now."""
        return sum(int(np.count_nonzero(s.blobs.pins[: s.blobs.slots.high])) for s in self._spaces)

    @property
    def backlog(self) -> Backlog:
        """What waits to be written to SSD."""
        return self._writeback.backlog

    @property
    def follows_lru(self) -> bool:
        """Whether what leaves DRAM goes by recency now: the policy is `lru`, or the classifier trusts it more than itself."""
        return self._replacement.policies[DRAM].follows_lru

    @property
    def ssd_state(self) -> SsdHealth:
        """How the disk under the SSD tier is doing."""
        return self._writeback.state
