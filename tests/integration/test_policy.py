"""The policy in effect, as an operator sees it; and a data directory with spaces in its name."""

import urllib.request
from pathlib import Path

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.commands import kvstore
from tests.integration.pages import open_namespace
from tests.integration.raw import stat


def test_the_policy_is_shown(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "a folder" / "data", "--dram", "16MiB", "--ssd", "16MiB", "--policy", "s3fifo") as daemon:
        with Client(daemon.unix_endpoint) as client:
            open_namespace(client)
        assert (stat(daemon.http)["policy"], stat(daemon.http)["follows_lru"]) == ("s3fifo", False)
        with urllib.request.urlopen(f"{daemon.http}/metrics") as reply:
            metrics = reply.read().decode()
        assert 'kvstore_policy_info{policy="s3fifo"} 1.0' in metrics
        assert "kvstore_policy_follows_lru 0.0" in metrics
        shown = kvstore("status", "--http", daemon.http)
        assert "policy s3fifo," in shown.stdout
        assert any(line.endswith("policy: s3fifo") for line in daemon.lines)


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    done = kvstore("serve", "--data-dir", str(tmp_path / "d"), "--policy", "best")
    assert done.returncode == 2
    assert "one of lru, arc, classifier, s3fifo" in done.stderr
