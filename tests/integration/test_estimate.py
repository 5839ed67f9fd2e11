"""Load or recompute, with a real daemon: where pages are decides where the cut is, and a fetch follows it."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import BadRequest, Client, Component, Costs, Estimate, KVSpec, PartRange
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.commands import kvstore
from tests.integration.pages import SPEC, content, context
from tests.integration.raw import stat

PAGES, FRONT = 8, 5
TOKENS = context(70, PAGES)
FAST = 1e15
"""A link beside which only the disk counts."""
HYBRID = KVSpec(4, (Component("full", 4, 2, 16), Component("window", 2, 2, 16, window=8), Component("state", 1, 2, 64, planes=1)))
LARGE = KVSpec(4, (Component("full", 8, 2, 2048),))
"""Pages of 512 KiB: reading one tells how fast the disk is."""


SIZES = ("--dram", "16MiB", "--ssd", "64MiB")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a daemon leaves."""
    folder = tmp_path_factory.mktemp("estimate") / "data"
    with DaemonProcess(folder, *SIZES) as first, Client(first.endpoint) as client:
        client.namespace("pages", "rev-1", SPEC).put(TOKENS, content(TOKENS), durable=True)
        hybrid = client.namespace("hybrid", "rev-1", HYBRID)
        for pages, ends in ((3, 3), (6, 6)):
            data, parts, spans = hybrid_put(pages)
            hybrid.put(TOKENS[: pages * 4], data, parts=parts, spans=spans, durable=True)
            assert hybrid.match(TOKENS, lease_s=0).pages == ends
        client.namespace("large", "rev-1", LARGE).put(TOKENS[:4], bytes(LARGE.page_bytes), durable=True)
    return folder


@pytest.fixture
def daemon(written: Path, tmp_path: Path) -> Iterator[DaemonProcess]:
    """One that was started on a copy of it: all pages are on SSD only."""
    shutil.copytree(written, tmp_path / "data")
    with DaemonProcess(tmp_path / "data", *SIZES) as running:
        yield running


def hybrid_content(component: int, page: int) -> bytes:
    return np.random.default_rng([component, page]).bytes(HYBRID.part_bytes(HYBRID.whole(component)))


def hybrid_put(pages: int) -> tuple[bytes, tuple[PartRange, ...], tuple[tuple[int, int], ...]]:
    """Pages with the windows of the last two, and the state of the last."""
    spans = ((0, pages), (pages - 2, pages), (pages - 1, pages))
    cells = [(page, component) for page in range(pages) for component in range(3) if spans[component][0] <= page < spans[component][1]]
    data = b"".join(hybrid_content(component, page) for page, component in cells)
    return data, tuple(HYBRID.whole(component) for component in range(3)), spans


def estimated(namespace: Namespace, costs: Costs | bool) -> Estimate:
    found = namespace.match(TOKENS, lease_s=0, estimate=costs).estimate
    assert found is not None
    return found


def disk_times(namespace: Namespace, factor: float) -> Costs:
    """A page takes `factor` times as long to compute as it takes the disk to read it, at the rate measured up to now."""
    found = estimated(namespace, Costs(link_bytes_s=FAST))
    slowest = max(run.load_s / run.pages for run in found.runs)
    return Costs(factor * slowest / namespace.spec.page_tokens * 1e6, link_bytes_s=FAST)


def test_pages_on_ssd_are_loaded_only_if_computing_takes_longer(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("pages")
        namespace.prefetch(TOKENS, pages=(0, FRONT))
        found = estimated(namespace, disk_times(namespace, 0.5))
        assert [(run.tier, run.first_page, run.pages) for run in found.runs] == [("dram", 0, FRONT), ("ssd", FRONT, PAGES - FRONT)]
        assert (found.pages, found.tokens) == (FRONT, FRONT * SPEC.page_tokens)
        assert found.recompute_s is not None
        assert found.seconds < min(found.load_s, found.recompute_s)
        assert estimated(namespace, disk_times(namespace, 2.0)).pages == PAGES
        costs = disk_times(namespace, 0.5)
        namespace.prefetch(TOKENS)
        assert estimated(namespace, costs).pages == PAGES, "all is in DRAM now"
        assert estimated(namespace, Costs(1e-3, link_bytes_s=1.0)).pages == 0, "computing is faster than this link"


def test_a_fetch_follows_the_plan(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("pages")
        namespace.prefetch(TOKENS, pages=(0, FRONT))
        with namespace.match(TOKENS, estimate=disk_times(namespace, 0.5)) as match:
            out = np.zeros(PAGES * SPEC.page_bytes, np.uint8)
            assert match.estimate is not None
            nbytes = namespace.fetch(match, out, plan=match.estimate)
            assert nbytes == FRONT * SPEC.page_bytes
            assert np.array_equal(out[:nbytes], content(TOKENS)[:nbytes])
            assert not out[nbytes:].any()
            assert namespace.fetch(match, out) == len(out), "and all of it without one"
            with pytest.raises(BadRequest, match="not the estimate of this match"):
                namespace.fetch(namespace.match(TOKENS[:4], lease_s=0), out, plan=match.estimate)


def test_a_session_asks_at_each_move_of_its_cursor(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("pages")
        namespace.prefetch(TOKENS, pages=(0, FRONT))
        with namespace.session(costs=disk_times(namespace, 0.5)) as session:
            session.extend(TOKENS[: SPEC.page_tokens])
            assert session.estimate is not None
            assert session.estimate.pages == 1
            session.extend(TOKENS[SPEC.page_tokens :])
            assert session.estimate.pages == FRONT
            out = np.zeros(FRONT * SPEC.page_bytes, np.uint8)
            assert session.fetch(out, plan=session.estimate) == len(out)
            assert np.array_equal(out, content(TOKENS)[: len(out)])


def test_in_a_hybrid_model_the_cut_is_a_usable_boundary_with_its_own_parts(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("hybrid")
        namespace.prefetch(TOKENS[: 3 * 4])
        costs = Costs(0.5 * disk_times(namespace, 1.0).prefill_us, link_bytes_s=FAST)
        with namespace.match(TOKENS, estimate=costs) as match:
            plan = match.estimate
            assert plan is not None
            assert (match.pages, plan.pages) == (6, 3)
            for component, first in ((0, 0), (1, 1), (2, 2)):
                size = HYBRID.part_bytes(HYBRID.whole(component))
                out = np.zeros((3 - first) * size, np.uint8)
                namespace.fetch(match, out, wanted=HYBRID.whole(component), plan=plan)
                assert out.tobytes() == b"".join(hybrid_content(component, page) for page in range(first, 3))


def test_the_namespaces_cost_counts_where_none_is_given(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("pages", "rev-1", SPEC)
        assert estimated(namespace, True).recompute_s is None
        assert namespace.match(TOKENS, lease_s=0).estimate is None
        client.namespace("pages", "rev-1", SPEC, costs=Costs(100.0, 2.0))
        tokens = PAGES * SPEC.page_tokens
        assert estimated(namespace, True).recompute_s == pytest.approx(1e-4 * tokens + 2e-9 * tokens * (tokens - 1) / 2)
        info = client.namespace("pages").info
        assert (info.prefill_us, info.prefill_ns_per_position) == (100.0, 2.0)


def test_costs_that_make_no_sense_are_refused(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("pages")
        for numbers in ((float("nan"), 0, 0), (-1.0, 0, 0), (1.0, float("inf"), 0), (1.0, 1.0, -5.0), (1.0, 1.0, float("nan"))):
            with pytest.raises(BadRequest):
                namespace.match(TOKENS, lease_s=0, estimate=Costs(*numbers))


def test_rates_are_measured_and_shown(daemon: DaemonProcess) -> None:
    assert not any(rate["measured"] for rate in stat(daemon.http)["rates"].values())
    many = context(90, 40)
    with Client(daemon.endpoint, shared_memory=False) as client:
        namespace = client.namespace("pages")
        namespace.fetch(namespace.match(TOKENS), np.empty(PAGES * SPEC.page_bytes, np.uint8))
        assert not stat(daemon.http)["rates"]["ssd"]["measured"], "small reads count"
        large = client.namespace("large")
        large.fetch(large.match(TOKENS[:4]), np.empty(LARGE.page_bytes, np.uint8))
        namespace.put(many, content(many))
        namespace.fetch(namespace.match(many), np.empty(40 * SPEC.page_bytes, np.uint8))
        rates = stat(daemon.http)["rates"]
        assert all(rate["measured"] for rate in rates.values())
        assert round(estimated(namespace, True).link_bytes_s) == rates["link"]["bytes_s"]
        with urllib.request.urlopen(f"{daemon.http}/metrics") as reply:
            assert "kvstore_fetch_bytes_per_second" in reply.read().decode()


def test_it_is_asked_for_over_http_and_by_hand(daemon: DaemonProcess) -> None:
    body = {"tokens": TOKENS.tolist(), "estimate": {"prefill_us": 1e9, "link_bytes_s": 1e6}}
    request = urllib.request.Request(f"{daemon.http}/v1/namespaces/pages/match", json.dumps(body).encode())
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)["estimate"]
    assert found["pages"] == PAGES
    assert found["link_bytes_s"] == 1e6
    assert [run["tier"] for run in found["runs"]] == ["ssd"]
    tokens = ",".join(str(token) for token in TOKENS.tolist())
    command = ["match", "pages", "--tokens", tokens, "--endpoint", daemon.endpoint]
    shown = kvstore(*command, "--prefill-us", "0.000001").stdout
    assert f"best: load 0 tokens, compute {PAGES * SPEC.page_tokens}" in shown
    shown = kvstore(*command, "--estimate").stdout
    assert "no prefill cost is known" in shown
