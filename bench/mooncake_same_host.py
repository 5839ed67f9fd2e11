"""Mooncake Store's shared-memory path as a peer: a master, its client that holds the memory, and a dummy client, all on loopback."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from bench.peers.servers import free_port

_READY_S = 30.0


class Mooncake:
    """The three processes. `start` says in words why there are none."""

    def __init__(self, processes: "list[subprocess.Popen[str]]", folder: Path) -> None:
        self._processes = processes
        self._folder = folder

    @classmethod
    def start(cls, python: str, size: int, rotation: int) -> "Mooncake | str":
        """Start it for objects of one size, with the programs beside an interpreter; or why that can't be."""
        beside = Path(python).parent
        programs = [shutil.which(name, path=f"{beside}:{os.environ['PATH']}") for name in ("mooncake_master", "mooncake_client")]
        if not all(programs):
            return "there is no mooncake_master and mooncake_client (pip install mooncake-transfer-engine-non-cuda; see --peer-python)"
        folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-mooncake-"))
        peer = cls([], folder)
        master, client = free_port(), free_port()
        try:
            peer._run("master", str(programs[0]), "--rpc_address=127.0.0.1", f"--rpc_port={master}", "--metrics_host=127.0.0.1",
                      f"--metrics_port={free_port()}", "--default_kv_lease_ttl=2000")  # fmt: skip
            _wait_for(master)
            peer._run("client", str(programs[1]), "--host=127.0.0.1", f"--port={client}", f"--master_server_address=127.0.0.1:{master}",
                      "--metadata_server=P2PHANDSHAKE", f"--global_segment_size={2 * rotation >> 20} MB", "--protocol=tcp")  # fmt: skip
            _wait_for(client)
            driver = Path(__file__).with_name("mooncake_dummy.py")
            peer._run("dummy", python, str(driver), f"127.0.0.1:{client}", str(size), str(rotation))
            peer.measure(0.0)
        except (OSError, ValueError, TimeoutError) as error:
            words = peer.last_words()
            peer.close()
            return f"it does not run here: {error or type(error).__name__}; {words}"
        return peer

    def _run(self, name: str, *command: str) -> None:
        log = (self._folder / f"{name}.log").open("w")
        with log:
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if name == "dummy" else log, stderr=log, text=True)
            )

    def last_words(self) -> str:
        """What the processes said last."""
        lines = [line for log in sorted(self._folder.glob("*.log")) for line in log.read_text(errors="replace").splitlines()[-1:]]
        return " | ".join(line[:200] for line in lines)

    def measure(self, seconds: float) -> tuple[float, float]:
        """Gets and puts, GiB/s. Raises ValueError if it died."""
        dummy = self._processes[-1]
        assert dummy.stdin is not None
        assert dummy.stdout is not None
        dummy.stdin.write(f"{seconds}\n")
        dummy.stdin.flush()
        for line in dummy.stdout:
            if line.startswith("["):
                got, put = json.loads(line)
                return float(got), float(put)
        raise ValueError("the dummy client ended")

    def close(self) -> None:
        """End them."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"nothing listens on port {port}")
