"""Blobs that no namespace has, looked for after each start: they go, and nothing that comes to be meanwhile goes with them."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.store import Ack, Store
from kvstore.tiers.ssd import BlobBatch, BlobFile
from tests.store.test_store import config, put, read, settings_named
from tests.waiting import until

LEFT = bytes(range(16))
CONTEXT = (1, 2, 3)


class Late:
    """The look for namespaces that have blobs: it is begun only when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        look = BlobFile.namespace_numbers

        def late(blobs: BlobFile) -> list[int]:
            self.reached.set()
            assert self.go_on.wait(30)
            return look(blobs)

        monkeypatch.setattr(BlobFile, "namespace_numbers", late)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    look = Late(monkeypatch)
    yield look
    look.go_on.set()


async def swept(store: Store) -> None:
    """Wait until the sweep of this start is over, and what it threw away is deleted."""
    (sweep,) = (task for task in store._tasks if task.get_name() == "kvstore-sweep")
    await until(sweep.done)
    await store._writeback.emptied()


async def leave_a_blob(data_dir: Path) -> None:
    """As a crash can, of a namespace whose number the next one gets."""
    async with Store(config(data_dir)) as store:
        await swept(store)
        store._files.blobs.commit(BlobBatch(put=[(1, LEFT, memoryview(bytes(5000)))]))


def blobs_of_first(data_dir: Path) -> list[bytes]:
    with closing(BlobFile.readonly(data_dir / "blobs")) as blobs:
        return [blob for blob, _ in blobs.stored_blobs(1)]


async def all_there(data_dir: Path) -> None:
    async with Store(config(data_dir)) as store:
        assert await read(store, store.space("default", "ns"), CONTEXT) == len(CONTEXT)


async def test_what_is_left_of_no_namespace_goes(tmp_path: Path) -> None:
    await leave_a_blob(tmp_path)
    assert blobs_of_first(tmp_path) == [LEFT]
    async with Store(config(tmp_path)) as store:
        await swept(store)
    assert blobs_of_first(tmp_path) == []


async def test_a_namespace_that_is_made_while_they_are_looked_for_keeps_its_own(tmp_path: Path, late: Late) -> None:
    async with Store(config(tmp_path)) as store:
        await until(late.reached.is_set)
        await put(store, await store.create_namespace(settings_named()), CONTEXT, b"v" * 16, Ack.DURABLE)
        late.go_on.set()
        await swept(store)
    await all_there(tmp_path)


async def test_a_namespace_of_a_number_whose_blobs_were_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await leave_a_blob(tmp_path)
    late = Late(monkeypatch)
    async with Store(config(tmp_path)) as store:
        await until(late.reached.is_set)
        space = await store.create_namespace(settings_named())
        assert space.number == 1
        await put(store, space, CONTEXT, b"v" * 16, Ack.DURABLE)
        late.go_on.set()
        await swept(store)
    assert LEFT not in blobs_of_first(tmp_path)
    await all_there(tmp_path)
