"""Disks that fill up, fail, hang and lose bytes under a real daemon: it serves on from what it has, says so, and recovers."""

import asyncio
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import DiskFailing
from kvstore_client import AsyncClient, Busy, Client, DeadlineExceeded, NoSpace, NotFound
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import stat

SIZES = ("--dram", "8MiB", "--ssd", "256MiB")
PAGE_COUNT = 4


def wait_for(what: str, condition: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.05)


def state(daemon: DaemonProcess) -> Any:
    return stat(daemon.http)["ssd_state"]


def said(daemon: DaemonProcess, words: str) -> int:
    return sum(words in line for line in daemon.lines)


def put_until_full(namespace: Namespace, first: int, most: int = 2000) -> list[int]:
    """Durable puts of contexts until one is refused. Returns those that were acknowledged."""
    done: list[int] = []
    for seed in range(first, first + 10 * most, 10):
        try:
            namespace.put(context(seed), content(context(seed)), durable=True)
        except NoSpace as error:
            if "disk under the SSD tier is full" not in error.message:
                raise
            return done
        done.append(seed)
    raise AssertionError("nothing was refused")


def serves_from_dram(namespace: Namespace, seeds: list[int]) -> None:
    """Memory puts are taken, and what they brought is served."""
    for seed in seeds:
        assert namespace.put(context(seed), content(context(seed))).new_pages == PAGE_COUNT
        assert fetch_checked(namespace, context(seed)) == PAGE_COUNT


def fill_dram(namespace: Namespace) -> None:
    for seed in range(10_000, 40_000, 10):
        namespace.put(context(seed), content(context(seed)), timeout=1)


def all_there(data_dir: Path, seeds: list[int]) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        missing = [seed for seed in seeds if fetch_checked(namespace, context(seed)) != PAGE_COUNT]
        assert not missing, f"{len(missing)} of {len(seeds)} contexts acknowledged as durable are gone"


def full_and_well_again(daemon: DaemonProcess, make_room: Callable[[], None]) -> list[int]:
    """Fill the disk, serve on from DRAM, make room, and go on. Returns what was acknowledged as durable."""
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        durable = put_until_full(namespace, 0)
        wait_for("a word on it in the log", lambda: bool(said(daemon, "the disk is full")))
        assert state(daemon)["last_error"]
        durable += put_until_full(namespace, 500_000)  # some more may fit, in what LMDB has freed meanwhile
        serves_from_dram(namespace, list(range(600_000, 600_200, 10)))
        assert all(fetch_checked(namespace, context(seed)) == PAGE_COUNT for seed in durable[-20:])
        wait_for("each word once", lambda: said(daemon, "the disk is full") - said(daemon, "the disk takes writes again") in (0, 1))
        make_room()
        wait_for("recovery", lambda: bool(state(daemon)["state"] == "ok"))
        namespace.put(context(700_000), content(context(700_000)), durable=True)
        return [*durable, 700_000]


def test_out_of_disk(tmpfs: Path) -> None:
    filler = tmpfs / "filler"
    filler.write_bytes(bytes(10 << 20))
    daemon = DaemonProcess(tmpfs / "data", *SIZES).wait_ready()
    try:
        durable = full_and_well_again(daemon, filler.unlink)
    finally:
        daemon.kill()
    all_there(tmpfs / "data", durable)


def test_a_limit_on_the_file_size(data_dir: Path) -> None:
    daemon = DaemonProcess(data_dir, *SIZES).wait_ready()
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        durable = full_and_well_again(daemon, lambda: _set_limit(daemon.pid, hard))
    finally:
        daemon.kill()
    all_there(data_dir, durable)


def _set_limit(pid: int, limit: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes LMDB's files fail on demand."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the library that makes a disk fail")
    library = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    source = Path(__file__).with_name("failing_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def failing(shim: Path, data_dir: Path, tmp_path: Path) -> Iterator[tuple[DaemonProcess, Path]]:
    """A daemon whose disk fails while a file `write`, `sync`, `read` or `hang` is in a folder."""
    faults = tmp_path / "faults"
    faults.mkdir()
    environment = {"LD_PRELOAD": str(shim), "FAULTS": str(faults), "KVSTORE_PUT_WAIT": "0.2", "KVSTORE_SHUTDOWN_TIMEOUT": "1"}
    daemon = DaemonProcess(data_dir, *SIZES, environment=environment).wait_ready()
    yield daemon, faults
    daemon.kill()


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_writes_that_fail(failing: tuple[DaemonProcess, Path], data_dir: Path, kind: str) -> None:
    daemon, faults = failing
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in range(0, 100, 10):
            namespace.put(context(seed), content(context(seed)), durable=True)
        (faults / kind).touch()
        with pytest.raises(DiskFailing):
            namespace.put(context(1000), content(context(1000)), durable=True)
        assert state(daemon)["state"] == "failing"
        assert "nput/output" in state(daemon)["last_error"]
        with pytest.raises(DiskFailing):
            namespace.put(context(1010), content(context(1010)), durable=True)
        serves_from_dram(namespace, list(range(2000, 2200, 10)))
        assert all(fetch_checked(namespace, context(seed)) == PAGE_COUNT for seed in range(0, 100, 10))
        with pytest.raises((Busy, DeadlineExceeded)):  # DRAM is full of what no disk takes: nothing that was taken is given up
            fill_dram(namespace)
        assert all(fetch_checked(namespace, context(seed)) == PAGE_COUNT for seed in range(2000, 2200, 10))
        wait_for("a word on it in the log", lambda: said(daemon, "the disk is failing") == 1)
        (faults / kind).unlink()
        wait_for("recovery", lambda: bool(state(daemon)["state"] == "ok"))
        namespace.put(context(3000), content(context(3000)), durable=True)
    daemon.kill()
    all_there(data_dir, [*range(0, 100, 10), 3000])


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_namespaces_while_writes_fail(failing: tuple[DaemonProcess, Path], data_dir: Path, kind: str) -> None:
    daemon, faults = failing
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(1), content(context(1)), durable=True)
        (faults / kind).touch()
        with pytest.raises(DiskFailing):
            client.namespace("another", "rev-2", namespace.spec)
        with pytest.raises(DiskFailing, match="until then a restart brings it back"):
            namespace.drop()
        assert client.namespaces() == []
        (faults / kind).unlink()
        wait_for("recovery", lambda: bool(state(daemon)["state"] == "ok"))
        client.namespace("another", "rev-2", namespace.spec)
    daemon.kill()
    with DaemonProcess(data_dir, *SIZES) as again, Client(again.endpoint) as client:
        assert [info.name for info in client.namespaces()] == ["another"]


def test_reads_that_fail_are_misses(failing: tuple[DaemonProcess, Path]) -> None:
    daemon, faults = failing
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in range(0, 3000, 10):  # more than fits into DRAM
            namespace.put(context(seed), content(context(seed)))
        (faults / "read").touch()
        misses = 0
        for seed in range(0, 200, 10):
            try:
                fetch_checked(namespace, context(seed))
            except NotFound:
                misses += 1
        assert misses > 5
        assert stat(daemon.http)["totals"]["corrupt_blobs"] >= misses
        wait_for("the scrubber", lambda: bool(stat(daemon.http)["totals"]["scrub_unreadable"] > 5))
        (faults / "read").unlink()
        assert fetch_checked(namespace, context(1000)) == PAGE_COUNT
        assert state(daemon)["state"] == "ok"


def test_a_disk_that_is_away_for_a_while_costs_nothing(failing: tuple[DaemonProcess, Path], data_dir: Path) -> None:
    """What was durable is not given up for a cable that was loose: it is a miss until the disk is back."""
    daemon, faults = failing
    seeds = range(0, 3000, 10)  # more than fits into DRAM
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in seeds:
            namespace.put(context(seed), content(context(seed)), durable=True)
        for kind in ("read", "write"):
            (faults / kind).touch()
        misses = 0
        for seed in seeds:
            try:
                fetch_checked(namespace, context(seed))
            except NotFound:
                misses += 1
        assert misses > 50
        for kind in ("read", "write"):
            (faults / kind).unlink()
        wait_for("recovery", lambda: bool(state(daemon)["state"] == "ok"))
        assert all(fetch_checked(namespace, context(seed)) == PAGE_COUNT for seed in seeds)
    daemon.kill()
    all_there(data_dir, list(seeds))


def test_a_disk_that_hangs(failing: tuple[DaemonProcess, Path]) -> None:
    daemon, faults = failing
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(0), content(context(0)), durable=True)
        (faults / "hang").touch()
        with pytest.raises(DiskFailing, match="has not ended"):
            namespace.put(context(1000), content(context(1000)), durable=True)
        assert state(daemon)["state"] == "failing"
        serves_from_dram(namespace, list(range(2000, 2100, 10)))
        (faults / "hang").unlink()
        wait_for("recovery", lambda: bool(state(daemon)["state"] == "ok"))
        namespace.put(context(1000), content(context(1000)), durable=True)
        (faults / "hang").touch()
        namespace.put(context(3000), content(context(3000)))  # to be flushed
        assert daemon.stop(timeout=30) == 1, "it waited for a disk that does not answer"


async def test_puts_that_wait_for_the_disk_hold_no_place_in_shared_memory(failing: tuple[DaemonProcess, Path]) -> None:
    """There are four places for all puts of a client: a fifth needs none of those that are copied already."""
    daemon, faults = failing
    async with AsyncClient(daemon.endpoint, timeout=60) as client:
        if await client.same_host.connection() is None:
            pytest.skip("no shared memory here")
        namespace = await client.namespace("pages", "rev-1", SPEC)
        pages = (1 << 20) // SPEC.page_bytes
        contexts = [context(seed, pages) for seed in range(0, 50, 10)]

        def totals() -> Any:
            return stat(daemon.http)["totals"]

        before = totals()["copied_put_bytes"]
        (faults / "hang").touch()
        waiting = [asyncio.create_task(namespace.put(tokens, content(tokens), durable=True)) for tokens in contexts[:4]]
        async with asyncio.timeout(30):
            while (await asyncio.to_thread(totals))["puts"] < 4:
                await asyncio.sleep(0.02)
        assert (await namespace.put(contexts[4], content(contexts[4]))).new_pages == pages
        assert not any(put.done() for put in waiting)
        assert totals()["copied_put_bytes"] - before == 5 << 20
        (faults / "hang").unlink()
        assert [result.new_pages for result in await asyncio.gather(*waiting)] == [pages] * 4


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with 60 contexts, all durable."""
    folder = tmp_path_factory.mktemp("filled") / "data"
    with DaemonProcess(folder, *SIZES) as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in range(0, 600, 10):
            namespace.put(context(seed), content(context(seed)), durable=True)
    return folder


@pytest.mark.parametrize("name", ["journal/data.mdb", "blobs/data.mdb", "blobs.extents"])
@pytest.mark.parametrize("kept", [0.9, 0.3, 100])
def test_files_cut_short(filled: Path, tmp_path: Path, name: str, kept: float) -> None:
    shutil.copytree(filled, tmp_path / "data")
    file = tmp_path / "data" / name
    size = file.stat().st_size
    os.truncate(file, int(kept * size) if kept < 1 else int(kept))
    with DaemonProcess(tmp_path / "data", *SIZES) as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        found = 0
        for seed in range(0, 600, 10):
            for _ in range(PAGE_COUNT + 1):
                try:
                    found += fetch_checked(namespace, context(seed))
                    break
                except NotFound:
                    continue
        assert found < 60 * PAGE_COUNT
        namespace.put(context(5000), content(context(5000)), durable=True)
        assert fetch_checked(namespace, context(5000)) == PAGE_COUNT
    assert (tmp_path / "data" / f"{Path(name).parent}.damaged").exists() is (Path(name).suffix == ".mdb")


def test_many_flipped_bits(filled: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for trial in range(4):
        copy = tmp_path / str(trial)
        shutil.copytree(filled, copy)
        for name in ("journal/data.mdb", "blobs/data.mdb", "blobs.extents"):
            file = copy / name
            data = bytearray(file.read_bytes())
            for bit in rng.integers(8 * 8192, len(data) * 8, 200).tolist():
                data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
        with DaemonProcess(copy, *SIZES) as daemon, Client(daemon.endpoint) as client:
            namespace = open_namespace(client)
            for seed in range(0, 600, 10):
                try:
                    fetch_checked(namespace, context(seed))
                except NotFound:
                    continue
            namespace.put(context(5000), content(context(5000)))
            assert fetch_checked(namespace, context(5000)) == PAGE_COUNT
