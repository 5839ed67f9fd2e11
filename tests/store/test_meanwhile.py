"""A store in process when bytes are lost, tables are full, and several things happen at once."""

import asyncio
import shutil
from pathlib import Path

import pytest

from kvstore.digests import slice_digest
from kvstore.errors import Cancelled, MissingParent, NoSpace, NotFound, UnknownNamespace
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.dram.eviction import Unit, free_dram
from tests.store.test_store import OWNER, PARTS, SPEC, Prefix, config, page_bytes, put, read, settings_named, tokens_of


def in_dram(store: Store, space: Space, row: int) -> memoryview:
    found = store.reading.resident(space, row)
    assert found is not None
    return found


async def test_a_bad_dram_copy_is_replaced_from_ssd(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1,), b"v" * 16, Ack.DURABLE)
        row = store.reading.find(space, space.blobs.id_of(0))
        held = await store.reading.hold(space, row)
        held.view[5] ^= 1
        store.reading.discard_bad_copy(space, row, held.view)
        held.release()
        assert await read(store, space, (1,)) == 1
        assert store.stats.corrupt_blobs == 1


async def test_a_blob_lost_in_every_tier_is_a_miss(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2, 3), b"v" * 16)
        slot = int(space.tree.path_slots(space.tree.match(tokens_of((1, 2, 3))))[1])
        row = space.rows_of(slot)[0]
        store.reading.discard_bad_copy(space, row, in_dram(store, space, row))
        assert await read(store, space, (1, 2, 3)) == 1
        with pytest.raises(NotFound):
            store.reading.find(space, b"\xff" * 16)
        await store.settle()
        check(store)


async def test_a_lost_page_ends_what_holds_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2, 3), b"v" * 16)
        whole = store.match(space, tokens_of((1, 2, 3)), {}, owner=OWNER, lease_s=60).lease
        short = store.match(space, tokens_of((1,)), {}, owner=OWNER, lease_s=60).lease
        assert whole is not None
        assert short is not None
        under_way = await store.begin_put(OWNER, space, PutRequest(b"w" * 16, tokens_of((1, 2, 3, 4)), {}, 3, PARTS, Ack.MEMORY))
        slot = int(space.tree.path_slots(space.tree.match(tokens_of((1, 2, 3))))[1])
        row = space.rows_of(slot)[0]
        store.reading.discard_bad_copy(space, row, in_dram(store, space, row))
        assert (whole.pages, short.pages) == (1, 1)
        await put(store, space, (1, 4, 5), b"v" * 16)
        with pytest.raises(NotFound, match="lost"):  # who holds it gives what comes after (1, 2, 3)
            store.match(space, tokens_of((4, 5)), {}, owner=OWNER, base=whole.id)
        with pytest.raises(NotFound, match="lost"):
            await store.begin_put(OWNER, space, PutRequest(b"w" * 16, tokens_of((4, 5, 6)), {}, 3, PARTS, Ack.MEMORY), whole.id)
        assert store.match(space, tokens_of((4, 5)), {}, owner=OWNER, base=short.id).pages == 3
        with pytest.raises(MissingParent):
            await store.commit_put(under_way)
        await store.settle()
        check(store)
        assert await read(store, space, (1, 2, 3)) == 1
        store.release_owner(OWNER)
        check(store)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.004])
async def test_a_namespace_dropped_while_it_is_written_leaves_nothing(tmp_path: Path, delay: float) -> None:
    async with Store(config(tmp_path / "d", ssd_bytes=4 << 20)) as store:
        other = await store.create_namespace(NamespaceSettings("default", "other", "another model", SPEC))
        for round_number in range(5):
            space = await store.create_namespace(settings_named())
            async with asyncio.TaskGroup() as group:
                for number in range(4):
                    group.create_task(_put_or_gone(store, space, (round_number, number, 2)))
                await asyncio.sleep(delay)
                await store.drop_namespace(space)
        await store.settle()
        check(store)
        assert store.figures.usage()["dram"].used == store.figures.usage()["ssd"].used == 0
        await put(store, other, (1, 2), b"v" * 16, Ack.DURABLE)
        assert await read(store, other, (1, 2)) == 2


async def _put_or_gone(store: Store, space: Space, prefix: Prefix) -> None:
    try:
        await put(store, space, prefix, b"v" * 16, Ack.DURABLE)
    except (NotFound, Cancelled, UnknownNamespace):
        pass  # it was dropped


async def test_a_full_page_table_refuses_a_put_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d", max_pages=6)) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2, 3, 4), b"v" * 16)
        with pytest.raises(NoSpace):
            await put(store, space, (5, 6, 7, 8), b"v" * 16)
        await store.settle()
        check(store)
        assert await read(store, space, (1, 2, 3, 4)) == 4


async def test_bytes_promoted_while_a_put_brings_the_same(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        await put(store, space, (1,), b"v" * 16, Ack.DURABLE)
        slot = int(space.tree.path_slots(space.tree.match(tokens_of((1,))))[0])
        row = space.rows_of(slot)[0]
        free_dram(Unit(space, space.tree.pages.key_bytes(slot), 1, 0, 0, 0))
        promoting = asyncio.create_task(store.reading.hold(space, row))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        twin = await store.begin_put(OWNER, space, PutRequest(b"v" * 16, tokens_of((2,)), {}, 0, PARTS, Ack.MEMORY))
        for part, part_range in enumerate(PARTS):
            data, sizes = page_bytes((1,), b"v" * 16, part), SPEC.slice_layout(part_range).sizes
            view, _ = twin.locate(0, part, 0, len(data), len(sizes))
            view[:] = data
            digests = [slice_digest(data[o : o + s]) for o, s in zip(SPEC.slice_layout(part_range).offsets, sizes, strict=False)]
            twin.received(0, part, 0, digests, b"".join(digests))
        await store.commit_put(twin)
        (await promoting).release()
        await store.settle()
        check(store)


async def test_after_a_restart_the_deepest_pages_are_still_the_first_to_go(tmp_path: Path) -> None:
    chain = tuple(range(20))
    async with Store(config(tmp_path / "d", ssd_bytes=4 << 20)) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        await put(store, space, chain, b"v" * 16, Ack.DURABLE)
        held = store.match(space, tokens_of(chain), {}).pages
    assert held == 20
    async with Store(config(tmp_path / "d", ssd_bytes=25 * 16_320)) as store:
        space = store.space("default", "ns")
        for number in range(100, 112):
            await put(store, space, (number,), b"v" * 16, Ack.DURABLE)
            await store.settle()
            check(store)
        assert 5 < store.match(space, tokens_of(chain), {}).pages < 20


async def test_a_fetch_in_the_middle_of_a_durable_put_takes_nothing_from_it(tmp_path: Path) -> None:
    """The blob is on SSD for another page, which has just been given up, when a durable put names it again."""
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(retention_s=3600))
        await put(store, space, (1,), b"v" * 16)
        slot = int(space.tree.path_slots(space.tree.match(tokens_of((1,))))[0])
        rows = space.rows_of(slot)
        await store._writeback.make_durable(space, [space.tree.pages.key_bytes(slot)])
        for row in rows:
            space.blobs.durable_pages[row] = 0  # as after `evict_ssd` of a twin: the bytes are there, no record names them
        space.tree.pages.flags[slot] = 0
        space.tree.parts.durable[:] = False
        acknowledged = asyncio.create_task(put(store, space, (1,), b"w" * 16, Ack.DURABLE))
        while not store._writeback.lock.locked():
            await asyncio.sleep(0)
        for row in rows:
            (await store.reading.hold(space, row)).release()
        await acknowledged
        await store.settle()
        check(store)
        shutil.copytree(tmp_path / "d", tmp_path / "copy")
    await _all_there(tmp_path / "copy", (1,))


async def _all_there(data_dir: Path, prefix: Prefix) -> None:
    async with Store(config(data_dir)) as store:
        assert await read(store, store.space("default", "ns"), prefix) == len(prefix)
