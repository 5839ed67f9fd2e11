"""Interrupting what a thread does, as Ctrl-C or a signal's handler that raises would.

A handler runs as a call returns or a function begins, so that is where these raise, at one point after the other.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def reached(work: Callable[[], Any], at: int, then: Callable[[], None], where: tuple[str, ...]) -> bool:
    """Do something, and have `then` called at the point number `at` of what it does there; False if there are not so many."""
    left = at

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename in where:
            left -= 1
            if left == -1:
                sys.setprofile(None)
                then()

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return left < 0


def interrupted(work: Callable[[], Any], at: int, where: tuple[str, ...]) -> bool:
    """Whether something was interrupted at its point number `at`."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        return reached(work, at, interrupt, where)
    except KeyboardInterrupt:
        return True
