"""Daemons, and other processes that tests start often, as forks of one that has imported them: most of a start is importing.

From `kvstore.cli.main` on a daemon is what `python -m kvstore` runs, with its own arguments, environment and standard error. That the
command starts from nothing is seen by those tests that run it, and by daemons with more than KVSTORE_* in their environment.
"""

import io
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TextIO

from kvstore_workers.daemon_process import Launched, launch
from tests.ports import with_own_ports

_IMPORTED = ["kvstore.cli.app", "kvstore.cli.serve", "kvstore.daemon"]
_COMMAND = [sys.executable, "-m", "kvstore"]
_STDOUT, _STDERR = 1, 2


def forking() -> ForkServerContext:
    """What makes processes that are forks of the one that has imported it all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class Fork:
    """A running fork, in the shape of a `subprocess.Popen` one of whose streams is read."""

    def __init__(self, run: Callable[..., None], arguments: Sequence[str], environment: Mapping[str, str], stream: int) -> None:
        context = forking()
        ours, theirs = context.Pipe(duplex=False)
        given = (run, list(arguments), dict(environment), stream, theirs)
        self._process: ForkServerProcess = context.Process(target=_begin, args=given, daemon=True)
        with theirs:
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        said = io.TextIOWrapper(os.fdopen(os.dup(ours.fileno()), "rb"))
        ours.close()
        self.stdout: TextIO | None = said if stream == _STDOUT else None
        self.stderr: TextIO | None = said if stream == _STDERR else None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        for said in (self.stdout, self.stderr):
            if said is not None:
                said.close()


def launch_forked(command: Sequence[str], environment: Mapping[str, str]) -> Launched:
    """Start a daemon by forking, if nothing has to be there before Python is."""
    command = with_own_ports(command)
    own = {name for name, value in environment.items() if os.environ.get(name) != value}
    if list(command[:3]) != _COMMAND or not all(name.startswith("KVSTORE_") for name in own):
        return launch(command, environment)
    return Fork(_run_kvstore, command[3:], environment, _STDERR)


def forked_module(name: str, *arguments: str) -> Fork:
    """What `python -m NAME` runs, its standard output to be read. At its end it is killed."""
    return Fork(_run_module, [name, *arguments], os.environ, _STDOUT)


def _begin(run: Callable[..., None], arguments: list[str], environment: dict[str, str], stream: int, theirs: Connection) -> None:
    os.dup2(theirs.fileno(), stream)
    theirs.close()
    if stream == _STDOUT:
        sys.stdout = os.fdopen(stream, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    run(*arguments)


def _run_kvstore(*arguments: str) -> None:
    sys.argv = ["kvstore", *arguments]
    from kvstore.cli import main

    main()


def _run_module(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
