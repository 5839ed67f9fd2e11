"""Daemons for fault tests, and the baseline that they must come back to."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import Held, nothing_left, wait_for_baseline
from tests.integration.pages import content, context, fetch_checked, open_namespace

SEEDED = range(0, 100, 10)
"""Contexts that every daemon of a fault test has, so that it can be seen to serve."""

Faulty = Callable[..., DaemonProcess]


def serves(daemon: DaemonProcess) -> None:
    """The daemon answers others as before, with the right bytes."""
    with Client(daemon.endpoint, connections=1, timeout=10) as client:
        namespace = open_namespace(client)
        assert all(fetch_checked(namespace, context(seed)) == 4 for seed in SEEDED)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Faulty]:
    """Start a daemon with settings; at the end of the test it must serve, hold nothing, and have no bug to tell of."""
    running: list[tuple[DaemonProcess, Held]] = []

    def start_one(*arguments: str, dram: str = "16MiB", ssd: str = "64MiB", **settings: object) -> DaemonProcess:
        environment = {f"KVSTORE_{name.upper()}": str(value) for name, value in settings.items()}
        daemon = DaemonProcess(tmp_path / f"data{len(running)}", "--dram", dram, "--ssd", ssd, *arguments, environment=environment)
        daemon.wait_ready()
        with Client(daemon.endpoint, connections=1) as client:
            namespace = open_namespace(client)
            for seed in SEEDED:
                namespace.put(context(seed), content(context(seed)))
        empty = Held(0, 0, 0, 0, 0, 0, tasks=1 << 30, descriptors=1 << 30)
        wait_for_baseline(daemon, empty)
        running.append((daemon, Held.by(daemon)))
        return daemon

    try:
        yield start_one
        for daemon, baseline in running:
            wait_for_baseline(daemon, baseline)
            serves(daemon)
            wait_for_baseline(daemon, baseline)
            nothing_left(daemon)
    finally:
        for daemon, _ in running:
            daemon.kill()
