"""The workers' side against a real daemon, with tensors of its own in place of an engine's."""

import secrets
import time
from asyncio import base_events, selector_events
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstore_client import Client, Component, KVSpec, fingerprint_revision, job
from kvstore_connectors import link_loop, vllm_loads
from kvstore_connectors.vllm_layout import GroupLayout, Layout
from kvstore_connectors.vllm_loads import Finished
from kvstore_connectors.vllm_metadata import Load, Save, Step
from kvstore_connectors.vllm_settings import Settings
from kvstore_connectors.vllm_worker import WorkerSide
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.vllm.link import Link
from tests.interrupts import interrupted

PAGE, LAYERS, HEADS, CONTENT, BLOCKS = 16, 6, 2, 512, 40
SPEC = KVSpec(page_tokens=PAGE, components=(Component("full", LAYERS, HEADS, CONTENT, dtype="f32", planes=1),), group_layers=2)
NAMES = tuple(f"layers.{n}" for n in range(LAYERS))
PAGES = 8
TOKENS = np.arange(PAGES * PAGE, dtype=np.uint32)

BEGINNING = (vllm_loads.__file__, link_loop.__file__, job.__file__, base_events.__file__, selector_events.__file__)
"""Where a load is begun."""


class Rank:
    """One worker, and its tensors."""

    def __init__(self, endpoint: str, name: str, rank: int = 0, ranks: int = 1, **settings: Any) -> None:
        heads = HEADS // ranks
        group = GroupLayout(0, 0, NAMES, heads, HEADS, heads * PAGE * CONTENT * 4, window=False)
        self.side = WorkerSide(Settings(endpoint=endpoint, shared_memory=False, **settings), Layout(SPEC, (group,)), rank=rank, ranks=ranks)
        self.tensors = {name: torch.zeros(BLOCKS, heads, PAGE, CONTENT) for name in NAMES}
        self.side.register(self.tensors, BLOCKS)
        self.name = name

    def fill(self, seed: int, heads: slice = slice(None)) -> None:
        """Random numbers everywhere; ranks with one seed have their heads of the same ones."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.copy_(torch.rand(BLOCKS, HEADS, PAGE, CONTENT, generator=generator)[:, heads])

    def step(self, *, saves: tuple[Save, ...] = (), loads: tuple[Load, ...] = ()) -> Finished:
        """What the engine does in a step."""
        self.side.begin(Step(self.name, fingerprint_revision(self.name, "v1"), list(loads), list(saves), idle=not saves))
        self.side.load()
        for name in NAMES:
            self.side.wait_layer(name)
            self.side.save_layer(name)
        self.side.end()
        return self.side.finished()

    def until_loaded(self, load: Load) -> Finished:
        """Steps until the load is over."""
        done = self.step(loads=(load,))
        end = time.monotonic() + 60
        while not done.requests:
            assert time.monotonic() < end
            done = self.step()
        return done


def load(first: int, last: int, blocks: range, *, layerwise: bool = False) -> Load:
    return Load("r", TOKENS[: last * PAGE].tobytes(), {}, first, last, (np.array(blocks, np.int64),), layerwise)


def save(first: int, last: int, blocks: range, put_id: bytes | None = None) -> Save:
    tokens = TOKENS[: last * PAGE].tobytes()
    return Save("r", tokens, {}, first, last, (np.array(blocks, np.int64),), put_id or secrets.token_bytes(16))


def stored(daemon: DaemonProcess, name: str, wanted: int = PAGES) -> None:
    """Wait until so many pages are in the store."""
    end = time.monotonic() + 30
    with Client(daemon.endpoint, shared_memory=False) as client:
        namespace = client.namespace(name, fingerprint_revision(name, "v1"), SPEC)
        while namespace.match(TOKENS, lease_s=0).pages < wanted:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


@pytest.fixture
def kept(daemon: DaemonProcess, name: str) -> Iterator[Rank]:
    """A worker that has saved its blocks 10 to 17."""
    rank = Rank(daemon.endpoint, name)
    rank.fill(1)
    rank.step(saves=(save(0, PAGES, range(10, 18)),))
    stored(daemon, name)
    yield rank
    rank.side.close()


@pytest.mark.parametrize("buffer", [32 << 20, 3 * HEADS * PAGE * CONTENT * 4])
@pytest.mark.parametrize("layerwise", [False, True])
def test_what_was_saved_is_loaded_into_other_blocks(daemon: DaemonProcess, name: str, kept: Rank, buffer: int, layerwise: bool) -> None:
    rank = Rank(daemon.endpoint, name, load_buffer_bytes=buffer)
    rank.fill(2)
    before = {layer: tensor.clone() for layer, tensor in rank.tensors.items()}
    done = rank.step(loads=(load(3, PAGES, range(5), layerwise=True),)) if layerwise else rank.until_loaded(load(3, PAGES, range(5)))
    assert not done.blocks
    assert not done.lost
    for layer, tensor in rank.tensors.items():
        assert torch.equal(tensor[:5], kept.tensors[layer][13:18])
        assert torch.equal(tensor[5:], before[layer][5:])
    rank.side.close()


def test_ranks_put_their_heads_under_one_put_id(daemon: DaemonProcess, name: str) -> None:
    put_id = secrets.token_bytes(16)
    for number in range(2):
        rank = Rank(daemon.endpoint, name, number, 2)
        rank.fill(3, slice(number, number + 1))
        rank.step(saves=(save(0, PAGES, range(PAGES), put_id),))
        if number == 0:
            time.sleep(0.2)
            with Client(daemon.endpoint, shared_memory=False) as client:
                assert client.namespace(name, fingerprint_revision(name, "v1"), SPEC).match(TOKENS, lease_s=0).pages == 0
            first = rank
    stored(daemon, name)
    whole, wanted = Rank(daemon.endpoint, name), Rank(daemon.endpoint, name)
    wanted.fill(3)
    whole.until_loaded(load(0, PAGES, range(PAGES)))
    for layer, tensor in whole.tensors.items():
        assert torch.equal(tensor[:PAGES], wanted.tensors[layer][:PAGES])
    for one in (first, rank, whole):
        one.side.close()


def test_pages_that_are_gone_are_told(daemon: DaemonProcess, name: str, kept: Rank) -> None:
    with Client(daemon.endpoint, shared_memory=False) as client:
        client.namespace(name, fingerprint_revision(name, "v1"), SPEC).delete(TOKENS, from_page=5)
    done = kept.until_loaded(load(2, PAGES, range(6)))
    assert (done.requests, done.blocks, done.lost) == ({"r"}, {3, 4, 5}, {"r": 5})
    assert kept.side.not_in_store() == {"r": 5}
    for layer, tensor in kept.tensors.items():
        assert torch.equal(tensor[:3], kept.tensors[layer][12:15])


@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_daemon_that_dies_under_a_load(tmp_path_factory: pytest.TempPathFactory, name: str, layerwise: bool, connections: int) -> None:
    with DaemonProcess(tmp_path_factory.mktemp("dies"), "--dram", "64MiB", "--ssd", "64MiB") as mortal:
        writer = Rank(mortal.endpoint, name)
        writer.fill(4)
        writer.step(saves=(save(0, PAGES, range(PAGES)),))
        stored(mortal, name)
        writer.side.close()
        link = Link(mortal.endpoint)
        rank = Rank(link.endpoint, name, call_timeout_s=0.5, connections=connections)
        link.break_after(1_500_000, mortal.kill)
        if layerwise:
            done = rank.step(loads=(load(0, PAGES, range(PAGES), layerwise=True),), saves=(save(0, 1, range(1)),))
            assert not done.requests
            assert rank.side.not_in_store() == {"r": 0}, "nothing of a step that computed with what did not come is saved"
        else:
            done = rank.until_loaded(load(0, PAGES, range(PAGES)))
        assert link.broken
        assert done.blocks == set(range(PAGES))
        assert done.reasons[0].startswith("DeadlineExceeded")
        rank.side.close()
        link.close()


def test_what_finds_no_room_is_told(daemon: DaemonProcess, name: str) -> None:
    page = LAYERS * HEADS * PAGE * CONTENT * 4
    rank = Rank(daemon.endpoint, name, save_buffer_bytes=2 * page, save_buffers=2)
    rank.fill(5)
    rank.step(saves=(save(0, PAGES, range(PAGES)),))
    assert rank.side.not_in_store() == {"r": 4}
    stored(daemon, name, 4)
    end = time.monotonic() + 30
    while True:  # once the buffers are free again
        rank.step(saves=(save(4, PAGES, range(4, PAGES)),))
        if not rank.side.not_in_store():
            break
        assert time.monotonic() < end
        time.sleep(0.05)
    stored(daemon, name)
    rank.step(saves=(Save("q", (TOKENS[: 2 * PAGE] + 1).tobytes(), {}, 1, 2, (np.array([3]),), secrets.token_bytes(16)),))
    end = time.monotonic() + 30
    while (told := rank.side.not_in_store()) != {"q": 0}:  # the page before it is not there
        assert not told
        assert time.monotonic() < end
        time.sleep(0.01)
    rank.side.close()


def test_what_was_said_to_be_over_writes_nothing_though_it_was_interrupted_as_it_was_begun(kept: Rank) -> None:
    at, said = 0, 0
    kept.step()
    while interrupted(lambda: kept.side._loader.start(load(0, PAGES, range(8))), at, BEGINNING):
        kept.fill(2)
        end = time.monotonic() + 60
        while kept.side._loader._states:
            assert time.monotonic() < end, f"it is never over (interrupted at {at})"
            done = kept.step()
            said += len(done.requests)
            if done.lost:
                kept.fill(3)
        before = {layer: tensor.clone() for layer, tensor in kept.tensors.items()}
        assert kept.side._link is not None
        while kept.side._link._running:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert all(torch.equal(tensor, before[layer]) for layer, tensor in kept.tensors.items()), f"interrupted at {at}"
        at += 1
    assert at >= 5
    assert said
