"""Coroutines that are begun where they are made: one that has nothing to wait for needs no task, and no turn of the loop.

As the eager tasks of Python 3.12, but the rest of one that does wait is run by a task that is there already.
"""

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """What is left of a coroutine that waits for something. Await it once, or `abandon` it."""

    def __init__(self, work: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        """Go on to its end, as `yield from` would have from the start."""
        waits_for = self._waits_for
        while True:
            try:
                go_on = partial(self._work.send, (yield waits_for))
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                go_on = partial(self._work.throw, error)
            try:
                waits_for = go_on()
            except StopIteration as done:
                value: T = done.value
                return value

    def abandon(self) -> None:
        """End it as a task that is cancelled would end."""
        with suppress(asyncio.CancelledError, StopIteration, Exception):
            self._work.throw(asyncio.CancelledError())
        self._work.close()


def begin(work: Coroutine[Any, Any, T]) -> "Begun[T] | None":
    """Run a coroutine as far as it goes without waiting; None if that was to its end. It must not ask for its task meanwhile."""
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return Begun(work, waits_for)


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    work.close()
    raise RuntimeError("a coroutine that was to wait for nothing does wait")
