"""What the policies are told of: each page that comes, goes or is forgotten, and of each use what is left of it."""

from pathlib import Path

import numpy as np
import pytest

from kvstore.radix.pages import Slots
from kvstore.store import Ack, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.dram.replacement import DRAM
from kvstore.store.uses import Asked, Use
from kvstore.tiers.policies import ARC, S3FIFO
from tests.store.test_store import OWNER, Prefix, config, put, read, settings_named, tokens_of


class _Broken:
    """An observer with a bug."""

    def used(self, space: Space, use: Use, asked: Asked | None) -> None:
        raise ValueError("a bug")

    def abandoned(self, space: Space, slots: Slots, first: int) -> None:
        raise ValueError("a bug")

    def cooled(self, space: Space, slots: Slots) -> None:
        raise ValueError("a bug")


async def test_a_match_that_fails_leaves_no_lease(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (0, 1), b"v" * 16)
        store.uses.observers.append(_Broken())
        with pytest.raises(ValueError, match="a bug"):
            store.match(space, tokens_of((0, 1)), {}, owner=OWNER, lease_s=60)
        assert not len(store.leases)
        assert not space.tree.pages.leases[space.tree.live_slots()].any()


def _slots(space: Space, prefix: Prefix) -> Slots:
    return space.tree.path_slots(space.tree.match_with_ghosts(tokens_of(prefix)))


def _remembered(store: Store) -> int:
    """How many ghosts the policy of DRAM has in its queues."""
    policy = store.replacement.policies[DRAM]
    assert isinstance(policy, ARC | S3FIFO)
    return len(policy._ghosts) if isinstance(policy, S3FIFO) else len(policy._once_ghosts) + len(policy._again_ghosts)


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
async def test_ghosts_that_go_with_a_page_are_forgotten_by_the_policies(tmp_path: Path, policy: str) -> None:
    async with Store(config(tmp_path / "d", policy=policy)) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (0, 1, 2), b"v" * 16)
        await put(store, space, (0, 5), b"v" * 16, first=1)
        await store.replacement.catch_up()
        store.replacement.resize(DRAM, [space])
        space.remove_page(int(_slots(space, (0, 1, 2))[1]))
        assert space.tree.ghost_count == _remembered(store) == 2
        await store.prefixes.delete(space, tokens_of((0, 5)), {})
        assert space.tree.ghost_count == _remembered(store) == 0


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
async def test_ghosts_below_a_colder_one_are_forgotten_with_it(tmp_path: Path, policy: str) -> None:
    async with Store(config(tmp_path / "d", policy=policy)) as store:
        space = await store.create_namespace(settings_named())
        for prefix in ((0, 1, 2), (7,)):
            await put(store, space, prefix, b"v" * 16)
        await store.replacement.catch_up()
        store.replacement.resize(DRAM, [space])
        for prefix in ((0, 1, 2), (7,)):
            space.remove_page(int(_slots(space, prefix)[0]))
        space.tree.cool(_slots(space, (0,)), 0)
        assert space.tree.ghost_count == _remembered(store) == 4
        space.forget_ghosts(1)
        assert space.tree.ghost_count == _remembered(store) == 1


def _in_dram_for_the_policies(space: Space) -> int:
    live = space.tree.live_slots()
    return int(np.count_nonzero(space.tree.pages.kept["place"][live] & DRAM))


async def test_pages_that_are_read_and_not_fetched_do_not_count_as_in_dram(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", policy="s3fifo")) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        for prefix in ((0, 1, 2), (5, 6)):
            await put(store, space, prefix, b"v" * 16, Ack.DURABLE)
        await store._residency.reclaim(1 << 30)
        assert not space.resident_bytes
        for prefix in ((0, 1, 2), (5, 6)):
            match = store.match(space, tokens_of(prefix), {}, owner=OWNER, lease_s=60)
            assert match.lease is not None
            if prefix == (0, 1, 2):
                store.release_lease(OWNER, match.lease.id)
        await store._residency.reclaim(1)
        assert _in_dram_for_the_policies(space) == 2, "those under a lease may still come"
        store.release_owner(OWNER)
        assert await read(store, space, (5, 6)) == 2
        await store._residency.reclaim(1)
        assert _in_dram_for_the_policies(space) == int(space.in_dram(space.tree.live_slots()).sum()) > 0
        check(store)


@pytest.mark.parametrize("ghosts", [True, False])
async def test_a_use_whose_end_is_gone_is_told_as_far_as_it_is_there(tmp_path: Path, ghosts: bool) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        prefix = (0, 1, 2, 3, 4)
        await put(store, space, prefix, b"v" * 16)
        await store.replacement.catch_up()
        for _ in range(2):
            match = store.match(space, tokens_of(prefix), {}, owner=OWNER, lease_s=60)
            assert match.lease is not None
            store.release_lease(OWNER, match.lease.id)
        space.remove_page(int(_slots(space, prefix)[4]), ghosts=ghosts)
        told = store.why(space, tokens_of(prefix), {}).found
        assert [page.explanation.uses for page in told if page.explanation is not None][:4] == [3] * 4
        check(store)


async def test_what_was_gone_before_it_was_told_is_new_when_it_comes_back(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (0, 1), b"v" * 16)
        space.remove_page(int(_slots(space, (0, 1))[1]))
        await store.replacement.catch_up()
        await put(store, space, (0, 1), b"v" * 16, first=1)
        told = store.why(space, tokens_of((0, 1)), {}).found
        assert [page.explanation.uses for page in told if page.explanation is not None] == [1, 1]
