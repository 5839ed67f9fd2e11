"""Ports for daemons: each once in a run, and none of those that the system gives to whoever asks for any.

So nobody else is ever found where a daemon is gone, or has taken the port of one that is to come back.
"""

import itertools
import os
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path

_FIRST = 10_000
_A_WORKER = 1500
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
_counted = itertools.count(zlib.crc32(_RUN.encode()) + _A_WORKER * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))


def own_port() -> int:
    """A port that is free; 0, any, where the system gives all of them away."""
    if (room := int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - _FIRST) < 10 * _A_WORKER:
        return 0
    for number in itertools.islice(_counted, 1000):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port := _FIRST + number % room))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def with_own_ports(command: Sequence[str]) -> list[str]:
    """A daemon's command that asks for any free ports, with such ones in their place."""
    pairs = zip(["", *command], command, strict=False)
    return [str(own_port()) if word == "0" and before in ("--port", "--http-port") else word for before, word in pairs]
