"""Data directories that a daemon must not touch, and a clean stop."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from kvstore.errors import DiskFailing
from kvstore_client import Client, ConnectionLost
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import content, context, fetch_checked, open_namespace

SIZES = ("--dram", "4MiB", "--ssd", "16MiB")


def last_words(data_dir: Path, *arguments: str) -> str:
    daemon = DaemonProcess(data_dir, *arguments)
    assert daemon.wait_exit(20) == 2
    return daemon.lines[-1]


def test_a_second_daemon_is_refused_and_the_first_goes_on(data_dir: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as first:
        words = last_words(data_dir)
        assert "data_dir" in words
        assert f"pid {first.pid}" in words
        for endpoint in (first.endpoint, first.unix_endpoint):
            with Client(endpoint) as client:
                open_namespace(client)


def test_a_port_that_a_daemon_has_is_said(data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--dram", "4MiB", "--ssd", "16MiB") as first:
        port = first.http.rpartition(":")[2]
        words = last_words(data_dir.parent / "another", "--http-port", port)
        assert f"127.0.0.1:{port}: Address already in use (by a daemon that runs already? `kvstore status` asks it)" in words


def test_without_its_lock_file_too(data_dir: Path) -> None:
    """Two daemons on one directory would each write blobs over those of the other."""
    with DaemonProcess(data_dir, *SIZES) as first, Client(first.endpoint) as client:
        (data_dir / "lock").unlink()
        assert "is in use by another process" in last_words(data_dir)
        open_namespace(client).put(context(1), content(context(1)), durable=True)
    with DaemonProcess(data_dir, *SIZES) as again, Client(again.endpoint) as client:
        assert fetch_checked(open_namespace(client), context(1)) == 4


def test_an_ssd_tier_that_may_fill_the_disk_is_warned_of(data_dir: Path) -> None:
    for nbytes, warned in ((16 << 20, False), (2 * shutil.disk_usage(data_dir.parent).total, True)):
        with DaemonProcess(data_dir, "--dram", "4MiB", "--ssd", str(nbytes)) as daemon:
            assert any("may take" in line and "--ssd" in line for line in daemon.lines) is warned


def test_after_two_starts_that_died_while_loading_the_journal_is_salvaged(data_dir: Path) -> None:
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        open_namespace(client).put(context(1), content(context(1)), durable=True)
    for deaths, salvaged in ((1, False), (2, True)):
        (data_dir / "loading").write_text(str(deaths))
        with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
            assert fetch_checked(open_namespace(client), context(1)) == 4
            assert any("died while they read the journal" in line for line in daemon.lines) is salvaged
            assert any("entries were saved" in line for line in daemon.lines) is salvaged
            assert not (data_dir / "loading").exists()


@pytest.mark.parametrize("how", ["deleted", "emptied"])
@pytest.mark.parametrize(
    ("name", "also"),
    [("journal/data.mdb", ["blobs", "blobs.extents"]), ("blobs/data.mdb", ["blobs.extents"]), ("blobs.extents", ["blobs"])],
)
def test_without_a_file_it_does_not_start(data_dir: Path, tmp_path: Path, name: str, also: list[str], how: str) -> None:
    """A start that went on would lose what the others have, for ever. With the file back all is there, and without the others it starts."""
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        open_namespace(client).put(context(1), content(context(1)), durable=True)
    shutil.copyfile(data_dir / name, tmp_path / "copy")
    (data_dir / name).unlink() if how == "deleted" else os.truncate(data_dir / name, 0)
    words = last_words(data_dir, *SIZES)
    assert f"{name} is missing or empty" in words
    assert "put it back" in words
    shutil.copyfile(tmp_path / "copy", data_dir / name)
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        assert fetch_checked(open_namespace(client), context(1)) == 4
    (data_dir / name).unlink()
    for path in also:
        shutil.rmtree(data_dir / path) if (data_dir / path).is_dir() else (data_dir / path).unlink()
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        open_namespace(client).put(context(100), content(context(100)), durable=True)


@pytest.mark.parametrize("name", ["journal", "blobs", "blobs.extents"])
def test_files_deleted_under_a_daemon_take_nothing_durable(data_dir: Path, name: str) -> None:
    """They are there as long as the daemon has them open, and no longer."""
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(1), content(context(1)), durable=True)
        shutil.rmtree(data_dir / name) if (data_dir / name).is_dir() else (data_dir / name).unlink()
        with pytest.raises(DiskFailing, match="was deleted"):
            namespace.put(context(100), content(context(100)), durable=True)
        namespace.put(context(200), content(context(200)))
        for seed in (1, 200):
            assert fetch_checked(namespace, context(seed)) == 4
        daemon.kill()


@pytest.mark.parametrize("left", range(0, 96, 4))
def test_a_new_store_on_a_full_disk_says_so(tmpfs: Path, left: int) -> None:
    """LMDB's files are mapped: where the disk has no room for what is written to a hole, that is the end of the process."""
    (tmpfs / "filler").write_bytes(bytes(shutil.disk_usage(tmpfs).free - (left << 10)))
    daemon = DaemonProcess(tmpfs / "data", *SIZES)
    with contextlib.suppress(ConnectionLost):
        daemon.wait_ready()
        daemon.kill()
        return
    assert daemon.wait_exit(20) == 2
    assert "No space left on device" in daemon.lines[-1]


def test_a_newer_format_is_refused_untouched(data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--ssd", "16MiB"):
        pass
    (data_dir / "format.json").write_text(json.dumps({"format": 3}))
    before = (data_dir / "journal" / "data.mdb").read_bytes()
    assert "format 2" in last_words(data_dir)
    assert (data_dir / "journal" / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "x"}'])
def test_a_damaged_format_file_is_named(data_dir: Path, text: str) -> None:
    data_dir.mkdir()
    (data_dir / "format.json").write_text(text)
    assert "format" in last_words(data_dir)


def test_data_without_a_format_file_is_not_guessed_at(data_dir: Path) -> None:
    (data_dir / "journal").mkdir(parents=True)
    assert "format.json is missing" in last_words(data_dir)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--dram", "lots"), "dram"),
        (("--dram", "1KiB"), "dram"),
        (("--dram", "1024TiB"), "more than the"),
        (("--log-level", "loud"), "log_level"),
        (("--host", "256.1.1.1"), "256.1.1.1"),
    ],
)
def test_a_bad_configuration_is_named(data_dir: Path, arguments: tuple[str, ...], named: str) -> None:
    assert named in last_words(data_dir, *arguments)


def test_a_misspelt_variable_is_refused(data_dir: Path) -> None:
    daemon = DaemonProcess(data_dir, environment={"KVSTORE_DARM": "4MiB", "KVSTORE_HTTP": "http://127.0.0.1:1"})
    assert daemon.wait_exit(20) == 2
    assert "KVSTORE_DARM" in daemon.lines[-1]
    assert "did you mean KVSTORE_DRAM?" in daemon.lines[-1]


def test_a_clean_stop_flushes_and_says_so(data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB") as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in range(0, 200, 10):
            namespace.put(context(seed), content(context(seed)))
    assert any("flushed 80 pages, dropped 0" in line for line in daemon.lines)
    assert not (data_dir / "kvstore.sock").exists()
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB") as daemon, Client(daemon.endpoint) as client:
        assert all(fetch_checked(open_namespace(client), context(seed)) == 4 for seed in range(0, 200, 10))


def test_configuration_sources_in_order(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('dram = "8MiB"\nssd = "32MiB"\nput_wait = 0.5\n')
    daemon = DaemonProcess(data_dir, "--config", str(file), "--dram", "2MiB", environment={"KVSTORE_SSD": "16MiB", "KVSTORE_DRAM": "4MiB"})
    with daemon:
        from tests.integration.raw import stat

        tiers = stat(daemon.http)["tiers"]
    assert tiers["dram"]["capacity"] == 2 << 20
    assert tiers["ssd"]["capacity"] == 16 << 20
