"""What the store says of its tiers, against where its pages are: equal after any sequence, and nothing is said twice."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.digests import KEY_BYTES, NO_EXTRA, page_key_chain
from kvstore.errors import KVStoreError
from kvstore.radix.pages import DURABLE
from kvstore.store import Ack, Space, Store, tier_events
from kvstore.store.checking.check import check
from kvstore.store.tier_events import DRAM, SSD, Changes, whole_in_dram
from tests.store import test_store
from tests.store.test_store import PAGE_TOKENS, Prefix, config, page_bytes, put, read, settings_named, tokens_of


def keys_of(space: Space, prefix: Prefix) -> list[bytes]:
    tokens = tokens_of(prefix)
    labels = [tokens[at : at + 4 * PAGE_TOKENS] + NO_EXTRA for at in range(0, len(tokens), 4 * PAGE_TOKENS)]
    return list(page_key_chain(space.digest, labels))


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class Follower:
    """What one who is told everything takes to be where."""

    def __init__(self) -> None:
        self.there: dict[int, set[bytes]] = {DRAM: set(), SSD: set()}
        self.parents: dict[bytes, bytes] = {}
        self.tokens: dict[bytes, bytes] = {}

    def follow(self, store: Store, pages: int = 7) -> None:
        assert store.tier_events is not None
        while (changes := store.tier_events.take(pages)) is not None:
            self.apply(changes)

    def apply(self, changes: Changes) -> None:
        for left in changes.left:
            gone = split(left.keys)
            assert self.there[left.tier].issuperset(gone), "a page left a tier that it was not said to be in"
            self.there[left.tier].difference_update(gone)
        for came in changes.came:
            new = split(came.keys)
            assert self.there[came.tier].isdisjoint(new), "a page came to a tier where it is"
            self.there[came.tier].update(new)
            self.parents |= dict(zip(new, [came.parent, *new[:-1]], strict=True))
            width = len(came.tokens) // len(new)
            self.tokens |= {key: came.tokens[at * width : (at + 1) * width] for at, key in enumerate(new)}


def truth(space: Space) -> dict[int, set[bytes]]:
    slots = space.tree.live_slots()
    keys = space.tree.pages.key
    on_ssd = slots[(space.tree.pages.flags[slots] & DURABLE) != 0]
    return {DRAM: set(split(keys[slots[whole_in_dram(space, slots)]].tobytes())), SSD: set(split(keys[on_ssd].tobytes()))}


@pytest.mark.parametrize("shared", [False, True], ids=["each its bytes", "shared bytes"])
@pytest.mark.parametrize("changes", [{}, {"max_ghosts": 0, "policy": "lru"}], ids=["ghosts", "no ghosts"])
async def test_what_is_told_is_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool, changes: dict[str, Any]
) -> None:
    if shared:
        monkeypatch.setattr(test_store, "page_bytes", lambda prefix, version, part: page_bytes(prefix[-1:], b"same", part))
    rng, follower, known = random.Random(repr(changes)), Follower(), set[Prefix]()
    for generation in range(3):
        async with Store(config(tmp_path / "d", events=True, **changes)) as store:
            space = await store.create_namespace(settings_named(retention_s=0))
            follower.there = {DRAM: set(), SSD: set()}
            follower.follow(store)
            assert follower.there == truth(space)
            assert bool(follower.there[SSD]) == (generation > 0)
            for _ in range(60):
                prefix = tuple(rng.choices(range(3), k=rng.randint(1, 6)))
                known.add(prefix)
                try:
                    await _one_thing(store, space, prefix, rng)
                except KVStoreError:
                    pass  # no room, or gone: what is told must be right all the same
                if rng.random() < 0.6:
                    follower.follow(store, rng.choice((1, 3, 100)))
                    assert follower.there == truth(space)
            await store.settle()
            follower.follow(store)
            assert follower.there == truth(space)
            check(store)
    for prefix in known:
        for parent, key in pairwise([b"", *keys_of(space, prefix)]):
            assert follower.parents.get(key, parent) == parent, "a page was told under another parent"


async def _one_thing(store: Store, space: Space, prefix: Prefix, rng: random.Random) -> None:
    what = rng.random()
    if what < 0.6:
        await put(store, space, prefix, b"v" * 16, rng.choice((Ack.MEMORY, Ack.MEMORY, Ack.DURABLE)))
    elif what < 0.85:
        await read(store, space, prefix)
    else:
        await store.prefixes.delete(space, tokens_of(prefix), {}, rng.randrange(len(prefix)))


async def test_a_namespace_that_is_dropped_and_made_again(tmp_path: Path) -> None:
    """The new one has the same keys: that the old pages are gone is told first."""
    async with Store(config(tmp_path / "d", events=True)) as store:
        follower = Follower()
        for _ in range(3):
            space = await store.create_namespace(settings_named())
            await put(store, space, (0, 1, 2), b"v" * 16, Ack.DURABLE)
            follower.follow(store, 2)
            assert follower.there == {DRAM: set(keys_of(space, (0, 1, 2))), SSD: set(keys_of(space, (0, 1, 2)))}
            await put(store, space, (0, 1, 2, 1), b"v" * 16)
            await store.drop_namespace(space)
        space = await store.create_namespace(settings_named())
        await put(store, space, (0, 1), b"v" * 16)
        follower.follow(store, 1)
        assert follower.there == {DRAM: set(keys_of(space, (0, 1))), SSD: set()}


async def test_pages_that_move_while_the_journal_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that grows moves to other slots, also to some that were looked at already."""
    monkeypatch.setattr(tier_events, "_SCAN_SLOTS", 3)
    async with Store(config(tmp_path / "d", events=True)) as store:
        space = await store.create_namespace(settings_named())
        for number in range(6):
            await put(store, space, (number, 1), b"v" * 16, Ack.DURABLE)
    async with Store(config(tmp_path / "d", events=True)) as store:
        space, follower = store.space("default", "ns"), Follower()
        assert store.tier_events is not None
        first_slot = {space.tree.pages.find_key(keys_of(space, (number,))[0]): number for number in range(6)}
        by_slot = [number for _, number in sorted(first_slot.items())]
        while len(follower.there[SSD]) < 6:
            changes = store.tier_events.take(1)
            assert changes is not None
            follower.apply(changes)
        for number in by_slot[:3]:  # they leave room before the others
            await store.prefixes.delete(space, tokens_of((number,)), {})
        grows = by_slot[4]  # where it is, it has none
        await put(store, space, (grows, 1, 2), b"v" * 16)
        assert space.tree.pages.find_key(keys_of(space, (grows,))[0]) < min(first_slot) + 6
        follower.follow(store, 1)
        assert follower.there == truth(space)
        assert follower.there[SSD] == {key for number in by_slot[3:] for key in keys_of(space, (number, 1))}


@pytest.mark.parametrize(("recipes", "asked"), [(True, True), (True, False), (False, True)])
async def test_tokens_are_told_only_if_asked_for_where_there_are_recipes(tmp_path: Path, recipes: bool, asked: bool) -> None:
    told = recipes and asked
    for _ in range(2):  # now, and from the journal
        async with Store(config(tmp_path / "d", events=True, event_tokens=asked)) as store:
            space, follower = await store.create_namespace(settings_named(recipes=recipes)), Follower()
            await put(store, space, (3, 1, 2), b"v" * 16, Ack.DURABLE)
            follower.follow(store)
            each = [np.full(PAGE_TOKENS, token, np.uint32).tobytes() if told else b"" for token in (3, 1, 2)]
            assert [follower.tokens[key] for key in keys_of(space, (3, 1, 2))] == each


async def test_nothing_is_kept_if_nobody_follows(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        assert store.tier_events is None
        assert space.follower is None
        assert "told" not in space.tree.pages.kept
