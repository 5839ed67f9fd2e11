"""The SSD tier: blobs in LMDB, cut into extents of one size, so that freed pages are reused without growth.

Blocking: call from an executor thread; writes from one thread only. No read transaction outlives a call. A batch is
durable when `commit` returns. LMDB has no checksums: what is read is verified against the blob id before it is given out.
"""

import errno
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import lmdb

from kvstore.errors import Busy, Corrupt, NotFound
from kvstore.kvspec import SliceLayout
from kvstore.lmdb_files import (
    DATA_FILE,
    STRUCTURAL,
    Gate,
    check_order,
    mark_damaged,
    no_room,
    open_environment,
    open_readonly,
    probe,
    writing,
)
from kvstore.lmdb_find import Damaged, Overtaken, Place, find_values
from kvstore.threads import started_pool
from kvstore.tiers import Usage
from kvstore.tiers.extents import PAGE_HEADER, ExtentFile, check_extent, check_unopened
from kvstore.tiers.stored import pieces_to_read, verify_slices, verify_table
from kvstore.tiers.together import Together

_KEY = struct.Struct(">I16sH")
_PROBE_NUMBER = 0xFFFFFFFF
"""The namespace of what is written to see whether writing works; no namespace has it, so a rest is swept at the next start."""
_MOST_TRIES = 100
_KEYS_AT_ONCE = (1 << 16) + 1
"""Looked at by one transaction: no blob has so many extents."""

_PARTNERS = 2
"""Threads that help those who read a large blob."""

DEFAULT_EXTENT_BYTES = (68 << 10) - PAGE_HEADER
"""A little over 64 KiB, so that a blob whose payload is a power of two finds room for its digests in the last extent."""

_ROOM_BYTES = 256 << 20
"""And a tenth of the tier: what the file may have beside it, for what is freed and can't be written over yet."""
_STEP_BYTES = 16 << 20
"""Written at a time where a whole batch has no room."""
_STEP_TRIES = 10
_STEP_WAIT_S = 0.05

Arrived = Callable[[int], object]

_NOT_THE_DISK = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
"""They say nothing of the blob."""


class Unreadable(Corrupt):
    """The disk gave an error where the blob lies; it may give the bytes another time."""


@dataclass(slots=True)
class BlobBatch:
    """Changes to commit together; deletions come first. Blobs are named by (namespace number, blob id)."""

    delete: list[tuple[int, bytes, int]] = field(default_factory=list)
    """(namespace number, blob id, stored bytes)."""
    put: list[tuple[int, bytes, memoryview]] = field(default_factory=list)
    """(namespace number, blob id, stored form)."""

    def __bool__(self) -> bool:
        return bool(self.delete or self.put)


class BlobFile:
    """One LMDB environment of extents. `capacity` bounds the bytes of extents; the file may be a tenth and 256 MiB larger."""

    def __init__(self, path: Path, capacity: int, extent_bytes: int = DEFAULT_EXTENT_BYTES) -> None:
        check_unopened(path, extent_bytes)
        self._path = path
        self._readonly = False
        self.capacity = capacity
        self.extent_bytes = extent_bytes
        self._map_bytes = capacity + capacity // 10 + _ROOM_BYTES
        self._gate = Gate()
        self._partners = started_pool(_PARTNERS, "kvstore-reader-2nd")
        try:
            self._open()
        except BaseException:
            self._partners.shutdown(wait=False)
            raise

    def _open(self) -> None:
        self._env = open_environment(self._path, self._map_bytes, entry_bytes=self.extent_bytes, max_spare_txns=8, max_readers=126)
        check_extent(self._env, self._path, self.extent_bytes)
        self._extents: int = self._env.stat()["entries"]
        self._file = ExtentFile(self._path / DATA_FILE, self.extent_bytes)
        self._page_bytes: int = self._env.stat()["psize"]

    @classmethod
    def readonly(cls, path: Path) -> "BlobFile":
        """The file as it is, for reading only: nothing of it is changed, locked or mended."""
        file = cls.__new__(cls)
        file._path, file._readonly, file._gate, file._env = path, True, Gate(), open_readonly(path)
        file._page_bytes = file._env.stat()["psize"]
        with file._env.begin() as txn, txn.cursor() as cursor:
            file.extent_bytes = len(cursor.value()) if cursor.first() else DEFAULT_EXTENT_BYTES
        file._file = ExtentFile(path / DATA_FILE, file.extent_bytes)
        file._partners = started_pool(_PARTNERS, "kvstore-reader-2nd")
        file._extents = file._env.stat()["entries"]
        file.capacity = file._extents * file.extent_bytes
        return file

    def close(self) -> None:
        """Close the environment."""
        self._partners.shutdown()
        self._close_files()

    def _close_files(self) -> None:
        self._env.close()
        self._file.close()

    def probe(self, nbytes: int) -> None:
        """See whether the disk takes about `nbytes` (see lmdb_files.probe). Raises lmdb.Error or OSError."""
        extents = max(1, self._extent_count(nbytes))
        keys = [_KEY.pack(_PROBE_NUMBER, bytes(16), extent) for extent in range(min(extents, 1 << 16))]
        probe(self._env, self._path, keys, lambda: os.urandom(16).ljust(self.extent_bytes, b"p"), self._open_anew)

    def _open_anew(self) -> lmdb.Environment:
        with self._gate.alone():
            self._close_files()
            self._open()
        return self._env

    def mark_damaged(self) -> None:
        """Have it salvaged when it is opened next."""
        mark_damaged(self._path)

    def no_room(self) -> bool:
        """Whether its file can't grow."""
        return no_room(self._path)

    def usage(self) -> Usage:
        """Capacity, and the bytes of all extents."""
        return Usage(self.capacity, self._extents * self.extent_bytes)

    def footprint(self, stored: int) -> int:
        """Bytes that a blob of `stored` bytes takes up."""
        return self._extent_count(stored) * self.extent_bytes

    def _extent_count(self, stored: int) -> int:
        return -(-stored // self.extent_bytes)

    def commit(self, batch: BlobBatch) -> None:
        """Apply a batch; it is durable when this returns. Raises lmdb.Error or OSError: of a large batch, a part may be done then."""
        try:
            self._commit_at_once(batch)
        except lmdb.MapFullError:
            self._commit_step_by_step(batch)

    def _commit_at_once(self, batch: BlobBatch) -> None:
        with writing(self._env, self._path) as txn:
            self._apply(txn, batch)
        self._extents = self._env.stat()["entries"]

    def _commit_step_by_step(self, batch: BlobBatch) -> None:
        """Deletions first, then what is put, a little at a time.

        What a transaction frees can be written over only by the next but one, and a page comes with all its ancestors: a batch may be
        larger than the room that the file has beside the tier. It takes what the batches before it freed, and then what it frees itself.
        """
        self._commit_at_once(BlobBatch(delete=batch.delete))
        step = BlobBatch()
        nbytes = 0
        for one in batch.put:
            step.put.append(one)
            nbytes += len(one[2])
            if nbytes >= _STEP_BYTES:
                self._commit_patiently(step)
                step, nbytes = BlobBatch(), 0
        if step:
            self._commit_patiently(step)

    def _commit_patiently(self, batch: BlobBatch) -> None:
        """Who reads keeps what was freed since from being written over: for as long as a blob takes."""
        for _ in range(_STEP_TRIES):
            try:
                return self._commit_at_once(batch)
            except lmdb.MapFullError:
                time.sleep(_STEP_WAIT_S)
        return self._commit_at_once(batch)

    def _apply(self, txn: lmdb.Transaction, batch: BlobBatch) -> None:
        for number, blob, stored in batch.delete:
            for extent in range(self._extent_count(stored)):
                txn.delete(_KEY.pack(number, blob, extent))
        for number, blob, data in batch.put:
            for extent, offset in enumerate(range(0, len(data), self.extent_bytes)):
                piece: memoryview | bytes = data[offset : offset + self.extent_bytes]
                if len(piece) < self.extent_bytes:
                    piece = bytes(piece).ljust(self.extent_bytes, b"\0")
                txn.put(_KEY.pack(number, blob, extent), piece)

    def read(
        self, number: int, blob: bytes, layout: SliceLayout, target: memoryview, *, uncached: bool = False, arrived: Arrived | None = None
    ) -> None:
        """Copy a blob's stored form into `target` and verify all of it: its end and digest table first, then its slices, in order.

        `arrived` is told, about every two MiB until the end, how many slices are there and verified. With `uncached`, the disk is asked
        and not the page cache, as far as the system allows. Raises NotFound if an extent is missing, Corrupt if the bytes are not the
        blob's, Unreadable if the disk gives an error, Busy if the system has no memory or descriptors for it now.
        """
        try:
            with self._gate.shared():
                self._fill(number, blob, layout, target, arrived, uncached=uncached)
        except (lmdb.Error, Damaged) as error:
            if isinstance(error, (*STRUCTURAL, Damaged)) and not self._readonly:
                mark_damaged(self._path)
            raise Corrupt(f"blob {blob.hex()} can't be read: {error}") from error
        except OSError as error:
            if error.errno in _NOT_THE_DISK:
                raise Busy(f"blob {blob.hex()} can't be read now: {error}", retry_after_ms=1000) from error
            raise Unreadable(f"blob {blob.hex()} can't be read: {error}") from error

    def _fill(self, number: int, blob: bytes, layout: SliceLayout, out: memoryview, arrived: Arrived | None, *, uncached: bool) -> None:
        """Not through LMDB's map: an I/O error is an error then, not the end of the process."""
        for _ in range(_MOST_TRIES):
            with self._env.begin() as txn:  # until it ends, what is in the file stays as it is
                try:
                    places = find_values(self._file.fd, txn.id(), _KEY.pack(number, blob, 0)[:-2], self._page_bytes)
                except Overtaken:  # there were two commits since it began
                    continue
                self._check_places(number, blob, len(out), places)
                self._fill_from(places, blob, layout, out, arrived, uncached=uncached)
                return
        raise Unreadable(f"blob {blob.hex()}: {_MOST_TRIES} times the file was written to twice while it was looked for")

    def _fill_from(
        self, places: list[Place], blob: bytes, layout: SliceLayout, out: memoryview, arrived: Arrived | None, *, uncached: bool
    ) -> None:  # fmt: skip
        pieces = pieces_to_read(layout, len(out))
        table_tried, table_good = threading.Event(), False

        def read_end() -> None:
            nonlocal table_good
            try:
                self._file.read(places, pieces[0].start, pieces[0].end, out, uncached=uncached)
                verify_table(blob, layout, out)
                table_good = True
            finally:
                table_tried.set()

        def read(number: int) -> None:
            piece = pieces[number]
            if number:
                self._file.read(places, piece.start, piece.end, out, uncached=uncached)
                table_tried.wait()  # it was begun before, so somebody reads it
            else:
                read_end()
            if table_good:  # else there is an error already
                verify_slices(blob, layout, out, piece.first, piece.last)

        def upto(count: int) -> None:
            if arrived is not None and 1 < count < len(pieces):
                arrived(pieces[count - 1].last)

        Together(len(pieces), read, upto).run(self._partners)

    def _check_places(self, number: int, blob: bytes, nbytes: int, places: list[Place]) -> None:
        """Raise NotFound unless all extents of a blob were found, Corrupt if one is too short."""
        for extent, offset in enumerate(range(0, nbytes, self.extent_bytes)):
            if extent >= len(places) or places[extent].key != _KEY.pack(number, blob, extent):
                raise NotFound(f"blob {blob.hex()} is not on SSD")
            if places[extent].nbytes < min(self.extent_bytes, nbytes - offset):
                raise Corrupt(f"blob {blob.hex()}: extent {extent} on SSD is cut short")

    def stored_blobs(self, number: int, after: bytes = b"", limit: int = 1 << 62) -> list[tuple[bytes, int]]:
        """The next (blob id, extents) of a namespace as the file has them, in order of id, behind the id `after`. Raises lmdb.Error.

        Only LMDB's index is read: a cursor of its own looks at the first page of each extent, a read of the disk each.
        """
        found: list[tuple[bytes, int]] = []
        try:
            with self._gate.shared():
                while len(found) < limit and (some := self._next_blobs(number, found[-1][0] if found else after)):
                    found += some
        except Damaged as error:
            raise lmdb.CorruptedError(f"the blobs of namespace {number} can't be looked through: {error}") from error
        except OSError as error:
            raise lmdb.DiskError(f"the blobs of namespace {number} can't be looked through: {error}") from error
        return found[:limit]

    def _next_blobs(self, number: int, after: bytes) -> list[tuple[bytes, int]]:
        """Some of the next blobs and their extents; none if there are none."""
        prefix = number.to_bytes(4, "big")
        start = prefix + after + b"\xff\xff\xff" if after else prefix
        for _ in range(_MOST_TRIES):
            with self._env.begin() as txn:
                try:
                    places = find_values(self._file.fd, txn.id(), prefix, self._page_bytes, start=start, most=_KEYS_AT_ONCE)
                    break
                except Overtaken:  # there were two commits since it began
                    continue
        else:
            raise Damaged(f"{_MOST_TRIES} times the file was written to twice while it was begun")
        extents = Counter(place.key[4:20] for place in places)
        for before, blob in pairwise([after, *extents]):
            check_order(blob, before + b"\0")
        if len(places) == _KEYS_AT_ONCE:
            extents.popitem()  # the rest of it may be still to come
        return list(extents.items())

    def namespace_numbers(self) -> list[int]:
        """The namespace numbers that have extents in the file."""
        numbers = []
        with self._gate.shared(), self._env.begin() as txn, txn.cursor() as cursor:
            start = b""
            while cursor.set_range(start):
                numbers.append(int.from_bytes(check_order(cursor.key(), start)[:4], "big"))
                if numbers[-1] == 0xFFFFFFFF:
                    break
                start = (numbers[-1] + 1).to_bytes(4, "big")
        return numbers

    def drop_namespace(self, number: int, batch: int = 4096) -> None:
        """Delete all extents of a namespace, in bounded transactions."""
        prefix = number.to_bytes(4, "big")
        more = True
        while more:
            deleted = 0
            with writing(self._env, self._path) as txn, txn.cursor() as cursor:
                more = cursor.set_range(prefix) and cursor.key()[:4] == prefix
                while more and deleted < batch:
                    deleted += cursor.delete()
                    more = cursor.key()[:4] == prefix
            self._extents = self._env.stat()["entries"]
