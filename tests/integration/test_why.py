"""`kvstore why` and its route, against a real daemon."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.commands import kvstore
from tests.integration.pages import SPEC, content, context, open_namespace


def ask(daemon: DaemonProcess, seed: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    tokens = ",".join(str(token) for token in context(seed).tolist())
    return kvstore("why", "pages", "--tokens", tokens, "--http", daemon.http, *arguments)


def told(daemon: DaemonProcess, seed: int) -> dict[str, Any]:
    done = ask(daemon, seed, "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if answer["pages"] else 1), done.stderr
    return answer


def test_pages_in_use_and_abandoned_ones_are_explained(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for seed in (10, 20):
            namespace.put(context(seed), content(context(seed)))
        for _ in range(3):
            time.sleep(0.01)
            namespace.match(context(10), lease_s=10).release()
        namespace.abandon(context(20))
        with namespace.match(context(10), lease_s=60) as held:
            now = told(daemon, 10)
            assert now["policy"] == "classifier"
            assert [page["leased"] for page in now["found"]] == [True] * held.pages
            assert all(page["estimate"]["uses"] == 5 and page["in_dram"] for page in now["found"])
            assert now["found"][0]["decision"].startswith("stays")
        used, given_up = told(daemon, 10)["found"], told(daemon, 20)["found"]
        assert all(page["estimate"]["abandoned"] and "abandoned" in page["decision"] for page in given_up)
        assert max(page["rank"] for page in given_up) < min(page["rank"] for page in used)
        assert [page["rank"] for page in used] == sorted((page["rank"] for page in used), reverse=True), "a page goes before one below it"
    shown = ask(daemon, 10)
    assert shown.returncode == 0
    assert "chance" in shown.stdout
    assert str(len(used)) in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"), [((), 1, "no page of this prefix is in"), (("--first-page", "-1"), 2, "first-page")]
)
def test_what_is_not_there(daemon: DaemonProcess, arguments: tuple[str, ...], code: int, says: str) -> None:
    with Client(daemon.endpoint) as client:
        open_namespace(client)
    done = ask(daemon, 999_000, *arguments)
    assert done.returncode == code
    assert says in done.stderr


def test_a_policy_that_estimates_nothing_is_shown_too(data_dir: Path) -> None:
    sizes = ("--dram", "16MiB", "--ssd", "64MiB")
    with DaemonProcess(data_dir, *sizes, environment={"KVSTORE_POLICY": "lru"}) as daemon, Client(daemon.endpoint) as client:
        open_namespace(client).put(context(10), content(context(10)))
        done = ask(daemon, 10)
    assert done.returncode == 0, done.stderr
    assert "kept by recency" in done.stdout


def test_pages_that_are_gone_are_told_of_with_their_history(data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "1MiB") as daemon, Client(daemon.endpoint) as client:
        namespace = client.namespace("pages", "rev-1", SPEC, retention_s=0)
        seeds = range(1000, 1400)
        for seed in seeds:
            namespace.put(context(seed), content(context(seed)))
        lost = [seed for seed in seeds if namespace.match(context(seed), lease_s=0).pages < 4]
        assert lost, "all fits: this test shows nothing"
        now = told(daemon, lost[0])
        assert now["pages"] + now["gone"] == len(now["found"])
        gone = now["found"][-1]
        assert gone["gone"]
        assert not gone["in_dram"]
        assert not gone["on_ssd"]
        assert "gone" in gone["decision"]
        assert gone["estimate"]["uses"] == 1
        shown = ask(daemon, lost[0])
        assert "are gone" in shown.stdout
        assert "none" in shown.stdout
        assert shown.returncode == (0 if now["pages"] else 1)
