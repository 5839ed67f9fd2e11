"""What a call waits out until its deadline, so that the error at the end can tell."""

import asyncio
import time

from kvstore.api.wire import Busy, KVStoreError

_BUSY_MS = 100


def blame(cancelled: asyncio.CancelledError, error: KVStoreError | None) -> None:
    """A wait for something to get better was cancelled: keep what was wrong. The first to say so knows best."""
    if cancelled.__cause__ is None:
        cancelled.__cause__ = error


def blamed(over: TimeoutError) -> KVStoreError | None:
    """What was wrong while `asyncio.timeout` ran out, if somebody has said so."""
    cause = over.__cause__.__cause__ if over.__cause__ is not None else None
    return cause if isinstance(cause, KVStoreError) else None


class Patience:
    """Tries something again for as long as the daemon is busy: `with Patience() as patience`, and `wait` before each new attempt.

    A deadline in an attempt is put down to the last Busy only if it may be told so again: as long as it took to be told, and the wait.
    """

    __slots__ = ("_began", "_last", "_until")

    def __init__(self) -> None:
        self._last: Busy | None = None
        self._began = time.monotonic()
        self._until = 0.0

    def __enter__(self) -> "Patience":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, asyncio.CancelledError) and time.monotonic() <= self._until:
            blame(error, self._last)

    async def wait(self, busy: Busy) -> None:
        """Wait for as long as the daemon said."""
        wait_s = (busy.retry_after_ms or _BUSY_MS) / 1000
        now = time.monotonic()
        self._last, self._until = busy, now + 2 * wait_s + (now - self._began) + _BUSY_MS / 1000
        await asyncio.sleep(wait_s)
        self._began = time.monotonic()
