"""A policy that would have nothing written to SSD, in a real store: what was promised is written all the same."""

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.store import Ack, Store
from kvstore.store.checking.check import check
from kvstore.store.dram.replacement import DRAM
from kvstore.tiers.policies import Pages
from kvstore.tiers.policies.lru import LeafLRU
from tests.store.test_store import config, put, settings_named, tokens_of


class RefusesAll(LeafLRU):
    """Nothing is worth writing."""

    def admits(self, batch: list[Pages], now: float) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        return np.zeros(sum(len(pages.slots) for pages in batch), np.bool_)


async def test_what_is_refused_is_gone_and_counted_and_durable_puts_are_not_touched(tmp_path: Path) -> None:
    settings = config(tmp_path / "d", dram_bytes=40 * 5000, ssd_bytes=4000 * 5000, put_wait_s=10)
    async with Store(settings) as store:
        store.replacement.policies[DRAM] = RefusesAll()
        space = await store.create_namespace(settings_named())
        for number in range(100):
            await put(store, space, (number, 1, 2), b"m" * 16)
        await store.settle()
        assert store.stats.refused_pages > 100
        assert store.stats.demoted_pages == 0
        check(store)
        for first in range(0, 60, 3):
            durable = [put(store, space, (1000 + number, 1, 2), b"d" * 16, ack=Ack.DURABLE) for number in range(first, first + 3)]
            others = [put(store, space, (5000 + number, 1, 2), b"m" * 16) for number in range(first, first + 3)]
            await asyncio.gather(*durable, *others)
        await store.settle()
        check(store)
        for number in range(60):
            assert space.tree.match(tokens_of((1000 + number, 1, 2))).pages == 3
    async with Store(settings) as store:
        again = store.space("default", "ns")
        assert all(again.tree.match(tokens_of((1000 + number, 1, 2))).pages == 3 for number in range(60))


async def test_what_somebody_waits_for_is_written_with_all_above_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        store.replacement.policies[DRAM] = RefusesAll()
        space = await store.create_namespace(settings_named())
        await put(store, space, (0, 1, 2), b"m" * 16)
        await put(store, space, (0, 1, 3), b"m" * 16, first=2)
        path = space.tree.path_slots(space.tree.match(tokens_of((0, 1, 3))))
        admitted = store.replacement.admits(space, space.tree.live_slots(), lambda: [space.tree.pages.key_bytes(int(path[-1]))])
        assert set(space.tree.live_slots()[admitted].tolist()) == set(path.tolist())
        assert len(path) == 3
        assert not store.replacement.admits(space, space.tree.live_slots(), list).any()
