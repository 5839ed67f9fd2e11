"""Eviction by policies in a real store: what must not go, and what is told of uses."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import Busy, NoSpace
from kvstore.store import Ack, NamespaceSettings, Space, Store, StoreConfig
from kvstore.store.checking.check import check
from kvstore.store.dram import untold
from kvstore.tiers.policies.make import NAMES
from kvstore.tiers.watermarks import Watermarks
from tests.store.test_shards import SPEC as HYBRID
from tests.store.test_shards import put_shard
from tests.store.test_shards import tokens_of as hybrid_tokens
from tests.store.test_store import OWNER, config, put, read, settings_named, tokens_of


async def _fits(putting: Awaitable[object]) -> bool:
    try:
        await putting
    except (Busy, NoSpace):
        return False
    return True


@pytest.mark.parametrize("policy", NAMES)
async def test_a_durable_page_outlives_parts_that_were_added_to_it(tmp_path: Path, policy: str) -> None:
    """SSD is full of what is retained, and DRAM is wanted: what was added in memory goes, what was promised stays."""
    settings = StoreConfig(
        data_dir=tmp_path / "d", dram_bytes=40 * 5000, ssd_bytes=30 * 5000, max_pages=20_000, segment_bytes=20_000,
        put_wait_s=0.3, journal_bytes=64 << 20, watermarks=Watermarks(0.8, 0.6), policy=policy,
    )  # fmt: skip
    async with Store(settings) as store:
        space = await store.create_namespace(NamespaceSettings("default", "n", "m", HYBRID, retention_s=86_400))
        await put_shard(store, space, (1, 2), b"a" * 16, None, window_pages=0, with_state=False, ack=Ack.DURABLE)
        full = 100
        while full < 200 and await _fits(put_shard(store, space, (full, full), b"f" * 16, None, window_pages=2, ack=Ack.DURABLE)):
            full += 1
        assert full < 200, "SSD never got full: this test shows nothing"
        await put_shard(store, space, (1, 2), b"b" * 16, None, window_pages=2, ack=Ack.MEMORY)
        for number in range(1000, 1060):
            await _fits(put_shard(store, space, (number, number), b"m" * 16, None, window_pages=0, with_state=False))
        await store.settle()
        assert space.tree.match(hybrid_tokens((1, 2))).pages == 2
        check(store)
    async with Store(settings) as store:
        assert store.space("default", "n").tree.match(hybrid_tokens((1, 2))).pages == 2


async def test_reads_of_more_than_is_there_and_of_just_that_are_told_in_order(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (0, 1, 2), b"v" * 16)
        for asked in ((0, 1, 2, 3), (0, 1, 2), (0, 9)):
            match = store.match(space, tokens_of(asked), {}, owner=OWNER, lease_s=60)
            assert match.lease is not None
            store.release_lease(OWNER, match.lease.id)
        await put(store, space, (0, 1, 2, 3), b"v" * 16, first=3)
        await store.replacement.catch_up()
        told = store.why(space, tokens_of((0, 1, 2, 3)), {}).found
        assert [page.explanation.uses for page in told if page.explanation is not None] == [4, 3, 3, 1]
        check(store)


async def _used(store: Store, space: Space, prefix: tuple[int, ...]) -> None:
    match = store.match(space, tokens_of(prefix), {}, owner=OWNER, lease_s=60)
    assert match.lease is not None
    store.release_lease(OWNER, match.lease.id)


async def test_a_burst_of_long_uses_is_not_put_off_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits to be told is bounded by pages, not only by uses."""
    monkeypatch.setattr(untold, "MOST", 1 << 14)
    monkeypatch.setattr(untold, "A_USE", 1)
    async with Store(config(tmp_path / "d", dram_bytes=400 * 5000, ssd_bytes=400 * 5000)) as store:
        space = await store.create_namespace(settings_named())
        prefix = tuple(range(60))
        await put(store, space, prefix, b"v" * 16)
        for _ in range(400):
            await _used(store, space, prefix)
        assert 0 < store.replacement._notes.weight <= 1 << 14
        while store.replacement._notes:
            await asyncio.sleep(0.01)
        assert await read(store, space, prefix) == 60
        assert np.count_nonzero(space.tree.live_slots() >= 0) == 60


async def test_long_uses_are_told_between_requests_and_not_in_them(tmp_path: Path) -> None:
    """A match does not wait for what was used before it; and where requests never pause, it is told all the same."""
    async with Store(config(tmp_path / "d", dram_bytes=400 * 5000, ssd_bytes=400 * 5000)) as store:
        space = await store.create_namespace(settings_named())
        prefix = tuple(range(60))
        await put(store, space, prefix, b"v" * 16)
        await store.replacement.catch_up()
        noted = 200
        for _ in range(noted):
            await _used(store, space, prefix)  # nobody else has a turn
        assert len(store.replacement._notes) == noted
        for _ in range(500):
            await _used(store, space, prefix)
            await asyncio.sleep(0.005)
            if len(store.replacement._notes) < noted:
                break
        assert len(store.replacement._notes) < noted
