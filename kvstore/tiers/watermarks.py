"""When the mover starts, and how far it goes: two marks with hysteresis. Pure."""

from dataclasses import dataclass

from kvstore.errors import BadRequest
from kvstore.tiers import Usage


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Fractions of a tier's capacity. Above `high` the mover starts; it stops at `low`.

    Without `on_demand` nothing goes for the sake of those who wait: they are refused.
    """

    high: float = 0.92
    low: float = 0.85
    on_demand: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1:
            raise BadRequest(f"watermarks must be 0 < low < high <= 1, not low {self.low}, high {self.high}")

    def above_high(self, usage: Usage) -> bool:
        """Whether the mover should start."""
        return usage.used > self.high * usage.capacity

    def excess(self, usage: Usage, demand: int) -> int:
        """Bytes to free: down to the low mark once over the high one, and in any case as much as someone waits for."""
        demand *= self.on_demand
        if self.above_high(usage):
            return max(usage.used - int(self.low * usage.capacity), demand)
        return demand
