"""A store that loses a page, dies under a load or is slow: the engine's answers stay as they are, and no request hangs or fails."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.vllm.engine_process import EngineProcess, connector
from tests.engines.vllm.link import Link
from tests.engines.vllm.prompts import prompt
from tests.engines.vllm.store import PAGE, pages, wait_for_pages

TOKENS = prompt("LICENSE", 1100)  # a text that stays: answers of the same prompt, computed in other pieces, part at a near tie
OTHER = prompt("docs/lab.md", 300)
LOST_PAGE = 5
SETTLE_S = 120
ENVIRONMENT = {"KVSTORE_SCRUB_RATE": "0"}  # the page is to be found bad when it is read
DAEMON = ("--dram", "256MiB", "--ssd", "1GiB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failures")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[int, list[int]]:
    """What an engine without a store answers, by the pages of the prompt that it had in its own cache."""
    answers = {}
    with EngineProcess() as engine:
        answers[0] = engine.ask(TOKENS)["tokens"]
        for have in (LOST_PAGE, pages(TOKENS)):
            engine.call("forget")
            engine.ask(TOKENS[: have * PAGE + 1], 1)
            answer = engine.ask(TOKENS)
            assert answer["cached"] == have * PAGE
            answers[have] = answer["tokens"]
    return answers


class Kept:
    """A daemon behind a link, and an engine that keeps its KV there, durably."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.daemon = DaemonProcess(self.data, *DAEMON, environment=ENVIRONMENT).wait_ready()
        self.link = Link(self.daemon.endpoint)
        self.engine = EngineProcess(connector(self.link.endpoint, shared_memory=False, durable=True, retry_s=1))

    def restart(self) -> None:
        """A new daemon on the same data, where the engine finds it."""
        self.daemon = DaemonProcess(self.data, *DAEMON, environment=ENVIRONMENT).wait_ready()
        self.link.upstream = self.daemon.endpoint

    def settle(self, tokens: list[int]) -> None:
        """Ask until the store gives all of a prompt, then let the engine forget it."""
        end, cached = time.monotonic() + SETTLE_S, -1
        while cached < pages(tokens) * PAGE:
            assert time.monotonic() < end, (
                f"after {SETTLE_S} s the engine gets only {cached} tokens from the store: {self.engine.log[-3000:]}"
            )
            self.engine.call("forget")
            cached = self.engine.ask(tokens, 1)["cached"]
        self.engine.call("forget")


@pytest.fixture(scope="module")
def kept(folder: Path) -> Iterator[Kept]:
    made = Kept(folder)
    with made.engine:
        made.settle(TOKENS)
        yield made
        print("\nwhat the engine said of the store:", *[line for line in made.engine.log.splitlines() if "kvstore" in line][2:], sep="\n  ")
    made.daemon.kill()
    made.link.close()


def flip(data_dir: Path, page: npt.NDArray[np.uint8]) -> None:
    """Change one bit of a page in the store's file."""
    file = data_dir / "blobs.extents"
    stored, sample = file.read_bytes(), page.reshape(-1)[1000:1064].tobytes()
    at = stored.find(sample)
    assert at >= 0, "the page is not in the file"
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([sample[0] ^ 1]))


def test_a_corrupted_page_is_computed(kept: Kept, wanted: dict[int, list[int]], folder: Path) -> None:
    answer = kept.engine.ask(TOKENS, dump=folder / "blocks.npy")
    assert answer["tokens"] == wanted[pages(TOKENS)]
    kept.settle(OTHER)
    kept.daemon.stop()
    flip(kept.data, np.load(folder / "blocks.npy")[LOST_PAGE])
    kept.restart()
    kept.settle(OTHER)
    assert kept.engine.ask(TOKENS)["tokens"] == wanted[LOST_PAGE]
    assert f"of the {pages(TOKENS)} pages to load" in kept.engine.log
    assert f", {LOST_PAGE} came" in kept.engine.log


def test_a_store_that_dies_under_a_load(kept: Kept, wanted: dict[int, list[int]]) -> None:
    kept.settle(TOKENS)
    try:
        kept.link.break_after(10 << 20, kept.daemon.kill)
        answer = kept.engine.ask(TOKENS)
        assert kept.link.broken
        assert f"of the {pages(TOKENS)} pages to load for request" in kept.engine.log
        assert ", 0 came" in kept.engine.log
        assert answer["tokens"] == wanted[0]
        for turn in range(7):  # until both sides of the connector have met it
            assert kept.engine.ask(prompt("docs/http.md", 300, 300 * turn), 1)["reason"] == "length"
            if "serving without kvstore" in kept.engine.log:
                break
        assert kept.engine.log.count("serving without kvstore") == 1
    finally:
        kept.daemon.kill()
        kept.restart()
    kept.settle(TOKENS)
    assert kept.engine.ask(TOKENS)["tokens"] == wanted[pages(TOKENS)]


def test_a_slow_store(kept: Kept, wanted: dict[int, list[int]]) -> None:
    kept.settle(TOKENS)
    kept.link.delay_s = 1.0
    try:
        answer = kept.engine.ask(TOKENS)
        assert answer["cached"] == 0
        assert answer["tokens"] == wanted[0]
        assert kept.engine.ask(OTHER, 1)["reason"] == "length"
    finally:
        kept.link.delay_s = 0.0


def test_a_full_store(kept: Kept, wanted: dict[int, list[int]], tmp_path: Path) -> None:
    """A daemon with no room for a prompt: the engine goes on, with what of it there was room for."""
    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "16MiB") as small:
        before, kept.link.upstream = kept.link.upstream, small.endpoint
        kept.link.cut()
        try:
            for _ in range(3):
                kept.engine.call("forget")
                answer = kept.engine.ask(TOKENS)
                assert answer["cached"] < len(TOKENS) // 2
                assert answer["tokens"] == wanted[0]
        finally:
            kept.link.upstream = before
            kept.link.cut()
    assert "pages are not saved just now" in kept.engine.log


def test_loads_layer_by_layer_in_the_request_s_own_step(tmp_path: Path) -> None:
    """Loaded well, and with a daemon that dies in the middle: the step has computed with what did not come, and is done again."""
    with DaemonProcess(tmp_path / "data", "--dram", "256MiB", "--ssd", "512MiB") as daemon:
        link = Link(daemon.endpoint)
        with EngineProcess(connector(link.endpoint, shared_memory=False, layerwise=True, load_buffer_bytes=4 << 20)) as engine:
            cold = engine.ask(TOKENS)
            own = engine.ask(TOKENS)
            with Client(daemon.endpoint, shared_memory=False) as client:
                wait_for_pages(client, TOKENS, pages(TOKENS))
            engine.call("forget")
            loaded = engine.ask(TOKENS)
            assert loaded["cached"] == own["cached"] == pages(TOKENS) * PAGE
            assert loaded["tokens"] == own["tokens"]
            engine.call("forget")
            link.break_after(10 << 20, daemon.kill)
            lost = engine.ask(TOKENS)
            assert link.broken
            assert lost["tokens"] == cold["tokens"]
            assert f"of the {pages(TOKENS)} pages to load for request" in engine.log
        link.close()
