"""Waiting for what comes in its own time: a bound on it, and no guess how long it takes."""

import asyncio
import time
from collections.abc import Callable

_MOST_S = 30.0


async def until(there: Callable[[], object], what: str = "", *, most_s: float = _MOST_S) -> None:
    """Wait on the loop until something is so; a test fails with `what` if it does not come to be."""
    end = time.monotonic() + most_s
    while not there():
        assert time.monotonic() < end, what or "it did not come to be"
        await asyncio.sleep(0.001)


def wait_until(there: Callable[[], object], what: str = "", *, most_s: float = _MOST_S) -> None:
    """The same in a thread."""
    end = time.monotonic() + most_s
    while not there():
        assert time.monotonic() < end, what or "it did not come to be"
        time.sleep(0.01)
