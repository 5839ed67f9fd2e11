"""Copies by several threads: what they find, and how they end."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore.api.copying import COPIERS, Copying, Job
from kvstore.digests import slice_digest
from kvstore.errors import BadRequest, Busy

KIB, MIB = 1 << 10, 1 << 20
SOURCE = np.random.default_rng(5).integers(0, 256, 12 * MIB, dtype=np.uint8)


def read(target: memoryview, offset: int) -> None:
    np.frombuffer(target, np.uint8)[:] = SOURCE[offset : offset + len(target)]


@pytest.mark.parametrize(
    "sizes",
    [
        [(MIB,) * 9],
        [(100,)],
        [(256 * KIB,) * 8, (256 * KIB + 1, 7), (4 * KIB,) * 300],
        [(3 * MIB, 1, 300 * KIB, 5, 255 * KIB, KIB, 2 * MIB)],
        [],
    ],
    ids=["large", "tiny", "several jobs", "mixed", "none"],
)
async def test_slices_of_all_sizes_are_copied_and_hashed(sizes: list[tuple[int, ...]]) -> None:
    jobs: list[Job] = []
    offset = 3
    for each in sizes:
        jobs.append((memoryview(bytearray(sum(each))), each, offset))
        offset += sum(each) + 11
    with ThreadPoolExecutor(COPIERS) as copiers:
        found = await Copying(read, jobs).start(copiers)
    for (target, each, start), digests in zip(jobs, found, strict=True):
        assert target == SOURCE[start : start + len(target)].data
        ends = np.cumsum(each)
        assert digests == [slice_digest(target[end - size : end]) for end, size in zip(ends, each, strict=True)]


async def test_a_thread_that_does_not_come_holds_nobody_up() -> None:
    go_on = threading.Event()
    with ThreadPoolExecutor(COPIERS) as copiers:
        copiers.submit(go_on.wait)
        target = memoryview(bytearray(8 * MIB))
        found = await asyncio.wait_for(Copying(read, [(target, (MIB,) * 8, 0)]).start(copiers), 10)
        assert len(found[0]) == 8
        target.release()  # nobody has a view of it any more, though a thread is still to come
        go_on.set()


async def test_what_goes_wrong_is_told_once_nobody_writes_any_more() -> None:
    writing = 0
    lock = threading.Lock()

    def fail(target: memoryview, offset: int) -> None:
        nonlocal writing
        with lock:
            writing += 1
        try:
            if offset >= 3 * MIB:
                raise BadRequest("there is no more")
            read(target, offset)
        finally:
            with lock:
                writing -= 1

    with ThreadPoolExecutor(COPIERS) as copiers:
        with pytest.raises(BadRequest, match="no more"):
            await Copying(fail, [(memoryview(bytearray(8 * MIB)), (MIB,) * 8, 0)]).start(copiers)
        assert not writing


async def test_a_small_request_does_not_wait_for_all_of_a_large_one() -> None:
    begun, waiting, small_done = threading.Event(), threading.Event(), threading.Event()
    late: list[int] = []

    def large(target: memoryview, offset: int) -> None:
        begun.set()
        waiting.wait(20)
        if offset >= 24 * MIB and not late and not small_done.wait(5):
            late.append(offset)

    with ThreadPoolExecutor(COPIERS) as copiers:
        target = memoryview(bytearray(32 * MIB))
        first = Copying(large, [(target, (MIB,) * 32, 0)]).start(copiers)
        while not begun.is_set():
            await asyncio.sleep(0.001)
        second = Copying(read, [(memoryview(bytearray(MIB)), (MIB,), 0)]).start(copiers)
        waiting.set()
        assert len((await second)[0]) == 1
        assert not first.done()
        small_done.set()
        assert len((await first)[0]) == 32
    assert not late


async def test_copies_that_no_thread_can_begin_are_busy_and_never_made() -> None:
    """An executor that can't start a thread says so when the work is in its queue already."""

    class NoThread(ThreadPoolExecutor):
        def _adjust_thread_count(self) -> None:
            if refused:
                raise RuntimeError("can't start new thread")
            super()._adjust_thread_count()

    refused = False
    go_on, first_runs = threading.Event(), threading.Event()

    def hold() -> None:
        first_runs.set()
        go_on.wait(20)

    with NoThread(COPIERS) as copiers:
        copiers.submit(hold)
        assert first_runs.wait(20)
        refused = True
        target = memoryview(bytearray(8 * MIB))
        with pytest.raises(Busy) as caught:
            await Copying(read, [(target, (MIB,) * 8, 0)]).start(copiers)
        assert caught.value.retry_after_ms
        go_on.set()
    assert target == bytes(8 * MIB), "it was written to after its request had ended"
    target.release()


async def test_copies_go_on_to_their_end_while_the_threads_are_shut_down() -> None:
    begun, shut_down = threading.Event(), threading.Event()

    def slow(target: memoryview, offset: int) -> None:
        begun.set()
        shut_down.wait(20)
        read(target, offset)

    copiers = ThreadPoolExecutor(COPIERS)
    target = memoryview(bytearray(12 * MIB))
    copying = Copying(slow, [(target, (MIB,) * 12, 0)]).start(copiers)
    while not begun.is_set():
        await asyncio.sleep(0.001)
    copiers.shutdown(wait=False)
    shut_down.set()
    assert len((await copying)[0]) == 12
    assert target == SOURCE.data
