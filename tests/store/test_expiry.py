"""Pages that nobody used for the TTL of their namespace go, in order, and nothing that is protected."""

import asyncio
from pathlib import Path

import pytest

from kvstore.errors import BadRequest
from kvstore.store import Ack, NamespaceSettings, Store
from kvstore.store.checking.check import check
from kvstore.store.clock import elapsed
from kvstore.store.stats import Stats
from kvstore.store.uses import Uses
from tests.store.test_store import OWNER, SPEC, config, put, settings_named, tokens_of

DAY = 86_400.0


class Later:
    """The store's clock, which the test moves."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seconds = 0.0
        store.uses._passed = lambda: elapsed() + self.seconds
        now = store._clock.now
        store._expiry._now = lambda: now() + self.seconds

    def passes(self, seconds: float) -> None:
        self.store.uses.note_time()
        self.seconds += seconds


async def test_unused_pages_go_and_used_ones_stay(tmp_path: Path) -> None:
    async with Store(config(tmp_path, dram_bytes=200 * 5000)) as store:
        later = Later(store)
        space = await store.create_namespace(settings_named(ttl_s=int(DAY)))
        await put(store, space, (1, 2, 3, 4, 5), b"v" * 16)
        await put(store, space, (1, 2, 8), b"v" * 16)
        await put(store, space, (7,), b"v" * 16)
        later.passes(DAY / 2)
        assert await store._expiry.expire(space) == 0
        match = store.match(space, tokens_of((1, 2, 3)), {}, owner=OWNER, lease_s=60)
        assert match.lease is not None
        store.release_lease(OWNER, match.lease.id)
        later.passes(DAY / 2 + 5)
        assert await store._expiry.expire(space) == 4, "4, 5, 8 and 7: what is before them was used"
        assert [store.match(space, tokens_of(p), {}).pages for p in ((1, 2, 3, 4), (1, 2, 8), (7,))] == [3, 2, 0]
        assert space.tree.ghost_count == 0, "what is over its time leaves no tokens"
        later.passes(DAY)
        assert await store._expiry.expire(space) == 3
        assert store.stats.expired_pages == 7
        await store.settle()
        check(store)
        assert store.figures.usage()["dram"].used == 0


async def test_leased_and_retained_pages_stay(tmp_path: Path) -> None:
    async with Store(config(tmp_path, dram_bytes=200 * 5000)) as store:
        later = Later(store)
        space = await store.create_namespace(settings_named(ttl_s=60, retention_s=3600))
        await put(store, space, (1, 2), b"v" * 16, Ack.DURABLE)
        await put(store, space, (1, 2, 3), b"w" * 16, first=2)
        await put(store, space, (5, 6), b"v" * 16)
        pin = store.prefixes.pin(space, tokens_of((5,)), {}, 3000)
        later.passes(120)
        assert await store._expiry.expire(space) == 2
        assert store.match(space, tokens_of((1, 2, 3)), {}).pages == 2
        assert store.match(space, tokens_of((5, 6)), {}).pages == 1
        store.prefixes.unpin(space, pin.id)
        assert await store._expiry.expire(space) == 1
        later.passes(3600)
        assert await store._expiry.expire(space) == 2
        await store.settle()
        check(store)
        assert store.figures.usage()["ssd"].used == 0


async def test_a_clock_that_is_put_right_makes_nothing_unused(tmp_path: Path) -> None:
    async with Store(config(tmp_path)) as store:
        space = await store.create_namespace(settings_named(ttl_s=60))
        await put(store, space, (1, 2), b"v" * 16)
        store.uses.note_time()
        store._clock.not_before(store._clock.now() + DAY)  # as a record does that was written by a clock ahead of ours
        assert await store._expiry.expire(space) == 0


async def test_the_background_task_does_it_by_itself_and_the_ttl_outlives_a_restart(tmp_path: Path) -> None:
    async with Store(config(tmp_path)) as store:
        space = await store.create_namespace(settings_named(ttl_s=1, retention_s=0))
        await store.create_namespace(NamespaceSettings("default", "other", "another model", SPEC))
        await put(store, space, (1, 2), b"v" * 16, Ack.DURABLE)
    async with Store(config(tmp_path)) as store:
        assert [s.settings.ttl_s for s in store.namespaces("default")] == [1, 0]
        space = store.space("default", "ns")
        assert space.tree.page_count == 2
        while space.tree.page_count:
            await store.settle()
            await asyncio.sleep(0.05)
        await store.settle()
        check(store)


def test_a_note_of_time_is_never_early_and_notes_stay_few() -> None:
    time = 0.0
    uses = Uses(lambda: 0.0, Stats(), lambda: time)
    for second in range(40_000):
        time = float(second)
        uses._tick += 1
        uses.note_time()
    assert len(uses._marks) <= 8193
    for age in (1, 10, 100, 1000, 10_000, 35_000):
        tick = uses.tick_before(age)
        assert tick <= 40_000 - age, "a use counts as old before it is"
        assert tick >= 40_000 - age - 2 - age // 100
    assert uses.tick_before(40_000) == -1


@pytest.mark.parametrize("ttl_s", [-1, 10 * 365 * 86_400 + 1])
def test_a_ttl_out_of_range(ttl_s: int) -> None:
    with pytest.raises(BadRequest, match="ttl_s"):
        settings_named(ttl_s=ttl_s)
