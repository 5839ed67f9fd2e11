"""`kvstore` commands as forks of the process that daemons are forks of: most of a command is importing."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.forked_daemon import forking

_LONGEST_S = 60.0


def from_nothing(*arguments: str, environment: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command as a shell does."""
    line = [sys.executable, "-m", "kvstore", *arguments]
    return subprocess.run(line, env=_whole(environment), capture_output=True, text=True, timeout=_LONGEST_S, check=False)


def kvstore(*arguments: str, environment: Mapping[str, str] | None = None, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a command with more in its environment, and something to read. What it says goes to files, as to a pipe."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "stdin").write_text(stdin)
        process = forking().Process(target=_run, args=(list(arguments), _whole(environment), place))
        process.start()
        process.join(_LONGEST_S)
        if (code := process.exitcode) is None:
            process.kill()
            process.join()
        said = [(place / name).read_text() if (place / name).exists() else "" for name in ("stdout", "stderr")]
    if code is None:
        raise subprocess.TimeoutExpired(["kvstore", *arguments], _LONGEST_S, *said)
    return subprocess.CompletedProcess(["kvstore", *arguments], code, *said)


def _whole(environment: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(environment or {})}


def _run(arguments: list[str], environment: dict[str, str], place: Path) -> None:
    for number, (name, flags) in enumerate([("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)]):
        opened = os.open(place / name, flags | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["kvstore", *arguments]
    from kvstore.cli import main

    main()
