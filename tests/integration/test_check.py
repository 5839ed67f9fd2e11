"""`kvstore check` as a user runs it: on a stopped store, and on one that a daemon serves."""

import asyncio
import json
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.lmdb_walk import LEAF, page_flags, page_nodes
from kvstore_client import Client, NotFound
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.apart import apart
from tests.commands import kvstore
from tests.integration.pages import content, context, fetch_checked, open_namespace
from tests.integration.raw import stat
from tests.integration.test_http import ask
from tests.store.test_recipes import is_clean
from tests.store.test_verify import edit
from tests.store.test_verify import fill as fill_store

SIZES = ("--dram", "32MiB", "--ssd", "64MiB")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return kvstore("check", *arguments)


def fill(daemon: DaemonProcess, seeds: range = range(0, 50, 10)) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in seeds:
            namespace.put(context(seed), content(context(seed)), durable=True)


def test_a_stopped_store_before_and_after_damage(data_dir: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon:
        fill(daemon)
    done = check("--data-dir", str(data_dir))
    assert done.returncode == 0, done.stderr
    assert "20 pages" in done.stdout
    assert "clean" in done.stdout
    edit(data_dir / "blobs", b"", "flip")
    done = check("--data-dir", str(data_dir))
    assert done.returncode == 1
    assert "does not verify" in done.stdout
    assert "by itself" in done.stdout
    done = check("--data-dir", str(data_dir), "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    lost = report["namespaces"][0]["lost_pages"]
    assert 0 < lost < 20
    quiet = {"KVSTORE_SCRUB_RATE": "0"}  # or the scrubber might be there first
    with DaemonProcess(data_dir, *SIZES, environment=quiet) as daemon, Client(daemon.endpoint) as client:
        done = check("--http", daemon.http, "--json")
        assert done.returncode == 1
        assert json.loads(done.stdout)["namespaces"][0]["lost_pages"] == lost, "the running store is judged as the stopped one"
        namespace = open_namespace(client)
        assert sum(fetched(namespace, seed) for seed in range(0, 50, 10)) == 20 - lost
        assert check("--http", daemon.http).returncode == 0, "the daemon has dropped what was damaged"


def fetched(namespace: Namespace, seed: int) -> int:
    while True:
        try:
            return fetch_checked(namespace, context(seed))
        except NotFound:
            continue


def test_a_page_that_lmdb_dies_of_is_damage(data_dir: Path) -> None:
    asyncio.run(fill_store(data_dir, recipes=True))
    point_behind_the_end(data_dir / "recipes" / "data.mdb")
    assert apart(is_clean, data_dir) is None, "LMDB lives"
    done = check("--data-dir", str(data_dir))
    assert (done.returncode, done.stderr) == (1, "")
    assert "LMDB ended the check at a damaged page" in done.stdout
    done = check("--data-dir", str(data_dir), "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["clean"], [damage["kind"] for damage in report["damage"]]) == (False, ["structure"])


def point_behind_the_end(file: Path) -> None:
    """Let every leaf page say that its entries are some 60 KiB behind it, where a small file is over."""
    raw = bytearray(file.read_bytes())
    assert len(raw) < 0xF000
    for at in range(2 * 4096, len(raw), 4096):
        page = bytes(raw[at : at + 4096])
        for entry in range(len(page_nodes(page, at // 4096)) if page_flags(page) & LEAF else 0):
            raw[at + 17 + 2 * entry] ^= 0xF0
    file.write_bytes(raw)


def test_a_journal_that_can_not_be_read(data_dir: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon:
        fill(daemon)
    (data_dir / "journal" / "data.mdb").write_bytes(b"no file of LMDB's" * 1000)
    done = check("--data-dir", str(data_dir))
    assert (done.returncode, done.stderr) == (1, "")
    assert "DAMAGE: 1 finding, all pages that only what can't be read knew of" in done.stdout
    assert "note: blobs named by nothing that could be read of the journal: 20 (" in done.stdout
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        assert open_namespace(client).match(context(0)).pages == 0, "it serves again, and nothing of it is wrong"


def test_a_locked_store_is_checked_by_its_daemon(data_dir: Path, tmp_path: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon:
        fill(daemon)
        done = check("--data-dir", str(data_dir), "--http", daemon.http, "--rate", "100MiB", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["clean"], report["namespaces"][0]["pages"]) == (True, 20)
        assert report["checked_bytes"] > 2 * 20 * 16384 - 1, "both copies are read"
        with DaemonProcess(tmp_path / "other", *SIZES) as other:
            done = check("--data-dir", str(data_dir), "--http", other.http)
            assert done.returncode == 2
            assert "another one" in done.stderr


def test_what_can_not_run_says_so(tmp_path: Path) -> None:
    for arguments in (
        ("--data-dir", str(tmp_path / "nowhere")),
        ("--http", "http://127.0.0.1:1"),
        ("--http", "http://127.0.0.1:1", "--rate", "x"),
    ):
        done = check(*arguments)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "nowhere").exists()


def begin(daemon: DaemonProcess) -> socket.socket:
    """A slow check, under way."""
    where = urlsplit(daemon.http)
    sock = socket.create_connection((where.hostname, where.port or 0), timeout=20)
    sock.sendall(b"POST /v1/check?bytes_per_s=1048576 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    assert b"200 OK" in sock.recv(4096)
    return sock


def test_one_check_at_a_time_and_none_for_a_client_that_left(data_dir: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon:
        fill(daemon, range(0, 500, 10))
        before = stat(daemon.http)["tiers"]["dram"]["used"]
        with begin(daemon):
            status, _, body = ask(f"{daemon.http}/v1/check", "POST", b"")
            assert (status, json.loads(body)["code"]) == (409, "conflict")
        deadline = time.monotonic() + 20
        while ask(f"{daemon.http}/v1/check", "POST", b"")[0] == 409:
            assert time.monotonic() < deadline, "a check goes on for a client that is gone"
            time.sleep(0.05)
        assert stat(daemon.http)["tiers"]["dram"]["used"] == before
        with begin(daemon) as sock:
            assert daemon.stop() == 0
            rest = b""
            while piece := sock.recv(65536):
                rest += piece
            assert b'"event":"problem"' in rest
            assert b"stopping" in rest
