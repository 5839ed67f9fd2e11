"""Data directories of format 1 become ones of format 2: all of it, whatever ends the migration, and whatever is damaged."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore.errors import DataDirError
from kvstore.store import Ack, NamespaceSettings, Store
from kvstore.store.checking.stopped import check_stopped
from kvstore.store.datadir import FORMAT, DataDir, DataDirInUse
from kvstore.store.migrating import migrate as migrating
from kvstore.store.migrating.migrate import migrate
from kvstore.store.migrating.report import MigrationReport
from tests.forked_daemon import forking
from tests.format1 import EXTENT_BYTES, LARGEST, SMALLEST, contents, die_at_every_step, format_of, put_entries, to_format1
from tests.store.test_store import PARTS, SPEC, config, put, read
from tests.store.test_verify import CONTEXTS, PAGES, SSD, edit, fill, try_all

BLOBS = PAGES * len(PARTS)
SPACES = [("ns", PAGES, PAGES), ("empty", 0, 0), ("third", 3, 0)]
THIRD = NamespaceSettings("default", "third", "a third", SPEC)


def quietly(data_dir: Path) -> MigrationReport:
    return migrate(data_dir, lambda *_: None)


async def old_store(data_dir: Path, extent_bytes: int = EXTENT_BYTES) -> None:
    """Of format 1, with recipes and two namespaces that hold the same bytes."""
    await fill(data_dir, recipes=True)
    async with Store(config(data_dir, ssd_bytes=SSD)) as store:
        space = await store.create_namespace(THIRD)
        await put(store, space, CONTEXTS[0], b"v" * 16, Ack.DURABLE)
    to_format1(data_dir, extent_bytes)


def all_verifies(data_dir: Path) -> None:
    """Every page and every blob, and nothing is left over."""
    assert format_of(data_dir) == FORMAT
    assert not [path.name for path in data_dir.iterdir() if path.name.startswith("blobs.") and path.name != "blobs.extents"]
    report = check_stopped(data_dir, lambda _: None)
    assert (report.clean, report.notes, report.checked_blobs) == (True, [], BLOBS + 3 * len(PARTS))
    assert [(space.name, space.pages, space.recipes) for space in report.namespaces] == SPACES


async def all_there(data_dir: Path) -> None:
    """A daemon's store reads every byte."""
    all_verifies(data_dir)
    async with Store(config(data_dir, ssd_bytes=SSD)) as store:
        for context in CONTEXTS:
            assert await read(store, store.space("default", "ns"), context) == len(context)
        assert await read(store, store.space("default", "third"), CONTEXTS[0]) == len(CONTEXTS[0])


@pytest.mark.parametrize("extent_bytes", [SMALLEST, EXTENT_BYTES, LARGEST])
async def test_everything_is_there_afterwards(tmp_path: Path, extent_bytes: int) -> None:
    await old_store(tmp_path, extent_bytes)
    before, told = contents(tmp_path), list[tuple[str, int, int]]()
    report = migrate(tmp_path, lambda *step: told.append(step))
    assert (report.from_format, report.to_format, report.lost_blobs, report.kept) == (1, 2, 0, None)
    assert {(space.name, space.blobs) for space in report.namespaces} == {("ns", BLOBS), ("empty", 0), ("third", 3 * len(PARTS))}
    assert told[-1][1:] == (report.moved_bytes, report.moved_bytes)
    after = contents(tmp_path)
    kept = [name for name in before if name.startswith(("journal", "recipes", "id"))]
    assert len(kept) == 3
    assert all(after[name] == before[name] for name in kept)
    await all_there(tmp_path)
    assert quietly(tmp_path).from_format == FORMAT, "and again, it is nothing to do"
    await all_there(tmp_path)


async def test_blobs_that_no_record_names_are_left_behind(tmp_path: Path) -> None:
    await old_store(tmp_path)
    put_entries(tmp_path, [((number).to_bytes(4, "big") + bytes(18), bytes(EXTENT_BYTES)) for number in (1, 9)])
    assert quietly(tmp_path).lost_blobs == 0
    await all_there(tmp_path)


async def test_a_store_that_was_never_used(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "used")):
        pass
    to_format1(tmp_path / "used")
    DataDir(tmp_path / "bare").close()
    (tmp_path / "bare" / "format.json").write_text('{"format": 1}')
    for name in ("used", "bare"):
        assert quietly(tmp_path / name).moved_blobs == 0
        async with Store(config(tmp_path / name)):
            pass


# --- ended in the middle ---------------------------------------------------------------------------------------------------


async def test_killed_at_any_step_it_starts_over(tmp_path: Path) -> None:
    await old_store(tmp_path / "d")
    (tmp_path / "copies").mkdir()
    process = forking().Process(target=die_at_every_step, args=(str(tmp_path / "d"), str(tmp_path / "copies")))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    *killed, whole = sorted((tmp_path / "copies").iterdir(), key=lambda copy: int(copy.name))
    await all_there(whole)
    formats = [format_of(copy) for copy in killed]
    assert len(formats) > 12
    assert set(formats) == {1, 2}
    for copy, number in zip(killed, formats, strict=True):
        if number == 1:
            with pytest.raises(DataDirError, match=f"run `kvstore migrate --data-dir {copy}`"):
                DataDir(copy)
        quietly(copy)
        all_verifies(copy)


async def test_killed_at_any_step_it_keeps_what_could_not_be_read(tmp_path: Path) -> None:
    await old_store(tmp_path / "d", SMALLEST)
    with (tmp_path / "d" / "blobs" / "data.mdb").open("r+b") as opened:
        opened.truncate(40 * 4096)
    old = contents(tmp_path / "d" / "blobs") | {"unread": b""}
    (tmp_path / "copies").mkdir()
    process = forking().Process(target=die_at_every_step, args=(str(tmp_path / "d"), str(tmp_path / "copies")))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    copies = list((tmp_path / "copies").iterdir())
    assert len(copies) > 12
    for copy in copies:
        report = quietly(copy)
        assert contents(copy / "blobs.format1.damaged") == old, copy.name
        assert not (copy / "blobs.format1").exists()
        assert (report.kept is None) <= (report.from_format == FORMAT)
        assert quietly(copy).kept is None
        assert contents(copy / "blobs.format1.damaged") == old, "another run is nothing to do"


async def test_without_its_journal_it_is_left_alone(tmp_path: Path) -> None:
    await old_store(tmp_path)
    shutil.rmtree(tmp_path / "journal")
    before = contents(tmp_path)
    with pytest.raises(DataDirError, match="journal is missing"):
        quietly(tmp_path)
    assert contents(tmp_path) == before


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_an_error_in_the_middle_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrating, "_BATCH_BYTES", 8192)
    await old_store(tmp_path)
    before, (soft, hard) = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(_: str, done: int, total: int) -> None:
        if done > total // 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))

    try:
        with pytest.raises(DataDirError, match="as it was"):
            migrate(tmp_path, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before
    quietly(tmp_path)
    await all_there(tmp_path)


async def test_what_can_not_be_done_is_said_before_anything_is_changed(tmp_path: Path) -> None:
    await old_store(tmp_path)
    before = contents(tmp_path)
    with file_limit(64 << 10), pytest.raises(DataDirError, match=r"that takes \d+ bytes, and a file may have 65536"):
        quietly(tmp_path)
    with closing(DataDir(tmp_path, oldest=1)), pytest.raises(DataDirInUse, match="pid"):
        quietly(tmp_path)
    with pytest.raises(DataDirError, match="no store"):
        quietly(tmp_path / "nowhere")
    assert contents(tmp_path) == before
    (tmp_path / "journal" / "damaged").touch()
    with pytest.raises(DataDirError, match=r"journal .* is damaged"):
        quietly(tmp_path)
    (tmp_path / "journal" / "damaged").unlink()
    (tmp_path / "journal" / "data.mdb").write_bytes(b"no file of LMDB's" * 1000)
    with pytest.raises(DataDirError, match=r"journal .* is damaged"):
        quietly(tmp_path)
    assert contents(tmp_path) == before | {"journal/data.mdb": b"no file of LMDB's" * 1000}


# --- damage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["flip", "delete"])
async def test_a_bad_extent_costs_the_pages_from_it_on(tmp_path: Path, change: str) -> None:
    await fill(tmp_path / "d")
    to_format1(tmp_path / "d", SMALLEST)
    for which in range(0, BLOBS, 8):
        copy = tmp_path / str(which)
        shutil.copytree(tmp_path / "d", copy)
        key = edit(copy / "blobs", b"", change, which)
        report = quietly(copy)
        assert (report.moved_blobs, report.lost_blobs, report.kept) == (BLOBS - 1, 1, None)
        assert key[4:20].hex() in report.losses[0].what
        assert not (copy / "blobs.format1").exists()
        async with Store(config(copy, ssd_bytes=SSD)) as store:
            space = store.space("default", "ns")
            for context in CONTEXTS:
                await try_all(store, space, context)
            assert space.tree.page_count == PAGES - report.lost_pages
        assert check_stopped(copy, lambda _: None).clean


@pytest.mark.parametrize("kept", [0, 2 * 4096, 40 * 4096, None])
async def test_old_blobs_that_can_not_be_read_are_kept(tmp_path: Path, kept: int | None) -> None:
    await old_store(tmp_path, SMALLEST)
    file = tmp_path / "blobs" / "data.mdb"
    if kept is None:
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(kept)
    report = quietly(tmp_path)
    assert report.moved_blobs + report.lost_blobs == BLOBS + 3 * len(PARTS)
    assert (report.lost_blobs > 0, report.moved_blobs > 0) == (True, kept == 40 * 4096)
    assert (report.lost_pages == PAGES + 3) is (report.moved_blobs == 0)
    damaged = tmp_path / "blobs.format1.damaged"
    assert (report.kept, damaged.exists()) == ((None, False) if kept is None else (str(damaged), True))
    async with Store(config(tmp_path, ssd_bytes=SSD)) as store:
        for context in CONTEXTS:
            await try_all(store, store.space("default", "ns"), context)
        await store.settle()
    assert check_stopped(tmp_path, lambda _: None).lost_pages == sum(space.lost_pages for space in report.namespaces if space.name != "ns")
