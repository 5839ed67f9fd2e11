"""Clients with shared memory that die, stand still, or are somebody else; and memory that goes bad under them."""

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import FrameType
from kvstore.api.wire.same_host import SegmentsRequest
from kvstore_client import AsyncClient, Client, NotFound
from kvstore_workers.daemon_process import DaemonProcess
from tests.commands import kvstore
from tests.faults.baseline import Held, wait_for_baseline
from tests.faults.conftest import Faulty
from tests.forked_daemon import Fork, forked_module
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import RawClient, stat

ROOT = Path(__file__).parents[2]
SEEDS = (200, 210, 220, 230)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


@contextmanager
def holding(daemon: DaemonProcess, lease_s: float) -> Iterator[Fork]:
    """A client process that holds views of 32 pages of each context."""
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in SEEDS:
            namespace.put(context(seed, 32), content(context(seed, 32)))
    with forked_module("tests.faults.near_victim", daemon.endpoint, str(lease_s), *map(str, SEEDS)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"holding {32 * len(SEEDS)}\n"
        yield process


def everything_goes(daemon: DaemonProcess) -> None:
    """Nothing holds what the views were of: all of DRAM can be had for something else."""
    with Client(daemon.endpoint, timeout=20) as client:
        for namespace in client.namespaces():
            if namespace.name == "pages":
                namespace.drop()
        again = open_namespace(client)
        for seed in range(0, 100, 10):
            again.put(context(seed), content(context(seed)))


def test_a_client_killed_with_views_holds_nothing(start: Faulty) -> None:
    daemon = start()
    with holding(daemon, 3600) as process:
        assert stat(daemon.http)["leases"] == len(SEEDS)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while stat(daemon.http)["leases"]:
            assert time.monotonic() < deadline, "a dead client's leases"
            time.sleep(0.02)
    everything_goes(daemon)


def test_a_client_that_stands_still_holds_nothing_past_its_leases(start: Faulty) -> None:
    daemon = start()
    with holding(daemon, 2) as process:
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while stat(daemon.http)["leases"]:
            assert time.monotonic() < deadline, "leases of a client that stands still"
            time.sleep(0.05)
        assert stat(daemon.http)["tiers"]["dram"]["used"] > len(SEEDS) * 32 * SPEC.page_bytes
        everything_goes(daemon)
        assert stat(daemon.http)["tiers"]["dram"]["used"] < 2 << 20, "slots that nobody has a lease on stay taken"


# --- memory that goes bad ------------------------------------------------------------------------------------------------


def flip(daemon: DaemonProcess, pattern: bytes) -> int:
    """Flip a bit of some bytes wherever they are in the daemon's segments. Returns how often they were there."""
    found = 0
    with Path(f"/proc/{daemon.pid}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{daemon.pid}/maps").read_text().splitlines():
            if "kvstore-segment" not in line:
                continue
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            memory.seek(start)
            data = memory.read(end - start)
            for hit in re.finditer(re.escape(pattern), data):
                memory.seek(start + hit.start())
                memory.write(bytes([pattern[0] ^ 1]))
                found += 1
    return found


@needs_root
@pytest.mark.parametrize("durable", [True, False])
async def test_a_flipped_bit_is_never_served(start: Faulty, durable: bool) -> None:
    daemon = start(scrub_rate=0)
    tokens = context(300)
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        await namespace.put(tokens, content(tokens), durable=durable)
        match = await namespace.match(tokens, lease_s=60)
        view = await namespace.view(match)
        out = np.zeros(4 * SPEC.page_bytes, np.uint8)
        assert await asyncio.to_thread(flip, daemon, content(tokens)[5000:5064].tobytes()) == 1
        with pytest.raises(NotFound):
            view.copy_into(out)
        with pytest.raises(NotFound):  # Corrupt, which the daemon meets as it sends it
            await namespace.fetch(match, out)
        deadline = time.monotonic() + 10
        while view.valid:
            assert time.monotonic() < deadline, "the bad copy was not dropped"
            await asyncio.sleep(0.01)
        if durable:
            await namespace.fetch(match, out)
            assert np.array_equal(out, content(tokens)), "SSD has a good copy"
        else:
            with pytest.raises(NotFound):
                await namespace.fetch(match, out)
        assert stat(daemon.http)["totals"]["corrupt_blobs"] >= 1


# --- another user --------------------------------------------------------------------------------------------------------


def as_nobody(endpoint: str, token: str, pipe: "Pipe") -> None:
    """In a process of its own: become nobody, and ask for segments. Sends what came of it."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        with RawClient(endpoint, token=token) as client:
            kind = client.ask(FrameType.SEGMENTS, SegmentsRequest(numbers=[0], dropped=[]))[0].type
            pipe.send(kind.name)
    except (OSError, EOFError) as error:
        pipe.send(type(error).__name__)


def asked_as_nobody(endpoint: str) -> str:
    ours, theirs = multiprocessing.Pipe()
    context_ = multiprocessing.get_context("fork")
    process = context_.Process(target=as_nobody, args=(endpoint, "", theirs))
    process.start()
    try:
        assert ours.poll(20)
        return str(ours.recv())
    finally:
        process.join(10)


@needs_root
def test_another_user_gets_nothing_unless_it_is_configured(tmp_path: Path) -> None:
    public = Path("/dev/shm") / f"kvstore-test-{os.getpid()}"
    public.mkdir(mode=0o755)
    try:
        socket_path = public / "kvstore.sock"
        for users, expected in (
            ("", "PermissionError"),
            ("1234", "EOFError|ConnectionResetError|BrokenPipeError"),
            (str(NOBODY), "SEGMENT_LIST"),
        ):
            environment = {"KVSTORE_UNIX_USERS": users, "KVSTORE_UNIX_SOCKET": str(socket_path)}
            with DaemonProcess(tmp_path / f"data{users}", "--dram", "16MiB", "--ssd", "16MiB", environment=environment) as daemon:
                with Client(daemon.unix_endpoint) as client:
                    namespace = open_namespace(client)
                    namespace.put(context(1), content(context(1)))
                    assert fetch_checked(namespace, context(1)) == 4
                assert re.fullmatch(expected, asked_as_nobody(daemon.unix_endpoint)), users
    finally:
        public.rmdir()


# --- at rest -------------------------------------------------------------------------------------------------------------


def test_clients_that_come_and_go_leave_nothing(start: Faulty) -> None:
    daemon = start(dram="64MiB")
    baseline = Held.by(daemon)
    for turn in range(4):
        with Client(daemon.endpoint) as client:
            namespace = open_namespace(client)
            tokens = context(400 + turn, 100)
            buffer = client.buffer(100 * SPEC.page_bytes)
            buffer.array[:] = content(tokens)
            namespace.put(tokens, buffer.array)
            assert fetch_checked(namespace, tokens) == 100
            with namespace.match(tokens) as match:
                assert namespace.view(match).valid
        wait_for_baseline(daemon, baseline)
    report = kvstore("check", "--http", daemon.http)
    assert report.returncode == 0, report.stdout + report.stderr
