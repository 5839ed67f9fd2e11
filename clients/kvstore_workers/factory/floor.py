"""The factory floor: where every turn is, which worker does what, and what to do next. Pure.

Time is an argument, and what workers are to do comes back as orders; so the same code runs the real factory and a simulated
one. Whoever drives it tells what happened (`arrive`, `join`, `started`, `filled`, `retired`, `lost`, `leave`), and then takes
the `orders`.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore_workers.factory.controls import (
    Admission,
    Kind,
    Lanes,
    Reconfiguration,
    SampleMean,
    View,
    may_take,
)
from kvstore_workers.factory.turns import CancelOrder, ChangeOrder, DecodeOrder, FillOrder, Order, Stage, Turn, WorkerState

Part = tuple[int, int]
"""A turn and which attempt at its stage."""
_FILLS = (Kind.PREFILL, Kind.MIDFILL, Kind.AGGREGATED)


@dataclass(frozen=True, slots=True)
class FloorSettings:
    """`fill_depth` turns at a time are with a filling worker: one is computed while the next one's prefix moves.

    Of its places, all workers of a kind together, `reserved_fills` are for short turns, and `reserved_slots` of all decode
    slots. A turn that lost its worker or its pages begins again, at most `most_restarts` times. `follow` has decode begin with
    a put under way when it has a slot free.
    """

    fill_depth: int = 2
    reserved_fills: int = 1
    reserved_slots: int = 1
    most_restarts: int = 3
    follow: bool = True


class _Queue:
    """Turns in order, short ones apart."""

    def __init__(self) -> None:
        self.lanes: dict[bool, deque[int]] = {True: deque(), False: deque()}

    def __len__(self) -> int:
        return len(self.lanes[True]) + len(self.lanes[False])

    def add(self, turn: Turn, *, first: bool = False) -> None:
        lane = self.lanes[turn.short]
        lane.appendleft(turn.number) if first else lane.append(turn.number)

    def discard(self, turn: Turn) -> None:
        if turn.number in self.lanes[turn.short]:
            self.lanes[turn.short].remove(turn.number)

    def heads(self) -> list[int]:
        return [lane[0] for lane in self.lanes.values() if lane]

    def all(self) -> list[int]:
        return [*self.lanes[True], *self.lanes[False]]


class Floor:
    """All turns and workers of a factory."""

    def __init__(
        self, admission: Admission, settings: FloorSettings | None = None, *, reconfiguration: Reconfiguration | None = None,
        decode_s: float = 5.0, fill_s: float = 1.0,
    ) -> None:  # fmt: skip
        self.turns: dict[int, Turn] = {}
        self.workers: dict[str, WorkerState] = {}
        self.retired_turns = 0
        self.settings = settings or FloorSettings()
        self._admission = admission
        self._reconfiguration = reconfiguration
        self._lanes = Lanes()
        self._backlog = _Queue()
        self._admitted: dict[Kind, _Queue] = {kind: _Queue() for kind in _FILLS}
        self._ready = _Queue()
        self._filling: set[int] = set()
        self._fill_s = SampleMean(fill_s)
        self._decode_s = SampleMean(decode_s)
        self._orders: list[Order] = []

    # --- what is seen --------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Turns that are filled and wait for a decode slot: the ready buffer."""
        return len(self._ready)

    def view(self, now: float) -> View:
        """What admission sees."""
        admitted = sum(len(queue) for queue in self._admitted.values())
        soon = now + self._fill_s.value
        due = sum(1 for n in self._filling if self.turns[n].decode_worker is None and self.turns[n].due_at <= soon)
        decoding = sum(len(w.decodes) for w in self.workers.values())
        followed = sum(1 for number in self._filling if self.turns[number].decode_worker is not None)
        slots = sum(w.slots for w in self.workers.values() if w.kind in (Kind.DECODE, Kind.AGGREGATED))
        return View(
            waiting=len(self._backlog), filling=admitted + len(self._filling) - followed, due=admitted + due, ready=self.ready,
            decoding=decoding, slots=slots, retired=self.retired_turns, fill_s=self._fill_s.value, decode_s=self._decode_s.value,
        )  # fmt: skip

    # --- what happens --------------------------------------------------------------------------------------------------

    def arrive(self, turn: Turn) -> None:
        """A turn comes, or is known again after a restart: then what has become of it (READY, DONE) is kept."""
        self.turns[turn.number] = turn
        if turn.stage is Stage.WAITING:
            self._backlog.add(turn)
        elif turn.stage is Stage.READY:
            self._ready.add(turn)

    def join(self, name: str, kind: Kind, slots: int, fills: Iterable[Part] = (), decodes: Iterable[Part] = ()) -> list[int]:
        """A worker comes. Turns (with the attempt) that it has from before are taken up again; those returned it is to drop."""
        worker = self.workers[name] = WorkerState(name, kind, slots)
        strange: list[int] = []
        for number, attempt in fills:
            turn = self.turns.get(number)
            if turn is None or turn.stage not in (Stage.WAITING, Stage.ADMITTED):
                strange.append(number)
                continue
            self._backlog.discard(turn)
            self._admitted_queue(turn).discard(turn)
            turn.stage, turn.fill_worker, turn.fill_attempt = Stage.FILLING, name, attempt
            worker.fills.append(number)
            self._filling.add(number)
        for number, attempt in decodes:
            turn = self.turns.get(number)
            if turn is None or turn.stage is not Stage.READY:
                strange.append(number)
                continue
            self._ready.discard(turn)
            turn.stage, turn.decode_worker, turn.decode_attempt = Stage.DECODING, name, attempt
            worker.decodes.add(number)
        return strange

    def leave(self, name: str, now: float) -> None:
        """A worker is gone: its turns go to others."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        for number in reversed(worker.fills):
            self._refill(self.turns[number], now)
        for number in sorted(worker.decodes, reverse=True):
            turn = self.turns[number]
            turn.decode_worker = None
            turn.decode_attempt += 1
            if turn.stage is Stage.DECODING:
                self._count_restart(turn, now)
                if not turn.over:
                    if worker.kind is Kind.AGGREGATED:
                        self._to_admitted(turn)
                    else:
                        turn.stage = Stage.READY
                        self._ready.add(turn, first=True)

    def started(self, number: int, attempt: int, now: float) -> None:
        """A fill's put is under way: decode may follow it, if it has nothing else to do."""
        turn = self.turns.get(number)
        if turn is None or turn.stage is not Stage.FILLING or turn.fill_attempt != attempt:
            return
        worker = self.workers.get(turn.fill_worker or "")
        if (
            self.settings.follow
            and not self.ready
            and turn.decode_worker is None
            and worker is not None
            and worker.kind is not Kind.AGGREGATED
        ):
            self._give_decode(turn, now, follow=True)

    def filled(self, number: int, attempt: int, now: float) -> None:
        """A turn's pages are in the store, and its first token is out."""
        turn = self.turns.get(number)
        if turn is None or turn.stage is not Stage.FILLING or turn.fill_attempt != attempt:
            return
        worker = self._end_fill(turn)
        turn.filled_at = now
        self._fill_s.add(turn.predicted_s)
        if worker is not None and worker.kind is Kind.AGGREGATED:
            turn.stage, turn.decode_worker, turn.decoding_at = Stage.DECODING, worker.name, now
            worker.decodes.add(number)
        elif turn.decode_worker is not None:
            turn.stage = Stage.DECODING
        else:
            turn.stage = Stage.READY
            self._ready.add(turn)

    def retired(self, number: int, now: float) -> None:
        """A turn's last token is out. Whoever says so first has done it."""
        turn = self.turns.get(number)
        if turn is None or turn.over:
            return
        if turn.decode_worker is not None:
            self._decode_s.add(now - turn.decoding_at)
        self._take_out(turn)
        turn.stage, turn.done_at = Stage.DONE, now
        self.retired_turns += 1

    def lost(self, number: int, attempt: int, stage: Stage, now: float) -> None:
        """A worker could not do a stage: pages were gone, or the put that it followed. The turn is filled again, if nobody does."""
        turn = self.turns.get(number)
        if turn is None or turn.over:
            return
        if stage is Stage.FILLING:
            if turn.stage is Stage.FILLING and turn.fill_attempt == attempt:
                self._refill(turn, now)
        elif turn.decode_attempt == attempt:
            self._end_decode(turn)
            turn.decode_attempt += 1
            if turn.stage is Stage.DECODING:
                self._count_restart(turn, now)
                if not turn.over:
                    self._to_admitted(turn)

    def changed(self, name: str, kind: Kind) -> None:
        """A worker has become another kind."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.kind, worker.target = kind, None

    def tick(self, now: float) -> None:
        """Look at deadlines, and at what kinds of workers there should be. About once a second or more often."""
        for turn in [t for t in self.turns.values() if not t.over and now > t.deadline]:
            self._give_up(turn, now)
        if self._reconfiguration is not None:
            self._reconfigure(now)

    # --- what to do ----------------------------------------------------------------------------------------------------

    def orders(self, now: float) -> list[Order]:
        """What the workers are to do now."""
        self._admit(now)
        for kind in _FILLS:
            while self._give_fill(kind, now):
                pass
        while self._ready and self._next_decode(now):
            pass
        found, self._orders = self._orders, []
        return found

    def _admit(self, now: float) -> None:
        for _ in range(min(self._admission.admit(self.view(now), now), len(self._backlog))):
            short, long = (self.turns[lane[0]].arrived if (lane := self._backlog.lanes[s]) else None for s in (True, False))
            turn = self.turns[self._backlog.lanes[self._lanes.short_next(short, long)].popleft()]
            turn.admitted_at = now
            self._to_admitted(turn, first=False)

    def _give_fill(self, kind: Kind, now: float) -> bool:
        queue, depth = self._admitted[kind], self.settings.fill_depth
        workers = self._filling_workers(kind)
        free = {w.name: self._places(w) for w in workers}
        places = sum(max(n, 0) for n in free.values())
        heads = sorted((self.turns[n] for n in queue.heads()), key=lambda t: t.admitted_at)
        reserved = min(self.settings.reserved_fills, max(depth * len(workers) - 1, 0))
        turn = next((t for t in heads if may_take(t.short, places, reserved)), None)
        if turn is None:
            return False
        worker = min((w for w in workers if free[w.name] > 0), key=lambda w: len(w.fills))
        queue.discard(turn)
        turn.stage, turn.fill_worker, turn.filling_at = Stage.FILLING, worker.name, now
        turn.due_at = worker.busy_until = max(now, worker.busy_until) + turn.predicted_s
        worker.fills.append(turn.number)
        self._filling.add(turn.number)
        self._orders.append(FillOrder(worker.name, turn.number, turn.fill_attempt))
        return True

    def _places(self, worker: WorkerState) -> int:
        places = self.settings.fill_depth - len(worker.fills)
        return min(places, worker.free_slots) if worker.kind is Kind.AGGREGATED else places

    def _next_decode(self, now: float) -> bool:
        heads = sorted((self.turns[n] for n in self._ready.heads()), key=lambda t: t.filled_at)
        return any(self._give_decode(turn, now, follow=False) for turn in heads)

    def _give_decode(self, turn: Turn, now: float, *, follow: bool) -> bool:
        workers = [w for w in self.workers.values() if w.kind is Kind.DECODE]
        free = sum(w.free_slots for w in workers)
        reserved = min(self.settings.reserved_slots, max(sum(w.slots for w in workers) - 1, 0))
        if not may_take(turn.short, free, reserved):
            return False
        worker = max(workers, key=lambda w: w.free_slots)
        self._ready.discard(turn)
        turn.decode_worker, turn.decoding_at = worker.name, now
        if not follow:
            turn.stage = Stage.DECODING
        worker.decodes.add(turn.number)
        self._orders.append(DecodeOrder(worker.name, turn.number, turn.decode_attempt, follow))
        return True

    def _filling_workers(self, kind: Kind) -> list[WorkerState]:
        """The workers that fill turns of a kind: those of the other kind if it has none."""
        usable = [w for w in self.workers.values() if w.target is None]
        found = [w for w in usable if w.kind is kind]
        if found or kind is Kind.AGGREGATED:
            return found
        other = Kind.MIDFILL if kind is Kind.PREFILL else Kind.PREFILL
        return [w for w in usable if w.kind is other] or [w for w in usable if w.kind is Kind.AGGREGATED]

    def _reconfigure(self, now: float) -> None:
        counts = {k: sum(1 for w in self.workers.values() if w.kind is k) for k in (Kind.PREFILL, Kind.MIDFILL, Kind.DECODE)}
        assert self._reconfiguration is not None
        if any(w.target is not None for w in self.workers.values()) or not all(counts.values()):
            return
        change = self._reconfiguration.decide(self.pressures(), counts, now)
        if change is not None:
            workers = [w for w in self.workers.values() if w.kind is change.source]
            worker = min(workers, key=lambda w: len(w.fills) + len(w.decodes))
            worker.target = change.target
            self._orders.append(ChangeOrder(worker.name, change.target))

    def pressures(self) -> dict[Kind, float]:
        """Seconds that the workers of a kind need for all that has come and has yet to pass through them."""
        before = [t for t in self.turns.values() if t.stage in (Stage.WAITING, Stage.ADMITTED, Stage.FILLING)]
        found: dict[Kind, float] = {}
        for kind in (Kind.PREFILL, Kind.MIDFILL):
            workers = sum(1 for w in self.workers.values() if w.kind is kind)
            found[kind] = sum(t.predicted_s for t in before if t.kind is kind) / max(workers, 1)
        slots = sum(w.slots for w in self.workers.values() if w.kind is Kind.DECODE)
        found[Kind.DECODE] = (len(before) + self.ready) * self._decode_s.value / max(slots, 1)
        return found

    # --- moves ---------------------------------------------------------------------------------------------------------

    def _admitted_queue(self, turn: Turn) -> _Queue:
        return self._admitted[turn.kind]

    def _to_admitted(self, turn: Turn, *, first: bool = True) -> None:
        turn.stage = Stage.ADMITTED
        self._admitted_queue(turn).add(turn, first=first)

    def _end_fill(self, turn: Turn) -> WorkerState | None:
        self._filling.discard(turn.number)
        worker = self.workers.get(turn.fill_worker or "")
        if worker is not None and turn.number in worker.fills:
            worker.fills.remove(turn.number)
        turn.fill_worker = None
        return worker

    def _end_decode(self, turn: Turn) -> None:
        worker = self.workers.get(turn.decode_worker or "")
        if worker is not None:
            worker.decodes.discard(turn.number)
        turn.decode_worker = None

    def _refill(self, turn: Turn, now: float) -> None:
        """A fill came to nothing: who follows it is called off, and it begins again before others."""
        self._end_fill(turn)
        turn.fill_attempt += 1
        if turn.decode_worker is not None:
            self._orders.append(CancelOrder(turn.decode_worker, turn.number))
            self._end_decode(turn)
            turn.decode_attempt += 1
        self._count_restart(turn, now)
        if not turn.over:
            self._to_admitted(turn)

    def _count_restart(self, turn: Turn, now: float) -> None:
        turn.restarts += 1
        if turn.restarts > self.settings.most_restarts:
            self._give_up(turn, now)

    def _give_up(self, turn: Turn, now: float) -> None:
        for name in (turn.fill_worker, turn.decode_worker):
            if name in self.workers:
                self._orders.append(CancelOrder(name, turn.number))
        self._take_out(turn)
        turn.stage, turn.done_at = Stage.GIVEN_UP, now

    def _take_out(self, turn: Turn) -> None:
        """Wherever it is, it is there no more."""
        for queue in (self._backlog, self._ready, *self._admitted.values()):
            queue.discard(turn)
        self._end_fill(turn)
        self._end_decode(turn)
