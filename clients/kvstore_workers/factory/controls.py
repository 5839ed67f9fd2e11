"""The control loops, each at its own pace: admission, reserved capacity, and what kind a worker is. Pure: time is an argument."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Kind(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    MIDFILL = "midfill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class Smoother:
    """An exponentially weighted mean over time: what is older than `tau` seconds has lost two thirds of its weight."""

    def __init__(self, tau: float, value: float = 0.0) -> None:
        self.value = value
        self._tau = tau
        self._at: float | None = None

    def add(self, value: float, now: float) -> float:
        """The value is this from the last call until now."""
        weight = 1.0 if self._at is None else 1.0 - math.exp(-(now - self._at) / self._tau)
        self._at = now
        self.value += weight * (value - self.value)
        return self.value


class SampleMean:
    """A mean over samples, of which the last `count` or so matter."""

    def __init__(self, value: float, count: float = 50.0) -> None:
        self.value = value
        self._weight = 1.0 / count

    def add(self, value: float) -> float:
        """Another sample."""
        self.value += self._weight * (value - self.value)
        return self.value


@dataclass(frozen=True, slots=True)
class View:
    """What admission sees: turns by where they are, slots for decoding, and what has been retired since the start."""

    waiting: int
    filling: int
    """Admitted, and not yet filled."""
    due: int
    """Of these, those that will be filled within the next `fill_s`, by prediction."""
    ready: int
    decoding: int
    slots: int
    retired: int
    fill_s: float
    """Mean time that a fill takes, by prediction; what it waits for is not in it, for that grows with what is admitted."""
    decode_s: float
    """Mean time in a decode slot, lately."""


class Admission(Protocol):
    """How many turns may begin to be filled."""

    def admit(self, view: View, now: float) -> int:
        """How many, at this moment. Called at every event and at every tick."""


class DirectAdmission:
    """Tied to retirements: when a decode retires, so many turns are admitted as decode has room for at that moment.

    What is being filled is not seen, so it admits again at each retirement until the first of them are ready, and then not at
    all until decode has taken them. If decode has run dry, no retirement will come: then it opens for as many turns as decode
    has room for in all (and again if nothing came of them). `target` ready turns count as room too; as the design warns of it,
    it knows of no buffer (0).
    """

    def __init__(self, target: float = 0.0) -> None:
        self._target = target
        self._retired = 0
        self._let_in = 0
        """While decode has been dry."""

    def admit(self, view: View, now: float) -> int:
        """As many as there is room for, at retirements only."""
        room = int(view.slots + self._target) - view.decoding - view.ready
        retired, self._retired = view.retired != self._retired, view.retired
        if view.decoding or view.ready or not view.filling:
            self._let_in = 0
        if not (view.decoding or view.ready):
            allowed = min(max(room - self._let_in, 0), view.waiting)
            self._let_in += allowed
            return allowed
        return max(room, 0) if retired else 0


class SmoothedAdmission:
    """From the smoothed work in the factory and the predicted service rate.

    By Little's law, decode slots that are all taken, a ready buffer of `target` turns, and what will be filled within the next
    `fill_s` at the rate at which decode serves, are `slots + target + rate * fill_s` turns together. Turns are admitted at the
    predicted rate, faster or slower by what the smoothed number of turns is short of that, spread over `correct_s`; one by one,
    not in bursts.
    """

    def __init__(self, target: float, *, smooth_s: float = 0.5, correct_s: float = 1.0, burst: float = 2.0) -> None:
        self._target = target
        self._correct_s = correct_s
        self._burst = burst
        self._inside = Smoother(smooth_s)
        self._credit = 0.0
        self._at: float | None = None

    def admit(self, view: View, now: float) -> int:
        """What the credit allows that has built up."""
        passed = 0.0 if self._at is None else now - self._at
        self._at = now
        inside = view.due + view.ready + view.decoding
        rate = view.slots / max(view.decode_s, 1e-3)
        wanted = view.slots + self._target + rate * view.fill_s
        smoothed = self._inside.add(inside, now)
        self._credit = min(self._credit + max(rate + (wanted - smoothed) / self._correct_s, 0.0) * passed, self._burst)
        allowed = min(int(self._credit), view.waiting)
        self._credit -= allowed
        return allowed


@dataclass(slots=True)
class Lanes:
    """Of what is admitted, a share is for short interactive turns as long as some wait; else the oldest goes first."""

    short_share: float = 0.25
    _credit: float = 0.0

    def short_next(self, oldest_short: float | None, oldest_long: float | None) -> bool:
        """Whether the next is a short one, given when the oldest of each came."""
        self._credit = min(self._credit + self.short_share, 1.0)
        if oldest_short is None or oldest_long is None:
            return oldest_long is None
        if self._credit >= 1.0:
            self._credit -= 1.0
            return True
        return oldest_short <= oldest_long


def may_take(short: bool, free: int, reserved: int) -> bool:
    """Whether a turn may take one of the free places, the last of which are for short turns."""
    return free > (0 if short else reserved)


@dataclass(frozen=True, slots=True)
class Change:
    """A worker is to become another kind."""

    source: Kind
    target: Kind


@dataclass(slots=True)
class Reconfiguration:
    """When a worker changes its kind: with hysteresis, and slower than everything below it.

    The pressure on a kind is the work that has yet to pass through it, in seconds for its workers, smoothed over `smooth_s`. A change
    comes when for `hold_s` on end one kind has had `ratio` times the pressure of another and at least `least_s`, and
    `dwell_s` have passed since the last one. The last worker of a kind stays.
    """

    ratio: float = 3.0
    least_s: float = 4.0
    hold_s: float = 8.0
    dwell_s: float = 20.0
    smooth_s: float = 5.0
    changes: int = 0
    _smoothed: dict[Kind, Smoother] = field(default_factory=dict)
    _candidate: Change | None = None
    _since: float = 0.0
    _last: float = -math.inf

    def decide(self, pressures: dict[Kind, float], workers: dict[Kind, int], now: float) -> Change | None:
        """What to change now, if anything. To be asked regularly."""
        for kind, pressure in pressures.items():
            self._smoothed.setdefault(kind, Smoother(self.smooth_s)).add(pressure, now)
        wanted = self._wanted(workers)
        if wanted != self._candidate:
            self._candidate, self._since = wanted, now
        if wanted is None or now - self._since < self.hold_s or now - self._last < self.dwell_s:
            return None
        self._candidate, self._last = None, now
        self.changes += 1
        return wanted

    def _wanted(self, workers: dict[Kind, int]) -> Change | None:
        smoothed = {kind: s.value for kind, s in self._smoothed.items() if workers.get(kind, 0)}
        donors = [kind for kind in smoothed if workers[kind] > 1]
        if not donors:
            return None
        target = max(smoothed, key=lambda kind: smoothed[kind])
        source = min(donors, key=lambda kind: smoothed[kind])
        if source is target or smoothed[target] < max(self.least_s, self.ratio * smoothed[source]):
            return None
        return Change(source, target)
