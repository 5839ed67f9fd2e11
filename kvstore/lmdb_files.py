"""Opening LMDB environments, and saving what can be read of one whose structure is damaged.

LMDB has no page checksums. Records verify themselves, but a flipped bit in a branch or meta page makes LMDB itself give up.
Whoever meets that marks the environment; the next one to open it copies what is readable into a fresh file.
"""

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import lmdb

from kvstore.errors import DataDirError

_log = logging.getLogger("kvstore.lmdb")

STRUCTURAL = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.BadTxnError, lmdb.CursorFullError)
"""The errors that mean damage, as against a full map or disk."""

_MARK = "damaged"
_BATCH = 10_000


def open_environment(path: Path, map_bytes: int, **options: Any) -> lmdb.Environment:
    """Open the environment in a folder, made if it is not there; a marked one is salvaged first. Raises DataDirError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (path / _MARK).exists():
        salvage(path, map_bytes)
    try:
        env = _open(path, map_bytes, options)
    except STRUCTURAL as error:
        _log.critical("%s can't be opened (%s): it is set aside, and everything in it is lost", path, error)
        _set_aside(path)
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
    if file.stat().st_size < used:  # reading on would end the process with SIGBUS
        env.close()
        raise lmdb.CorruptedError(f"{file} has {file.stat().st_size} bytes, its own header says {used}")
    return env


def is_marked(path: Path) -> bool:
    """Whether the environment in a folder is to be salvaged when it is opened next."""
    return (path / _MARK).exists()


def _open(path: Path, map_bytes: int, options: dict[str, Any]) -> lmdb.Environment:
    path.mkdir(mode=0o700, exist_ok=True)
    return lmdb.open(str(path), map_size=map_bytes, mode=0o600, readahead=False, **options)


def mark_damaged(path: Path) -> None:
    """Have the environment in a folder salvaged when it is opened next."""
    (path / _MARK).touch(mode=0o600)


def salvage(path: Path, map_bytes: int) -> int:
    """Copy every entry that can be reached, from both ends, into a fresh environment in the folder's place.

    The damaged one is kept beside it, one generation of it. Returns the entries saved.
    """
    fresh = path.with_name(path.name + ".salvaged")
    shutil.rmtree(fresh, ignore_errors=True)
    started = time.monotonic()
    source = lmdb.open(str(path), map_size=map_bytes, readonly=True, lock=False, readahead=False)
    target = _open(fresh, map_bytes, {})
    saved = 0
    try:
        for forward in (True, False):
            saved += _copy(source, target, forward=forward)
    finally:
        source.close()
        target.close()
    _set_aside(path)
    fresh.rename(path)
    _log.error("%s was damaged: %d entries were saved in %.1f s", path, saved, time.monotonic() - started)
    return saved


def _copy(source: lmdb.Environment, target: lmdb.Environment, *, forward: bool) -> int:
    """Copy entries from one end until something can't be read, or is there already."""
    saved = 0
    with source.begin(buffers=False) as reader, reader.cursor() as cursor:
        step = cursor.next if forward else cursor.prev
        try:
            more = cursor.first() if forward else cursor.last()
            while more:
                with target.begin(write=True) as writer:
                    for _ in range(_BATCH):
                        if not writer.put(bytes(cursor.key()), bytes(cursor.value()), overwrite=False):
                            return saved  # the two directions have met
                        saved += 1
                        if not (more := step()):
                            break
        except lmdb.Error as error:
            _log.warning("reading %s ended at a damaged page: %s", "forward" if forward else "backward", error)
    return saved


def _set_aside(path: Path) -> None:
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
