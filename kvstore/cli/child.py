"""A command that goes on in a child process, as what it reads may end its process."""

import ctypes
import os
import signal
import sys
from types import FrameType

import typer

_PR_SET_PDEATHSIG = 1
_DEADLY = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


def _end_with(parent: int) -> None:
    """Have the system end this process with its parent, also if that is killed: else it would keep the store's lock."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def go_on_in_a_child() -> int | None:
    """Fork. The child goes on, with None; the command ends as it does, unless by a signal that a damaged page gives: by that it goes on.

    To be called before there are threads. Raises typer.Exit.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if not child:
        _end_with(parent)
        return None

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's both get it
    signal.signal(signal.SIGTERM, pass_on)
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if (code := os.waitstatus_to_exitcode(status)) >= 0:
        raise typer.Exit(code)
    if -code not in _DEADLY:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return -code
