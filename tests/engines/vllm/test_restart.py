"""An engine is killed; the next one on the same store goes on where it was: same tokens, same bytes, and far sooner."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.vllm.engine_process import EngineProcess, connector
from tests.engines.vllm.prompts import prompt
from tests.engines.vllm.store import pages, read_pages, wait_for_pages

TEXT = "docs/architecture.md+docs/known-limits.md+docs/protocol.md"
SIZES = (1500, 3500)
APART = 100
"""Tokens from the beginning of one prompt to that of the next: they have no block in common."""
WARM = prompt("docs/lab.md", 40)
BLOCK = int(os.environ.get("KVSTORE_TEST_BLOCK", "32"))
"""32 is the smallest block that vLLM takes on a CPU: as little as can be is left to compute."""
REPETITIONS = int(os.environ.get("KVSTORE_TEST_REPETITIONS", "3"))
LEAST_RATIO = 8.0
TIMED = os.environ.get("KVSTORE_TEST_TIMES") == "1"
"""Whether times are to be judged: only on a quiet machine."""


@dataclass(slots=True)
class Times:
    """Seconds to the first token, by where the KV of the prompt came from; what belongs together was asked one after the other."""

    computed: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """How many times shorter the restored one was, by medians."""
        return median(self.computed) / median(self.loaded)

    def __str__(self) -> str:
        rows = (("computed", self.computed), ("from the engine's own cache", self.own), ("loaded after a restart", self.loaded))
        shown = ", ".join(f"{median(row):.3f} s {name} ({min(row):.3f} to {max(row):.3f})" for name, row in rows)
        each = ", ".join(f"{cold / warm:.1f}" for cold, warm in zip(self.computed, self.loaded, strict=True))
        return f"to the first token {shown}: {self.ratio:.1f} times shorter ({each})"


def numbered(size: int, number: int) -> list[int]:
    """The prompt of a size with a number: of each size, those from REPETITIONS on are known to nobody before."""
    return prompt(TEXT, size, (SIZES.index(size) * 2 * REPETITIONS + number) * APART)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


def computed_before(engine: EngineProcess, client: Client, folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What an engine answers from its own cache, once it has computed the prompts of all sizes and the store has them."""
    engine.ask(WARM)
    own: dict[int, list[dict[str, Any]]] = {}
    for size in SIZES:
        own[size] = []
        for number in range(REPETITIONS):
            tokens = numbered(size, number)
            cold = engine.ask(tokens, dump=folder / f"computed-{size}.npy" if not number else None)
            assert cold["cached"] == 0
            wait_for_pages(client, tokens, pages(tokens, BLOCK))
            own[size].append(engine.ask(tokens))
    return own


def timed(engine: EngineProcess, client: Client, folder: Path, own: dict[int, list[dict[str, Any]]]) -> dict[int, Times]:
    """Prompts that the store has, each beside one of the same size that nobody has: so that noise meets both."""
    engine.ask(WARM)
    times = {size: Times() for size in SIZES}
    for number in range(REPETITIONS):
        for size in SIZES:
            known, fresh = numbered(size, number), numbered(size, REPETITIONS + number)
            cold = engine.ask(fresh)
            assert cold["cached"] == 0
            wait_for_pages(client, fresh, pages(fresh, BLOCK))  # nothing of it is under way any more
            loaded = engine.ask(known, dump=folder / f"loaded-{size}.npy" if not number else None)
            again = engine.ask(known)
            assert loaded["cached"] == again["cached"] == own[size][number]["cached"] == pages(known, BLOCK) * BLOCK
            assert loaded["tokens"] == own[size][number]["tokens"]
            times[size].computed.append(cold["ttft"])
            times[size].own.append(again["ttft"])
            times[size].loaded.append(loaded["ttft"])
    return times


def test_a_killed_engine_is_followed_by_one_that_loads(folder: Path) -> None:
    with (
        DaemonProcess(folder / "data", "--dram", "2GiB", "--ssd", "3GiB") as daemon,
        Client(daemon.endpoint, shared_memory=False) as client,
    ):
        with EngineProcess(connector(daemon.endpoint), block_size=BLOCK) as first:
            own = computed_before(first, client, folder)
            first.kill()
        with EngineProcess(connector(daemon.endpoint), block_size=BLOCK) as second:
            times = timed(second, client, folder, own)
        for size in SIZES:
            tokens = numbered(size, 0)
            count = pages(tokens, BLOCK)
            computed, there = (np.load(folder / f"{what}-{size}.npy")[:count] for what in ("computed", "loaded"))
            namespace = wait_for_pages(client, tokens, count)
            kept = read_pages(namespace, tokens)[:count]
            assert np.array_equal(there, computed)
            assert np.array_equal(kept, computed)
            halves = np.concatenate([read_pages(namespace, tokens, heads)[:count] for heads in ((0, 2), (2, 3))], axis=2)
            assert np.array_equal(halves, computed), "two readers with a range of heads each see what one reader sees"
            print(f"\n{size} tokens: {count} pages of {BLOCK}, {computed.nbytes:,} bytes of KV; {times[size]}")
            assert times[size].ratio >= LEAST_RATIO or not TIMED
