"""What requests took, and which errors there were, as an operator sees them."""

import json
import re
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore_client import Client, UnknownNamespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.commands import kvstore
from tests.integration.pages import content, context, fetch_checked, open_namespace
from tests.integration.raw import stat


def look(*words: str) -> str:
    done = kvstore(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_requests_and_errors_are_shown_wherever_one_looks(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, shared_memory=False) as client:
        namespace = open_namespace(client)
        tokens = context(1)
        namespace.put(tokens, content(tokens))
        for _ in range(3):
            assert fetch_checked(namespace, tokens) == 4
        namespace.drop()
        with pytest.raises(UnknownNamespace):
            namespace.match(tokens)
    found = stat(daemon.http)
    times = found["requests"]
    assert times["fetch"]["count"] == sum(times["fetch"]["buckets"]) == 3
    assert times["match"]["count"] >= 3
    assert 0 < times["fetch"]["seconds"] < 60
    assert found["errors"]["unknown_namespace"] >= 1

    with urllib.request.urlopen(f"{daemon.http}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    assert 'kvstore_request_seconds_count{request="fetch"} 3.0' in lines
    assert 'kvstore_request_seconds_bucket{le="+Inf",request="fetch"} 3.0' in lines
    assert any(line.startswith('kvstore_request_errors_total{code="unknown_namespace"}') for line in lines)

    shown = look("status", "--http", daemon.http)
    assert "fetch" in shown
    assert "p99" in shown
    assert "error: unknown_namespace" in shown
    assert look("top", "--http", daemon.http, "--count", "2", "--interval", "0.1").count("no requests since the last look") == 2


def test_the_first_look_of_top_has_the_rates_of_now(daemon: DaemonProcess) -> None:
    over, before = threading.Event(), stat(daemon.http)["totals"]["matches"]

    def use() -> None:
        with Client(daemon.endpoint) as client:
            namespace = open_namespace(client)
            while not over.is_set():
                namespace.match(context(1), lease_s=0)

    with ThreadPoolExecutor(1) as pool:
        using = pool.submit(use)
        try:
            while stat(daemon.http)["totals"]["matches"] == before:
                assert not using.done()
            words = ("top", "--http", daemon.http, "--count", "1", "--interval", "0.3")
            told, shown = json.loads(look(*words, "--json")), look(*words)
        finally:
            over.set()
        using.result()
    assert told["per_s"]["matches"] > 0
    assert told["time"] > 0
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}\n", shown), shown
    assert "p99 (about)" in shown
