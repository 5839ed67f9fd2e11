"""`kvstore migrate` as a user runs it, on what a real daemon wrote: a daemon of today serves every byte afterwards."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.api.wire import Component, KVSpec
from kvstore.errors import DataDirError
from kvstore.store.migrating import migrate as migrating
from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.commands import kvstore
from tests.format1 import contents, format_of, to_format1
from tests.integration.pages import content, context, fetch_checked, open_namespace
from tests.integration.test_check import point_behind_the_end
from tests.store.test_verify import edit
from tests.store.test_verify import fill as fill_store

SIZES = ("--dram", "64MiB", "--ssd", "128MiB")
LARGE = KVSpec(16, (Component("full", 20, 8, 512),))
"""Pages of 5 MiB, in 20 slices."""
SEEDS = range(0, 100, 10)
PAGES = 4 * len(SEEDS)
LARGE_TOKENS = np.arange(4 * LARGE.page_tokens, dtype=np.uint32)


def large_bytes() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(5).integers(0, 256, 4 * LARGE.page_bytes, dtype=np.uint8)


def fill(data_dir: Path, *, large: bool = True) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        for seed in SEEDS:
            for name in ("pages", "others"):
                open_as(client, name).put(context(seed), content(context(seed)), durable=True)
        if large:
            client.namespace("large", "rev-1", LARGE).put(LARGE_TOKENS, large_bytes(), durable=True)


def open_as(client: Client, name: str) -> Any:
    """Two namespaces with the same bytes."""
    return open_namespace(client) if name == "pages" else client.namespace(name, "rev-2", open_namespace(client).spec)


def serves_it_all(data_dir: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        for name in ("pages", "others"):
            assert all(fetch_checked(open_as(client, name), context(seed)) == 4 for seed in SEEDS)
        namespace = client.namespace("large", "rev-1", LARGE)
        with namespace.match(LARGE_TOKENS) as match:
            assert match.pages == 4
            out = np.zeros(4 * LARGE.page_bytes, np.uint8)
            namespace.fetch(match, out)
        assert np.array_equal(out, large_bytes())


def migrate(data_dir: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return kvstore("migrate", "--data-dir", str(data_dir), *arguments)


def test_a_store_of_format_1(data_dir: Path) -> None:
    fill(data_dir)
    to_format1(data_dir)
    told = f"run `kvstore migrate --data-dir {data_dir}`"
    daemon = DaemonProcess(data_dir, *SIZES)
    assert daemon.wait_exit(20) == 2
    assert told in daemon.lines[-1]
    done = kvstore("check", "--data-dir", str(data_dir))
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    done = kvstore("doctor", "--data-dir", str(data_dir), "--no-measure", "--dram", "4MiB", "--ssd", "16MiB")
    assert done.returncode == 1
    assert f"kvstore migrate --data-dir {data_dir}" in done.stdout
    done = migrate(data_dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"is of format 2 now, and was of 1: 3 namespaces, {2 * PAGES + 4} blobs, 21.3 MiB written anew" in done.stdout
    assert not (data_dir / "blobs.format1").exists()
    serves_it_all(data_dir)
    again = migrate(data_dir)
    assert (again.returncode, again.stderr) == (0, "")
    assert "already: nothing to do" in again.stdout
    assert kvstore("check", "--data-dir", str(data_dir)).returncode == 0


def test_a_flipped_bit_costs_its_page_and_those_below_it(data_dir: Path, tmp_path: Path) -> None:
    fill(data_dir, large=False)
    to_format1(data_dir)
    key = edit(data_dir / "blobs", (1).to_bytes(4, "big"), "flip")
    shutil.copytree(data_dir, tmp_path / "copy")
    done = migrate(data_dir)
    assert (done.returncode, done.stderr) == (1, "")
    assert "LOST: 1 blob could not be brought along" in done.stdout
    assert f"pages: blob {key[4:20].hex()}: slice 0 does not verify" in done.stdout
    assert "by itself" in done.stdout
    done = kvstore("migrate", "--json", environment={"KVSTORE_DATA_DIR": str(tmp_path / "copy")})
    report = json.loads(done.stdout)
    assert (done.returncode, report["lost_blobs"], report["moved_blobs"]) == (1, 1, 2 * PAGES - 1)
    quiet = {"KVSTORE_SCRUB_RATE": "0"}
    with DaemonProcess(data_dir, *SIZES, environment=quiet) as daemon, Client(daemon.endpoint) as client:
        done = kvstore("check", "--http", daemon.http, "--json")
        assert json.loads(done.stdout)["namespaces"][0]["lost_pages"] == report["lost_pages"]
        assert all(fetch_checked(open_as(client, "others"), context(seed)) == 4 for seed in SEEDS)


def test_not_while_a_daemon_has_it_and_nowhere_else(data_dir: Path, tmp_path: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon:
        done = migrate(data_dir)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"pid {daemon.pid}" in done.stderr
    done = migrate(tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no store in" in done.stderr
    (data_dir / "format.json").write_text('{"format": 3}')
    done = migrate(data_dir)
    assert done.returncode == 2
    assert "use the version of kvstore that wrote it" in done.stderr


def test_a_journal_page_that_lmdb_dies_of(data_dir: Path) -> None:
    asyncio.run(fill_store(data_dir))
    to_format1(data_dir)
    before = contents(data_dir / "blobs")
    point_behind_the_end(data_dir / "journal" / "data.mdb")
    done = migrate(data_dir)
    assert (done.returncode, done.stdout) == (2, "")
    assert "LMDB ended the migration" in done.stderr
    assert (format_of(data_dir), contents(data_dir / "blobs")) == (1, before)


def test_a_disk_without_room(tmpfs: Path) -> None:
    data_dir, filler = tmpfs / "data", tmpfs / "filler"
    fill(data_dir, large=False)
    to_format1(data_dir)
    before, free = contents(data_dir), shutil.disk_usage(tmpfs).free
    filler.write_bytes(bytes(free - (2 << 20)))
    done = migrate(data_dir)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"bytes, and the disk has {shutil.disk_usage(tmpfs).free}" in done.stderr
    assert contents(data_dir) == before
    filler.unlink()

    def fill_up(_: str, done: int, total: int) -> None:
        filler.write_bytes(bytes(shutil.disk_usage(tmpfs).free - (64 << 10)))

    with pytest.raises(DataDirError, match="it is as it was"):
        migrating.migrate(data_dir, fill_up)
    assert contents(data_dir) == before
    filler.unlink()
    assert migrate(data_dir).returncode == 0
    assert kvstore("check", "--data-dir", str(data_dir)).returncode == 0
