"""Whose turn it is: a lock that an interrupt (Ctrl-C, a signal's handler that raises) can't leave held by nobody."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Taken(Exception):
    """It is another's turn."""


class Turn:
    """For one thread at a time, and not for a signal's handler that comes in between there."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """One that knows its owner from the moment it is taken: whoever was interrupted just then lets go of it all the same."""
        self._by = 0

    def alone(self, work: Callable[[], T], wait_s: float = 0.0) -> T:
        """What `work` returns, done while nobody else has the turn. Raises Taken if it can't be had at once, or in so many seconds."""
        me = threading.get_ident()
        if self._by == me:
            raise Taken
        try:
            if not self._lock.acquire(timeout=wait_s):
                raise Taken
            self._by = me
            return work()
        finally:  # no call before `release`: it is where calls return that an interrupt comes
            if self._by == me:
                self._by = 0
            try:
                self._lock.release()
            except RuntimeError:
                pass  # it is another's
