"""What may go from DRAM is looked for piece by piece, and others have turns in between: what they do counts."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from kvstore.store import Store
from kvstore.store.checking.check import check
from kvstore.store.dram import eviction, residency
from kvstore.store.dram.eviction import InDram, dram_victims
from kvstore.store.dram.replacement import DRAM
from tests.store.test_store import OWNER, config, put, settings_named, tokens_of

PIECE = 2


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (eviction, residency):
        monkeypatch.setattr(module, "LOOKED_AT_ONCE", PIECE)


@pytest.mark.parametrize("policy", ["lru", "classifier"])
async def test_what_goes_or_is_leased_in_between_is_no_candidate(tmp_path: Path, policy: str) -> None:
    async with Store(config(tmp_path, policy=policy)) as store:
        space = await store.create_namespace(settings_named())
        tree = space.tree
        for prefix in ((1, 2), (3, 4), (5, 6)):
            await put(store, space, prefix, b"v" * 16)
        of = {first: tree.path_slots(tree.match(tokens_of((first, first + 1)))) for first in (1, 3, 5)}
        keys = {first: [tree.pages.key_bytes(int(slot)) for slot in slots] for first, slots in of.items()}
        candidates, turns = InDram(space), 0
        while candidates.look():
            turns += 1
            if turns == 3:
                store.match(space, tokens_of((1, 2)), {}, owner=OWNER, lease_s=60)
                space.remove_page(int(of[3][1]))
        assert turns >= 3
        victims = dram_victims([candidates], 1 << 40, partial(store.replacement.values, DRAM))
        assert [unit.key for unit in victims] == [keys[3][0], keys[5][1], keys[5][0]]
        check(store)


async def test_a_namespace_that_is_dropped_in_between_has_none(tmp_path: Path) -> None:
    async with Store(config(tmp_path)) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2, 3), b"v" * 16)
        candidates = InDram(space)
        assert candidates.look()
        await store.drop_namespace(space)
        assert not candidates.look()
        assert dram_victims([candidates], 1 << 40, partial(store.replacement.values, DRAM)) == []


async def test_others_have_their_turns_while_all_pages_are_looked_at(tmp_path: Path) -> None:
    async with Store(config(tmp_path)) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, tuple(range(20)), b"v" * 16)
        looking = asyncio.create_task(store._residency._candidates([space], ()))
        turns = 0
        while not looking.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 20 // PIECE
        victims = dram_victims(looking.result(), 1 << 40, partial(store.replacement.values, DRAM))
        assert len(victims) == 20
