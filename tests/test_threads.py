"""Pools that need no thread any more once they are made."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blockbuster import BlockBuster

from kvstore.errors import Busy
from kvstore.kvspec import Component, KVSpec
from kvstore.threads import in_order, started_pool
from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess

SPEC = KVSpec(page_tokens=16, components=(Component(kind="full", layers=4, kv_heads=4, head_dim=8192, planes=2),), max_slice_bytes=1 << 20)
PAGES = 4


def no_more(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_all_work_is_done_by_threads_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with started_pool(3, "some") as pool:
        monkeypatch.setattr(threading.Thread, "start", no_more)
        together = threading.Barrier(3)

        def meet() -> int:
            together.wait(20)
            return threading.get_ident()

        for _ in range(2):
            assert len({each.result() for each in [pool.submit(meet) for _ in range(3)]}) == 3
        assert sorted(pool.map(abs, range(50))) == list(range(50))


def test_too_few_threads_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def two(thread: threading.Thread) -> None:
        if len(begun) == 2:
            no_more(thread)
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", two)
    with pytest.raises(Busy, match="kvstore-some can't be started"):
        started_pool(3, "kvstore-some")
    for thread in begun:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("count", [2, 64])
def test_threads_that_are_to_be_apart_share_no_processor(count: int) -> None:
    usable, together = os.sched_getaffinity(0), threading.Barrier(count)

    def meet() -> set[int]:
        together.wait(20)
        return os.sched_getaffinity(0)

    with started_pool(count, "some", apart=True) as pool:
        shares = [each.result() for each in [pool.submit(meet) for _ in range(count)]]
    assert set.union(*shares) == usable == os.sched_getaffinity(0)
    alone = [share for share in shares if share != usable]
    assert sum(map(len, alone)) == len(set.union(*alone)), "a processor is in two shares"
    assert len(alone) == min(count, len(usable))


async def test_the_loop_is_not_held_by_it(never_blocks: BlockBuster) -> None:
    started_pool(4, "some").shutdown(wait=False)


def test_a_daemon_that_runs_starts_no_thread(tmp_path: Path) -> None:
    """Whatever is asked of it: durable puts out of lent memory, over a socket, and reads from SSD."""
    with DaemonProcess(tmp_path, "--dram", "64MiB", "--ssd", "256MiB") as first, Client(first.endpoint) as client:
        namespace = client.namespace("ns", "fingerprint", SPEC)
        nbytes = SPEC.part_bytes(SPEC.whole())
        for number in range(PAGES):
            namespace.put(_tokens(number), np.full(nbytes, number, np.uint8), durable=True)
    with DaemonProcess(tmp_path, "--dram", "64MiB", "--ssd", "256MiB") as daemon:
        before = _threads(daemon)
        for shared in (True, False):
            with Client(daemon.endpoint, shared_memory=shared) as client:
                namespace = client.namespace("ns")
                namespace.put(_tokens(100 + shared), np.full(nbytes, 100, np.uint8), durable=True)
                found = np.zeros(nbytes, np.uint8)
                for number in range(shared, PAGES, 2):  # half of them each, so that all are cold
                    with namespace.match(_tokens(number)) as match:
                        assert not match.dram_pages
                        namespace.fetch(match, found)
                    assert (found == number).all()
        assert _threads(daemon) <= before


def _tokens(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.arange(16, dtype=np.uint32) + 1000 * number


def _threads(daemon: DaemonProcess) -> set[str]:
    return {entry.name for entry in Path(f"/proc/{daemon.pid}/task").iterdir()}


def test_work_ahead_comes_in_order_and_is_bounded() -> None:
    begun: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            begun.append(number)
            yield number

    with started_pool(3, "ahead") as pool:
        for number, square in in_order(pool, lambda number: number * number, items(), 4):
            assert square == number * number
            assert len(begun) <= number + 5
    assert begun == list(range(20))


def test_work_ahead_that_fails_is_told_in_its_turn() -> None:
    with started_pool(2, "ahead") as pool:
        results = in_order(pool, lambda number: 10 // number, [5, 2, 0, 1], 2)
        assert [next(results), next(results)] == [(5, 2), (2, 5)]
        with pytest.raises(ZeroDivisionError):
            next(results)
