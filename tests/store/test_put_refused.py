"""A put that is sent at once and refused: whatever was sent behind it is told why, not that somebody gave it up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.errors import Busy, KVStoreError, UnknownNamespace
from kvstore.store import Ack, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.puts.put import Put
from tests.store.test_store import OWNER, PARTS, Prefix, config, settings_named, tokens_of

NAME = 77
FULL = tuple(range(100, 120))
"""So many pages leave no room for two others."""


def request_of(prefix: Prefix) -> PutRequest:
    return PutRequest(b"v" * 16, tokens_of(prefix), {}, 0, PARTS, Ack.MEMORY)


@asynccontextmanager
async def without_room(store: Store) -> AsyncIterator[tuple[Space, Put, "asyncio.Task[Put]", "asyncio.Task[None]"]]:
    """A put that waits for room in DRAM, and something sent behind it that waits for the put to have begun."""
    space = await store.create_namespace(settings_named())
    await store.begin_put(OWNER, space, request_of(FULL))
    beginning = asyncio.create_task(store.begin_put(OWNER, space, request_of((1, 2, 3)), handle=NAME))
    await asyncio.sleep(0)
    put = store.get_put(OWNER, NAME)
    behind = asyncio.create_task(store.put_begun(put, 60))
    await asyncio.sleep(0)
    yield space, put, beginning, behind
    assert put.closed
    with pytest.raises(KVStoreError) as why:
        await store.put_begun(put, 0)
    assert type(why.value) is type(beginning.exception())
    store.release_owner(OWNER)
    check(store)


async def test_when_one_of_them_was_not_patient_enough(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", put_wait_s=60)) as store, without_room(store) as (_, put, beginning, behind):
        with pytest.raises(Busy) as refused:
            await store.put_begun(put, 0.001)
        put.fail(refused.value)
        store.abort_put(put)  # as the COMMIT does
        for task in (behind, beginning):
            with pytest.raises(Busy):
                await task
        with pytest.raises(Busy):
            put.locate(0, 0, 0, 1, 1)


async def test_when_there_is_no_room_in_time(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", put_wait_s=0.05)) as store, without_room(store) as (_, _, beginning, behind):
        for task in (beginning, behind):
            with pytest.raises(Busy, match="no DRAM free"):
                await task


async def test_when_its_namespace_is_dropped(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", put_wait_s=60)) as store, without_room(store) as (space, _, beginning, behind):
        await store.drop_namespace(space)
        for task in (behind, beginning):
            with pytest.raises(UnknownNamespace):
                await task
