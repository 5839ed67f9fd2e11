"""Copies out of a segment by two threads: what counts, what does not, and that nothing is written once it is over."""

import asyncio
import mmap
import os
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.api.wire import Run, SliceLayout, blob_id, cut, slice_digest
from kvstore.api.wire.same_host import Place, SegmentMeta
from kvstore.memfds import map_memfd
from kvstore_client.blocks import Item
from kvstore_client.helper import Helper
from kvstore_client.near import NearBlob
from kvstore_client.near_copy import copy_near
from kvstore_client.same_host import MappedSegment

MIB = 1 << 20
LAYOUT = SliceLayout((MIB,) * 4)
SLOT = 5 * MIB
BLOBS = 6


class Segment:
    """A segment with a blob in each slot, as a client has mapped it, and as the daemon writes it."""

    def __init__(self) -> None:
        nbytes = BLOBS * SLOT + 8 * (1 + BLOBS)
        descriptor = os.memfd_create("segment")
        os.ftruncate(descriptor, nbytes)
        self._memory, self._view = map_memfd(descriptor, nbytes)
        self.written: npt.NDArray[np.uint8] = np.frombuffer(self._view, np.uint8)
        self.words: npt.NDArray[np.uint64] = self.written[BLOBS * SLOT :].view(np.uint64)
        self.words[1:] = 7
        self.mapped = MappedSegment(SegmentMeta(number=1, nbytes=nbytes, slots=BLOBS), descriptor)
        os.close(descriptor)
        self.blobs: dict[bytes, NearBlob] = {}
        self.items: list[Item] = []
        for slot in range(BLOBS):
            self._fill(slot)

    def _fill(self, slot: int) -> None:
        payload = np.random.default_rng(slot).integers(0, 256, LAYOUT.payload_bytes, dtype=np.uint8)
        table = b"".join(slice_digest(payload[at : at + MIB].data) for at in range(0, len(payload), MIB))
        blob, at = blob_id(table), slot * SLOT
        self.written[at : at + len(payload)] = payload
        self.written[at + len(payload) : at + len(payload) + len(table)] = np.frombuffer(table, np.uint8)
        self.blobs[blob] = NearBlob(blob, LAYOUT, Place(1, slot, at, 7), self.mapped)
        run = Run(0, 0, LAYOUT.payload_bytes)
        self.items.append(Item(blob, LAYOUT, run, cut(run, LAYOUT), slot * LAYOUT.payload_bytes, 0))

    def payload(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes that lie in a slot now."""
        return self.written[slot * SLOT : slot * SLOT + LAYOUT.payload_bytes]


@pytest.fixture
def segment() -> Segment:
    return Segment()


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})  # also where there is only one
    one = Helper()
    yield one
    one.close()


def target() -> npt.NDArray[np.uint8]:
    return np.zeros(BLOBS * LAYOUT.payload_bytes, np.uint8)


def copiers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-client-copier")]


async def test_what_is_there_is_copied_and_told_in_order(segment: Segment, helper: Helper) -> None:
    before, out, seen = set(copiers()), target(), list[Item]()
    assert await copy_near(segment.blobs, segment.items, out.data, seen.append, helper) == []
    assert seen == segment.items
    assert all(np.array_equal(out[n * 4 * MIB : (n + 1) * 4 * MIB], segment.payload(n)) for n in range(BLOBS))
    (second,) = set(copiers()) - before
    helper.close()
    second.join(10)
    assert not second.is_alive()


async def test_little_is_copied_by_the_caller_alone(segment: Segment, helper: Helper) -> None:
    before, out = set(copiers()), np.zeros(MIB, np.uint8)
    run = Run(0, MIB, MIB)
    item = Item(segment.items[0].blob, LAYOUT, run, cut(run, LAYOUT), 0, 0)
    assert await copy_near(segment.blobs, [item], out.data, lambda _: None, helper) == []
    assert np.array_equal(out, segment.payload(0)[MIB : 2 * MIB])
    assert set(copiers()) == before


@pytest.mark.parametrize("slice_number", range(4))
async def test_a_blob_with_a_slice_that_is_not_its_own_is_left(segment: Segment, helper: Helper, slice_number: int) -> None:
    segment.payload(2)[slice_number * MIB + 5] ^= 1
    seen = list[Item]()
    assert await copy_near(segment.blobs, segment.items, target().data, seen.append, helper) == [segment.items[2]]
    assert seen == [*segment.items[:2], *segment.items[3:]]


async def test_a_blob_whose_slot_is_given_away_meanwhile_is_left(segment: Segment, helper: Helper) -> None:
    seen = list[Item]()

    def arrived(item: Item) -> None:
        seen.append(item)
        if len(seen) == 1:
            segment.words[1 + 4] += 1  # all of its bytes stay, so only this tells

    assert await copy_near(segment.blobs, segment.items, target().data, arrived, helper) == [segment.items[4]]
    assert seen == [*segment.items[:4], *segment.items[5:]]


async def test_a_blob_without_a_place_is_left_and_so_is_one_of_another_name(segment: Segment, helper: Helper) -> None:
    del segment.blobs[segment.items[0].blob]
    segment.written[5 * SLOT + LAYOUT.payload_bytes] ^= 1
    assert await copy_near(segment.blobs, segment.items, target().data, lambda _: None, helper) == [segment.items[0], segment.items[5]]


async def test_nothing_is_written_once_it_was_cancelled(segment: Segment, helper: Helper) -> None:
    out = target()
    for _ in range(20):
        out[:] = 0
        tasks = list[asyncio.Task[list[Item]]]()
        task = asyncio.create_task(copy_near(segment.blobs, segment.items, out.data, partial(_cancel, tasks), helper))
        tasks.append(task)
        with pytest.raises(asyncio.CancelledError):
            await task
        then = out.copy()
        await asyncio.sleep(0.002)
        assert np.array_equal(out, then)


def _cancel(tasks: list[asyncio.Task[list[Item]]], _: Item) -> None:
    tasks[0].cancel()


async def test_an_error_of_the_caller_ends_it(segment: Segment, helper: Helper) -> None:
    def arrived(_: Item) -> None:
        raise ValueError("no more")

    out = target()
    with pytest.raises(ValueError, match="no more"):
        await copy_near(segment.blobs, segment.items, out.data, arrived, helper)
    then = out.copy()
    await asyncio.sleep(0.002)
    assert np.array_equal(out, then)


async def test_a_thread_that_starts_late_writes_into_nothing_that_was_given_back(
    segment: Segment, helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor queues work before it starts its thread: what failed to start is begun with the next work."""
    start = threading.Thread.start
    for _ in range(30):
        one, failed = Helper(), list[threading.Thread]()

        def failing(thread: threading.Thread, failed: list[threading.Thread] = failed) -> None:
            if thread.name.startswith("kvstore-client-copier") and not failed:
                failed.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", failing)
            first, second, told = target(), target(), (list[Item](), list[Item]())
            left = await asyncio.gather(
                copy_near(dict(segment.blobs), segment.items, first.data, told[0].append, one),
                copy_near(dict(segment.blobs), segment.items, second.data, told[1].append, one),
            )
        then = first.copy(), second.copy()
        await asyncio.sleep(0.001)
        assert not any(left)
        assert told == (segment.items, segment.items)
        assert np.array_equal(first, then[0])
        assert np.array_equal(first, second)
        assert np.array_equal(second, then[1])
        one.close()


async def test_what_was_fetched_into_is_free_at_once(segment: Segment, helper: Helper) -> None:
    held = threading.Event()
    helper.offer(lambda: _wait(held))  # so that what is offered next stays in the queue
    try:
        for _ in range(3):
            memory = mmap.mmap(-1, BLOBS * LAYOUT.payload_bytes)
            view = memoryview(memory)
            assert await copy_near(segment.blobs, segment.items, view, lambda _: None, helper) == []
            view.release()
            memory.close()  # BufferError if anything still has it
    finally:
        held.set()


async def test_a_helper_that_is_busy_is_not_waited_for(segment: Segment, helper: Helper) -> None:
    held = threading.Event()
    helper.offer(lambda: _wait(held))
    try:
        seen = list[Item]()
        assert await copy_near(segment.blobs, segment.items, target().data, seen.append, helper) == []
        assert seen == segment.items
    finally:
        held.set()


def _wait(event: threading.Event) -> None:
    event.wait(30)
