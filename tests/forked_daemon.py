"""Daemons as forks of one process that has imported them: most of a start is importing, and the suite starts some hundred.

From `kvstore.cli.main` on it is what `python -m kvstore` runs, with its own arguments, environment and standard error. That the
command starts from nothing is seen by those tests that run it, and by daemons with more than KVSTORE_* in their environment.
"""

import io
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TextIO

from kvstore_workers.daemon_process import Launched, launch

_IMPORTED = ["kvstore.cli.app", "kvstore.cli.serve", "kvstore.daemon"]
_COMMAND = [sys.executable, "-m", "kvstore"]


def forking() -> ForkServerContext:
    """What makes processes that are forks of the one that has imported it all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class ForkedDaemon:
    """A running fork, in the shape of a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        context = forking()
        ours, theirs = context.Pipe(duplex=False)
        self._process: ForkServerProcess = context.Process(target=_run, args=(list(arguments), dict(environment), theirs), daemon=True)
        with theirs:
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.stderr: TextIO = io.TextIOWrapper(os.fdopen(os.dup(ours.fileno()), "rb"))
        ours.close()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("kvstore", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()


def launch_forked(command: Sequence[str], environment: Mapping[str, str]) -> Launched:
    """Start a daemon by forking, if nothing has to be there before Python is."""
    own = {name for name, value in environment.items() if os.environ.get(name) != value}
    if list(command[:3]) != _COMMAND or not all(name.startswith("KVSTORE_") for name in own):
        return launch(command, environment)
    return ForkedDaemon(command[3:], environment)


def _run(arguments: list[str], environment: dict[str, str], stderr: Connection) -> None:
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["kvstore", *arguments]
    from kvstore.cli import main

    main()
