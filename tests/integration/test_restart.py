"""A real daemon on a journal of many pages: it answers at once, says how far it is, and has everything in the end."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.restart import PAGE_TOKENS, SPEC, make
from kvstore.api.wire import Component, KVSpec
from kvstore.store import NamespaceSettings
from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat


@pytest.mark.parametrize("mixed", [False, True])
def test_serving_while_loading(tmp_path: Path, mixed: bool) -> None:
    settings = NamespaceSettings("default", "restart", "bench", SPEC)
    maker = make(tmp_path / "data", settings, 30_000, mixed=mixed)
    probes = [np.frombuffer(b"".join(label for _, label in context), np.uint32) for context in maker.contexts[:20]]
    daemon = DaemonProcess(
        tmp_path / "data", "--dram", "64MiB", "--ssd", "256MiB", environment={"KVSTORE_SCRUB_RATE": "0"}
    ).wait_listening()
    try:
        with Client(daemon.endpoint) as client:
            namespace = client.namespace("restart", "bench", SPEC)
            states = [_readiness(daemon.http)]
            while states[-1]["status"] == "loading":
                assert states[-1]["loading"]["pages"] <= states[-1]["loading"]["of_about"] == 30_000
                with namespace.match(probes[0], parts=False) as match:
                    assert match.pages <= len(probes[0]) // PAGE_TOKENS
                states.append(_readiness(daemon.http))
            daemon.wait_ready()
            assert states[-1]["status"] == "ready"
            assert "loading" not in stat(daemon.http)
            for probe in probes:
                with namespace.match(probe, parts=False) as match:
                    assert match.pages == len(probe) // PAGE_TOKENS
    finally:
        daemon.stop()


def _readiness(http: str) -> Any:
    with urllib.request.urlopen(f"{http}/readyz", timeout=10) as response:
        return json.loads(response.read())


@pytest.mark.parametrize("page_tokens", [16, 64, 1024])
@pytest.mark.parametrize("recipes", [False, True])
def test_pages_of_every_size_are_back(tmp_path: Path, page_tokens: int, recipes: bool) -> None:
    """Labels longer than a byte can count, too."""
    spec = KVSpec(page_tokens, (Component("full", 2, 1, 8),))
    tokens = np.arange(3 * page_tokens, dtype=np.uint32)
    data = np.random.default_rng(page_tokens).integers(0, 256, 3 * spec.page_bytes, dtype=np.uint8)
    sizes = ("--dram", "16MiB", "--ssd", "64MiB")
    with DaemonProcess(tmp_path / "data", *sizes) as daemon, Client(daemon.endpoint) as client:
        client.namespace("sizes", "rev-1", spec, recipes=recipes).put(tokens, data, durable=True)
    with DaemonProcess(tmp_path / "data", *sizes) as daemon, Client(daemon.endpoint) as client:
        out = np.zeros_like(data)
        with client.namespace("sizes").match(tokens) as match:
            assert match.pages == 3
            client.namespace("sizes").fetch(match, out)
        assert np.array_equal(out, data)
