"""Who makes room on SSD when it is full, and what those are told for whom none can be made."""

import asyncio
from pathlib import Path

import pytest

from kvstore.errors import NoSpace
from kvstore.radix.pages import DURABLE
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.checking.check import check
from tests.store.test_store import OWNER, PARTS, SPEC, config, put, read, tokens_of
from tests.waiting import until

PAGE = 4 * 4096
"""What the three parts of a page take up."""
PAGES = 24
KEPT = "is kept for the retention_s of its namespace"


async def space_of(store: Store, tenant: str, name: str = "n", retention_s: int = 0) -> Space:
    return await store.create_namespace(NamespaceSettings(tenant, name, f"model of {name}", SPEC, retention_s=retention_s))


async def put_all(store: Store, space: Space, first: int, count: int) -> None:
    for number in range(first, first + count):
        await put(store, space, (number,), b"v" * 16, Ack.DURABLE)


def durable(space: Space) -> int:
    return int(((space.tree.pages.flags[space.tree.live_slots()] & DURABLE) != 0).sum())


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "classifier"])
async def test_the_coldest_of_all_namespaces_go(tmp_path: Path, policy: str) -> None:
    async with Store(config(tmp_path, dram_bytes=1 << 20, ssd_bytes=PAGES * PAGE, policy=policy)) as store:
        cold, used, comes = [await space_of(store, "alice", name) for name in ("cold", "used", "comes")]
        await put_all(store, cold, 0, PAGES // 3)
        await put_all(store, used, 0, PAGES - PAGES // 3)
        for _ in range(2):
            for number in range(PAGES - PAGES // 3):
                assert await read(store, used, (number,)) == 1
        await put_all(store, comes, 0, PAGES // 4)
        await store.settle()
        assert durable(used) == PAGES - PAGES // 3, "pages in use went before those of another namespace that nobody used"
        assert durable(cold) + durable(comes) == PAGES // 3


async def test_what_a_tenant_is_told_of_a_full_tier(tmp_path: Path) -> None:
    async with Store(config(tmp_path, dram_bytes=1 << 20, ssd_bytes=PAGES * PAGE)) as store:
        hers = await space_of(store, "alice", retention_s=3600)
        with pytest.raises(NoSpace, match=f"^the SSD tier is full, and what is there {KEPT}$"):
            await put_all(store, hers, 0, PAGES + 1)
        under_way = await store.begin_put(OWNER, hers, PutRequest(b"w" * 16, tokens_of((0, 9)), {}, 1, PARTS, Ack.MEMORY))
        store.match(hers, tokens_of((1,)), {}, owner=OWNER, lease_s=60)
        with pytest.raises(NoSpace, match=f"^the SSD tier is full, and what is there is leased or is of puts under way or {KEPT}$"):
            await put_all(store, hers, 100, 1)
        store.abort_put(under_way)
        his = await space_of(store, "bob")
        with pytest.raises(NoSpace, match=r"^the SSD tier is full of what others have there, which can't go now$"):
            await put_all(store, his, 0, 1)


async def test_what_keeps_the_pages_of_others_is_not_told(tmp_path: Path) -> None:
    async with Store(config(tmp_path, dram_bytes=1 << 20, ssd_bytes=PAGES * PAGE)) as store:
        hers, his = await space_of(store, "alice", retention_s=3600), await space_of(store, "bob")
        await put_all(store, his, 0, 4)
        for number in range(4):
            store.match(his, tokens_of((number,)), {}, owner=OWNER, lease_s=60)
        beside = ", and of what others have there nothing can go now$"
        with pytest.raises(NoSpace, match=f"^the SSD tier is full, and what you have there {KEPT}{beside}"):
            await put_all(store, hers, 0, PAGES)
        with pytest.raises(NoSpace, match=f"^the SSD tier is full, and what you have there is leased{beside}"):
            await put_all(store, his, 100, 1)


async def test_what_fits_does_not_fail_with_what_does_not(tmp_path: Path) -> None:
    async with Store(config(tmp_path, dram_bytes=4 << 20, ssd_bytes=PAGES * PAGE)) as store:
        space = await space_of(store, "alice", retention_s=3600)
        await put_all(store, space, 0, PAGES // 2)
        async with store._writeback.lock:  # so that all of them wait, and go into one group commit
            large = tuple(range(100, 100 + PAGES))
            puts = [asyncio.create_task(put(store, space, prefix, b"v" * 16, Ack.DURABLE)) for prefix in ((50,), large, (51, 52))]
            await until(lambda: len(store._writeback.backlog) == len(puts))
        told = await asyncio.gather(*puts, return_exceptions=True)
        assert [isinstance(one, NoSpace) for one in told] == [False, True, False], told
        assert durable(space) == PAGES // 2 + 3
        await store.settle()
        check(store)
