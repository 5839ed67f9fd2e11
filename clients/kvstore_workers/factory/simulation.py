"""The factory in simulated time: the same floor and controls as the real one, workers and transfers by their models.

For what needs many runs, such as the picture of what admission does to the ready buffer. Seconds of simulated time take
milliseconds.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.cost import CostModel, DecodeBatch
from kvstore_workers.factory.floor import Floor
from kvstore_workers.factory.turns import CancelOrder, ChangeOrder, DecodeOrder, FillOrder, Stage, Turn


@dataclass(frozen=True, slots=True)
class Plant:
    """What a simulated factory has: workers by kind, their decode slots, the links, and how often it is looked at."""

    workers: dict[Kind, int]
    slots: int
    cost: CostModel
    fetch_token_s: float = 50e-9
    """Seconds a token of context takes to arrive in HBM."""
    fetch_s: float = 0.01
    groups: int = 4
    change_s: float = 2.0
    """What becoming another kind takes."""
    tick_s: float = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """The factory at one moment."""

    time: float
    waiting: int
    filling: int
    ready: int
    decoding: int


@dataclass(slots=True)
class Run:
    """What a simulated run came to."""

    samples: list[Sample] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    tokens: int = 0
    busy_s: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))
    seconds: float = 0.0


class _Filler:
    """A worker that fills: one turn at a time, the next one's prefix on its way meanwhile."""

    def __init__(self) -> None:
        self.queue: list[tuple[FillOrder, float]] = []
        self.running: FillOrder | None = None


class Simulation:
    """A run of a floor over some turns, given in the order of their arrival."""

    def __init__(self, floor: Floor, plant: Plant, turns: Sequence[Turn]) -> None:
        self._floor = floor
        self._plant = plant
        self._turns = turns
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._fillers: dict[str, _Filler] = {}
        self._batches: dict[str, DecodeBatch] = {}
        self._there: set[tuple[str, int, int]] = set()
        self._due: dict[str, float | None] = {}
        self.result = Run()

    def run(self, most_s: float = 86_400.0) -> Run:
        """Run until all turns are over. Raises nothing; what is not over after `most_s` is left."""
        for kind, number in self._plant.workers.items():
            for index in range(number):
                name = f"{kind.value} {index}"
                self._fillers[name], self._batches[name] = _Filler(), DecodeBatch(self._plant.cost)
                self._floor.join(name, kind, self._plant.slots)
        for turn in self._turns:
            self._at(turn.arrived, self._floor.arrive, turn)
        self._at(0.0, self._tick)
        while self._events and self._now < most_s:
            self._now, _, callback, arguments = heapq.heappop(self._events)
            callback(*arguments)
            self._carry_out()
            if len(self._floor.turns) == len(self._turns) and all(t.over for t in self._floor.turns.values()):
                break
        self.result.turns = list(self._floor.turns.values())
        self.result.tokens = sum(t.output_tokens for t in self.result.turns if t.stage is Stage.DONE)
        self.result.busy_s[Kind.DECODE] = sum(batch.busy_s for batch in self._batches.values())
        self.result.seconds = self._now
        return self.result

    def _at(self, when: float, callback: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), callback, arguments))

    def _tick(self) -> None:
        view = self._floor.view(self._now)
        self.result.samples.append(Sample(self._now, view.waiting, view.filling, view.ready, view.decoding))
        self._floor.tick(self._now)
        self._at(self._now + self._plant.tick_s, self._tick)

    def _carry_out(self) -> None:
        for order in self._all_orders():
            match order:
                case FillOrder():
                    self._fillers[order.worker].queue.append((order, self._now))
                    self._next_fill(order.worker)
                case DecodeOrder():
                    turn = self._floor.turns[order.turn]
                    self._at(self._now + self._fetch_s(turn.input_tokens), self._join_batch, order)
                case CancelOrder():
                    self._batches[order.worker].remove(order.turn, self._now)
                    self._watch(order.worker)
                case ChangeOrder():
                    self._change(order)

    def _all_orders(self) -> Iterator[Any]:
        while orders := self._floor.orders(self._now):
            yield from orders

    def _fetch_s(self, tokens: int) -> float:
        return self._plant.fetch_s + tokens * self._plant.fetch_token_s

    # --- filling -------------------------------------------------------------------------------------------------------

    def _next_fill(self, name: str) -> None:
        filler = self._fillers[name]
        if filler.running is not None or not filler.queue:
            return
        filler.running, ordered = filler.queue.pop(0)
        turn = self._floor.turns[filler.running.turn]
        fetch = self._fetch_s(turn.cached_tokens)
        start = max(self._now, ordered + fetch / self._plant.groups)
        compute = self._plant.cost.fill_s(turn.input_tokens - turn.cached_tokens, turn.cached_tokens)
        self.result.busy_s[self._floor.workers[name].kind] += compute
        if self._floor.workers[name].kind is Kind.AGGREGATED:
            self._batches[name].pause(start + compute, self._now)
            self._watch(name)
        self._at(start, self._floor.started, turn.number, filler.running.attempt, start)
        self._at(max(start + compute, ordered + fetch), self._filled, name, filler.running)

    def _filled(self, name: str, order: FillOrder) -> None:
        turn = self._floor.turns[order.turn]
        followed = turn.decode_worker
        self._fillers[name].running = None
        self._floor.filled(order.turn, order.attempt, self._now)
        if name in self._floor.workers and self._floor.workers[name].kind is Kind.AGGREGATED:
            self._add(name, turn)
        elif followed is not None and (followed, order.turn, turn.decode_attempt) in self._there:
            self._add(followed, turn)  # its prefix was there before the fill was done
        self._next_fill(name)

    # --- decoding ------------------------------------------------------------------------------------------------------

    def _join_batch(self, order: DecodeOrder) -> None:
        turn = self._floor.turns[order.turn]
        if turn.decode_worker != order.worker or turn.decode_attempt != order.attempt:
            return
        if turn.stage is Stage.FILLING:
            self._there.add((order.worker, order.turn, order.attempt))
        else:
            self._add(order.worker, turn)

    def _add(self, name: str, turn: Turn) -> None:
        self._batches[name].add(turn.number, turn.input_tokens, turn.output_tokens, self._now)
        self._watch(name)

    def _watch(self, name: str) -> None:
        """See to it that the end of the next sequence is noticed."""
        due = self._due[name] = self._batches[name].next_end()
        if due is not None:
            self._at(due, self._retire, name, due)

    def _retire(self, name: str, due: float) -> None:
        if self._due.get(name) != due:
            return  # the batch has changed since
        for number in self._batches[name].ended(self._now):
            self._floor.retired(number, self._now)
        self._watch(name)

    def _change(self, order: ChangeOrder) -> None:
        worker = self._floor.workers[order.worker]
        if worker.fills or worker.decodes:
            self._at(self._now + self._plant.tick_s, self._change, order)
        else:
            self._at(self._now + self._plant.change_s, self._floor.changed, order.worker, order.kind)
