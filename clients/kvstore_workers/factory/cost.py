"""What stages cost: seconds of a simulated accelerator. Pure; times are in seconds, lengths in tokens."""

from dataclasses import dataclass, field

import numpy as np

from kvstore.api.wire import BadRequest


@dataclass(frozen=True, slots=True)
class CostModel:
    """A fill costs by its new tokens, and by what they attend to; a decode step by its batch, and by the context it reads."""

    start_s: float = 0.02
    """Of a fill, whatever its length."""
    token_s: float = 40e-6
    """For each new token: the layers' products."""
    attention_s: float = 0.5e-9
    """For each pair of a new token and one that it attends to."""
    step_s: float = 8e-3
    """Of a decode step: reading the weights."""
    sequence_s: float = 0.25e-3
    """For each sequence of a step's batch."""
    context_s: float = 5e-9
    """For each token of context that a step reads."""

    def fill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """A prefill (nothing cached), or a midfill."""
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        return self.start_s + new_tokens * self.token_s + pairs * self.attention_s

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """One token for each sequence of a batch that together has so much context."""
        return self.step_s + batch * self.sequence_s + context_tokens * self.context_s


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """Output lengths: log-normal with this median and spread, at most `most`, the same for a seed and a turn."""

    seed: int
    median: float = 250.0
    sigma: float = 0.9
    most: int = 2000

    def of(self, turn: int) -> int:
        """The output tokens of a turn."""
        drawn = np.random.Generator(np.random.Philox(key=[self.seed, turn])).lognormal(np.log(self.median), self.sigma)
        return int(min(max(drawn, 1), self.most))


@dataclass(slots=True)
class _Sequence:
    context: int
    left: float


@dataclass(slots=True)
class DecodeBatch:
    """The sequences that a decode worker works on, each a token a step. Time is an argument: it never goes back."""

    cost: CostModel
    now: float = 0.0
    paused_until: float = 0.0
    busy_s: float = 0.0
    tokens: float = 0.0
    _sequences: dict[int, _Sequence] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, turn: int, context_tokens: int, output_tokens: int, now: float) -> None:
        """A sequence joins, to make so many tokens."""
        if turn in self._sequences:
            raise BadRequest(f"turn {turn} is in the batch already")
        self._advance(now)
        self._sequences[turn] = _Sequence(context_tokens, float(output_tokens))

    def remove(self, turn: int, now: float) -> None:
        """A sequence leaves before its end."""
        self._advance(now)
        self._sequences.pop(turn, None)

    def pause(self, until: float, now: float) -> None:
        """The accelerator does something else until then: a fill in an aggregated worker."""
        self._advance(now)
        self.paused_until = max(self.paused_until, until)

    def step(self) -> float:
        """Seconds of a step as the batch is now."""
        return self.cost.decode_step_s(len(self._sequences), sum(s.context for s in self._sequences.values()))

    def next_end(self) -> float | None:
        """When the next sequence is done, if nothing changes."""
        if not self._sequences:
            return None
        return max(self.now, self.paused_until) + min(s.left for s in self._sequences.values()) * self.step()

    def ended(self, now: float) -> list[int]:
        """Go on to a time, and take out the sequences that are done by then."""
        self._advance(now)
        done = [turn for turn, s in self._sequences.items() if s.left <= 1e-6]
        for turn in done:
            del self._sequences[turn]
        return done

    def _advance(self, now: float) -> None:
        start = min(max(self.now, self.paused_until), now)
        self.now = max(now, self.now)
        if self._sequences and now > start:
            steps = (now - start) / self.step()
            for sequence in self._sequences.values():
                made = min(steps, sequence.left)
                sequence.left -= made
                self.tokens += made
            self.busy_s += now - start
