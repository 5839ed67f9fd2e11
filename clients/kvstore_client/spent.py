"""Time that a call has used up before its deadline begins to run: by the blocking client, which waits for other things first."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SPENT: "ContextVar[float]" = ContextVar("kvstore_spent", default=0.0)
_LEAST_S = 0.005
"""Less is not worth a look."""


@contextmanager
def spent(seconds: float) -> Iterator[None]:
    """The next deadline in this context, or in one that is made from it, is so much shorter."""
    if seconds < _LEAST_S:
        yield
        return
    token = _SPENT.set(seconds)
    try:
        yield
    finally:
        _SPENT.reset(token)


def taken() -> float:
    """What was spent, in seconds; the next deadline is not concerned any more."""
    seconds = _SPENT.get()
    if seconds:
        _SPENT.set(0.0)
    return seconds
