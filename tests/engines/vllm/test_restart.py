"""An engine is killed; the next one on the same store goes on where it was: same tokens, same bytes, and far sooner."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.vllm.engine_process import EngineProcess, connector
from tests.engines.vllm.prompts import prompt
from tests.engines.vllm.store import pages, read_pages, wait_for_pages

PROMPTS = {1500: prompt("protocol.md", 1500), 3500: prompt("architecture.md+known-limits.md", 3500)}
WARM = prompt("lab.md", 40)
BLOCK = 32
"""The smallest block that vLLM takes on a CPU: as little as can be is left to compute."""
LEAST_RATIO = 8.0
TIMED = os.environ.get("KVSTORE_TEST_TIMES") == "1"
"""Whether times are to be judged: only on a quiet machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


def test_a_killed_engine_is_followed_by_one_that_loads(folder: Path) -> None:
    with (
        DaemonProcess(folder / "data", "--dram", "512MiB", "--ssd", "1GiB") as daemon,
        Client(daemon.endpoint, shared_memory=False) as client,
    ):
        cold, own, loaded = {}, {}, {}
        with EngineProcess(connector(daemon.endpoint), block_size=BLOCK) as first:
            first.ask(WARM)
            for size, tokens in PROMPTS.items():
                cold[size] = first.ask(tokens, dump=folder / f"computed-{size}.npy")
                own[size] = first.ask(tokens)
                wait_for_pages(client, tokens, pages(tokens, BLOCK))
            first.kill()
        with EngineProcess(connector(daemon.endpoint), block_size=BLOCK) as second:
            second.ask(WARM)
            for size, tokens in PROMPTS.items():
                loaded[size] = second.ask(tokens, dump=folder / f"loaded-{size}.npy")
        for size, tokens in PROMPTS.items():
            count = pages(tokens, BLOCK)
            assert cold[size]["cached"] == 0
            assert own[size]["cached"] == loaded[size]["cached"] == count * BLOCK
            assert loaded[size]["tokens"] == own[size]["tokens"]
            computed, there = (np.load(folder / f"{what}-{size}.npy")[:count] for what in ("computed", "loaded"))
            namespace = wait_for_pages(client, tokens, count)
            kept = read_pages(namespace, tokens)[:count]
            assert np.array_equal(there, computed)
            assert np.array_equal(kept, computed)
            halves = np.concatenate([read_pages(namespace, tokens, heads)[:count] for heads in ((0, 2), (2, 3))], axis=2)
            assert np.array_equal(halves, computed), "two readers with a range of heads each see what one reader sees"
            ratio = cold[size]["ttft"] / loaded[size]["ttft"]
            print(
                f"\n{size} tokens: {count} pages, {computed.nbytes:,} bytes of KV. To the first token: {cold[size]['ttft']:.3f} s computed,"
                f" {own[size]['ttft']:.3f} s from the engine's own cache, {loaded[size]['ttft']:.3f} s loaded after a restart:"
                f" {ratio:.1f} times shorter"
            )
            assert ratio >= LEAST_RATIO or not TIMED
