"""What a call waits out until its deadline, so that the error at the end can tell."""

import asyncio

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
    """Tries something again for as long as the daemon is busy: `with Patience() as patience`, and `wait` before each new attempt."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Busy | None = None

    def __enter__(self) -> "Patience":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, asyncio.CancelledError):
            blame(error, self._last)

    async def wait(self, busy: Busy) -> None:
        """Wait for as long as the daemon said."""
        self._last = busy
        await asyncio.sleep((busy.retry_after_ms or _BUSY_MS) / 1000)
