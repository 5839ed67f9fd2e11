"""Errors that are done with: what their tracebacks hold."""

import traceback


def forget_frames(error: BaseException) -> None:
    """Empty the frames that an error, and those that led to it, went through: it is told, and nobody looks at them any more.

    They hold what a request had in hand, and one of them often holds the error itself (a TaskGroup's always does, as does who awaited a
    future that failed): a cycle, in which all of it would wait until Python looks for cycles. Frames that still run stay as they are.
    """
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        todo += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
