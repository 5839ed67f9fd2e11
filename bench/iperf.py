"""Servers of iperf3, started so that the first client finds them."""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_STARTS_S = 10.0


def iperf_server(*options: str, before: Sequence[str] = (), seconds: float = _STARTS_S) -> subprocess.Popen[bytes]:
    """An iperf3 server that listens, with `before` in front of its command. Ends the benchmark if it does not within so many seconds."""
    return started([*before, "iperf3", "-s", *options, "--forceflush"], seconds)


def started(command: Sequence[str], seconds: float) -> subprocess.Popen[bytes]:
    """A command that has said that it is listening."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    said, until = b"", time.monotonic() + seconds
    while b"listening" not in said:
        there = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]
        if not (more := os.read(process.stdout.fileno(), 1 << 16) if there else b""):
            process.kill()
            process.wait()
            process.stdout.close()
            why = "has ended" if there else f"does not listen after {seconds:g} s"
            sys.exit(f"iperf3 {why}: {said.decode(errors='replace').strip()}")
        said += more
    threading.Thread(target=process.stdout.read, daemon=True).start()  # what it says later is nobody's business
    return process
