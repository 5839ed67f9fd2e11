"""Checks of stopped and of serving stores: clean ones are clean, whatever is under way, and each kind of damage is found."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.errors import Cancelled, DataDirError, NotFound
from kvstore.store import Ack, NamespaceSettings, Space, Store
from kvstore.store.checking.running import check_running
from kvstore.store.checking.stopped import check_stopped
from kvstore.store.checking.verify import CheckProgress, CheckReport
from kvstore.store.datadir import DataDir, DataDirInUse
from tests.store.test_store import PARTS, SPEC, Prefix, config, put, read, settings_named, tokens_of

CONTEXTS: list[Prefix] = [(1, 2, 3), (1, 2, 4), (5, 6, 7)]
PAGES = 7
SSD = 4 << 20
EXTRA = NamespaceSettings("default", "extra", "another", SPEC)


async def fill(data_dir: Path, **settings: Any) -> None:
    async with Store(config(data_dir, ssd_bytes=SSD)) as store:
        space = await store.create_namespace(settings_named(**settings))
        await store.create_namespace(NamespaceSettings("default", "empty", "another", SPEC))
        for context in CONTEXTS:
            await put(store, space, context, b"v" * 16, Ack.DURABLE)


def stopped(data_dir: Path) -> CheckReport:
    return check_stopped(data_dir, lambda _: None)


def edit(folder: Path, prefix: bytes, change: str, which: int = 0) -> bytes:
    """Flip a bit of an entry, or delete it. Returns its key."""
    env = lmdb.open(str(folder), map_size=64 << 20)
    with env.begin(write=True) as txn, txn.cursor() as cursor:
        assert cursor.set_range(prefix)
        for _ in range(which):
            assert cursor.next()
        key, value = bytes(cursor.key()), bytearray(cursor.value())
        assert key.startswith(prefix)
        if change == "delete":
            cursor.delete()
        else:
            value[5] ^= 4
            cursor.put(key, bytes(value))
    env.close()
    return key


def contents(data_dir: Path) -> dict[str, bytes]:
    return {str(p.relative_to(data_dir)): p.read_bytes() for p in data_dir.rglob("*") if p.is_file() and p.name != "lock"}


# --- stopped ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipes", [False, True])
async def test_a_stopped_store_is_clean_and_not_touched(tmp_path: Path, recipes: bool) -> None:
    await fill(tmp_path, recipes=recipes)
    before, told = contents(tmp_path), list[CheckProgress]()
    report = check_stopped(tmp_path, told.append)
    assert (report.clean, report.damage, report.notes) == (True, [], [])
    assert {(n.name, n.pages, n.lost_pages) for n in report.namespaces} == {("ns", PAGES, 0), ("empty", 0, 0)}
    assert report.checked_blobs == PAGES * len(PARTS)
    assert told[-1].done_bytes == told[-1].total_bytes == report.checked_bytes > 0
    assert contents(tmp_path) == before


@pytest.mark.parametrize("change", ["flip", "delete"])
async def test_a_bad_blob_costs_the_pages_from_it_on(tmp_path: Path, change: str) -> None:
    await fill(tmp_path / "d")
    for which in range(0, PAGES * len(PARTS), 4):
        copy = tmp_path / str(which)
        shutil.copytree(tmp_path / "d", copy)
        key = edit(copy / "blobs", b"", change, which)
        before = contents(copy)
        report = stopped(copy)
        assert not report.clean
        [damage] = report.damage
        assert damage.kind == "blob"
        assert key[4:20].hex() in damage.what
        lost = next(n for n in report.namespaces if n.name == "ns").lost_pages
        assert contents(copy) == before
        async with Store(config(copy, ssd_bytes=SSD)) as store:  # the promise: the daemon loses just these, by itself
            space = store.space("default", "ns")
            for context in CONTEXTS:
                await try_all(store, space, context)
            assert space.tree.page_count == PAGES - lost
        assert stopped(copy).clean, "the daemon left damage behind"


async def try_all(store: Store, space: Space, context: Prefix) -> None:
    for _ in range(4):
        try:
            await read(store, space, context)
        except NotFound:
            continue


@pytest.mark.parametrize("change", ["flip", "delete"])
async def test_a_bad_record_costs_its_subtree(tmp_path: Path, change: str) -> None:
    await fill(tmp_path / "d")
    found = set()
    for which in range(PAGES):
        copy = tmp_path / str(which)
        shutil.copytree(tmp_path / "d", copy)
        edit(copy / "journal", b"P", change, which)
        report = stopped(copy)
        lost = report.lost_pages
        found.add((lost, report.clean))
        async with Store(config(copy, ssd_bytes=SSD)) as store:
            left = store.space("default", "ns").tree.page_count
        assert left == PAGES - lost - (change == "delete")  # a record that is not there is a page that never was
    # Of (1, 2, 3), (1, 2, 4) and (5, 6, 7), each with the pages below it: 4, 3, 1, 1 and 3, 2, 1.
    assert {lost + (change == "delete") for lost, _ in found} == {1, 2, 3, 4}
    assert all(clean == (lost == 0) for lost, clean in found)


@pytest.mark.parametrize("change", ["flip", "delete"])
async def test_a_bad_namespace_record_is_named_and_goes_at_the_next_start(tmp_path: Path, change: str) -> None:
    await fill(tmp_path)
    edit(tmp_path / "journal", b"N", change)
    report = stopped(tmp_path)
    assert [d.kind for d in report.damage] == ["namespace"]
    assert str(PAGES) in report.damage[0].what
    assert (report.lost_pages, report.all_read) == (PAGES, True)
    async with Store(config(tmp_path, ssd_bytes=SSD)) as store:
        assert [space.settings.name for space in store.all_spaces()] == ["empty"]
    assert stopped(tmp_path).clean, "the daemon left damage behind"


async def test_blobs_without_a_record_are_a_note(tmp_path: Path) -> None:
    await fill(tmp_path)
    edit(tmp_path / "journal", b"P" + (1).to_bytes(4, "big"), "delete", PAGES - 1)
    report = stopped(tmp_path)
    assert "named by no record" in report.notes[-1]


@pytest.mark.parametrize("name", ["journal", "blobs"])
async def test_a_file_cut_short_is_damage_and_no_crash(tmp_path: Path, name: str) -> None:
    await fill(tmp_path)
    file = tmp_path / name / "data.mdb"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2 // 4096 * 4096)
    report = stopped(tmp_path)
    assert "structure" in [d.kind for d in report.damage]


async def test_what_a_journal_that_can_not_be_read_knew_is_not_taken_for_nothing(tmp_path: Path) -> None:
    await fill(tmp_path)
    (tmp_path / "journal" / "data.mdb").write_bytes(b"no file of LMDB's" * 1000)
    report = stopped(tmp_path)
    assert [d.kind for d in report.damage] == ["structure"]
    assert not report.all_read
    assert f"named by nothing that could be read of the journal: {PAGES * len(PARTS)} (" in report.notes[-1]


async def test_a_missing_file_and_a_mark_are_damage(tmp_path: Path) -> None:
    await fill(tmp_path)
    (tmp_path / "journal" / "damaged").touch()
    for lost in (tmp_path / "blobs.extents", tmp_path / "blobs" / "data.mdb"):
        lost.unlink()
        report = stopped(tmp_path)
        assert report.lost_pages == PAGES
        assert len([d for d in report.damage if d.kind == "structure"]) == 2


async def test_no_store_and_a_store_in_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataDirError, match="no store"):
        stopped(tmp_path)
    assert not list(tmp_path.iterdir())
    holder = DataDir(tmp_path)
    with pytest.raises(DataDirInUse, match="pid"):
        stopped(tmp_path)
    holder.close()


# --- serving ---------------------------------------------------------------------------------------------------------------


async def running(store: Store, **options: Any) -> CheckReport:
    last = None
    async for step in check_running(store, store.all_spaces(), lambda: True, **options):
        last = step
    assert isinstance(last, CheckReport)
    return last


@pytest.mark.usefixtures("never_blocks")
async def test_a_serving_store_is_clean_under_load(tmp_path: Path) -> None:
    async with Store(config(tmp_path, ssd_bytes=SSD, put_wait_s=10.0)) as store:
        space = await store.create_namespace(settings_named())

        async def load(worker: int) -> None:
            for number in range(20):
                await put(store, space, (worker, number % 7, number), b"v" * 16, Ack.DURABLE if number % 3 else Ack.MEMORY)
                await read(store, space, (worker, (number + 3) % 7, number + 3))

        async def drop() -> None:
            for _ in range(5):
                extra = await store.create_namespace(EXTRA)
                await put(store, extra, (1, 2, 3), b"v" * 16, Ack.DURABLE)
                await store.drop_namespace(extra)

        work = asyncio.gather(*(load(worker) for worker in range(3)), drop())
        reports = []
        while not work.done():
            reports.append(await running(store))
            await asyncio.sleep(0.002)
        await work
        assert all(report.clean for report in reports), [report.damage for report in reports if not report.clean]
        assert max(report.checked_blobs for report in reports) > 30
        await store.settle()
        assert not space.blobs.pins.any()


async def test_damage_in_each_tier_is_found_while_serving(tmp_path: Path) -> None:
    await fill(tmp_path)
    key = edit(tmp_path / "blobs", b"", "flip")
    async with Store(config(tmp_path, ssd_bytes=SSD)) as store:
        space = store.space("default", "ns")
        report = await running(store)
        [damage] = report.damage
        assert damage.what.startswith("SSD: ")
        assert key[4:20].hex() in damage.what
        assert report.lost_pages
        await put(store, space, (9,), b"v" * 16, Ack.DURABLE)
        row = space.rows_of(int(space.tree.path_slots(space.tree.match(tokens_of((9,))))[0]))[0]
        held = await store.reading.hold(space, row)
        held.view[5] ^= 1
        again = await running(store)
        held.view[5] ^= 1
        held.release()
        assert {d.what.split(":")[0] for d in again.damage} == {"SSD", "DRAM"}
        assert again.lost_pages == report.lost_pages, "the blob that is bad in DRAM is good on SSD"


async def test_a_broken_tree_is_found_while_serving(tmp_path: Path) -> None:
    async with Store(config(tmp_path)) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2, 3), b"v" * 16)
        assert (await running(store)).clean
        space.tree.pages.tokens[1, 0] ^= 1
        [damage] = (await running(store)).damage
        assert (damage.kind, "not its chain's" in damage.what) == ("tree", True)
        space.tree.pages.tokens[1, 0] ^= 1
        space.blobs.pages[0] += 1
        [damage] = (await running(store)).damage
        assert "counts other pages" in damage.what
        space.blobs.pages[0] -= 1


async def test_blobs_that_no_page_needs_are_found_while_serving(tmp_path: Path) -> None:
    async with Store(config(tmp_path)) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2), b"v" * 16)
        [row, *others] = space.rows_of(int(space.tree.path_slots(space.tree.match(tokens_of((1, 2))))[1]))
        for one in (row, *others):
            space.pin(one)
        await store.prefixes.delete(space, tokens_of((1, 2)), {}, 1)
        assert (await running(store)).clean, "who has them in use keeps them"
        space.blobs.pins[row] -= 1
        [damage] = (await running(store)).damage
        assert (damage.kind, "1 blob is kept" in damage.what) == ("tree", True)
        assert f"{space.slot_bytes(int(space.blobs.slot[row]))} bytes of DRAM" in damage.what
        space.settle(row)
        space.blobs.pages[others[0]] += 1
        [damage] = (await running(store)).damage
        assert "counts other pages" in damage.what, "no page needs it at all"
        space.blobs.pages[others[0]] -= 1
        for one in others:
            space.unpin(one)
        assert (await running(store)).clean


async def test_a_check_ends_when_the_daemon_stops_or_nobody_listens(tmp_path: Path) -> None:
    await fill(tmp_path)
    async with Store(config(tmp_path, ssd_bytes=SSD)) as store:
        space = store.space("default", "ns")
        steps = check_running(store, [space], lambda: False)
        with pytest.raises(Cancelled):
            async for _ in steps:
                pass
        task = asyncio.create_task(running(store, bytes_per_s=1))
        while not space.blobs.pins.any():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while space.blobs.pins.any():
            await asyncio.sleep(0.001)
