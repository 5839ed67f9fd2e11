"""Puts of several pages of a flat namespace, one by one, in process, on a real disk."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import BadDigest, BadRequest, Busy, Conflict, NoSpace, NotFound
from kvstore.kvspec import PartRange
from kvstore.store import Ack, PutRequest, PutResult, Store
from kvstore.store.checking.check import check
from kvstore.store.puts.pages import MAX_FLAT_PAGES
from tests.store.flat_pages import (
    ONE,
    TWO,
    A,
    B,
    Page,
    begin,
    data_of,
    key_of,
    labels,
    pages_of,
    parts_of,
    put_pages,
    read_page,
    send,
    settings_of,
    there,
)
from tests.store.test_shards import config


async def test_a_put_brings_many_pages_and_says_which_were_there(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        assert await put_pages(store, space, pages_of(4, 2)) == PutResult(2, 0, 0)
        pages = (*pages_of(5, 4, 1, 2, 3), Page(2, extra=True))
        put = await begin(store, space, pages, B)
        assert put.wanted_runs() == [(p, *run) for p in (0, 1) for run in ((0, 1), (2, 3), (4, 6))]
        assert put.first_needed == 0
        send(put, pages)
        result = await store.commit_put(put)
        assert (result, result.existing) == (PutResult(4, 2, 0), ((1, 2), (3, 4)))
        check(store)
        found = store.match(space, labels(pages)[0], labels(pages)[1], owner=1, lease_s=60, parts=True, holes=True)
        assert found.known_pages == 6
        for page, version in zip(pages, (B, A, B, A, B, B), strict=True):
            assert await read_page(store, space, page) == {part: data_of(ONE, page, version, part) for part in parts_of(ONE, None)}
        assert found.lease is not None
        store.release_lease(1, found.lease.id)
        assert (await put_pages(store, space, pages[::-1])).existing == ((0, 6),), "the order of pages is nothing"
        check(store)


async def test_a_page_named_twice_is_refused(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        with pytest.raises(BadRequest, match="pages 1 and 3 of the put are the same"):
            await begin(store, space, pages_of(1, 2, 3, 2))
        await put_pages(store, space, (Page(2), Page(2, extra=True)))
        assert store.figures.puts_open == 0
        check(store)


@pytest.mark.parametrize("bad", [0, 2, 4])
async def test_one_bad_digest_among_many_leaves_nothing(tmp_path: Path, bad: int) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(1, 2, 3, 4, 5)
        put = await begin(store, space, pages)
        send(put, pages, bad=bad)
        with pytest.raises(BadDigest, match=f"page {bad}, part 0"):
            await store.commit_put(put)
        assert not any(there(store, space, pages))
        assert store.figures.usage()["dram"].used == 0
        check(store)
        assert await put_pages(store, space, pages, B) == PutResult(5, 0, 0)
        check(store)


async def test_a_put_that_lacks_slices_says_of_which_page(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        pages = pages_of(1, 2, 3)
        put = await begin(store, space, pages)
        send(put, pages, only={0, 2})
        with pytest.raises(BadRequest, match="page 1"):
            await store.commit_put(put)
        assert not any(there(store, space, pages))
        check(store)


async def test_more_pages_than_one_put_may_have_are_refused(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        for pages in (pages_of(*range(MAX_FLAT_PAGES + 1)), ()):
            with pytest.raises(BadRequest, match=f"1 to {MAX_FLAT_PAGES}"):
                await begin(store, space, pages)
        many = tuple(PartRange(0, layer, layer + 1, head, head + 1) for layer in range(4) for head in range(2))
        wide = PutRequest(A, labels(pages_of(*range(64)))[0], {}, 0, many * 9, Ack.MEMORY)
        with pytest.raises(BadRequest):
            await store.begin_put(1, space, wide)
        with pytest.raises(BadRequest, match="from page 1 on"):
            await store.begin_put(1, space, PutRequest(A, labels(pages_of(1, 2))[0], {}, 1, parts_of(ONE, None), Ack.MEMORY))
        assert store.figures.puts_open == 0


async def test_the_first_commit_of_each_page_wins(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        mine, others = pages_of(1, 2, 3), pages_of(3, 4, 2)
        put, other = await begin(store, space, mine), await begin(store, space, others, B)
        send(put, mine)
        send(other, others)
        assert await store.commit_put(other) == PutResult(3, 0, 0)
        result = await store.commit_put(put)
        assert (result, result.existing) == (PutResult(1, 2, 0), ((1, 3),))
        assert (await read_page(store, space, Page(3)))[PartRange(0, 0, 3, 0, 2)] == data_of(ONE, Page(3), B, PartRange(0, 0, 3, 0, 2))
        check(store)


async def test_pages_wait_for_their_shards_each_alone(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        assert await put_pages(store, space, pages_of(1, 2, 3), A, 0) == PutResult(0, 0, 3)
        assert await put_pages(store, space, pages_of(3, 1), A, 1) == PutResult(2, 0, 0)
        assert there(store, space, pages_of(1, 2, 3)) == [True, False, True]
        check(store)
        assert await put_pages(store, space, pages_of(2, 4), B, 1) == PutResult(0, 0, 2), "shards of two computations were mixed"
        with pytest.raises(BadRequest, match="another shard"):
            await begin(store, space, pages_of(9, 2), A, None)
        again = await begin(store, space, pages_of(2, 3), A, 0)
        assert again.wanted_runs() == [], "what an earlier try had brought was asked for again"
        assert await store.commit_put(again) == PutResult(0, 1, 1)
        check(store)
        store.release_owner(1)
        assert store.figures.pending_pages == 0
        check(store)


async def test_a_shard_can_wait_for_the_others(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        put = await begin(store, space, pages_of(1, 2), A, 0, ack=Ack.DURABLE)
        send(put, pages_of(1, 2))
        waiting = asyncio.create_task(store.commit_put(put, 20))
        await asyncio.sleep(0)
        for number in (2, 1):
            await put_pages(store, space, pages_of(number), A, 1, owner=2)
        assert await waiting == PutResult(2, 0, 0)
        assert all(space.is_durable(space.tree.pages.find_key(key_of(space, page))) for page in pages_of(1, 2))


async def test_a_page_gets_the_state_it_lacks(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(TWO))
        await put_pages(store, space, pages_of(1, 2), A, with_state=False)
        result = await put_pages(store, space, pages_of(1, 3), B)
        assert (result, result.existing) == (PutResult(1, 1, 0), ((0, 1),))
        check(store)
        state = PartRange(1, 0, 2, 0, 2)
        assert (await read_page(store, space, Page(1)))[state] == data_of(TWO, Page(1), B, state)
        assert state not in await read_page(store, space, Page(2))


async def test_a_durable_put_is_there_after_a_kill(tmp_path: Path) -> None:
    pages = pages_of(1, 2, 3, 4)
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages[:1])
        assert await put_pages(store, space, pages, ack=Ack.DURABLE) == PutResult(3, 1, 0)
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    async with Store(config(tmp_path / "killed")) as store:
        space = store.space("default", "flat")
        assert all(there(store, space, pages))
        for page in pages:
            assert await read_page(store, space, page) == {part: data_of(ONE, page, A, part) for part in parts_of(ONE, None)}
        assert await put_pages(store, space, (*pages, Page(5)), B) == PutResult(1, 4, 0)
        check(store)


async def test_pages_that_are_there_are_held_while_the_rest_is_sent(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages_of(1, 2))
        put = await begin(store, space, pages_of(1, 2, 3), B)
        with pytest.raises(Conflict):
            await store.prefixes.delete(space, Page(2).digest, {})
        store.release_owner(1)
        check(store)
        assert put.closed
        await store.prefixes.delete(space, Page(2).digest, {})
        assert there(store, space, pages_of(1, 2, 3)) == [True, False, False]


async def test_a_lost_page_ends_the_puts_that_count_on_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages_of(1, 2))
        put, other = await begin(store, space, pages_of(3, 2)), await begin(store, space, pages_of(1, 4))
        slot = space.tree.pages.find_key(key_of(space, Page(2)))
        space.lose_blob(space.rows_of(slot)[0])
        with pytest.raises(Busy, match="put it again"):
            await store.commit_put(put)
        send(other, pages_of(1, 4))
        assert await store.commit_put(other) == PutResult(1, 1, 0)
        assert await put_pages(store, space, pages_of(3, 2)) == PutResult(2, 0, 0)
        check(store)


async def test_a_pin_with_a_number_of_its_own_is_made_once(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", pin_bytes=3 * ONE.page_bytes)) as store:
        space, prefixes = await store.create_namespace(settings_of(ONE)), store.prefixes
        others = [
            await store.create_namespace(replace(settings_of(ONE), name="other", fingerprint="another")),
            await store.create_namespace(replace(settings_of(ONE), tenant="else")),
        ]
        for one in (space, *others):
            await put_pages(store, one, pages_of(1, 2, 3))
        pin = prefixes.pin(space, *labels(pages_of(1, 2)), 60, 7)
        assert pin.id == 7
        assert prefixes.pin(space, *labels(pages_of(1, 2)), 60, 7) is pin
        check(store)
        with pytest.raises(BadRequest, match="63 random bits"):
            prefixes.pin(others[0], *labels(pages_of(1)), 60, 7)
        theirs = prefixes.pin(others[1], *labels(pages_of(1)), 60, 7)
        assert theirs is not pin, "what one tenant does says nothing to another"
        for wrong in (-1, 1 << 63):
            with pytest.raises(BadRequest, match="63 random bits"):
                prefixes.pin(space, *labels(pages_of(1)), 60, wrong)
        prefixes.unpin(space, 7)
        check(store)
        assert await prefixes.delete(space, *labels(pages_of(1, 2, 3))) == 3
        with pytest.raises(Conflict):
            await prefixes.delete(others[1], *labels(pages_of(1)))
        prefixes.unpin(others[1], 7)
        check(store)


async def test_only_a_lost_page_leaves_its_leases_and_pins(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", pin_bytes=6 * ONE.page_bytes)) as store:
        space, prefixes = await store.create_namespace(settings_of(ONE)), store.prefixes
        await put_pages(store, space, pages_of(1, 2, 3, 4))
        pin, alone = prefixes.pin(space, *labels(pages_of(1, 2, 3, 2, 4)), 60), prefixes.pin(space, *labels(pages_of(2)), 60)
        wanted = labels(pages_of(2, 3, 1))
        front, holes = (store.match(space, *wanted, owner=1, lease_s=60, parts=True, holes=holes).lease for holes in (False, True))
        assert front is not None
        assert holes is not None
        space.lose_blob(space.rows_of(space.tree.pages.find_key(key_of(space, Page(2))))[0])
        check(store)
        assert (pin.pages, front.pages, holes.pages) == (3, 2, 2)
        with pytest.raises(NotFound):
            prefixes.unpin(space, alone.id)
        more = prefixes.pin(space, *labels(pages_of(1, 3, 4)), 60)
        with pytest.raises(Busy, match="`max_pinned`"):
            prefixes.pin(space, *labels(pages_of(1)), 60)
        prefixes.unpin(space, more.id)
        for number in (1, 3, 4):
            with pytest.raises(Conflict):
                await prefixes.delete(space, *labels(pages_of(number)))
        prefixes.unpin(space, pin.id)
        with pytest.raises(Conflict):
            await prefixes.delete(space, *labels(pages_of(3)))
        for lease in (front, holes):
            store.release_lease(1, lease.id)
        check(store)
        assert await prefixes.delete(space, *labels(pages_of(1, 3, 4))) == 3


async def test_a_full_table_of_pages_takes_none_of_a_put(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", max_pages=5, max_ghosts=0)) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages_of(1, 2, 3))
        with pytest.raises(NoSpace):
            await put_pages(store, space, pages_of(3, 4, 5, 6))
        assert there(store, space, pages_of(1, 2, 3, 4, 5, 6)) == [True, True, True, False, False, False]
        check(store)
        assert await put_pages(store, space, pages_of(4, 5)) == PutResult(2, 0, 0)
        check(store)


async def test_a_put_larger_than_dram_is_refused(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_of(ONE))
        with pytest.raises(NoSpace, match="fewer pages at once"):
            await begin(store, space, pages_of(*range(100)))
        check(store)


async def test_a_durable_put_that_ssd_has_no_room_for_says_which_pages_are_durable(tmp_path: Path) -> None:
    given = config(tmp_path / "d", dram_bytes=1 << 20, ssd_bytes=20 * 4080, batch_bytes=6000)
    async with Store(given) as store:
        space = await store.create_namespace(settings_of(ONE))
        await put_pages(store, space, pages_of(*range(200, 212, 2)), ack=Ack.DURABLE)
        pages = pages_of(*range(100, 116, 2))  # no two with the same bytes
        with pytest.raises(NoSpace) as caught:
            await put_pages(store, space, pages, ack=Ack.DURABLE)
        durable = [space.is_durable(space.tree.pages.find_key(key_of(space, page))) for page in pages]
        assert 0 < caught.value.done_pages == durable.index(False)
        check(store)
        with pytest.raises(NoSpace) as again:
            await put_pages(store, space, pages[caught.value.done_pages :], ack=Ack.DURABLE)
        assert again.value.done_pages == 0
        assert await put_pages(store, space, pages[: caught.value.done_pages], B, ack=Ack.DURABLE) == PutResult(0, sum(durable), 0)
    async with Store(given) as store:
        space = store.space("default", space.id)
        await store.loaded.wait()
        assert there(store, space, pages)[: caught.value.done_pages] == [True] * caught.value.done_pages


async def test_several_pages_are_pinned_abandoned_and_deleted(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space, prefixes = await store.create_namespace(settings_of(ONE)), store.prefixes
        await put_pages(store, space, pages_of(1, 2, 3, 4, 5), ack=Ack.DURABLE)
        pin = prefixes.pin(space, *labels((*pages_of(2, 9), Page(1, extra=True), *pages_of(4))), 60)
        assert pin.pages == 2
        check(store)
        with pytest.raises(Conflict, match="page 1 of this list"):
            await prefixes.delete(space, *labels(pages_of(1, 2, 3)))
        assert all(there(store, space, pages_of(1, 2, 3))), "a part of a list that could not be deleted is gone"
        assert await prefixes.delete(space, *labels(pages_of(2, 3, 9, 5)), 1) == 2
        prefixes.unpin(space, pin.id)
        check(store)
        with pytest.raises(NotFound):
            prefixes.pin(space, *labels(pages_of(7, 8, 9)), 60)
        recency, find = space.tree.pages.recency, space.tree.pages.find_key
        assert prefixes.abandon(space, *labels(pages_of(9, 4, 2))) == 2
        one, two, four = (int(recency[find(key_of(space, Page(number)))]) for number in (1, 2, 4))
        assert max(two, four) < one
        with pytest.raises(BadRequest, match="at most 256"):
            prefixes.abandon(space, *labels(pages_of(*range(257))))
        check(store)
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    async with Store(config(tmp_path / "killed")) as store:
        assert there(store, store.space("default", "flat"), pages_of(1, 2, 3, 4, 5)) == [True, True, False, True, False]
