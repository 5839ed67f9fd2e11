"""Shards of one computation that wait for each other, and components that come and go."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.digests import slice_digest
from kvstore.errors import BadRequest, Busy, MissingParent, NoSpace
from kvstore.kvspec import PartRange
from kvstore.store import Ack, PutRequest, PutResult, Store
from kvstore.store.checking.check import check
from tests.store.test_shards import (
    SETTINGS,
    SPEC,
    Prefix,
    config,
    cut,
    parts_of,
    payload,
    put_shard,
    tokens_of,
)


async def test_one_missing_rank_is_never_a_hit(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        assert await put_shard(store, space, (1, 2), b"a" * 16, 0) == PutResult(0, 0, 2)
        assert store.match(space, tokens_of((1, 2)), {}).known_pages == 0
        assert await put_shard(store, space, (1, 2), b"b" * 16, 1) == PutResult(0, 0, 2), "shards of two computations were mixed"
        assert store.match(space, tokens_of((1, 2)), {}).known_pages == 0
        assert await put_shard(store, space, (1, 2), b"a" * 16, 1) == PutResult(2, 0, 0)
        assert store.match(space, tokens_of((1, 2)), {}).pages == 2
        check(store)
        assert await put_shard(store, space, (1, 2), b"b" * 16, 0) == PutResult(0, 2, 0)
        store._puts.sweep(float("inf"))
        assert store.figures.pending_pages == 0
        check(store)


async def test_a_later_shard_waits_for_the_pages_before_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        await put_shard(store, space, (1, 2), b"a" * 16, 0, with_state=False)
        await put_shard(store, space, (1, 2, 3, 4), b"a" * 16, 0, first=2)
        assert await put_shard(store, space, (1, 2), b"a" * 16, 1, with_state=False) == PutResult(2, 0, 0)
        with pytest.raises(MissingParent):
            await put_shard(store, space, (1, 2, 9, 9, 9), b"a" * 16, 1, first=4)
        assert await put_shard(store, space, (1, 2, 3, 4), b"a" * 16, 1, first=2) == PutResult(2, 0, 0)
        assert store.match(space, tokens_of((1, 2, 3, 4)), {}).pages == 4
        check(store)


async def test_a_commit_can_wait_for_the_other_shards(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        request = PutRequest(b"a" * 16, tokens_of((1,)), {}, 0, parts_of(0), Ack.DURABLE)
        first = await store.begin_put(1, space, request)
        await _send(first)
        waiting = asyncio.create_task(store.commit_put(first, wait_s=10))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert await put_shard(store, space, (1,), b"a" * 16, 1) == PutResult(1, 0, 0)
        assert await waiting == PutResult(1, 0, 0)
        assert space.is_durable(int(space.tree.live_slots()[0]))
        check(store)


async def _send(put: Any, prefix: Prefix = (1,)) -> None:
    for page, part in put.wanted_cells():
        part_range = put.request.ranges[part]
        data = cut(payload(prefix[: page + 1], put.request.put_id, part_range.component), part_range)
        layout = SPEC.slice_layout(part_range)
        view, _ = put.locate(page, part, 0, len(data), layout.count)
        view[:] = data
        digests = [slice_digest(data[at : at + size]) for at, size in zip(layout.offsets, layout.sizes, strict=False)]
        put.received(page, part, 0, digests, b"".join(digests))


async def test_the_death_of_all_ranks_ends_what_is_pending(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        await put_shard(store, space, (1, 2), b"a" * 16, 0, owner=5)
        used = store.figures.usage()["dram"].used
        assert used > 0
        store.release_owner(5)
        assert store.figures.usage()["dram"].used == 0
        assert store.figures.pending_pages == 0
        check(store)


async def test_a_page_gets_the_state_that_it_lacked(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        await put_shard(store, space, (1, 2), b"a" * 16, None, with_state=False, ack=Ack.DURABLE)
        assert store.match(space, tokens_of((1, 2)), {}).pages == 0
        assert await put_shard(store, space, (1, 2), b"b" * 16, 0) == PutResult(0, 2, 0)
        assert store.match(space, tokens_of((1, 2)), {}).pages == 0
        assert await put_shard(store, space, (1, 2), b"b" * 16, 1, ack=Ack.DURABLE) == PutResult(0, 2, 0)
        assert store.match(space, tokens_of((1, 2)), {}).pages == 2
        await store.settle()
        check(store)
        shutil.copytree(tmp_path / "d", tmp_path / "copy")
    async with Store(config(tmp_path / "copy")) as store:
        assert store.match(store.space("default", "ns"), tokens_of((1, 2)), {}).pages == 2
        check(store)


async def test_a_state_behind_every_boundary_in_use_goes_before_any_page(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", ssd_bytes=4080 * 20 * 6)) as store:
        space = await store.create_namespace(SETTINGS)
        for total in range(1, 7):
            await put_shard(store, space, tuple(range(total)), b"a" * 16, None, window_pages=1)
        chain = tuple(range(6))
        before = store.match(space, tokens_of(chain), {}, boundaries=True).boundaries.tolist()
        assert before == [0, 1, 2, 3, 4, 5, 6]
        await store._writeback.make_durable(space, [space.tree.key_at(space.tree.match(tokens_of(chain)))])
        store._residency.make_ssd_room(4080, 1e12)
        store._writeback.poke()
        await store.settle()
        check(store)
        after = store.match(space, tokens_of(chain), {}, boundaries=True)
        assert after.known_pages == after.pages == 6
        assert len(after.boundaries) < 7
        assert await put_shard(store, space, chain, b"b" * 16, None) == PutResult(0, 6, 0)


async def test_two_branches_under_one_put_id_stay_apart(tmp_path: Path) -> None:
    x, y = (1, 2, 3, 4), (1, 2, 5, 6)
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        whole: dict[str, Any] = {"window_pages": 0, "with_state": False}
        for rank in (0, 1):
            await put_shard(store, space, x[:2], b"a" * 16, rank, **whole)
            for context in (x, y):
                await put_shard(store, space, context, b"a" * 16, rank, first=2, **whole)
            if rank == 0:
                assert store.figures.pending_pages == 6
        assert store.figures.pending_pages == 0
        for context in (x, y):
            found = store.match(space, tokens_of(context), {}, parts=True)
            assert found.known_pages == 4
            slots = space.tree.path_slots(space.tree.match(tokens_of(context)))
            for page, slot in enumerate(slots.tolist()):
                for part, row in enumerate(space.rows_of(slot)):
                    held = await store.reading.hold(space, row)
                    rank, which = divmod(part, 2)
                    expected = cut(payload(context[: page + 1], b"a" * 16, 0), parts_of(rank)[which])
                    assert bytes(held.view[: len(expected)]) == expected, f"bytes of another branch in page {page} of {context}"
                    held.release()
        check(store)


async def test_forgetting_ghosts_harms_nothing_that_lives(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    async with Store(config(tmp_path / "d", max_ghosts=20, dram_bytes=120_000, ssd_bytes=160_000)) as store:
        space = await store.create_namespace(SETTINGS)
        for number in range(250):
            prefix = tuple(rng.integers(0, 3, rng.integers(1, 6)).tolist())
            try:
                await put_shard(store, space, prefix, number.to_bytes(16, "little"), None)
            except (Busy, NoSpace):
                await asyncio.sleep(0.01)
        assert not store.died.is_set()
        await store.settle()
        check(store)
        assert 0 < space.tree.ghost_count <= 20


async def test_a_put_refused_by_a_full_table_leaves_nothing(tmp_path: Path) -> None:
    """Ghosts that it would have brought back stay ghosts, and the tree is as it was."""
    async with Store(config(tmp_path / "d", max_pages=10, max_ghosts=4)) as store:
        space = await store.create_namespace(SETTINGS)
        await put_shard(store, space, (1, 2), b"a" * 16, None)
        space.remove_page(int(space.tree.path_slots(space.tree.match(tokens_of((1, 2))))[0]))
        assert space.tree.ghost_count == 2
        await put_shard(store, space, (5, 5, 5, 5, 5, 5), b"b" * 16, None)
        with pytest.raises(NoSpace):
            await put_shard(store, space, (1, 2, *range(10, 18)), b"c" * 16, None)
        assert store.match(space, tokens_of((1, 2)), {}).known_pages == 0
        await store.settle()
        check(store)
        assert (await put_shard(store, space, (5, 5, 9), b"d" * 16, None)).new_pages == 1
        check(store)


async def test_the_promise_of_a_durable_shard_holds_for_what_is_whole(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        await put_shard(store, space, (1, 2), b"a" * 16, 0, ack=Ack.DURABLE)
        assert await put_shard(store, space, (1, 2, 3, 4), b"a" * 16, 1, ack=Ack.DURABLE) == PutResult(2, 0, 2)
        await store.settle()
        assert all(space.is_durable(slot) for slot in space.tree.live_slots().tolist())


async def test_a_second_try_from_another_client_keeps_what_the_first_brought(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        await put_shard(store, space, (1, 2), b"a" * 16, 0, owner=1)
        again = await store.begin_put(2, space, PutRequest(b"a" * 16, tokens_of((1, 2)), {}, 0, parts_of(0)[:2], Ack.MEMORY))
        assert again.wanted_runs() == []
        store.release_owner(1)
        assert (await store.commit_put(again)).pending_pages == 2
        assert await put_shard(store, space, (1, 2), b"a" * 16, 1) == PutResult(2, 0, 0)
        await put_shard(store, space, (7,), b"b" * 16, 0, owner=1)
        again = await store.begin_put(2, space, PutRequest(b"b" * 16, tokens_of((7,)), {}, 0, parts_of(0)[:2], Ack.MEMORY))
        store._puts.assemblies.give_up(store._puts.assemblies.of_space(space)[0])
        with pytest.raises(Busy, match="put it again"):
            await store.commit_put(again)
        check(store)


async def test_pages_that_were_completed_by_another_shard_are_not_the_first_to_go(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        await put_shard(store, space, (1, 2), b"a" * 16, 0)
        for rank in (0, 1):
            await put_shard(store, space, (1, 2, 3, 4), b"a" * 16, rank, first=2)
        await put_shard(store, space, (1, 2), b"a" * 16, 1)
        slots = space.tree.path_slots(space.tree.match(tokens_of((1, 2, 3, 4))))
        assert len(slots) == 4
        assert (space.tree.pages.recency[slots] > 0).all()
        assert (np.diff(space.tree.pages.recency[slots]) < 0).all()
        check(store)


async def test_an_identical_second_try_is_no_overlap(tmp_path: Path) -> None:
    """Parts cut in one way on some pages and in another on others."""
    parts = (PartRange(0, 0, 4, 0, 1), PartRange(1, 0, 1, 0, 1), PartRange(1, 1, 2, 0, 1), PartRange(1, 0, 2, 0, 1))
    spans = ((0, 4), (0, 2), (0, 2), (2, 4))
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        for _ in range(2):
            request = PutRequest(b"a" * 16, tokens_of((1, 2, 3, 4)), {}, 0, parts, Ack.MEMORY, spans)
            under_way = await store.begin_put(1, space, request)
            await _send(under_way, (1, 2, 3, 4))
            assert (await store.commit_put(under_way)).pending_pages == 4
        with pytest.raises(BadRequest, match="another shard"):
            await store.begin_put(1, space, PutRequest(b"a" * 16, tokens_of((1,)), {}, 0, (PartRange(0, 0, 2, 0, 2),), Ack.MEMORY))
        check(store)


async def test_a_put_says_how_many_pages_gained_a_window_or_a_state(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(SETTINGS)
        first = await put_shard(store, space, (1, 2, 3), b"a" * 16, None, window_pages=0, with_state=False)
        assert (first.new_pages, first.gained_pages) == (3, 0)
        half = await put_shard(store, space, (1, 2, 3), b"b" * 16, 0, window_pages=2)
        assert (half.existing_pages, half.gained_pages) == (3, 0), "the other half is still to come"
        other = await put_shard(store, space, (1, 2, 3), b"b" * 16, 1, window_pages=2)
        assert (other.new_pages, other.existing_pages, other.gained_pages) == (0, 3, 2), "its last two have windows, the last a state"
        again = await put_shard(store, space, (1, 2, 3), b"c" * 16, None, window_pages=2)
        assert (again.existing_pages, again.gained_pages) == (3, 0)
        check(store)


async def test_a_refused_put_does_not_call_pages_done_that_lack_what_it_brings(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=1 << 20)) as store:
        space = await store.create_namespace(replace(SETTINGS, retention_s=86_400))
        await put_shard(store, space, (1, 2, 3), b"a" * 16, None, window_pages=0, with_state=False, ack=Ack.DURABLE)
        request = PutRequest(b"c" * 16, tokens_of((1, 2, 3, *range(1000))), {}, 0, parts_of(None)[:3], Ack.MEMORY)
        with pytest.raises(NoSpace, match="fewer pages at once") as refused:
            await store.begin_put(1, space, request)
        assert refused.value.done_pages == 0, "none of them has a window"
        with pytest.raises(NoSpace, match="fewer pages at once") as refused:
            await store.begin_put(1, space, replace(request, ranges=parts_of(None)[:2]))
        assert refused.value.done_pages == 3
        with pytest.raises(NoSpace):  # noqa: PT012 - until SSD is full
            for number in range(100, 1000):
                await put_shard(store, space, (number,), b"f" * 16, None, with_state=False, window_pages=0, ack=Ack.DURABLE)
        with pytest.raises(NoSpace) as refused:
            await put_shard(store, space, (1, 2, 3), b"b" * 16, None, window_pages=2, ack=Ack.DURABLE)
        assert refused.value.done_pages == 1, "the windows of the others, and the state, are there, but not durable"
        check(store)
