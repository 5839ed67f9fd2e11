"""Jobs of one transfer: the first failure stops the others, and deadlines around it stay what they are."""

import asyncio

import pytest

from kvstore_client import ConnectionLost
from kvstore_client.transfer import together


async def lost() -> None:
    raise ConnectionLost("gone")


async def endless(ended: list[str] | None = None) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        if ended is not None:
            await asyncio.sleep(0.01)
            ended.append("ended")


async def test_the_first_failure_stops_the_others_and_is_raised_alone() -> None:
    ended: list[str] = []
    with pytest.raises(ConnectionLost):
        await together([endless(ended), endless(ended), lost()])
    assert ended == ["ended", "ended"]


@pytest.mark.parametrize("others", [0, 2])
async def test_a_deadline_after_a_failure_is_a_deadline(others: int) -> None:
    """As in a fetch that is tried again until its time is over."""

    async def again_and_again() -> None:
        while True:
            try:
                await together([lost(), *(endless() for _ in range(others))])
            except ConnectionLost:
                await asyncio.sleep(0.01)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await again_and_again()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_is_not_taken_for_a_failure_of_a_job() -> None:
    async def fails_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionLost("gone while it was stopped")

    task = asyncio.create_task(together([fails_late(), endless()]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
