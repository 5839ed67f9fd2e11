"""A call in a process of its own, for what LMDB itself can end its process at: a page whose bits were flipped."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

DEADLY = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)

T = TypeVar("T")


def apart(call: Callable[..., T], *arguments: object) -> T | None:
    """What a function of a module returns; None if a signal of a damaged page ended its process. Its errors fail the test."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(theirs, call, arguments), daemon=True)
    with ours:
        with theirs:
            process.start()
        try:
            found, words = ours.recv()
        except EOFError:
            found, words = None, ""
    process.join(60)
    assert process.exitcode == 0 or process.exitcode in DEADLY, f"exit code {process.exitcode}\n{words}"
    result: T | None = found
    return result


def _call(answer: Connection, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        answer.send((call(*arguments), ""))
    except BaseException:
        answer.send((None, traceback.format_exc()))
        raise
