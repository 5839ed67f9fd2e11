"""Write-behind is bounded: who finds no room waits for a bounded time, and gets `busy`."""

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.errors import Busy
from kvstore.store import Ack, PutResult, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.ssd.backlog import Backlog, WriteRequest
from kvstore.tiers.ssd import BlobBatch, BlobFile
from tests.store.test_store import config, put, read, settings_named


def request(number: int, nbytes: int) -> WriteRequest:
    return WriteRequest(SimpleNamespace(number=1), b"%d" % number, False, nbytes)  # type: ignore[arg-type]


async def test_the_queue_takes_no_more_than_its_bounds() -> None:
    backlog = Backlog(100, max_requests=3)
    backlog.add(request(0, 250))  # larger than the bound, but alone
    assert not backlog.has_room(1)
    with pytest.raises(Busy):
        await backlog.wait_for_room(1, 0.01)
    assert [r.nbytes for r in backlog.take(1)] == [250]
    for number in range(3):
        assert backlog.has_room(10)
        backlog.add(request(number, 10))
    assert not backlog.has_room(0)
    waiting = asyncio.create_task(backlog.wait_for_room(10, 10))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(backlog.take(20)) == 2
    await waiting
    assert (len(backlog), backlog.nbytes) == (1, 10)
    assert 0 <= backlog.smoothed_bytes < 250


async def test_durable_puts_on_a_slow_disk_wait_and_then_get_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, commit = threading.Event(), BlobFile.commit

    def slow(self: BlobFile, batch: BlobBatch) -> None:
        go_on.wait()
        commit(self, batch)

    async with Store(config(tmp_path / "d", dram_bytes=4 << 20, ssd_bytes=4 << 20, batch_bytes=20_000, durable_wait_s=0.3)) as store:
        space = await store.create_namespace(settings_named())
        monkeypatch.setattr(BlobFile, "commit", slow)
        try:
            assert all(isinstance(outcome, Busy) for outcome in await durable(store, space, range(40)))
            assert store.figures.backlog.nbytes <= store.figures.backlog.max_bytes == 80_000
            assert [await read(store, space, (number,)) for number in range(40)] == [1] * 40, "they are in DRAM all the same"
        finally:
            go_on.set()
        monkeypatch.setattr(store._writeback, "_wait_s", 60.0)  # any disk is fast enough for that
        assert await durable(store, space, range(40)) == [PutResult(0, 1)] * 40, "they are put again, as a client does after `busy`"
        await store.settle()
        check(store)


async def test_who_asks_again_joins_what_waits_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client does after `busy`: the backlog does not fill with the same pages."""
    go_on, commit = threading.Event(), BlobFile.commit

    def slow(self: BlobFile, batch: BlobBatch) -> None:
        go_on.wait()
        commit(self, batch)

    async with Store(config(tmp_path / "d", dram_bytes=4 << 20, ssd_bytes=4 << 20, durable_wait_s=0.1)) as store:
        space = await store.create_namespace(settings_named())
        monkeypatch.setattr(BlobFile, "commit", slow)
        try:
            for _ in range(5):
                assert all(isinstance(outcome, Busy) for outcome in await durable(store, space, range(6)))
            assert 0 < len(store.figures.backlog) <= 6
            monkeypatch.setattr(store._writeback, "_wait_s", 60.0)
            together = asyncio.create_task(durable(store, space, range(6)))
            await asyncio.sleep(0.05)
            assert 0 < len(store.figures.backlog) <= 6
            given_up = asyncio.create_task(durable(store, space, range(6)))
            await asyncio.sleep(0.05)
            given_up.cancel()  # the others go on waiting
        finally:
            go_on.set()
        assert await together == [PutResult(0, 1)] * 6
        check(store)


async def test_who_gives_up_is_forgotten() -> None:
    """However often a page is asked for and given up while the disk hangs, what waits stays small."""
    waits = request(0, 10)
    stays = waits.join()
    for _ in range(1000):
        waits.join().cancel()
    assert len(waits.waiting) <= 2
    waits.answer(True)
    assert await stays


async def durable(store: Store, space: Space, numbers: Iterable[int]) -> list[PutResult | BaseException]:
    """Put pages, all at once, as durable; how each ended."""
    puts = [put(store, space, (number,), b"v" * 16, Ack.DURABLE) for number in numbers]
    return await asyncio.gather(*puts, return_exceptions=True)
