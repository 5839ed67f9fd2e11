"""What a thread waits for: however it is interrupted, those who wake it wait for nothing."""

import asyncio
import threading

import pytest

from kvstore_client import job
from kvstore_client.job import Bell, Gone, Job
from tests.interrupts import interrupted


def ended(work: threading.Thread) -> bool:
    work.join(20)
    return not work.is_alive()


def test_a_bell_is_rung_whoever_was_interrupted_there() -> None:
    bell, at, waits = Bell(), 0, 0

    def wait() -> None:
        bell.ring()
        bell.wait(20)

    while interrupted(wait, at, (job.__file__,)):
        ringer = threading.Thread(target=bell.ring, daemon=True)
        ringer.start()
        assert ended(ringer), f"interrupted at {at}"
        bell.wait(20)
        at, waits = at + 1, waits + 1
    assert waits >= 4


def test_what_was_rung_before_is_not_missed_and_counts_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.wait()
    waiter = threading.Thread(target=bell.wait, daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    bell.ring()
    assert ended(waiter)


def test_a_job_says_what_came_of_it_as_often_as_it_is_asked() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def work(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 7

    async def wait() -> None:
        await asyncio.Event().wait()

    try:
        job = Job(loop, work(None))
        assert [job.result(), job.result(0), job.wait(0), job.done] == [7, 7, True, True]
        with pytest.raises(KeyError):
            Job(loop, work(KeyError())).result(20)
        waiting = Job(loop, wait())
        assert not waiting.wait(0.01)
        with pytest.raises(TimeoutError):
            waiting.result(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            waiting.result(20)
        gone = Gone(work(None))
        assert gone.wait(0)
        with pytest.raises(asyncio.CancelledError):
            gone.result()
        gone.cancel()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    job.cancel()


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_whose_loop_was_closed_under_it_is_waited_for_by_nobody(begun: bool) -> None:
    loop = asyncio.new_event_loop()
    started, may_end, errors = threading.Event(), threading.Event(), list[BaseException]()

    def serve() -> None:
        if begun:
            loop.run_forever()
        may_end.wait(20)
        loop.close()

    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    def ask() -> None:
        try:
            waiting.result()
        except asyncio.CancelledError as error:
            errors.append(error)

    waiting = Job(loop, wait())
    server, asker = threading.Thread(target=serve, daemon=True), threading.Thread(target=ask, daemon=True)
    server.start()
    asker.start()
    if begun:
        assert started.wait(20)
        loop.call_soon_threadsafe(loop.stop)
    assert not waiting.done
    may_end.set()
    assert ended(server)
    assert ended(asker), "it waits for ever"
    assert errors
    assert waiting.done
    waiting.cancel()
