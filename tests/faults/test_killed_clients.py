"""Client processes killed with SIGKILL in the middle of something: all they held comes back, and nobody else notices."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import Held, wait_for_baseline
from tests.faults.conftest import Faulty, serves
from tests.faults.victim import LEASES, PAGES
from tests.forked_daemon import Fork, forked_module
from tests.integration.pages import context, fetch_checked, open_namespace
from tests.integration.raw import stat

_LIMIT_S = 30.0


@contextmanager
def victim(daemon: DaemonProcess, mode: str, first: int) -> Iterator[Fork]:
    """A client process at its work; killed at the end, if it was not before."""
    with forked_module("tests.faults.victim", daemon.endpoint, mode, str(first)) as process:
        yield process


def kill_when(daemon: DaemonProcess, process: Fork, holds: Callable[[Held], bool]) -> None:
    """Kill a client while the daemon holds something for it: it is stopped again and again until it is caught at it."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        os.kill(process.pid, signal.SIGSTOP)
        if holds(Held.by(daemon)):
            time.sleep(0.3)  # what was on its way when it was stopped may have been all that was needed
            if holds(Held.by(daemon)):
                break
        assert time.monotonic() < deadline, "the client was never caught in the middle"
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.003)
    process.kill()
    process.wait()


def first_line(process: Fork) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the client ended by itself"
    return line


def test_killed_in_the_middle_of_a_put(start: Faulty) -> None:
    daemon = start(dram="64MiB")
    baseline, aborted = Held.by(daemon), 0
    for round_number in range(3):
        with victim(daemon, "put", 1_000_000 * (round_number + 1)) as process:
            first_line(process)
            kill_when(daemon, process, lambda held: held.puts_open > 0)
        wait_for_baseline(daemon, baseline)
        assert stat(daemon.http)["totals"]["puts_aborted"] > aborted, "no put was cut off: this test shows nothing"
        aborted = stat(daemon.http)["totals"]["puts_aborted"]


def test_killed_in_the_middle_of_a_fetch(start: Faulty) -> None:
    daemon = start(dram="64MiB")
    baseline = Held.by(daemon)
    for _ in range(3):
        with victim(daemon, "fetch", 1_000_000) as process:
            first_line(process)
            kill_when(daemon, process, lambda held: held.pinned_blobs > 0)
        wait_for_baseline(daemon, baseline)


def test_killed_while_holding_leases(start: Faulty) -> None:
    daemon = start()
    baseline = Held.by(daemon)
    with victim(daemon, "lease", 1_000_000) as process:
        first_line(process)
        assert Held.by(daemon).leases == LEASES
        serves(daemon)
        process.kill()
    wait_for_baseline(daemon, baseline)


def test_killed_while_waiting_in_a_durable_commit(start: Faulty) -> None:
    daemon = start(ssd="512MiB")
    baseline, rng = Held.by(daemon), np.random.default_rng(4)
    acknowledged: list[int] = []
    for round_number in range(4):
        with victim(daemon, "durable", 1_000_000 * (round_number + 1)) as process:
            acknowledged.append(int(first_line(process)))
            time.sleep(float(rng.uniform(0, 0.05)))
            deadline = time.monotonic() + _LIMIT_S
            while not (stat(daemon.http)["pinned_blobs"] or time.monotonic() > deadline):
                pass
            process.kill()
            assert process.stdout is not None
            acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
        wait_for_baseline(daemon, baseline)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        missing = [seed for seed in acknowledged if fetch_checked(namespace, context(seed, PAGES)) != PAGES]
        assert not missing, f"{missing} were acknowledged as durable and are gone"
