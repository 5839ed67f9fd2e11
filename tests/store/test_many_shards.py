"""Half-put pages in great numbers: they are counted as they come and go, and given up some at a time."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import KVStoreError
from kvstore.store import Ack, PutResult, Space, Store
from kvstore.store.checking.check import check
from tests.store.flat_pages import ONE, A, B, Page, begin, key_of, labels, pages_of, put_pages, send, settings_of, there
from tests.store.test_shards import config

PAGES = 1024


async def filled(path: Path, **changes: Any) -> tuple[Store, Space]:
    """A store in which owner 1 has brought half of many pages, and owner 2 has begun to bring the other half of a few."""
    store = await Store(config(path, dram_bytes=8 << 20, segment_bytes=1 << 20, **changes)).__aenter__()
    space = await store.create_namespace(settings_of(ONE))
    for first in range(100, 100 + PAGES, 256):
        assert (await put_pages(store, space, pages_of(*range(first, first + 256)), A, 0)).pending_pages == 256
    return store, space


def counted(store: Store, space: Space) -> int:
    """Pages that are pending, counted one by one: as many as the store says."""
    pages = sum(len(pending.rows) for pending in store.figures.pending_of(space))
    assert store.figures.pending_pages == pages
    return pages


async def turns_until_empty(store: Store) -> int:
    turns = 0
    while store.figures.pending_pages:
        turns += 1
        assert turns < 10_000
        await asyncio.sleep(0)
    return turns


async def test_what_a_client_leaves_behind_goes_some_at_a_time(tmp_path: Path) -> None:
    store, space = await filled(tmp_path / "d")
    try:
        assert counted(store, space) == PAGES
        few = pages_of(*range(100, 104))
        await put_pages(store, space, few, A, 0, owner=2)  # a second try of the same shard, by another client
        store.release_owner(1)
        assert 0 < store.figures.pending_pages < PAGES, "all in one go, or none"
        last = pages_of(100 + PAGES - 1)
        await put_pages(store, space, last, A, 1, owner=3)  # its other half: it is whole before it is its turn
        while counted(store, space) > 4:
            await asyncio.sleep(0)
        check(store)
        assert there(store, space, last) == [True]
        assert (await put_pages(store, space, few, A, 1, owner=2)).new_pages == 4, "what another client also brought stays"
        assert store.figures.pending_pages == 0
        check(store)
    finally:
        await store.__aexit__()


@pytest.mark.parametrize("how", ["release", "drop"])
async def test_nothing_is_left_of_many_half_pages(tmp_path: Path, how: str) -> None:
    store, space = await filled(tmp_path / "d")
    try:
        if how == "release":
            store.release_owner(1)
        else:
            await store.drop_namespace(space)
        turns = await turns_until_empty(store)
        assert turns > 1 or how == "drop"
        assert store.figures.usage()["dram"].used == 0
        check(store)
    finally:
        await store.__aexit__()


async def test_half_pages_whose_time_is_over_go_and_younger_ones_stay(tmp_path: Path) -> None:
    store, space = await filled(tmp_path / "d", put_idle_s=60)
    try:
        between = time.monotonic()
        young = pages_of(1, 2, 100)
        await put_pages(store, space, young, A, 0)  # 100 came again: it is kept for as long as these
        await put_pages(store, space, pages_of(5), B, 0)
        store._puts.sweep(between + 60)
        while store.figures.pending_pages > 4:
            check(store)
            await asyncio.sleep(0)
        assert store.figures.pending_pages == 4
        assert (await put_pages(store, space, young, A, 1)).new_pages == 3
        assert counted(store, space) == 1
        check(store)
    finally:
        await store.__aexit__()


async def test_many_pages_are_deleted_in_steps_and_none_is_found_from_the_first_on(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=8 << 20, ssd_bytes=8 << 20, segment_bytes=1 << 20)) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(*range(100, 356))
        await put_pages(store, space, pages, A, ack=Ack.DURABLE)
        deleting = asyncio.create_task(store.prefixes.delete(space, *labels(pages)))
        await asyncio.sleep(0)
        assert not any(there(store, space, pages))
        assert not deleting.done()
        assert (await put_pages(store, space, pages[10:20], B)).new_pages == 10, "they were put again meanwhile"
        again = await begin(store, space, pages[30:31], A)  # of the same bytes, and it ends when the pages are gone for good
        for _ in range(8):
            assert not deleting.done(), "the loop was held to the end"
            await asyncio.sleep(0)
        assert await deleting == 256
        send(again, pages[30:31])
        assert (await store.commit_put(again)).new_pages == 1
        assert [n for n, here in enumerate(there(store, space, pages)) if here] == [*range(10, 20), 30]
        await store.settle()
        check(store)
        assert store.match(space, labels(pages[10:20])[0], {}, owner=1, parts=True, holes=True).known_pages == 10


async def test_pages_are_deleted_whose_readers_leave_meanwhile(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=8 << 20, segment_bytes=1 << 20)) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(*range(100, 356))
        await put_pages(store, space, pages)
        rows = space.tree.parts_of(space.tree.live_slots()).blob.tolist()
        for row in rows[::3]:
            space.pin(row)
        deleting = asyncio.create_task(store.prefixes.delete(space, *labels(pages)))
        await asyncio.sleep(0)
        for row in rows[::3]:
            space.unpin(row)
        assert await deleting == 256
        assert (space.blobs.count, store.figures.usage()["dram"].used) == (0, 0)
        check(store)


async def test_a_delete_that_is_cancelled_goes_on_to_its_end(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=8 << 20, segment_bytes=1 << 20)) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(*range(100, 356))
        await put_pages(store, space, pages)
        deleting = asyncio.create_task(store.prefixes.delete(space, *labels(pages)))
        await asyncio.sleep(0)
        deleting.cancel()
        await asyncio.wait([deleting])
        assert (space.tree.page_count, space.tree.ghost_count, store.figures.usage()["dram"].used) == (0, 0, 0)
        check(store)


async def test_a_list_of_pages_is_brought_up_at_once(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=8 << 20, ssd_bytes=8 << 20, segment_bytes=1 << 20)) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(1, 2, 3, 4, 5, 6)
        await put_pages(store, space, pages, ack=Ack.DURABLE)

        def only_on_ssd() -> None:
            for row in range(space.blobs.slots.high):
                space.clear_slot(row)
            assert store.figures.usage()["dram"].used == 0

        only_on_ssd()
        named = pages_of(9, 6, 3, 5, 7)
        found, blobs, nbytes = await store.prefixes.prefetch(space, *labels(named))
        assert (found, blobs) == (3, 6)
        assert nbytes > 3 * ONE.page_bytes
        assert await store.prefixes.prefetch(space, *labels(named)) == (3, 0, 0)
        only_on_ssd()
        recency, find = space.tree.pages.recency, space.tree.pages.find_key
        assert (await store.prefixes.prefetch(space, *labels(pages), 1, 3))[:2] == (2, 4)
        one, three, six = (int(recency[find(key_of(space, Page(number)))]) for number in (1, 3, 6))
        assert one < six < three, "it counts as a use of what was asked for"
        check(store)


@pytest.mark.parametrize("how", ["to its end", "cancelled", "its client is gone", "the namespace is dropped"])
async def test_the_last_shard_of_many_pages_is_taken_in_by_steps(tmp_path: Path, how: str) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=8 << 20, ssd_bytes=64 << 20, segment_bytes=1 << 20)) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(*range(100, 356))
        await put_pages(store, space, pages, A, 0, ack=Ack.DURABLE)
        put = await begin(store, space, pages, A, 1, owner=2)
        send(put, pages)
        committing = asyncio.create_task(store.commit_put(put))
        while not any(there(store, space, pages)):
            await asyncio.sleep(0)
        assert not all(there(store, space, pages)), "in one go"
        assert not committing.done()
        if how == "cancelled":
            committing.cancel()
        elif how == "its client is gone":
            store.release_owner(2)
            store.abort_put(put)
        elif how == "the namespace is dropped":
            await store.drop_namespace(space)
        done = (await asyncio.gather(committing, return_exceptions=True))[0]
        if how == "the namespace is dropped":
            assert isinstance(done, KVStoreError)
        else:
            assert done == PutResult(256, 0, 0) or (how == "cancelled" and isinstance(done, asyncio.CancelledError))
            assert all(there(store, space, pages))
            assert counted(store, space) == 0
            await store.settle()
            assert all(space.is_durable(slot) for slot in space.tree.live_slots().tolist()), "what the first shard asked for"
        assert store.figures.puts_open == 0
        await store.settle()
        check(store)
