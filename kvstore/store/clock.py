"""The time by which retention is counted: wall-clock seconds that no step of the wall clock moves.

Retention is a promise about elapsed time that has to outlive restarts, so it is kept as a date. The wall clock is asked once,
at start; from then on the time is what has passed since, sleep of the machine included. A record says when it was written:
a start whose wall clock is before that goes on from there, so that a date once promised is never reached too early.
"""

import time


class Clock:
    """Seconds since 1970, never going back while the process lives."""

    def __init__(self) -> None:
        self._base = time.time() - elapsed()

    def now(self) -> float:
        """The time now."""
        return self._base + elapsed()

    def not_before(self, seconds: float) -> None:
        """It is known to be at least this time: go on from there if the clock is behind."""
        self._base = max(self._base, seconds - elapsed())


def elapsed() -> float:
    """Seconds that have passed since some moment, sleep of the machine included; nothing moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
