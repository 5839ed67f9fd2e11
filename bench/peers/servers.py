"""Server processes of peers, all on loopback."""

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import NoReturn

from bench.peers.peer import Unavailable

_READY_S = 30.0


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Servers:
    """Processes that are started together and ended together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []

    def run(self, *command: str, environment: dict[str, str] | None = None) -> None:
        """Start one; what it says goes to a file. Raises Unavailable."""
        log = self._folder / f"{Path(command[0]).name}-{len(self._processes)}.log"
        with log.open("wb") as output:
            try:
                started = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                    env={**os.environ, **(environment or {})},
                )
            except OSError as error:
                raise Unavailable(f"{command[0]} can't be run: {error}") from None
        self._processes.append(started)
        self._logs.append(log)

    def wait_for(self, port: int) -> None:
        """Wait until the one started last listens. Raises Unavailable with its last words."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self._processes[-1].poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        self.fail("does not listen")

    def wait_for_word(self, word: bytes) -> None:
        """Wait until the one started last says it. Raises Unavailable with its last words."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self._processes[-1].poll() is None:
            if word in self._logs[-1].read_bytes():
                return
            time.sleep(0.05)
        self.fail("does not get ready")

    def fail(self, why: str) -> NoReturn:
        """Raises Unavailable with the last words of the one started last."""
        words = " | ".join(self._logs[-1].read_text(errors="replace").splitlines()[-2:])
        raise Unavailable(f"{self._logs[-1].stem} {why}: {words[:400]}")

    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        """End them."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
