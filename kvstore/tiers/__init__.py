"""The tiers: where bytes are. Knows nothing of prefixes.

Every tier module offers the same small protocol: allocate, write, read, free, usage.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a tier: what it may hold, and what is taken (free slots of a half-used segment count as free)."""

    capacity: int
    used: int

    @property
    def fraction(self) -> float:
        """Used share of the capacity."""
        return self.used / self.capacity if self.capacity else 1.0
