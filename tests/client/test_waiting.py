"""Which Busy an error at a deadline is put down to."""

import asyncio

import pytest

from kvstore.api.wire import Busy, KVStoreError
from kvstore_client.waiting import Patience, blamed


async def busy_until(seconds: float, busy: Busy) -> KVStoreError | None:
    """An attempt that is told so at once, then one without end. Returns what its deadline is put down to."""

    async def work() -> None:
        async with asyncio.timeout(seconds):
            with Patience() as patience:
                await patience.wait(busy)
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as over:
        await work()
    return blamed(over.value)


async def test_a_busy_that_is_over_is_not_blamed() -> None:
    """The next attempt takes much longer than the one that was told so: something else is wrong."""
    assert await busy_until(0.4, Busy("the quota is used up", retry_after_ms=1)) is None


async def test_a_busy_that_is_waited_out_is_blamed() -> None:
    busy = Busy("the quota is used up", retry_after_ms=60_000)
    assert await busy_until(0.01, busy) is busy


async def test_a_busy_that_may_be_told_again_is_blamed() -> None:
    busy, cancelled = Busy("the quota is used up", retry_after_ms=1), asyncio.CancelledError()

    async def work() -> None:
        with Patience() as patience:
            await patience.wait(busy)
            raise cancelled

    with pytest.raises(asyncio.CancelledError):
        await work()
    assert cancelled.__cause__ is busy
