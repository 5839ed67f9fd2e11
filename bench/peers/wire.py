"""The limits: iperf3 on loopback, and numpy's copy."""

import json
import subprocess
import time
from pathlib import Path

import numpy as np

from bench.peers.peer import GIB, Bytes, Moved
from bench.striped_fetch import Iperf

_BYTES = 2 * GIB
"""What one measurement of iperf3 moves."""


class Wire(Iperf):
    """iperf3 with writes of 1 MiB."""

    def move(self, connections: int, control: str = "") -> Moved:
        """Move 2 GiB over so many connections, under a congestion control, or the system's own."""
        command = ["iperf3", "-c", "127.0.0.1", "-p", str(self.port), "-l", "1M", "-P", str(connections), "-n", str(_BYTES), "-J"]
        command += ["-C", control] if control else []
        end = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)["end"]
        received, cpu = end["sum_received"], end["cpu_utilization_percent"]
        seconds = float(received["seconds"])
        client, server = (cpu[side] / 100 * seconds for side in ("host_total", "remote_total"))
        return Moved(int(received["bytes"]), seconds, client, server, 0.0, 0.0, " ".join(["-l 1M", control]).strip())


def unpaced() -> str:
    """A congestion control that does not pace what is sent, as ours has over loopback, if the system's own is another one."""
    kernel = Path("/proc/sys/net/ipv4")
    own, known = ((kernel / f"tcp_{name}congestion_control").read_text().split() for name in ("", "available_"))
    return "cubic" if "cubic" in known and own != ["cubic"] else ""


def copy_speed(source: Bytes, target: Bytes, nbytes: int) -> float:
    """GiB/s of numpy's copy of the whole rotation, a transfer at a time."""
    started = time.perf_counter()
    for at in range(0, len(source) - nbytes + 1, nbytes):
        np.copyto(target[at : at + nbytes], source[at : at + nbytes])
    return len(source) // nbytes * nbytes / GIB / (time.perf_counter() - started)
