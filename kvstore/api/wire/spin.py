"""Looking again for a moment before sleeping. Where answers take microseconds, most of the time of one is two wake-ups.

A processor that has gone to sleep takes tens of microseconds to be woken, in a virtual machine more than a small request takes otherwise.
What is looked for in vain is time that others could have had: so it is tried less and less often while it does not pay.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SPIN_S = 200e-6
_BYTE_S = 1e-9
"""So much longer for each byte that comes with an answer, or went with the last one: the other end has to look at it, too."""
_MOST_PAUSES = 63
"""So many waits in a row are slept through at most before it is tried again."""


def spin_s(nbytes: int) -> float:
    """How long to look for an answer that brings so many bytes, or for what comes after one."""
    return SPIN_S + _BYTE_S * nbytes


class Spin:
    """Remembers of one kind of wait whether looking again has paid lately."""

    __slots__ = ("_pauses", "_rest")

    def __init__(self) -> None:
        self._pauses = self._rest = 0

    def worth(self) -> bool:
        """Whether to look again in this wait; then say by `tried` what came of it."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    def tried(self, *, came: bool) -> None:
        """Whether what was waited for came in time."""
        self._pauses = 0 if came else min(2 * self._pauses + 1, _MOST_PAUSES)
        self._rest = self._pauses

    def look(self, poll: Callable[[], T], seconds: float = SPIN_S) -> T:
        """What `poll` returns once that is anything, or after so many seconds."""
        until = time.monotonic() + seconds
        while not (found := poll()) and time.monotonic() < until:
            pass
        self.tried(came=bool(found))
        return found
