"""Which job goes over which lane, so that all is done soonest. Pure: it is told what happens, and when.

A lane is a connection, a job a stripe or a frame of slices. Lanes take from one queue as they get free (work stealing), each with so
much in flight that it never runs dry. Near the end a lane takes a job only if the others would not have done all that is
left before it (list scheduling by the earliest finish). A job whose lane has fallen behind is dealt out once more, to a lane that would
have it there much sooner; whichever brings it first.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

J = TypeVar("J")

_SAMPLES = 8
_AHEAD_S = 0.1
"""What a lane has in flight, in time."""
_AT_LEAST = 2
"""Jobs that a lane has in flight, however slow it is: while one arrives, the next is asked for."""
_STALL_S = 0.25
_STALL_GAPS = 4
"""A lane that brings nothing for so long, and for so many times what it usually takes, is stalled."""
_SOONER = 2.0
_SOONER_S = 0.02
"""A job is asked for again if it then comes so many times sooner, and so much more."""


class Rate:
    """Bytes a second of a lane while it is busy, over its last few arrivals. 0 is unknown."""

    __slots__ = ("_bytes", "_last", "_samples", "_time")

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)
        self._bytes = 0
        self._time = 0.0
        self._last = 0.0

    def begin(self, now: float) -> None:
        """It had nothing to do, and has now."""
        self._last = now

    def arrived(self, nbytes: int, now: float) -> None:
        """Bytes came."""
        if len(self._samples) == _SAMPLES:
            old_bytes, old_time = self._samples[0]
            self._bytes -= old_bytes
            self._time -= old_time
        took = max(now - self._last, 1e-6)
        self._samples.append((nbytes, took))
        self._bytes += nbytes
        self._time += took
        self._last = now

    def quiet(self, now: float) -> float:
        """Seconds since the last bytes."""
        return now - self._last

    @property
    def gap(self) -> float:
        """Seconds from one arrival to the next, as a rule."""
        return self._time / len(self._samples) if self._samples else 0.0

    @property
    def steady(self) -> float:
        """As if it went on as before."""
        return self._bytes / self._time if self._samples else 0.0

    def at(self, now: float) -> float:
        """The less, the longer it has been quiet."""
        if not self._samples:
            return 0.0
        quiet = self.quiet(now)
        return self._bytes / (self._time + (quiet if quiet > 2 * self.gap else 0.0))


@dataclass(eq=False, slots=True)
class Ask(Generic[J]):
    """A job that a lane was given."""

    job: J
    nbytes: int
    lane: int
    again: bool = False
    """Whether another lane has it, too."""
    second: bool = False
    """Whether another lane had it before."""


@dataclass(eq=False, slots=True)
class _Lane(Generic[J]):
    number: int
    rate: Rate
    asks: list[Ask[J]] = field(default_factory=list)
    in_flight: int = 0


class Dealer(Generic[J]):
    """Deals jobs out to lanes. `size` says how many bytes a job is, `window` the fewest bytes that a lane has in flight."""

    def __init__(self, jobs: Iterable[J], size: Callable[[J], int], *, least_window: int) -> None:
        self._size = size
        self._window = least_window
        self._queue: deque[J] = deque(jobs)
        self._queued = sum(map(size, self._queue))
        self._lanes: dict[int, _Lane[J]] = {}

    @property
    def left(self) -> bool:
        """Whether a job is not done yet."""
        return bool(self._queue) or any(lane.asks for lane in self._lanes.values())

    @property
    def lanes(self) -> list[int]:
        """Those that are up."""
        return list(self._lanes)

    # --- what happens --------------------------------------------------------------------------------------------------

    def up(self, number: int, rate: Rate) -> None:
        """A lane is there."""
        self._lanes[number] = _Lane(number, rate)

    def down(self, number: int) -> list[Ask[J]]:
        """A lane is gone: its jobs that nobody else has go back to the front of the queue. Returns what it had."""
        lane = self._lanes.pop(number, None)
        if lane is None:
            return []
        for ask in reversed(lane.asks):
            others = [other for kept in self._lanes.values() for other in kept.asks if other.job is ask.job]
            for other in others:
                other.again = len(others) > 1
            if not others:
                self._queue.appendleft(ask.job)
                self._queued += ask.nbytes
        return lane.asks

    def arrived(self, number: int, nbytes: int, now: float) -> None:
        """Bytes of a lane's jobs came."""
        if (lane := self._lanes.get(number)) is not None:
            lane.rate.arrived(nbytes, now)

    def done(self, job: J) -> list[Ask[J]]:
        """A job is done: nobody has it any more. Returns who had it."""
        found = [ask for lane in self._lanes.values() for ask in lane.asks if ask.job is job]
        for ask in found:
            lane = self._lanes[ask.lane]
            lane.asks.remove(ask)
            lane.in_flight -= ask.nbytes
        return found

    # --- who gets what -------------------------------------------------------------------------------------------------

    def deal(self, now: float, *, twice: bool = True) -> list[Ask[J]]:
        """What is to be asked for now. With `twice`, also what is on its way already on a lane that has fallen behind."""
        dealt: list[Ask[J]] = []
        while (ask := (self._late(now) if twice else None) or self._next(now) or (self._overtaken(now) if twice else None)) is not None:
            dealt.append(ask)
        return dealt

    def _rate(self, lane: _Lane[J], now: float) -> float:
        """Of a lane that is not known yet, what the others have on average."""
        if rate := (lane.rate.at(now) if lane.asks else lane.rate.steady):
            return rate
        known = [other.rate.steady for other in self._lanes.values() if other.rate.steady]
        return sum(known) / len(known) if known else 1.0

    def stalled(self, number: int, now: float) -> bool:
        """Whether a lane has something to bring, and has brought nothing for long."""
        return number in self._lanes and self._stalled(self._lanes[number], now)

    def _stalled(self, lane: _Lane[J], now: float) -> bool:
        return bool(lane.asks) and lane.rate.quiet(now) > max(_STALL_S, _STALL_GAPS * lane.rate.gap)

    def _free(self, now: float) -> list[_Lane[J]]:
        found = []
        for lane in self._lanes.values():
            room = max(self._window, int(_AHEAD_S * lane.rate.steady))
            if (lane.in_flight < room or len(lane.asks) < _AT_LEAST) and not self._stalled(lane, now):
                found.append(lane)
        return found

    def _finish(self, lane: _Lane[J], nbytes: int, now: float) -> float:
        return (lane.in_flight + nbytes) / self._rate(lane, now)

    def _next(self, now: float) -> Ask[J] | None:
        """The front of the queue, for the lane that would have it there first."""
        if not self._queue or not (free := self._free(now)):
            return None
        nbytes = self._size(self._queue[0])
        best = min(free, key=lambda lane: self._finish(lane, nbytes, now))
        others = [lane for lane in self._lanes.values() if lane is not best and not self._stalled(lane, now)]
        if others:
            rest = (self._queued + sum(lane.in_flight for lane in others)) / sum(self._rate(lane, now) for lane in others)
            if self._finish(best, nbytes, now) > rest + self._gap(others):
                return None  # before it is there, they will have done all
        self._queued -= nbytes
        return self._give(best, self._queue.popleft(), nbytes, now)

    @staticmethod
    def _gap(lanes: list[_Lane[J]]) -> float:
        return min(lane.rate.gap for lane in lanes)

    def _late(self, now: float) -> Ask[J] | None:
        """A job of a lane that has stalled."""
        for lane in self._lanes.values():
            if self._stalled(lane, now):
                for ask in lane.asks:
                    if not ask.again and (free := [other for other in self._free(now) if other is not lane]):
                        return self._again(ask, min(free, key=lambda other: self._finish(other, ask.nbytes, now)), now)
        return None

    def _overtaken(self, now: float) -> Ask[J] | None:
        """Once all is dealt out: the job that would come last, if a free lane would have it there much sooner."""
        if self._queue or not (free := self._free(now)):
            return None
        last: tuple[float, Ask[J]] | None = None
        for lane in self._lanes.values():
            ahead = 0
            for ask in lane.asks:
                ahead += ask.nbytes
                expected = ahead / self._rate(lane, now)
                if not ask.again and (last is None or expected > last[0]):
                    last = expected, ask
        if last is None:
            return None
        expected, ask = last
        best = min(free, key=lambda lane: self._finish(lane, ask.nbytes, now) if lane.number != ask.lane else float("inf"))
        if best.number == ask.lane or expected < _SOONER * self._finish(best, ask.nbytes, now) + _SOONER_S:
            return None
        return self._again(ask, best, now)

    def _again(self, ask: Ask[J], lane: _Lane[J], now: float) -> Ask[J]:
        ask.again = True
        twin = self._give(lane, ask.job, ask.nbytes, now)
        twin.again = twin.second = True
        return twin

    def _give(self, lane: _Lane[J], job: J, nbytes: int, now: float) -> Ask[J]:
        if not lane.asks:
            lane.rate.begin(now)
        ask = Ask(job, nbytes, lane.number)
        lane.asks.append(ask)
        lane.in_flight += nbytes
        return ask

    def behind(self, now: float) -> list[int]:
        """Lanes to be given up, where a job can't be on two at once: stalled while another is not, or too slow for what is left."""
        found = []
        for lane in self._lanes.values():
            others = [other for other in self._lanes.values() if other is not lane and not self._stalled(other, now)]
            if not lane.asks or not others:
                continue
            sooner = lane.in_flight / sum(self._rate(other, now) for other in others)
            last = lane.in_flight / self._rate(lane, now)
            if self._stalled(lane, now) or (not self._queue and last > _SOONER * sooner + _STALL_S):
                found.append(lane.number)
        return found
