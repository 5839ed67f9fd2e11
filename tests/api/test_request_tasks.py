"""Requests that may wait: a task for each that does, and none for the others."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from kvstore.api.outbox import Outbox
from kvstore.api.request_stats import RequestStats
from kvstore.api.request_tasks import MAX_REQUESTS, RequestTasks
from kvstore.api.wire import Channel, FrameType, Header


@pytest.fixture
async def tasks() -> AsyncIterator[RequestTasks]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel, stats = Channel(ours), RequestStats()
    yield RequestTasks(Outbox(channel, stats, 5), stats, "test")
    channel.close()
    theirs.close()


def header(request: int) -> Header:
    return Header(FrameType.PUT, 0, request, 0, 0, 0)


async def test_what_has_nothing_to_wait_for_is_done_here(tasks: RequestTasks) -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(len(done))

    async with asyncio.TaskGroup() as group:
        before = len(asyncio.all_tasks())
        for request in range(2 * MAX_REQUESTS):
            assert await tasks.start(group, header(request), 0, work, here=True)
        assert done == list(range(2 * MAX_REQUESTS))
        assert not tasks.under_way
        assert len(asyncio.all_tasks()) == before


async def test_what_waits_goes_on_in_a_task_of_its_own(tasks: RequestTasks) -> None:
    ran_in: list[asyncio.Task[None] | None] = []

    async def work() -> None:
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await asyncio.sleep(0.001)
        ran_in.append(asyncio.current_task())

    async with asyncio.TaskGroup() as group:
        assert not await tasks.start(group, header(1), 0, work, here=True)
        assert set(tasks.under_way) == {1}
        own = tasks.under_way[1].task
    assert ran_in == [own] != [None]
    assert not tasks.under_way


@pytest.mark.parametrize("turns", [0, 1])
async def test_one_that_is_stopped_cleans_up_whether_its_task_had_begun_or_not(tasks: RequestTasks, turns: int) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with asyncio.TaskGroup() as group:
        for request in range(MAX_REQUESTS):
            assert not await tasks.start(group, header(request), 0, work, here=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks.stop()
    await asyncio.sleep(0)
    assert ended == ["cancelled"] * MAX_REQUESTS
    assert not tasks.under_way
