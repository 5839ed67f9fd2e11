"""Opening LMDB environments, and saving what can be read of one whose structure is damaged.

LMDB has no page checksums. Records verify themselves, but a flipped bit in a branch or meta page makes LMDB itself give up.
Whoever meets that marks the environment; the next one to open it copies what is readable into a fresh file.
"""

import errno
import logging
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from kvstore.errors import DataDirError
from kvstore.folders import sync_folder
from kvstore.lmdb_walk import Walk, read_meta, read_metas

_log = logging.getLogger("kvstore.lmdb")

STRUCTURAL = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.BadTxnError,
    lmdb.CursorFullError, lmdb.PageFullError, lmdb.ProblemError, lmdb.IncompatibleError,
)  # fmt: skip
"""The errors that mean damage, as against a full map or disk, or a write that failed."""

DATA_FILE = "data.mdb"
_MARK = "damaged"
_SALVAGED = ".salvaged"
_BATCH = 1000
_ROOM = 1 << 20
_LOCK_BYTES = 8192
"""Of the file with LMDB's table of 126 readers."""


def open_environment(path: Path, map_bytes: int, *, entry_bytes: int = 1, **options: Any) -> lmdb.Environment:
    """Open the environment in a folder, made if it is not there; one that is marked, or plainly damaged, is salvaged first.

    `entry_bytes` is the least that an entry takes up. Raises DataDirError.
    """
    finish_replacing(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_meta(path, entry_bytes)
    if (path / _MARK).exists():
        salvage(path, map_bytes)
    try:
        env = _open(path, map_bytes, options)
    except STRUCTURAL as error:
        _log.critical("%s can't be opened (%s): it is set aside, and everything in it is lost", path, error)
        fresh = _fresh(path)
        _open(fresh, map_bytes, {}).close()
        _replace(path, fresh)
        env = _open(path, map_bytes, options)
    except lmdb.Error as error:
        raise DataDirError(f"{path} can't be opened: {error}") from error
    env.reader_check()
    return env


def open_readonly(path: Path) -> lmdb.Environment:
    """Open an environment that nobody writes, without changing anything. Raises DataDirError or, for damage, lmdb.Error."""
    file = path / "data.mdb"
    if not file.exists():
        raise DataDirError(f"{file} is missing")
    env = lmdb.open(str(path), readonly=True, lock=False, create=False, readahead=False, max_spare_txns=8)
    used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if file.stat().st_size < used and not Walk(file).is_whole():  # reading on would end the process with SIGBUS
        env.close()
        raise lmdb.CorruptedError(f"{file} has {file.stat().st_size} bytes, its own header says {used}")
    return env


@contextmanager
def writing(env: lmdb.Environment, path: Path) -> Iterator[lmdb.Transaction]:
    """A write transaction of the environment in a folder. Raises lmdb.Error or OSError, nothing done; damage is marked.

    A file that was deleted takes no more: what is in it ends with the process.
    """
    _see_that_it_is_there(path)
    try:
        with env.begin(write=True) as txn:
            yield txn
    except SystemError as error:  # what py-lmdb's cursors make of an error while they delete from a damaged page
        mark_damaged(path)
        raise lmdb.CorruptedError(str(error.__cause__ or error)) from error
    except STRUCTURAL:
        mark_damaged(path)
        raise


def probe(
    env: lmdb.Environment, path: Path, keys: Sequence[bytes], value: Callable[[], bytes], open_anew: Callable[[], lmdb.Environment]
) -> None:
    """Write and delete entries, durably, to see whether the disk takes them. Raises lmdb.Error or OSError.

    An environment that gave up when a write failed is opened anew first.
    """
    _see_that_it_is_there(path)
    try:
        _put(env, keys, value)
    except (lmdb.PanicError, lmdb.BadTxnError):
        env = open_anew()
        _put(env, keys, value)
    with writing(env, path) as txn:
        for key in keys:
            txn.delete(key)


def _see_that_it_is_there(path: Path) -> None:
    if not (path / DATA_FILE).exists():
        raise FileNotFoundError(errno.ENOENT, f"{path / DATA_FILE} was deleted while it was in use")


def _put(env: lmdb.Environment, keys: Sequence[bytes], value: Callable[[], bytes]) -> None:
    with env.begin(write=True) as txn:
        for key in keys:
            txn.put(key, value())


def check_order(key: bytes, start: bytes) -> bytes:
    """A key that a cursor reached from `start` on. One before that would have it walked for ever: raises CorruptedError."""
    if key < start:
        raise lmdb.CorruptedError(f"keys are out of order: {key.hex()} comes after {start.hex()}")
    return key


def is_marked(path: Path) -> bool:
    """Whether the environment in a folder is to be salvaged when it is opened next."""
    return (path / _MARK).exists()


def _open(path: Path, map_bytes: int, options: dict[str, Any]) -> lmdb.Environment:
    path.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(lock, 0, _LOCK_BYTES)  # LMDB leaves a hole, and writes to it through a map: a full disk would be SIGBUS
    finally:
        os.close(lock)
    return lmdb.open(str(path), map_size=map_bytes, mode=0o600, readahead=False, **options)


def _check_meta(path: Path, entry_bytes: int) -> None:
    """Have a data file salvaged that was cut short, has lost a meta page, or says that it holds more than it can.

    Read through a map, what is missing would be the end of the process (SIGBUS); and by such a count the tier would be full for ever.
    Pages at the end that a transaction took and gave back are never written: then nothing is missing, though the file is shorter.
    """
    file = path / DATA_FILE
    size = size_of(file)
    if not size:
        return
    metas = read_metas(file)
    meta = max(metas, key=lambda one: one.transaction, default=None)
    needed = 2 * 4096 if meta is None else max(2, meta.last_page + 1) * meta.page_size
    if size < needed and not (len(metas) == 2 and Walk(file).is_whole()):
        _log.error("%s has %d bytes and should have %d: it was cut short", file, size, needed)
        mark_damaged(path)
    elif len(metas) == 1:
        _log.error("%s: one of its two meta pages can't be read", file)
        mark_damaged(path)
    elif meta is not None and meta.entries * entry_bytes > size:
        _log.error("%s has %d bytes and can't hold the %d entries that it counts", file, size, meta.entries)
        mark_damaged(path)


def size_of(file: Path) -> int:
    """How large a file is; 0 if it is not there."""
    return file.stat().st_size if file.exists() else 0


def entries_of(path: Path) -> int:
    """How many entries the environment in a folder counts, looked up without LMDB; 0 if there is none, or it can't be read."""
    meta = read_meta(path / DATA_FILE) if size_of(path / DATA_FILE) else None
    return 0 if meta is None else meta.entries


def no_room(path: Path, *others: Path) -> bool:
    """Whether the file of the environment in a folder, or another, can't grow.

    LMDB calls a write that was cut short an I/O error, whatever cut it.
    """
    disk = os.statvfs(path.parent)  # whoever deletes the folder is told that
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    grown = max(size_of(file) for file in (path / DATA_FILE, *others)) + _ROOM
    return disk.f_bavail * disk.f_frsize < _ROOM or (limit != resource.RLIM_INFINITY and grown > limit)


class Gate:
    """Many may pass at once, or one alone: an environment is only closed while nobody reads from it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Pass, once nobody wants to be alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until all are out, and keep others from coming in."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


def mark_damaged(path: Path) -> None:
    """Have the environment in a folder salvaged when it is opened next."""
    (path / _MARK).touch(mode=0o600)


def salvage(path: Path, map_bytes: int) -> int:
    """Copy every entry that can be reached into a fresh environment in the folder's place.

    The damaged one is kept beside it, one generation of it. Returns the entries saved.
    """
    fresh = _fresh(path)
    started = time.monotonic()
    walk = Walk(path / DATA_FILE)
    target = _open(fresh, map_bytes, {})
    saved = 0
    try:
        entries = iter(walk)
        while some := list(islice(entries, _BATCH)):
            with target.begin(write=True) as writer:
                for key, value in some:
                    saved += writer.put(key, value, overwrite=False) if len(key) <= target.max_key_size() else 0
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)  # who tries again may need its room
        raise
    finally:
        target.close()
    _replace(path, fresh)
    _log.error("%s was damaged: %d entries were saved, %d pages skipped, in %.1f s", path, saved, walk.skipped, time.monotonic() - started)
    return saved


def finish_replacing(path: Path) -> None:
    """Put the salvaged environment of a folder in its place, if whoever made it was killed when the damaged one was out of it."""
    if not path.exists() and (fresh := path.with_name(path.name + _SALVAGED)).exists():
        fresh.rename(path)
        sync_folder(path.parent)


def _fresh(path: Path) -> Path:
    """Where what is to replace a folder is made; nothing is there."""
    fresh = path.with_name(path.name + _SALVAGED)
    shutil.rmtree(fresh, ignore_errors=True)
    return fresh


def _replace(path: Path, fresh: Path) -> None:
    """Keep a damaged folder beside its place, and put a whole one there."""
    sync_folder(fresh)
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    fresh.rename(path)
    sync_folder(path.parent)
