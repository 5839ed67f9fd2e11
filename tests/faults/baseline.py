"""What a daemon holds for its clients, read from the real process, and the wait until it holds nothing more than before."""

import time
from dataclasses import asdict, dataclass

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat

UNEXPECTED = ("failed in a way it should not", "failed at this request", "Traceback", "background task", "never retrieved", "never awaited")
"""Log lines that no client may be able to cause."""


@dataclass(frozen=True, slots=True)
class Held:
    """Everything that a client's end must give back."""

    leases: int
    puts_open: int
    sessions: int
    connections: int
    pinned_blobs: int
    pending_pages: int
    tasks: int
    descriptors: int

    @classmethod
    def by(cls, daemon: DaemonProcess) -> "Held":
        """What a daemon holds now. Segments are the tier's, not anybody's; each is two descriptors, ours and that of its mapping."""
        found = stat(daemon.http)
        fields = {name: found[name] for name in cls.__slots__}
        fields["descriptors"] -= 2 * found["dram_segments"]["count"]
        return cls(**fields)

    def over(self, baseline: "Held") -> dict[str, int]:
        """What is held beyond a baseline, by name."""
        mine, base = asdict(self), asdict(baseline)
        return {name: mine[name] - base[name] for name in mine if mine[name] > base[name]}


def rss_bytes(daemon: DaemonProcess) -> int:
    """The daemon's resident memory."""
    return int(stat(daemon.http)["rss_bytes"])


def dram_used(daemon: DaemonProcess) -> int:
    """Bytes of DRAM slots that are taken."""
    return int(stat(daemon.http)["tiers"]["dram"]["used"])


def wait_for_baseline(daemon: DaemonProcess, baseline: Held, timeout: float = 20.0) -> None:
    """Wait until nothing is held beyond the baseline, and see that the log has no word of a bug."""
    deadline = time.monotonic() + timeout
    while over := Held.by(daemon).over(baseline):
        assert time.monotonic() < deadline, f"still held beyond the baseline: {over}"
        time.sleep(0.02)
    assert not (words := unexpected(daemon)), "\n".join(words)


def nothing_left(daemon: DaemonProcess, timeout: float = 20.0) -> None:
    """Drop every namespace, after which not one slot of DRAM may be taken: then whatever is, is lost for ever."""
    with Client(daemon.endpoint, connections=1, timeout=timeout) as client:
        for namespace in client.namespaces():
            namespace.drop()
    deadline = time.monotonic() + timeout
    while used := dram_used(daemon):
        assert time.monotonic() < deadline, f"{used} bytes of DRAM are taken, and there is no namespace"
        time.sleep(0.02)


def unexpected(daemon: DaemonProcess) -> list[str]:
    """The daemon's last log lines, if one of them tells of a bug."""
    lines = list(daemon.lines)
    return lines[-40:] if any(word in line for line in lines for word in UNEXPECTED) else []
