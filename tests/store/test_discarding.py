"""What may be given up in namespaces with recipes, and which recipes go."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import Busy, Conflict, NoSpace
from kvstore.radix.pages import RECIPE
from kvstore.store import Ack, Clock, NamespaceSettings, Space, Store
from kvstore.store.checking.check import check
from kvstore.tiers.text import Aged
from tests.store.test_recipes import keys_of, matched, rebuildable, recipes_of
from tests.store.test_store import SPEC, Prefix, config, put, read, settings_named, tokens_of
from tests.waiting import until


async def test_what_can_not_be_dropped(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        plain = await store.create_namespace(settings_named())
        await put(store, plain, (1,), b"v" * 16)
        with pytest.raises(Conflict, match="keeps no recipes"):
            await store.prefixes.drop_to_text(plain, tokens_of((1,)), {}, 0)
        space = await store.create_namespace(NamespaceSettings("default", "r", "model r", SPEC, recipes=True))
        await put(store, space, (1, 2), b"v" * 16)
        lease = store.match(space, tokens_of((1, 2)), {}, owner=1, lease_s=60).lease
        with pytest.raises(Conflict, match="leased"):
            await store.prefixes.drop_to_text(space, tokens_of((1, 2)), {}, 0)
        assert lease is not None
        store.release_lease(1, lease.id)
        await store.recipes.flush(5)
        space.tree.pages.flags[space.tree.pages.find_key(keys_of(space, (1, 2))[1])] &= ~np.uint8(RECIPE)
        with pytest.raises(Conflict, match="1 of these pages have no recipe"):
            await store.prefixes.drop_to_text(space, tokens_of((1, 2)), {}, 0)


async def test_a_page_stays_as_long_as_one_below_it_has_no_recipe(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        for prefix in ((1, 2), (1, 3), (1, 3, 4)):
            await put(store, space, prefix, b"v" * 16, first=max(0, matched(store, space, prefix)))
        await store.recipes.flush(5)
        slots = {prefix: space.tree.pages.find_key(keys_of(space, prefix)[-1]) for prefix in ((1,), (1, 2), (1, 3), (1, 3, 4))}
        assert all(space.may_discard(slot) for slot in slots.values())
        space.tree.pages.flags[slots[1, 3, 4]] &= ~np.uint8(RECIPE)
        assert {prefix for prefix, slot in slots.items() if space.may_discard(slot)} == {(1, 2)}


async def test_budget(tmp_path: Path) -> None:
    """The oldest recipes of pages that are gone make room; those of pages that are there only when there is nothing else."""
    async with Store(config(tmp_path / "d", recipe_bytes=16_000, dram_bytes=400 * 5000, ssd_bytes=400 * 5000)) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        await put(store, space, (0, 1), b"v" * 16)
        for number in range(1, 80):
            await put(store, space, (number,), b"v" * 16)
            await store.recipes.flush(5)
            await store.prefixes.drop_to_text(space, tokens_of((number,)), {}, 0)
            assert store.figures.usage()["text"].used <= 16_000
        assert store.stats.recipes_evicted > 20
        assert await rebuildable(store, space, (1,)) == 0
        assert await rebuildable(store, space, (79,)) == 1
        assert all(recipe is not None for recipe in await recipes_of(store, space, (0, 1)))
        for number in range(100, 160):  # all of these are there
            await put(store, space, (number,), b"v" * 16)
            await store.recipes.flush(5)
        slots = space.tree.live_slots()
        flagged = int(((space.tree.pages.flags[slots] & RECIPE) != 0).sum())
        assert flagged == store.recipes.holding(space).recipes < len(slots)
        with pytest.raises(Conflict, match="no recipe"):
            await store.prefixes.drop_to_text(space, tokens_of((0, 1)), {}, 0)


async def test_age(tmp_path: Path) -> None:
    clock = Clock()
    async with Store(config(tmp_path / "d", recipe_ttl_s=100.0), clock) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        await put(store, space, (1,), b"v" * 16)
        await put(store, space, (2,), b"v" * 16)
        await store.prefixes.drop_to_text(space, tokens_of((1,)), {}, 0)
        clock.not_before(clock.now() + 200)
        await store.recipes._budget.expire(100.0)
        assert await rebuildable(store, space, (1,)) == 0
        assert store.stats.recipes_expired == 1
        assert store.recipes.holding(space).recipes == 1  # the page is there


async def test_nothing_is_discarded_without_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes no recipes: pages stay, puts are refused when nothing else can go, and go on once it takes them again."""
    async with Store(config(tmp_path / "d", dram_bytes=30 * 5000, ssd_bytes=30 * 5000, put_wait_s=0.5)) as store:
        space = await store.create_namespace(settings_named(recipes=True, retention_s=0))
        commit, failing = store.recipes.file.commit, True

        def fails(batch: Any) -> None:
            if failing:
                raise OSError(28, "No space left on device")
            commit(batch)

        monkeypatch.setattr(store.recipes.file, "commit", fails)
        done: list[Prefix] = []
        for number in range(200):  # until it is full
            try:
                await put(store, space, (number,), b"v" * 16)
                done.append((number,))
            except (Busy, NoSpace):  # before, it is the disk that is slow
                if len(done) >= 10:
                    break
        else:
            pytest.fail("it was never full")
        for prefix in done:
            assert await read(store, space, prefix) == 1, "a page without a recipe was discarded"
        failing = False
        await until(lambda: store.recipes.holding(space).recipes >= len(done))
        for number in range(300, 340):
            await put_in_the_end(store, space, (number,))
        for number in range(len(done)):
            assert matched(store, space, (number,)) + await rebuildable(store, space, (number,)) == 1
        await store.settle()
        check(store)


async def put_in_the_end(store: Store, space: Space, prefix: Prefix) -> None:
    """Put a page, again and again as a client does after `busy`."""
    async with asyncio.timeout(30):
        while True:
            try:
                await put(store, space, prefix, b"v" * 16)
            except Busy:
                continue
            return


async def test_lossy_pages_go_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=30 * 5000, ssd_bytes=30 * 5000, put_wait_s=5.0)) as store:
        space = await store.create_namespace(settings_named(recipes=True, lossy=True, retention_s=0))

        def fails(batch: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store.recipes.file, "commit", fails)
        for number in range(100):
            await put(store, space, (number,), b"v" * 16)
        assert store.stats.dropped_pages > 10


@pytest.mark.parametrize("ack", [Ack.MEMORY, Ack.DURABLE])
async def test_never_discards(tmp_path: Path, ack: Ack) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=20 * 5000, ssd_bytes=40 * 5000, put_wait_s=2.0)) as store:
        space = await store.create_namespace(settings_named(rebuild="never", retention_s=0))
        other = await store.create_namespace(NamespaceSettings("default", "other", "other model", SPEC, retention_s=0))
        for number in range(8):
            await put(store, other, (number,), b"v" * 16, Ack.DURABLE)
        done: list[Prefix] = []
        with pytest.raises(NoSpace):  # noqa: PT012 - until it is full
            for number in range(200):
                await put(store, space, (number,), b"v" * 16, ack)
                done.append((number,))
        assert len(done) >= 10
        for prefix in done:
            assert await read(store, space, prefix) == 1, "a page was discarded that can't be computed again"
        assert sum(matched(store, other, (number,)) for number in range(8)) == 0  # those that can be went first
    async with Store(config(tmp_path / "d", dram_bytes=20 * 5000, ssd_bytes=40 * 5000)) as store:
        (space,) = (s for s in store.namespaces("default") if s.settings.rebuild == "never")
        kept = sum(matched(store, space, prefix) for prefix in done)
        assert kept == len(done) if ack is Ack.DURABLE else kept  # what is only in DRAM when SSD is full goes with the process


async def test_what_may_not_be_discarded_is_passed_over(tmp_path: Path) -> None:
    """SSD and half of DRAM are full of pages that must stay, and they are the coldest: others make room for each other all the same."""
    async with Store(config(tmp_path / "d", dram_bytes=40 * 8704, ssd_bytes=40_000, policy="lru")) as store:
        space = await store.create_namespace(settings_named(rebuild="never", retention_s=0))
        other = await store.create_namespace(NamespaceSettings("default", "other", "other model", SPEC, retention_s=0))
        for number in range(28):
            await put(store, space, (number,), b"v" * 16)
        for number in range(60):
            await put(store, other, (number,), b"v" * 16)
        for number in range(28):
            assert await read(store, space, (number,)) == 1
        await store.settle()  # what made the mover start may have gone with the rest: it frees down to the low mark
        await put(store, other, (60,), b"v" * 16)
        await store.settle()
        assert matched(store, other, (60,)) == 1
        check(store)


async def test_pages_lose_their_flag_before_their_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they would be given up while it is being deleted."""
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        for number in range(8):
            await put(store, space, (number,), b"v" * 16)
        await store.recipes.flush(5)
        file, flags = store.recipes.file, list[int]()
        file.capacity, forget_now = file.usage().used, file.forget

        def forget(gone: list[Aged]) -> None:
            pages = space.tree.pages
            flags.extend(int(pages.flags[pages.find_key(one.key)] & RECIPE) for one in gone)
            forget_now(gone)

        monkeypatch.setattr(file, "forget", forget)
        await put(store, space, (99,), b"v" * 16)
        await store.recipes.flush(5)
        assert len(flags) == 8
        assert not any(flags)
