"""Data directories of format 1, made of today's as the version before wrote them; and migrations that are killed."""

import json
import os
import shutil
import signal
import struct
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb

from kvstore.radix.journal import Journal
from kvstore.store.migrating import migrate as migrating
from kvstore.store.stopped import load_stopped, rows_by_id
from kvstore.tiers.blobs import stored_bytes
from kvstore.tiers.ssd import BlobFile

EXTENT_BYTES = 69_616
SMALLEST, LARGEST = 4_080, 1_048_560
MOST_STEPS = 200
_KEY = struct.Struct(">I16sH")


def to_format1(data_dir: Path, extent_bytes: int = EXTENT_BYTES) -> None:
    """Write the blobs of a stopped store as format 1 had them."""
    entries: list[tuple[bytes, bytes]] = []
    with closing(Journal(data_dir / "journal", readonly=True)) as journal, closing(BlobFile.readonly(data_dir / "blobs")) as blobs:
        for record in journal.namespaces()[0]:
            space = load_stopped(journal, record, journal.page_counts().get(record.number, 0)).space
            for row in rows_by_id(space).tolist():
                name, layout = space.blobs.id_of(row), space.blobs.layout_of(row)
                stored = bytearray(stored_bytes(layout))
                blobs.read(record.number, name, layout, memoryview(stored))
                for extent, at in enumerate(range(0, len(stored), extent_bytes)):
                    value = bytes(stored[at : at + extent_bytes]).ljust(extent_bytes, b"\0")
                    entries.append((_KEY.pack(record.number, name, extent), value))
    shutil.rmtree(data_dir / "blobs")
    (data_dir / "blobs.extents").unlink()
    put_entries(data_dir, entries)
    (data_dir / "format.json").write_text(json.dumps({"format": 1}))


def put_entries(data_dir: Path, entries: list[tuple[bytes, bytes]]) -> None:
    """Into the blobs of format 1."""
    env = lmdb.open(str(data_dir / "blobs"), map_size=1 << 30, mode=0o600, readahead=False)
    with closing(env), env.begin(write=True) as txn:
        for key, value in entries:
            txn.put(key, value)


def format_of(data_dir: Path) -> int:
    number: int = json.loads((data_dir / "format.json").read_bytes())["format"]
    return number


def contents(data_dir: Path) -> dict[str, bytes]:
    """All files, but for those that tell of who had it open."""
    files = [path for path in data_dir.rglob("*") if path.is_file() and path.name not in ("lock", "lock.mdb")]
    return {str(path.relative_to(data_dir)): path.read_bytes() for path in files}


def die_at_every_step(source: str, copies: str) -> None:
    """In a process of its own, without threads: a copy of the directory a step of the migration, killed before that; the last is not."""
    for steps in range(MOST_STEPS):
        copy = Path(copies) / str(steps)
        shutil.copytree(source, copy)
        if not (child := os.fork()):
            _migrate_and_die(copy, steps)
            os._exit(0)
        if not os.waitpid(child, 0)[1]:
            return


def _migrate_and_die(data_dir: Path, steps: int) -> None:
    """Steps are telling how far it is, and changes of folders."""
    left = steps

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, _: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            step()

    migrating._BATCH_BYTES = 24 << 10
    sys.addaudithook(watch)
    migrating.migrate(data_dir, lambda *_: step())
