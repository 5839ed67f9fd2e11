"""Leases that end in great numbers: nobody can use them from the first moment on, and what they pinned is let go some at a time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.errors import NotFound
from kvstore.store import Lease, Space, Store
from kvstore.store.checking.check import check
from tests.store.flat_pages import ONE, Page, labels, pages_of, put_pages, settings_of
from tests.store.test_shards import config

PAGES = pages_of(*range(100, 132))
LEASES = 32
OWNER, OTHER = 1, 2


@asynccontextmanager
async def leased(path: Path) -> AsyncIterator[tuple[Store, Space, list[Lease]]]:
    """A store in which one client holds many leases, each on all of some pages of a flat namespace."""
    async with Store(config(path, dram_bytes=8 << 20, segment_bytes=1 << 20)) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, PAGES)
        leases = [lease for _ in range(LEASES) if (lease := lease_of(store, space, OWNER)) is not None]
        assert pinned(space) == LEASES * len(PAGES)
        yield store, space, leases
        check(store)


def lease_of(store: Store, space: Space, owner: int, pages: tuple[Page, ...] = PAGES) -> Lease | None:
    return store.match(space, *labels(pages), owner=owner, lease_s=60).lease


def pinned(space: Space) -> int:
    return int(space.tree.pages.leases[space.tree.live_slots()].sum())


async def turns_until(space: Space, left: int) -> int:
    turns = 0
    while pinned(space) > left:
        turns += 1
        assert turns < 10_000
        await asyncio.sleep(0)
    return turns


async def test_the_leases_of_a_client_that_goes_away_end_some_at_a_time(tmp_path: Path) -> None:
    async with leased(tmp_path / "d") as (store, space, leases):
        other = lease_of(store, space, OTHER)
        store.release_owner(OWNER)
        assert 2 * len(PAGES) < pinned(space) < (LEASES + 1) * len(PAGES), "all in one go, or none"
        check(store)
        assert len(store.leases) == 1
        for lease in leases:
            with pytest.raises(NotFound):
                store.renew_lease(OWNER, lease.id, 60)
            with pytest.raises(NotFound):
                store.release_lease(OWNER, lease.id)
        again = lease_of(store, space, OWNER)  # a number of owners is as good as new
        assert again is not None
        assert await turns_until(space, 2 * len(PAGES)) > 1
        assert other is not None
        store.release_lease(OTHER, other.id)
        store.release_lease(OWNER, again.id)
        assert pinned(space) == 0
        assert await store.prefixes.delete(space, *labels(PAGES)) == len(PAGES)


async def test_leases_whose_time_is_over_end_some_at_a_time(tmp_path: Path) -> None:
    async with leased(tmp_path / "d") as (store, space, leases):
        store.leases.expire(time.monotonic() + 30)
        assert (len(store.leases), pinned(space)) == (LEASES, LEASES * len(PAGES)), "before their time"
        store.leases.expire(time.monotonic() + 61)
        assert len(store.leases) == 0
        assert 0 < pinned(space) < LEASES * len(PAGES), "all in one go, or none"
        with pytest.raises(NotFound):
            store.renew_lease(OWNER, leases[-1].id, 60)
        assert await turns_until(space, 0) > 1


async def test_a_page_that_is_lost_meanwhile_is_held_by_none_of_them(tmp_path: Path) -> None:
    async with leased(tmp_path / "d") as (store, space, _):
        other = lease_of(store, space, OTHER)
        store.release_owner(OWNER)
        assert pinned(space) > len(PAGES)
        slot = space.tree.path_slots(space.tree.match(labels(PAGES[:1])[0]))[0]
        space.lose_blob(space.rows_of(int(slot))[0])
        check(store)
        assert other is not None
        assert len(other.boundaries) == len(PAGES) - 2, "two pages have these bytes"
        await turns_until(space, len(other.boundaries))
        store.release_owner(OTHER)
        await turns_until(space, 0)


async def test_a_namespace_is_dropped_meanwhile(tmp_path: Path) -> None:
    async with leased(tmp_path / "d") as (store, space, _):
        store.release_owner(OWNER)
        await store.drop_namespace(space)
        await store.settle()
        assert store.figures.usage()["dram"].used == 0
