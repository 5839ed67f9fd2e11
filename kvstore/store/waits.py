"""Waiting for work in executors, which no cancellation can stop."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def finish_despite_cancel(future: "asyncio.Future[T]") -> T:
    """Await a future that can't be interrupted; a cancellation takes effect only once it is done."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if future.cancelled():
                raise
            cancelled = error
        except Exception:  # noqa: BLE001 - raised by future.result() below
            break
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()
