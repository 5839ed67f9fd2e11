"""Turns, workers, and what workers are told: the values that the floor works on."""

from dataclasses import dataclass, field
from enum import Enum

from kvstore_workers.factory.controls import Kind


class Stage(Enum):
    """Where a turn is. `DONE` and `GIVEN_UP` are ends."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    FILLING = "filling"
    READY = "ready"
    DECODING = "decoding"
    DONE = "done"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class Turn:
    """A turn on its way through the factory. Times are the clock's; `cached_tokens` are what the store knew when it came."""

    number: int
    arrived: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    deadline: float
    kind: Kind
    short: bool
    predicted_s: float
    """Of its fill."""
    stage: Stage = Stage.WAITING
    restarts: int = 0
    fill_attempt: int = 0
    decode_attempt: int = 0
    fill_worker: str | None = None
    decode_worker: str | None = None
    admitted_at: float = 0.0
    filling_at: float = 0.0
    due_at: float = 0.0
    """When its fill will be done, by prediction."""
    filled_at: float = 0.0
    decoding_at: float = 0.0
    done_at: float = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing more will become of it."""
        return self.stage in (Stage.DONE, Stage.GIVEN_UP)


@dataclass(slots=True)
class WorkerState:
    """A worker as the floor knows it. `slots` are those of its decode batch; `target` is the kind that it is to become."""

    name: str
    kind: Kind
    slots: int
    fills: list[int] = field(default_factory=list)
    decodes: set[int] = field(default_factory=set)
    target: Kind | None = None
    busy_until: float = 0.0
    """With fills, by prediction."""

    @property
    def free_slots(self) -> int:
        """Decode slots that are not taken; in an aggregated worker fills take them too."""
        if self.target is not None or self.kind not in (Kind.DECODE, Kind.AGGREGATED):
            return 0
        taken = len(self.decodes) + (len(self.fills) if self.kind is Kind.AGGREGATED else 0)
        return max(self.slots - taken, 0)


@dataclass(frozen=True, slots=True)
class FillOrder:
    """Fill a turn."""

    worker: str
    turn: int
    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """Decode a turn; `follow` says that its fill is under way, and the put of that is to be followed."""

    worker: str
    turn: int
    attempt: int
    follow: bool


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Have nothing more to do with a turn."""

    worker: str
    turn: int


@dataclass(frozen=True, slots=True)
class ChangeOrder:
    """Become another kind, once what is under way is done."""

    worker: str
    kind: Kind


Order = FillOrder | DecodeOrder | CancelOrder | ChangeOrder
