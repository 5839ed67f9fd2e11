"""Copies by several threads: what they find, and how they end."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore.api.copying import COPIERS, Copying, Job
from kvstore.digests import slice_digest
from kvstore.errors import BadRequest

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
