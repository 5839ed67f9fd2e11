"""Two hosts joined by several links of limited speed, on one machine: network namespaces, veth pairs and token buckets. Needs root."""

import ctypes
import itertools
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_NEW_NET = 0x40000000
_OWN = Path("/proc/thread-self/ns/net")
_NAMED = Path("/run/netns")
_BURST_KB = 128
"""More than a packet that the network stack has not yet cut up."""
_QUEUE_MS = 20

_numbers = itertools.count()


class LinkedHosts:
    """`near` and `far`, joined by a link for each of `mbits` (Mbit/s, each way). A context manager: at the end they are gone.

    Link n has the addresses `10.91.n.1` (near) and `10.91.n.2` (far). Raises OSError, saying why, where they can't be made.
    """

    def __init__(self, mbits: Sequence[float]) -> None:
        self.near_addresses = [f"10.91.{n}.1" for n in range(len(mbits))]
        self.far_addresses = [f"10.91.{n}.2" for n in range(len(mbits))]
        name = f"kv{os.getpid() % 100000}{next(_numbers)}{secrets.token_hex(2)}"
        self._names = {"near": f"{name}n", "far": f"{name}f"}
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise OSError(f"there is no `{tool}` here (Debian: apt-get install iproute2)")
        try:
            for host in self._names.values():
                _run("ip", "netns", "add", host)
                _run("ip", "-n", host, "link", "set", "lo", "up")
            for n, mbit in enumerate(mbits):
                _run(
                    "ip",
                    "-n",
                    self._names["near"],
                    "link",
                    "add",
                    f"l{n}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"l{n}",
                    "netns",
                    self._names["far"],
                )
                for host, address in (("near", self.near_addresses[n]), ("far", self.far_addresses[n])):
                    _run("ip", "-n", self._names[host], "address", "add", f"{address}/24", "dev", f"l{n}")
                    _run("ip", "-n", self._names[host], "link", "set", f"l{n}", "up")
                self.limit(n, mbit)
        except BaseException:
            self.close()
            raise

    def limit(self, link: int, mbit: float) -> None:
        """Limit a link, each way."""
        for host in self._names.values():
            _run(
                "tc", "-n", host, "qdisc", "replace", "dev", f"l{link}", "root", "tbf",
                "rate", f"{int(mbit * 1000)}kbit", "burst", f"{_BURST_KB}kb", "latency", f"{_QUEUE_MS}ms",
            )  # fmt: skip

    def congestion(self, name: str) -> None:
        """Have new TCP connections between them use another congestion control."""
        for host, addresses in (("near", self.near_addresses), ("far", self.far_addresses)):
            for n, address in enumerate(addresses):
                _run(
                    "ip", "-n", self._names[host], "route", "replace", f"10.91.{n}.0/24", "dev", f"l{n}",
                    "proto", "kernel", "scope", "link", "src", address, "congctl", name,
                )  # fmt: skip

    def cut(self, link: int) -> None:
        """Pull the plug, at the far end: nobody is told."""
        _run("ip", "-n", self._names["far"], "link", "set", f"l{link}", "down")

    def mend(self, link: int) -> None:
        """Plug it in again."""
        _run("ip", "-n", self._names["far"], "link", "set", f"l{link}", "up")

    def on(self, host: str) -> list[str]:
        """The front of a command that runs another on `near` or `far`."""
        return ["ip", "netns", "exec", self._names[host]]

    @contextmanager
    def near(self) -> Iterator[None]:
        """Meanwhile, the sockets that this thread makes are on `near`."""
        with _OWN.open() as before:
            _enter(_NAMED / self._names["near"])
            try:
                yield
            finally:
                _set(before.fileno())

    def close(self) -> None:
        """Take them away, with what is left of their sockets."""
        for host in self._names.values():
            if (_NAMED / host).exists():
                _run("ip", "netns", "delete", host)

    def __enter__(self) -> "LinkedHosts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")


def _enter(path: Path) -> None:
    with path.open() as file:
        _set(file.fileno())


def _set(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _NEW_NET):
        raise OSError(ctypes.get_errno(), "can't change the network namespace")
