"""Time that a call has used up before its deadline begins to run: by the blocking client, which waits for other things first."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_SPENT: "ContextVar[float]" = ContextVar("kvstore_spent", default=0.0)
_LEAST_S = 0.005
"""Less is not worth a look."""


def having_spent(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns, whose first deadline, here or in a task that it starts, is so much shorter."""
    if seconds < _LEAST_S:
        return call()
    token = _SPENT.set(seconds)
    try:
        return call()
    finally:
        _SPENT.reset(token)


def taken() -> float:
    """What was spent, in seconds; the next deadline is not concerned any more."""
    seconds = _SPENT.get()
    if seconds:
        _SPENT.set(0.0)
    return seconds
