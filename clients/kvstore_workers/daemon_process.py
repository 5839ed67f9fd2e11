"""A real daemon in a process of its own, for the demo, the benchmarks and the tests."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from kvstore.api.wire import ConnectionLost

_READY_S = 60.0
_STOP_S = 60.0


class Launched(Protocol):
    """A running process, as `subprocess.Popen` gives it."""

    pid: int

    @property
    def stderr(self) -> IO[str] | None:
        """What it says."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended. Raises subprocess.TimeoutExpired."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""

    def kill(self) -> None:
        """Kill it at once."""


def launch(command: Sequence[str], environment: Mapping[str, str]) -> Launched:
    """Start a command with an environment of its own."""
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


class DaemonProcess:
    """`kvstore serve` on free loopback ports. A context manager; the end is a clean stop unless `kill` came before.

    `within` is the front of a command that runs another in its place, such as `ip netns exec NAME`.

    `endpoint` is the data plane's address, `endpoints` all of them, `http` the control plane's URL, `lines` the last log lines.
    """

    launch = staticmethod(launch)
    """How to start the command: another way can take its place."""

    def __init__(
        self, data_dir: Path, *arguments: str, environment: dict[str, str] | None = None, within: Sequence[str] = ()
    ) -> None:  # fmt: skip
        self.data_dir = data_dir
        self.endpoint = ""
        self.endpoints: list[str] = []
        self.unix_endpoint = ""
        self.http = ""
        self.lines: deque[str] = deque(maxlen=200)
        self._listening = threading.Event()
        self._ready = threading.Event()
        command = [
            *within,
            sys.executable,
            "-m",
            "kvstore",
            "serve",
            "--data-dir",
            str(data_dir),
            "--port",
            "0",
            "--http-port",
            "0",
            *arguments,
        ]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
        self._process = self.launch(command, {**inherited, **(environment or {})})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip())
            if found := re.search(r"control plane on (https?://\S+)", line):
                self.http = found[1]
            if found := re.search(r"data plane on (.+?)(?:, (unix:.+))?$", line.rstrip()):
                self.endpoints, self.unix_endpoint = found[1].split(", "), found[2] or ""
                self.endpoint = self.endpoints[0]
                self._listening.set()
            if line.rstrip().endswith("kvstore: ready"):
                self._ready.set()
        self._listening.set()
        self._ready.set()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_ready(self, timeout: float = _READY_S) -> "DaemonProcess":
        """Wait until all its pages are back. Raises ConnectionLost with its last words if they do not come."""
        return self._wait(self._ready, timeout)

    def wait_listening(self, timeout: float = _READY_S) -> "DaemonProcess":
        """Wait until it serves, which may be while it is loading. Raises ConnectionLost with its last words if it does not."""
        return self._wait(self._listening, timeout)

    def _wait(self, event: threading.Event, timeout: float) -> "DaemonProcess":
        if not event.wait(timeout) or not self.endpoint:
            self.kill()
            raise ConnectionLost("the daemon did not start: " + " | ".join(list(self.lines)[-3:]))
        return self

    def wait_exit(self, timeout: float = _STOP_S) -> int:
        """Wait until it ends by itself. Returns its exit code."""
        code = self._process.wait(timeout)
        self._reader.join()
        return code

    def stop(self, timeout: float = _STOP_S) -> int:
        """A clean stop (SIGTERM). Returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it at once (SIGKILL)."""
        if self._process.poll() is None:
            self._process.kill()
        self.wait_exit()

    def __enter__(self) -> "DaemonProcess":
        return self.wait_ready()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
