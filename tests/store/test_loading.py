"""A store that serves while its journal is being loaded."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import lmdb
import pytest

from kvstore.errors import Busy, NotFound, UnknownNamespace
from kvstore.radix import load_plan
from kvstore.radix.journal import Journal, RecordBatch
from kvstore.store import Ack, NamespaceSettings, Space, Store
from kvstore.store.checking.check import check
from tests.store.test_store import SPEC, Prefix, config, put, read, settings_named, tokens_of

CONTEXTS: list[Prefix] = [(i // 8, i, i + 1, i + 2) for i in range(40)]
OTHER = NamespaceSettings("default", "other", "another model", SPEC)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_STEP_COST", 20)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("filled") / "d"

    async def fill() -> None:
        async with Store(config(place, dram_bytes=16 << 20, ssd_bytes=8 << 20)) as store:
            for settings in (settings_named(), OTHER):
                space = await store.create_namespace(settings)
                for context in CONTEXTS:
                    await put(store, space, context, b"v" * 16)

    asyncio.run(fill())
    return place


@pytest.fixture
def data_dir(tmp_path: Path, filled: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "d"))


@asynccontextmanager
async def opened(data_dir: Path) -> AsyncIterator[Store]:
    """A store that is still loading."""
    async with Store(config(data_dir, ssd_bytes=8 << 20, serve_while_loading=True)) as store:
        assert store.figures.loading is not None
        yield store


async def until_some_pages(store: Store) -> Space:
    space = store.space("default", "ns")
    while not space.tree.page_count:
        await asyncio.sleep(0)
    assert space.loading, "the steps are too large for this test"
    return space


@pytest.mark.usefixtures("never_blocks")
async def test_what_is_there_is_served_and_puts_wait(data_dir: Path) -> None:
    async with opened(data_dir) as store:
        space = await until_some_pages(store)
        assert store.figures.loading is not None
        assert 0 < store.figures.loading.pages < store.figures.loading.of_about
        with pytest.raises(Busy) as busy:
            await put(store, space, CONTEXTS[-1], b"w" * 16)
        assert busy.value.retry_after_ms
        found = [await read(store, space, context) for context in CONTEXTS]
        assert max(found) > 0
        assert await store.create_namespace(settings_named()) is space
        fresh = await store.create_namespace(NamespaceSettings("default", "fresh", "third model", SPEC))
        await put(store, fresh, (1, 2), b"v" * 16, Ack.DURABLE)
        await store.loaded.wait()
        assert store.figures.loading is None
        for name in ("ns", "other"):
            assert [await read(store, store.space("default", name), context) for context in CONTEXTS] == [4] * len(CONTEXTS)
        result = await put(store, space, CONTEXTS[3], b"w" * 16)
        assert (result.new_pages, result.existing_pages) == (0, 4)
        await store.settle()
        check(store)


@pytest.mark.parametrize("name", ["ns", "other"])
async def test_a_namespace_dropped_while_it_loads_leaves_nothing(data_dir: Path, name: str) -> None:
    async with opened(data_dir) as store:
        space = await until_some_pages(store)
        for context in CONTEXTS[:10]:
            await read(store, space, context)  # some of it comes to DRAM
        await store.drop_namespace(store.space("default", name))
        await store.loaded.wait()
        await store.settle()
        check(store)
        with pytest.raises(UnknownNamespace):
            store.space("default", name)
        kept = store.space("default", "other" if name == "ns" else "ns")
        assert [await read(store, kept, context) for context in CONTEXTS] == [4] * len(CONTEXTS)
        again = await store.create_namespace(settings_named() if name == "ns" else OTHER)
        assert await read(store, again, CONTEXTS[0]) == 0


async def test_a_stop_while_loading_loses_nothing(data_dir: Path) -> None:
    for turns in (0, 1, 5, 30):
        async with opened(data_dir) as store:
            for _ in range(turns):
                await asyncio.sleep(0)
    async with Store(config(data_dir, ssd_bytes=8 << 20)) as store:
        for name in ("ns", "other"):
            assert [await read(store, store.space("default", name), context) for context in CONTEXTS] == [4] * len(CONTEXTS)
        check(store)


async def test_a_blob_found_lost_while_loading_takes_all_its_pages(data_dir: Path) -> None:
    async with opened(data_dir) as store:
        space = await until_some_pages(store)
        slot = int(space.tree.live_slots()[0])
        key, row = space.tree.pages.key_bytes(slot), space.rows_of(slot)[0]
        store.blob_file.drop_namespace(space.number)
        with pytest.raises(NotFound):
            await store.reading.hold(space, row)
        await store.loaded.wait()
        assert space.tree.pages.find_key(key) < 0
        await store.settle()
        check(store)
    async with Store(config(data_dir, ssd_bytes=8 << 20)) as store:
        assert store.space("default", "ns").tree.pages.find_key(key) < 0, "its record was kept"


async def test_a_smaller_page_table_keeps_the_rest_for_later(data_dir: Path) -> None:
    async with Store(config(data_dir, ssd_bytes=8 << 20, max_pages=30)) as store:
        assert store.space("default", "ns").tree.page_count == 20  # of three blobs each, in a table of 60
        await store.settle()
    async with Store(config(data_dir, ssd_bytes=8 << 20)) as store:
        assert [await read(store, store.space("default", "ns"), context) for context in CONTEXTS] == [4] * len(CONTEXTS)


async def test_a_journal_found_damaged_while_loading(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB gives up on the second namespace; the first has been loaded, and salvage can't read all of its records."""
    scan, salvage = Journal.scan, Journal.salvage
    damaged = True

    def scan_until_damage(self: Journal, number: int, *arguments: object) -> RecordBatch:
        if damaged and number == 2:
            raise lmdb.CorruptedError("for this test")
        return scan(self, number, *arguments)  # type: ignore[arg-type]

    def salvage_with_loss(self: Journal) -> None:
        nonlocal damaged
        damaged = False
        salvage(self)
        keys = [key.tobytes() for group in self.load(1, settings_named().digest, 48)[0] for key in group.keys]
        self.delete_raw(1, keys[::3])

    monkeypatch.setattr(Journal, "scan", scan_until_damage)
    monkeypatch.setattr(Journal, "salvage", salvage_with_loss)
    async with Store(config(data_dir, ssd_bytes=8 << 20)) as store:
        assert store.stats.corrupt_records == 1
        for name in ("ns", "other"):
            assert [await read(store, store.space("default", name), context) for context in CONTEXTS] == [4] * len(CONTEXTS)
        shutil.copytree(data_dir, tmp_path / "copy")
    async with Store(config(tmp_path / "copy", ssd_bytes=8 << 20)) as store:
        assert store.stats.corrupt_records == 0
        for name in ("ns", "other"):
            space = store.space("default", name)
            assert [store.match(space, tokens_of(context), {}).pages for context in CONTEXTS] == [4] * len(CONTEXTS)


async def test_a_load_that_dies_loses_nothing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not read must not be taken for what nobody names, and be swept."""

    def die(*_: object) -> None:
        raise RuntimeError("a bug in loading")

    with monkeypatch.context() as patched:
        patched.setattr(load_plan, "plan_load", die)
        patched.setattr("kvstore.store.ssd.recovery.plan_load", die, raising=False)
        async with Store(config(data_dir, ssd_bytes=8 << 20, serve_while_loading=True)) as store:
            await store.died.wait()
            await asyncio.sleep(0.2)
    async with Store(config(data_dir, ssd_bytes=8 << 20)) as store:
        for name in ("ns", "other"):
            assert [await read(store, store.space("default", name), context) for context in CONTEXTS] == [4] * len(CONTEXTS)
