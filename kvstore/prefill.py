"""What computing tokens costs: the one arithmetic of it. Pure.

Computing the token at position p takes a constant for the weights, and a part that grows with p, for the attention over what is before it:
`base_s + slope_s * p` seconds, docs/sizing.md. A prompt's FLOPs are the sum of both (for instance in J. Kaplan et al., "Scaling Laws for
Neural Language Models", 2020, section 2.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kvstore.errors import BadRequest

_LONGEST = 1 << 40
_MOST_S = 1e6


@dataclass(frozen=True, slots=True)
class Prefill:
    """Computing the token at position p takes `base_s + slope_s * p` seconds."""

    base_s: float
    slope_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.base_s < _MOST_S and 0 <= self.slope_s < _MOST_S):
            raise BadRequest(f"a prefill cost of {self.base_s:g} s a token and {self.slope_s:g} s a token and position")

    @classmethod
    def measured(cls, points: Sequence[tuple[float, int]]) -> "Prefill":
        """From one or two measurements: (tokens a second, length) of prompts computed whole. One alone says nothing of the growth: none."""
        if not 1 <= len(points) <= 2:
            raise BadRequest(f"{len(points)} prefill rates: give one, or two at different lengths")
        for rate, length in points:
            if not (isfinite(rate) and rate > 0):
                raise BadRequest(f"a prefill rate is {rate:g}: it must be more than 0")
            if not 1 <= length <= _LONGEST:
                raise BadRequest(f"the length of a prefill rate is {length:g}: it must be at least 1 and at most {_LONGEST:g}")
        if len(points) == 1:
            return cls(1 / points[0][0])
        (near_rate, near), (far_rate, far) = sorted(points, key=lambda point: point[1])
        if near == far:
            raise BadRequest(f"both prefill rates are at {near} tokens: their lengths must differ")
        slope = 2 * (1 / far_rate - 1 / near_rate) / (far - near)
        base = 1 / near_rate - slope * (near - 1) / 2
        if slope < 0 or base <= 0:
            why = "faster for the longer prompt" if slope < 0 else "slower by more than attention can explain"
            raise BadRequest(f"prefill is {near_rate:g} tokens/s at {near} and {far_rate:g} at {far}: {why}")
        return cls(base, slope)

    def seconds(self, tokens: float) -> float:
        """How long a prompt takes from its start."""
        found: float = self.between(0.0, tokens)
        return found

    def between(self, first: Any, last: Any) -> Any:
        """How long the tokens from position `first` to before `last` take; numbers, or arrays of them."""
        tokens = last - first
        return tokens * self.base_s + self.slope_s * tokens * (first + last - 1) / 2
