"""The turns of a trace: what a request becomes in a factory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.cost import CostModel, OutputLengths
from kvstore_workers.factory.turns import Turn
from kvstore_workers.trace import BLOCK_TOKENS, Request


@dataclass(frozen=True, slots=True)
class TurnRules:
    """How turns are told apart: a midfill has at least `midfill_from` cached tokens, a short one a fill of at most `short_s`.

    A turn is given up `deadline_s` after its arrival.
    """

    cost: CostModel
    lengths: OutputLengths
    midfill_from: int = 2048
    short_s: float = 0.15
    deadline_s: float = 120.0

    def turn(self, number: int, arrived: float, input_tokens: int, cached_tokens: int, *, aggregated: bool = False) -> Turn:
        """The turn of a request, with what the store knows of its prompt."""
        predicted = self.cost.fill_s(input_tokens - cached_tokens, cached_tokens)
        filled_by = Kind.MIDFILL if cached_tokens >= self.midfill_from else Kind.PREFILL
        kind = Kind.AGGREGATED if aggregated else filled_by
        return Turn(
            number, arrived, input_tokens, cached_tokens, self.lengths.of(number), arrived + self.deadline_s, kind,
            predicted <= self.short_s, predicted,
        )  # fmt: skip


def cached_in_order(requests: Iterable[Request]) -> list[int]:
    """The tokens that each request finds cached if all before it are stored, and nothing ever leaves."""
    seen: set[int] = set()
    found = []
    for request in requests:
        known = 0
        while known < len(request.blocks) and request.blocks[known] in seen:
            known += 1
        seen.update(request.blocks)
        found.append(known * BLOCK_TOKENS)
    return found


def simulated_turns(requests: Sequence[Request], rules: TurnRules, speed: float, *, aggregated: bool = False) -> list[Turn]:
    """The turns of a trace for a simulated run: at their times, `speed` times as fast; nothing that was stored is lost."""
    cached = cached_in_order(requests)
    return [
        rules.turn(r.number, r.timestamp_ms / 1000 / speed, r.input_tokens, known, aggregated=aggregated)
        for r, known in zip(requests, cached, strict=True)
    ]
