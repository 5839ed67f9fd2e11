"""Pages dropped to text are computed again by vLLM's own server, asked through its completions endpoint; how far they differ is told."""

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client import Client, OpenAIRebuilder, RebuildWorker
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.vllm.engine_process import EngineProcess, connector
from tests.engines.vllm.prompts import prompt
from tests.engines.vllm.server import NAME, ServerProcess
from tests.engines.vllm.store import pages, read_pages, wait_for_pages

TOKENS = prompt("docs/security.md", 1000)
KEPT = 3
"""Pages that are not dropped: the server computes the others on top of them, as the engine did in one go."""


def as_float(pages_read: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """bf16 is the upper half of an f32."""
    return (pages_read.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def figures(daemon: DaemonProcess, namespace: Namespace) -> dict[str, Any]:
    with urllib.request.urlopen(f"{daemon.http}/v1/namespaces/{namespace.id}/rebuild", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def drift_of(daemon: DaemonProcess, namespace: Namespace) -> dict[str, Any]:
    """The figures, once what came back is compared."""
    end = time.monotonic() + 30
    while not (told := figures(daemon, namespace))["drift"]:
        assert time.monotonic() < end, told
        time.sleep(0.05)
    return told


def rebuild(namespace: Namespace, worker: RebuildWorker, tokens: npt.NDArray[np.uint32], wanted: int) -> None:
    """Somebody waits for the pages while the worker has them computed."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(namespace.match, tokens, lease_s=0, rebuild_s=120)
        assert worker.run_once(60)
        assert asked.result().pages == wanted


def test_pages_dropped_to_text_come_back_through_the_server(tmp_path: Path) -> None:
    array, count = np.array(TOKENS, np.uint32), pages(TOKENS)
    with (
        DaemonProcess(tmp_path / "data", "--dram", "256MiB", "--ssd", "512MiB") as daemon,
        Client(daemon.endpoint, shared_memory=False) as client,
    ):
        settings = connector(daemon.endpoint, recipes=True, rebuild="tolerant")
        with EngineProcess(settings) as engine:
            engine.ask(TOKENS, 1)
            namespace = wait_for_pages(client, TOKENS, count)
        before = read_pages(namespace, TOKENS)
        assert namespace.drop_to_text(array, from_page=KEPT) == count - KEPT
        found = namespace.match(array, lease_s=0, rebuildable=True)
        assert (found.pages, found.rebuildable_pages) == (KEPT, count - KEPT)
        with ServerProcess(settings) as server:
            worker = RebuildWorker(client, namespace.name, fetch_prefix=False)
            worker.rebuild(OpenAIRebuilder(server.url, NAME))
            rebuild(namespace, worker, array, count)
            after = read_pages(namespace, TOKENS)
            told = drift_of(daemon, namespace)
            assert namespace.drop_to_text(array, from_page=KEPT) == count - KEPT
            rebuild(namespace, worker, array, count)  # now the server has it all in its own cache
            assert np.array_equal(read_pages(namespace, TOKENS), after)
        assert after.shape == before.shape
        assert np.array_equal(after[:KEPT], before[:KEPT])
        drift = told["drift"]["bf16"]
        assert told["rebuilt_pages"] == count - KEPT
        assert drift["elements"] == 64 * (count - KEPT)
        same = sum(np.array_equal(one, other) for one, other in zip(after[KEPT:], before[KEPT:], strict=True))
        largest = np.abs(as_float(after) - as_float(before)).max()
        assert drift["max_abs"] <= largest, "the daemon compares a sample"
        print(
            f"\n{count - KEPT} pages came back through the completions endpoint, {same} of them the same bit by bit."
            f" Drift as the daemon reports it: {drift}; over all elements: {largest:g} at most"
        )
