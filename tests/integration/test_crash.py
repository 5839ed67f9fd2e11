"""What a power cut leaves, and the load for kill -9 and flipped bits, which are in tests/faults."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.radix.journal import Journal
from kvstore.store import Ack, Store
from kvstore.store.checking.check import check
from kvstore.tiers.ssd import BlobFile
from kvstore_client import Client, ConnectionLost, DeadlineExceeded
from tests.integration.pages import content, context, fetch_checked, open_namespace
from tests.store.test_store import Prefix, config, put, read, settings_named

SIZES = ("--dram", "4MiB", "--ssd", "1GiB")


class Load(threading.Thread):
    """A client that puts contexts, every second one durably, and checks what it fetches, until the daemon dies."""

    def __init__(self, endpoint: str, first: int) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._first = first
        self.durable: list[int] = []
        self.done = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with Client(self._endpoint, connections=2, timeout=20, reconnect=0) as client:
                namespace = open_namespace(client)
                for seed in range(self._first, self._first + 100_000):
                    durable = seed % 2 == 0
                    namespace.put(context(seed), content(context(seed)), durable=durable)
                    if durable:
                        self.durable.append(seed)
                    fetch_checked(namespace, context(max(self._first, seed - 3)))
                    self.done += 1
        except (ConnectionLost, DeadlineExceeded):
            pass  # the daemon was killed
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            self.failure = error


class SyncPoints:
    """A shim around the commits of both: each time one returns, the files are copied as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data_dir: Path, copies: Path) -> None:
        self.copies = copies
        self.count = 0
        self.acknowledged: dict[int, set[Prefix]] = {}
        self.promised: set[Prefix] = set()
        self._data_dir = data_dir
        for owner in (Journal, BlobFile):
            monkeypatch.setattr(owner, "commit", self._around(owner.commit))  # the real commit runs, and then the copy

    def _around(self, commit: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def commit_then_copy(owner: Any, batch: Any) -> None:
            commit(owner, batch)
            shutil.copytree(self._data_dir, self.copies / str(self.count))
            self.acknowledged[self.count] = set(self.promised)
            self.count += 1

        return commit_then_copy


async def run_load(data_dir: Path, points: SyncPoints) -> None:
    async with Store(config(data_dir, ssd_bytes=4 << 20)) as store:
        space = await store.create_namespace(settings_named(retention_s=3600))
        for number in range(24):
            prefix = (number // 6, number, number + 1)
            ack = Ack.DURABLE if number % 3 == 0 else Ack.MEMORY
            await put(store, space, prefix, b"v" * 16, ack)
            if ack is Ack.DURABLE:
                points.promised |= {prefix[:n] for n in range(1, 4)}


async def survivors_hold(data_dir: Path, promised: set[Prefix]) -> None:
    async with Store(config(data_dir, ssd_bytes=4 << 20)) as store:
        space = store.space("default", "ns")
        for prefix in promised:
            assert await read(store, space, prefix) == len(prefix), f"{prefix} was acknowledged as durable and is gone"
        await store.settle()
        check(store)


async def test_a_power_cut_at_every_sync_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = SyncPoints(monkeypatch, tmp_path / "live", tmp_path / "copies")
    await run_load(tmp_path / "live", points)
    monkeypatch.undo()
    assert points.count > 10
    assert len(points.acknowledged[points.count - 1]) > 10
    for point in range(points.count):
        # what was acknowledged *when the next point came* was promised by what this one had made durable
        promised = points.acknowledged[point + 1] if point + 1 < points.count else points.promised
        await survivors_hold(points.copies / str(point), promised)


async def test_a_power_cut_in_the_middle_of_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk had written any part of the next commit's pages, in any order, but not the page that makes them count."""
    points = SyncPoints(monkeypatch, tmp_path / "live", tmp_path / "copies")
    await run_load(tmp_path / "live", points)
    monkeypatch.undo()
    rng = np.random.default_rng(3)
    for point in range(points.count - 1):
        torn = tmp_path / "torn"
        shutil.rmtree(torn, ignore_errors=True)
        shutil.copytree(points.copies / str(point), torn)
        for name in ("journal", "blobs"):
            tear(torn / name / "data.mdb", points.copies / str(point + 1) / name / "data.mdb", rng)
        tear(torn / "blobs.extents", points.copies / str(point + 1) / "blobs.extents", rng, meta_pages=0)
        await survivors_hold(torn, points.acknowledged[point + 1])


def tear(old: Path, new: Path, rng: np.random.Generator, page: int = 4096, meta_pages: int = 2) -> None:
    """Write a random half of the changed pages of the new file into the old one, its meta pages left as they were."""
    before, after = old.read_bytes(), new.read_bytes()
    before = before.ljust(len(after), b"\0")
    out = bytearray(before)
    for at in range(meta_pages * page, len(after), page):
        if before[at : at + page] != after[at : at + page] and rng.random() < 0.5:
            out[at : at + page] = after[at : at + page]
    old.write_bytes(out)
