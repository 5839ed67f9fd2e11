"""Making a pin so that it is made once, however often it is asked for, and not at all if nobody hears of its number; and ending it."""

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING

from kvstore.api.wire import FrameType, KVStoreError, NotFound
from kvstore.api.wire.messages import Empty, Pinned, Prefix
from kvstore_client.answers import refused
from kvstore_client.connection import Connection

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient

_UNPIN_S = 5.0
_log = logging.getLogger(__name__)


async def pin_once(client: "AsyncClient", message: Prefix, payload: bytes | memoryview, timeout: float | None) -> Pinned:
    """Make a pin, under a number that is chosen here: to ask again where a connection breaks is harmless.

    An error after which the pin may have been made all the same has it ended.
    """
    message.handle = secrets.randbits(62) + 1
    over: list[Connection] = []

    async def attempt() -> Pinned:
        over.append(await client.for_requests())
        return (await over[-1].call(FrameType.PIN, message, Pinned, payload))[0]

    try:
        async with client.deadline(timeout):
            return await client.pool.retry(attempt)
    except BaseException as error:
        if len(over) > 1 or (over and not refused(error)):
            client.owe(_unpin(client, message, over[-1]))
        raise


async def unpin(client: "AsyncClient", message: Pinned, timeout: float | None) -> None:
    """End a pin. Where the answer to an earlier try was lost, a pin that is not there is one that has ended."""
    asked = False

    async def attempt() -> None:
        nonlocal asked
        connection = await client.for_requests()
        before, asked = asked, True
        try:
            await connection.call(FrameType.UNPIN, message, Empty)
        except NotFound:
            if not before:
                raise

    async with client.deadline(timeout):
        await client.pool.retry(attempt)


async def _unpin(client: "AsyncClient", message: Prefix, over: Connection) -> None:
    """End what may be pinned: behind the request that asked for it, which may be under way, or once the connection of that has ended."""
    end = Pinned(namespace=message.namespace, pin=message.handle)

    async def attempt() -> None:
        connection = over
        if over.lost is not None:
            connection = await client.pool.for_requests()
            await client.pool.end_there(over, connection)
        await connection.call(FrameType.UNPIN, end, Empty)

    try:
        async with asyncio.timeout(_UNPIN_S):
            await client.pool.retry(attempt)
    except (KVStoreError, TimeoutError) as error:
        _log.debug("pin %d is over by now, or lasts for its time: %s", message.handle, error)
