"""Pages dropped to text and computed again: a real daemon, and rebuild workers in processes of their own."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import (
    BadRequest,
    Busy,
    Client,
    Conflict,
    RebuildFailed,
)
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.rebuilds import SPEC, dropped, fetched, put, settled, state, tokens, totals, worker
from tests.integration.test_cli import kvstore
from tests.integration.test_http import ask


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.endpoint) as connected:
        yield connected


def test_an_exact_page_comes_back_as_it_was(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens()
    before = dropped(namespace, ids)
    look = namespace.match(ids, lease_s=0, rebuildable=True)
    assert (look.pages, look.rebuildable_pages) == (0, 4)
    assert namespace.match(ids, lease_s=0).rebuildable_pages == -1
    assert namespace.recipes()[0] == 4
    with worker(daemon, namespace):
        assert np.array_equal(fetched(namespace, ids), before)
        found = settled(daemon, namespace, 4)
        assert (found["rebuilt_pages"], found["same_pages"], found["new_version_pages"]) == (4, 4, 0)
        namespace.drop_to_text(ids, from_page=2)  # now with a prefix that the worker fetches, and checks
        assert np.array_equal(fetched(namespace, ids), before)
        assert settled(daemon, namespace, 6)["rebuilt_pages"] == 6


def test_tolerant_drift_is_measured_and_reported(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space("tolerant"), tokens(6)
    before = dropped(namespace, ids, "sum")
    with worker(daemon, namespace, "--model", "sum-reversed"):
        after = fetched(namespace, ids)
        distance = np.abs(after.view(np.float32).astype(float) - before.view(np.float32).astype(float))
        assert len(after) == 6
        assert 0 < distance.max() < 1e-5
        found = settled(daemon, namespace, 0)
        while not found["drift"]:
            found = state(daemon, namespace)
        drift = found["drift"]["f32"]
        assert drift["elements"] == 6 * 64
        assert 0 < drift["mean_abs"] < drift["max_abs"] <= distance.max()
        assert found["new_version_pages"] == 0
    with worker(daemon, namespace, "--model", "sum"):  # what is there now, beside what it was at first: all of it is at hand
        done = kvstore(daemon, "rebuild", namespace.id, "-t", ",".join(map(str, ids)), "--check", "--from-token", "8", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["checked_pages"] == 4
        assert found["drift"]["f32"]["elements"] == 4 * SPEC.page_bytes // 4, "what this check compared, and not what others did"
        assert found["drift"]["f32"]["max_abs"] == pytest.approx(distance[2:].max())
        again = namespace.rebuild_check(ids, from_page=5)
        assert (again.checked_pages, again.drift["f32"].elements) == (1, SPEC.page_bytes // 4)
        assert again.drift["f32"].max_abs == pytest.approx(distance[5:].max())
        all_of_them = state(daemon, namespace)
        assert all_of_them["checked_pages"] == 5
        assert all_of_them["drift"]["f32"]["elements"] == 6 * 64 + 5 * SPEC.page_bytes // 4
    text = ask(f"{daemon.http}/metrics")[2].decode()
    assert re.search(rf'kvstore_rebuild_drift_max_abs{{dtype="f32",namespace="{namespace.id}"}} [0-9.]+e-0', text)


def test_an_exact_mismatch_is_a_new_version(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    """What was computed on top of the old version is gone with it, and is computed again on top of the new one."""
    namespace, ids = space(), tokens(4)
    before = dropped(namespace, ids, "sum", from_page=1)
    with worker(daemon, namespace, "--model", "sum-reversed"):
        first = fetched(namespace, ids[:8])
        assert len(first) == 2
        assert namespace.match(ids, lease_s=0).pages == 2, "a page that was computed on the old version is served with the new one"
        assert np.array_equal(first[0], before[0])
        assert not np.array_equal(first[1], before[1])
        assert settled(daemon, namespace, 1)["new_version_pages"] == 1
        rest = fetched(namespace, ids)
        assert len(rest) == 4
        assert np.array_equal(rest[:2], first)
        found = settled(daemon, namespace, 3)
        assert (found["new_version_pages"], found["same_pages"]) == (3, 0)
    # The new version is what is on record now.
    namespace.drop_to_text(ids, from_page=1)
    with worker(daemon, namespace, "--model", "sum-reversed"):
        assert np.array_equal(fetched(namespace, ids), rest)
        assert settled(daemon, namespace, 6)["same_pages"] == 3


def test_waiting_ends_at_the_deadline(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(4)
    dropped(namespace, ids, from_page=1)
    assert len(fetched(namespace, ids, rebuild_s=0.1)) == 1
    progress = namespace.rebuild(ids, wait_s=0.1)
    assert (progress.pages, progress.wanted_pages, progress.waiting_jobs, progress.claimed_jobs) == (1, 4, 1, 0)
    done = kvstore(daemon, "rebuild", namespace.id, "-t", ",".join(map(str, ids)), "--wait", "0.1")
    told = "1 of 4 pages there in time: 0 jobs claimed, 1 waiting; does a rebuild worker of this namespace run (docs/rebuild.md)?\n"
    assert (done.returncode, done.stdout) == (1, told)
    short = kvstore(daemon, "rebuild", namespace.id, "-t", "1,2,3")
    assert (short.returncode, "do not fill a page of 4" in short.stderr) == (2, True), short.stderr


def test_a_recipe_whose_prefix_is_gone_as_well(daemon: DaemonProcess, client: Client, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(6)
    before = dropped(namespace, ids, from_page=4)
    assert namespace.rebuild(ids, wait_s=0).waiting_jobs == 1
    namespace.drop_to_text(ids, from_page=1)  # while the job waits
    with worker(daemon, namespace):
        assert np.array_equal(fetched(namespace, ids), before)
        assert state(daemon, namespace)["rebuilt_pages"] == 5
    assert totals(daemon)["rebuild_failed_attempts"] >= 0


def test_a_missing_recipe_is_said(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(6)
    before = dropped(namespace, ids)
    assert namespace.delete_recipes(ids, from_page=3) == 3
    assert namespace.match(ids, lease_s=0, rebuildable=True).rebuildable_pages == 3
    with pytest.raises(RebuildFailed, match="page 3 of this prefix is not in the store, and has no recipe"):
        namespace.rebuild(ids)
    put(namespace, ids)
    namespace.drop_to_text(ids, from_page=4)
    assert namespace.rebuild(ids, wait_s=0).waiting_jobs == 1
    namespace.drop_to_text(ids, from_page=1)  # while it waits, its prefix goes, and then one recipe in the middle
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(namespace.rebuild, ids, wait_s=20)
        while state(daemon, namespace)["waiting_jobs"] < 2:
            pass
        assert namespace.delete_recipes(ids, from_page=2) == 4
        with worker(daemon, namespace), pytest.raises(RebuildFailed, match=r"page 2 of the prefix .* its recipe is gone"):
            waiting.result(20)
    assert np.array_equal(before[:1], fetched(namespace, ids[:4], 0))


def test_recipes_survive_a_kill(data_dir: Path) -> None:
    sizes = ("--dram", "16MiB", "--ssd", "64MiB")
    ids = tokens(5)
    with DaemonProcess(data_dir, *sizes) as running, Client(running.endpoint) as one:
        namespace = one.namespace("kept", "rev-1", SPEC, recipes=True)
        before = dropped(namespace, ids)
        put(namespace, tokens(2, seed=9))
        running.kill()
    with DaemonProcess(data_dir, *sizes) as running, Client(running.endpoint) as one:
        namespace = one.namespace("kept")
        assert namespace.match(ids, lease_s=0, rebuildable=True).rebuildable_pages == 5
        with worker(running, namespace):
            assert np.array_equal(fetched(namespace, ids), before)
        assert running.stop() == 0


def test_ahead_of_need(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(3)
    before = dropped(namespace, ids)
    url, body = f"{daemon.http}/v1/namespaces/{namespace.id}/prefetch", {"tokens": ids.tolist(), "rebuild": True}
    assert "rebuilding_pages" not in json.loads(ask(url, "POST", {"tokens": ids.tolist()})[2])
    with worker(daemon, namespace, "--compute-s", "0.05"):
        assert json.loads(ask(url, "POST", body)[2])["rebuilding_pages"] == 3
        while len(out := fetched(namespace, ids, 0)) < 3:
            pass
        assert np.array_equal(out, before)
        namespace.drop_to_text(ids)
        refused = json.loads(ask(url, "POST", body | {"within_s": 0.001})[2])
        assert refused["rebuilding_pages"] == 0
        assert "it would take about" in refused["why_not"]
        assert namespace.prefetch(ids, rebuild=True, within_s=60) == 0
        while len(fetched(namespace, ids, 0)) < 3:
            pass


def test_over_http_and_from_the_command_line(daemon: DaemonProcess, client: Client, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(4)
    before, numbers, text = put(namespace, ids), ids.tolist(), ",".join(map(str, ids))
    base = f"{daemon.http}/v1/namespaces/{namespace.id}"

    def post(name: str, **body: Any) -> tuple[int, Any]:
        status, _, raw = ask(f"{base}/{name}", "POST", body)
        return status, json.loads(raw)

    assert post("drop", tokens=numbers, from_token=9) == (200, {"pages": 2})
    for number in ("18446744073709551616", "9223372036854775808"):
        past = kvstore(daemon, "drop", namespace.id, "-t", text, "--from-token", number)
        assert (past.returncode, "Traceback" in past.stderr) == (2, False), past.stderr
    with pytest.raises(BadRequest, match="can't be sent"):
        namespace.drop_to_text(ids, from_page=1 << 64)
    assert json.loads(kvstore(daemon, "drop", namespace.id, "-t", text, "--from-token", "4", "--json").stdout) == {"dropped_pages": 1}
    assert post("match", tokens=numbers)[1]["rebuildable_pages"] == 3
    assert post("rebuild", tokens=numbers, wait_s=0.01) == (
        200, {"pages": 1, "wanted_pages": 4, "waiting_jobs": 1, "claimed_jobs": 0, "checked_pages": 0, "drift": {}}
    )  # fmt: skip
    with worker(daemon, namespace):
        done = kvstore(daemon, "rebuild", namespace.id, "-t", text, "--json")
        assert json.loads(done.stdout)["pages"] == 4
        namespace.drop_to_text(ids)
        assert post("match", tokens=numbers, rebuild_s=10)[1]["pages"] == 4
    assert np.array_equal(fetched(namespace, ids, 0), before)
    count_, nbytes = namespace.recipes()
    assert json.loads(ask(f"{base}/recipes")[2]) == {"recipes": count_, "nbytes": nbytes}
    namespace.drop_to_text(ids, from_page=2)
    assert post("recipes/delete", tokens=numbers, from_token=12) == (200, {"recipes": 1})
    for narrower in (("--tokens", ""), ("--from-token", "4")):  # of an empty variable, say
        done = kvstore(daemon, "recipes", namespace.id, "--delete", "--all", *narrower)
        assert (done.returncode, "either --tokens, and perhaps --from-token, or --all" in done.stderr) == (2, True)
    assert json.loads(kvstore(daemon, "recipes", namespace.id, "--delete", "--all", "--json").stdout)["deleted"] == 1
    assert kvstore(daemon, "recipes", namespace.id, "--delete").returncode == 2
    status, failed = post("rebuild", tokens=numbers)
    assert (status, failed["code"]) == (502, "rebuild_failed")
    client.namespace("no-recipes", "rev-2", SPEC)
    plain = ask(f"{daemon.http}/v1/namespaces/no-recipes/rebuild", "POST", {"tokens": numbers})
    assert (plain[0], json.loads(plain[2])["code"]) == (409, "conflict")
    with pytest.raises(Conflict):
        client.namespace("no-recipes").drop_to_text(ids)
    with pytest.raises((Conflict, Busy)):
        client.namespace("no-recipes").rebuild(ids)
