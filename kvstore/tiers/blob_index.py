"""The index of the SSD tier, in LMDB: where in the file of extents each blob lies (see extent_record.py).

Blocking: call from an executor thread; writes from one thread only. No read transaction outlives a call. What is written is durable
when the call returns.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.lmdb_files import (
    DATA_FILE,
    STRUCTURAL,
    check_order,
    mark_damaged,
    open_environment,
    open_readonly,
    probe,
    writing,
)
from kvstore.lmdb_find import Entry, Overtaken, find_entries
from kvstore.tiers.extent_record import KEY_BYTES, ONE_EXTENT, begins_of, blob_key, decode_record, encode_record
from kvstore.tiers.free_space import Blocks, Extent
from kvstore.tiers.overlaps import Claim, losers, shared_blocks

_log = logging.getLogger("kvstore.ssd")

_PROBE_KEY = blob_key(0xFFFFFFFF, bytes(16))
"""Of what is written to see whether writing works. No namespace has that number, so a rest is swept at the next start."""
_MOST_TRIES = 100
_AT_ONCE = 1 << 16
"""Entries looked at by one transaction, or in one go."""
_DELETED_AT_ONCE = 10_000
"""By one transaction: it has a bound on the pages that it changes."""
_NO_COMMIT = 1 << 63
"""A commit's number is less: they are numbered by nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Used:
    """The extents of all blobs, a row (first block, blocks) each, and the number of the last commit."""

    extents: Blocks
    last_commit: int

    @property
    def blocks(self) -> int:
        """How many blocks they are."""
        return int(self.extents[:, 1].sum())


@dataclass(slots=True)
class IndexBatch:
    """Changes to commit together, deletions first. Blobs are named by (namespace number, blob id)."""

    delete: list[tuple[int, bytes]] = field(default_factory=list)
    put: list[tuple[int, bytes, Sequence[Extent]]] = field(default_factory=list)


class BlobIndex:
    """One LMDB environment. `map_bytes` bounds its file. Read-only, nothing of it is changed, locked or mended."""

    def __init__(self, path: Path, map_bytes: int = 0, *, readonly: bool = False) -> None:
        self._path = path
        self._map_bytes = map_bytes
        self._readonly = readonly
        self._open()

    def _open(self) -> None:
        if self._readonly:
            self._env = open_readonly(self._path)
        else:
            self._env = open_environment(self._path, self._map_bytes, entry_bytes=KEY_BYTES, max_spare_txns=8, max_readers=126)
        self._page_bytes: int = self._env.stat()["psize"]
        self._fd = os.open(self._path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the environment."""
        os.close(self._fd)
        self._env.close()

    def open_anew(self) -> lmdb.Environment:
        """After a write has failed for good; nobody else uses it meanwhile."""
        self.close()
        self._open()
        return self._env

    # --- looking up ----------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> bytes | None:
        """The record of a blob. Raises Damaged, OSError, lmdb.Error."""
        found = self._entries(key)
        return found[0].value if found else None

    def next_blobs(self, number: int, after: bytes) -> list[Entry]:
        """Some of the next records of a namespace behind a blob id; none if there are none. Raises Damaged, OSError, lmdb.Error."""
        start = blob_key(number, after) + b"\0" if after else b""
        found = self._entries(number.to_bytes(4, "big"), start)
        for before, entry in zip([start, *(entry.key for entry in found)], found, strict=False):
            check_order(entry.key, before)
        return found

    def _entries(self, prefix: bytes, start: bytes = b"") -> list[Entry]:
        """Not through LMDB's map: an I/O error is an error then, not the end of the process."""
        for _ in range(_MOST_TRIES):
            with self._env.begin() as txn:  # until it ends, what is in the file stays as it is
                try:
                    return find_entries(self._fd, txn.id(), prefix, self._page_bytes, start=start, most=_AT_ONCE)
                except Overtaken:  # there were two commits since it began
                    continue
        raise BlockingIOError(f"{_MOST_TRIES} times the index was written to twice while it was read")

    def count(self) -> int:
        """How many blobs there are, as LMDB counts them."""
        entries: int = self._env.stat()["entries"]
        return entries

    def namespace_numbers(self) -> list[int]:
        """The namespace numbers that have blobs."""
        numbers = []
        with self._env.begin() as txn, txn.cursor() as cursor:
            start = b""
            while cursor.set_range(start):
                numbers.append(int.from_bytes(check_order(cursor.key(), start)[:4], "big"))
                if numbers[-1] == 0xFFFFFFFF:
                    break
                start = (numbers[-1] + 1).to_bytes(4, "big")
        return numbers

    # --- writing -------------------------------------------------------------------------------------------------------

    def commit(self, batch: IndexBatch, number: int) -> list[Extent]:
        """Apply a batch as the commit of this number. Returns the extents that nothing names any more. Raises lmdb.Error or OSError."""
        freed: list[Extent] = []
        with writing(self._env, self._path) as txn:
            for space, blob in batch.delete:
                key = blob_key(space, blob)
                freed += _extents(key, bytes(txn.pop(key) or b""))
            for space, blob, extents in batch.put:
                key = blob_key(space, blob)
                freed += _extents(key, bytes(txn.replace(key, encode_record(key, number, extents)) or b""))
        return freed

    def delete_some(self, number: int, most: int) -> tuple[list[Extent], bool]:
        """Delete some records of a namespace. Returns the extents that nothing names any more, and whether there are more records."""
        prefix, freed, deleted = number.to_bytes(4, "big"), list[Extent](), 0
        with writing(self._env, self._path) as txn, txn.cursor() as cursor:
            more: bool = cursor.set_range(prefix) and cursor.key()[:4] == prefix
            while more and deleted < most:
                freed += _extents(bytes(cursor.key()), bytes(cursor.value()))
                deleted += cursor.delete()
                more = cursor.key()[:4] == prefix
        return freed, more

    def probe(self, open_anew: Callable[[], lmdb.Environment]) -> None:
        """See whether the disk takes a record (see lmdb_files.probe). Raises lmdb.Error or OSError."""
        probe(self._env, self._path, [_PROBE_KEY], bytes, open_anew)

    def mark_damaged(self) -> None:
        """Have it salvaged when it is opened next."""
        if not self._readonly:
            mark_damaged(self._path)

    # --- all of it -----------------------------------------------------------------------------------------------------

    def used(self, file_blocks: int) -> Used:
        """What is used of a file of so many blocks. Records that can't be right are deleted. Raises lmdb.Error or OSError."""
        try:
            return self._used(file_blocks)
        except STRUCTURAL:
            self.mark_damaged()
            self.open_anew()
            return self._used(file_blocks)

    def _used(self, file_blocks: int) -> Used:
        extents, outside, last = self._extents_of_all(file_blocks)
        shared = shared_blocks(extents[:, 0], extents[:, 1]).tolist()
        if shared or outside:
            self._drop_wrong({*shared, *outside}, file_blocks)
            extents, _, last = self._extents_of_all(file_blocks)
        return Used(extents, last)

    def _extents_of_all(self, file_blocks: int) -> tuple[Blocks, list[int], int]:
        """The extents that lie in the file, the first blocks of those that do not, and the number of the last commit."""
        rows = self._rows()
        inside = _inside(rows, file_blocks)
        found, commits = rows[inside], rows["commit"]
        extents = np.stack([found["first"], found["blocks"]], axis=1).astype(np.int64)
        return extents, rows["first"][~inside].tolist(), int(commits[commits < _NO_COMMIT].max(initial=0))

    def _rows(self) -> npt.NDArray[np.void]:
        """Commit, first block and blocks of all extents."""
        parts = [np.zeros(0, ONE_EXTENT)]
        for entries in self._all():
            parts.append(np.frombuffer(b"".join(value for _, value in entries if len(value) == ONE_EXTENT.itemsize), ONE_EXTENT))
            for key, value in entries:
                if len(value) > ONE_EXTENT.itemsize and (record := decode_record(key, value)) is not None:
                    parts.append(np.array([(record.commit, *extent, b"") for extent in record.extents], ONE_EXTENT))
        return np.concatenate(parts)

    def _all(self) -> Iterator[list[tuple[bytes, bytes]]]:
        last = b""
        with self._env.begin() as txn, txn.cursor() as cursor:
            entries = cursor.iternext()
            while some := list(islice(entries, _AT_ONCE)):
                keys = [last, *(key for key, _ in some)]
                if not all(map(lt, keys, keys[1:])):  # it would be gone through for ever
                    raise lmdb.CorruptedError("keys are out of order")
                last = keys[-1]
                yield some

    def _drop_wrong(self, begins: set[int], file_blocks: int) -> None:
        """Of the records with extents that begin at these blocks, delete those that have no right to all of theirs."""
        claims: list[Claim] = []
        for entries in self._all():
            for key, value in entries:
                record = decode_record(key, value)
                if not begins.isdisjoint([extent.first for extent in record.extents] if record is not None else begins_of(value)):
                    claims.append(Claim(key, record))
        keys = losers(claims, file_blocks)
        for some in range(0, len(keys), _DELETED_AT_ONCE):
            with writing(self._env, self._path) as txn:
                for key in keys[some : some + _DELETED_AT_ONCE]:
                    txn.delete(key)
        _log.error("%s: %d records named blocks that are not there, or another's: their blobs are lost", self._path, len(keys))


def _inside(rows: npt.NDArray[np.void], file_blocks: int) -> npt.NDArray[np.bool_]:
    """Which extents lie in a file of so many blocks."""
    found: npt.NDArray[np.bool_] = (rows["first"] < file_blocks) & (rows["blocks"] > 0) & (rows["blocks"] <= file_blocks - rows["first"])
    return found


def _extents(key: bytes, value: bytes) -> Sequence[Extent]:
    """What a record named that is gone; nothing if it did not verify: then who knows whose that is. The next start does."""
    record = decode_record(key, value)
    return () if record is None else record.extents
