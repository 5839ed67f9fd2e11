"""Puts that are answered before they are taken in: only where nothing can keep them out, and at once then."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.digests import slice_digest
from kvstore.errors import NoSpace
from kvstore.radix.tree import RadixTree
from kvstore.radix.values import NewPages
from kvstore.store import Ack, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.puts.put import Put
from tests.radix.test_tree import PAGE_TOKENS, RANGES, ROOT_KEY, encode, keys_of
from tests.store.test_store import OWNER, PARTS, SPEC, Prefix, config, page_bytes, put, settings_named, tokens_of

Later = list[Callable[[], None]]


async def sent(store: Store, space: Space, prefix: Prefix, version: bytes = b"v" * 16, ack: Ack = Ack.MEMORY, lacks: int = 0) -> Put:
    """A put of which all has arrived but for so many slices."""
    under_way = await store.begin_put(OWNER, space, PutRequest(version, tokens_of(prefix), {}, 0, PARTS, ack))
    slices = []
    for page, part in under_way.wanted_cells():
        data, at = page_bytes(prefix[: page + 1], version, part), 0
        for index, size in enumerate(SPEC.slice_layout(PARTS[part]).sizes):
            slices.append((page, part, index, data[at : at + size]))
            at += size
    for page, part, index, data in slices[: len(slices) - lacks]:
        view, _ = under_way.locate(page, part, index, len(data), 1)
        view[:] = data
        under_way.received(page, part, index, [slice_digest(view)], slice_digest(view))
    return under_way


async def test_it_is_answered_and_then_taken_in(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        later: Later = []
        under_way = await sent(store, space, (1, 2, 3))
        done = store.commit_put_now(under_way, later.append)
        assert done is not None
        assert (done.new_pages, done.existing_pages, done.pending_pages) == (3, 0, 0)
        assert not space.tree.page_count, "the answer was to come first"
        later[0]()
        assert under_way.committed
        assert space.tree.match(tokens_of((1, 2, 3))).pages == 3
        assert space.tree.pages.recency[space.tree.live_slots()].all(), "the use was not recorded"
        assert (store.stats.puts, store.stats.put_pages) == (1, 3)
        check(store)


async def test_the_second_of_two_hears_what_is_there(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        first, second = await sent(store, space, (1, 2), b"a" * 16), await sent(store, space, (1, 2, 3), b"b" * 16)
        later: Later = []
        assert store.commit_put_now(first, later.append) is not None
        later[0]()
        assert store.commit_put_now(second, later.append) is None
        assert len(later) == 1
        done = await store.commit_put(second)
        assert (done.new_pages, done.existing_pages) == (1, 2)
        assert space.tree.match(tokens_of((1, 2, 3))).pages == 3
        check(store)


@pytest.mark.parametrize("why", ["a slice is missing", "it is to be durable", "it is spoilt", "the bytes are there already"])
async def test_what_has_to_wait_is_left_alone(tmp_path: Path, why: str) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        version = b"v" * 16
        if why == "the bytes are there already":  # they are verified before they are shared
            await put(store, space, (1, 2), version)
            under_way = await _with_bytes_of(store, space, (7, 8), (1, 2), version)
        else:
            ack = Ack.DURABLE if why == "it is to be durable" else Ack.MEMORY
            under_way = await sent(store, space, (1, 2), version, ack, lacks=int(why == "a slice is missing"))
        if why == "it is spoilt":
            under_way.fail(NoSpace("it was spoilt"))
        assert store.commit_put_now(under_way, lambda _: pytest.fail("nothing was to be done")) is None
        assert not under_way.closed
        store.release_owner(OWNER)


async def _with_bytes_of(store: Store, space: Space, prefix: Prefix, other: Prefix, version: bytes) -> Put:
    under_way = await store.begin_put(OWNER, space, PutRequest(version, tokens_of(prefix), {}, 0, PARTS, Ack.MEMORY))
    for page, part in under_way.wanted_cells():
        data, at = page_bytes(other[: page + 1], version, part), 0
        for index, size in enumerate(SPEC.slice_layout(PARTS[part]).sizes):
            view, _ = under_way.locate(page, part, index, size, 1)
            view[:] = data[at : at + size]
            under_way.received(page, part, index, [slice_digest(view)], slice_digest(view))
            at += size
    return under_way


async def test_where_a_table_is_full_nobody_is_told_otherwise(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", max_pages=4, max_ghosts=0)) as store:
        space = await store.create_namespace(settings_named())
        puts = [await sent(store, space, prefix, bytes([prefix[0]]) * 16) for prefix in ((1, 2), (4, 5))]
        later: Later = []
        assert store.commit_put_now(puts[0], later.append) is not None
        later.pop()()
        assert store.commit_put_now(puts[1], later.append) is None
        assert not later, "it was answered"
        with pytest.raises(NoSpace):
            await store.commit_put(puts[1])
        assert puts[1].closed
        assert store.stats.puts_no_space == 1
        check(store)


@pytest.mark.parametrize("seed", range(4))
def test_room_that_is_there_is_there(seed: int) -> None:
    """A small tree that is filled, split and thinned out at random: where it has room, no extension may fail."""
    rng = random.Random(seed)
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 24)
    refused = 0
    for step in range(600):
        labels = tuple((rng.randrange(3), False) for _ in range(rng.randint(1, 12)))
        path = tree.match(*encode(labels))
        new = len(labels) - path.pages
        if rng.random() < 0.3 and path.pages:
            slot = int(tree.path_slots(path)[rng.randrange(path.pages)])
            tree.remove(slot) if rng.random() < 0.5 else tree.bury(slot)
            continue
        if not new or not (room := tree.has_room(new, new * len(RANGES))):
            refused += bool(new)
            if rng.random() < 0.3:
                tree.forget_ghosts(4)
            continue
        assert room
        blobs = np.full((new, len(RANGES)), step, np.int32)
        tree.extend(path, *encode(labels[path.pages :]), NewPages(b"".join(keys_of(labels)[path.pages :]), b"v" * 16, blobs, RANGES))
        assert tree.match(*encode(labels)).pages == len(labels)
    assert refused, "it was never full"
