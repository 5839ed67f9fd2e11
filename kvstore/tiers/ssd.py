"""The SSD tier: blobs in the extents of a file, found by an index in LMDB beside it.

Blocking: call from an executor thread; writes from one thread only. A blob's bytes are on the disk before the record that names them, and a
batch is durable when `commit` returns. Nothing on disk is trusted: what is read is verified against the blob id before it is given out.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from kvstore.errors import Busy, Corrupt, DataDirError, NotFound
from kvstore.kvspec import SliceLayout
from kvstore.lmdb_files import DATA_FILE, STRUCTURAL, Gate, finish_replacing, no_room, size_of
from kvstore.lmdb_find import Damaged
from kvstore.threads import started_pool
from kvstore.tiers import Usage
from kvstore.tiers.blob_index import BlobIndex, IndexBatch
from kvstore.tiers.blobs import stored_bytes
from kvstore.tiers.blocks import Blocks
from kvstore.tiers.extent_file import BLOCK_BYTES, ExtentFile, blocks_for
from kvstore.tiers.extent_record import blob_key, blob_of, decode_record
from kvstore.tiers.free_space import Extent, FreeSpace
from kvstore.tiers.stored import pieces_to_read, verify_slices, verify_table
from kvstore.tiers.together import Together

_PARTNERS = 2
"""Threads that help those who read a large blob."""

_ROOM_BYTES = 256 << 20
"""And a tenth of the tier: what the file may have beside it, for what is freed and can't be written over yet."""
_INDEX_SHARE, _INDEX_ROOM_BYTES = 16, 256 << 20
"""The index may have this part of the tier, and so many bytes: a record takes some 64 to 130 bytes, a blob a block or more."""
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


def extents_beside(path: Path) -> Path:
    """The file of extents that belongs to the index in a folder. Beside it: the folder goes when the index is salvaged."""
    return path.with_name(path.name + ".extents")


class BlobFile:
    """`capacity` bounds the bytes of blobs, in whole blocks; the file may be a tenth and 256 MiB larger. Its index is the folder `path`."""

    def __init__(self, path: Path, capacity: int) -> None:
        self._path = path
        self.capacity = capacity
        self._limit = blocks_for(capacity + capacity // 10 + _ROOM_BYTES)
        self._gate = Gate()
        _see_that_the_index_is_there(path)
        with contextlib.ExitStack() as opened:
            self._index = opened.enter_context(contextlib.closing(BlobIndex(path, capacity // _INDEX_SHARE + _INDEX_ROOM_BYTES)))
            if not size_of(extents_beside(path)) and (blobs := self._index.count()):
                raise DataDirError(
                    f"{extents_beside(path)} is missing or empty, in which the index in {path} names {blobs} blobs: put it back, "
                    f"or delete {path} to start without them"
                )
            self._extents = opened.enter_context(contextlib.closing(ExtentFile(extents_beside(path))))
            self._look_through()
            self._partners = started_pool(_PARTNERS, "kvstore-reader-2nd")
            opened.pop_all()

    def _look_through(self) -> None:
        used = self._index.used(blocks_for(self._extents.nbytes))
        self._used = used.blocks
        self._last_commit = used.last_commit
        self._blocks = Blocks(FreeSpace(self._limit, used.extents))

    @classmethod
    def readonly(cls, path: Path) -> "BlobFile":
        """The tier as it is, for reading only: nothing of it is changed, locked or mended. Raises DataDirError or lmdb.Error."""
        file = cls.__new__(cls)
        file._path, file._gate, file._index = path, Gate(), BlobIndex(path, readonly=True)
        try:
            file._extents = ExtentFile(extents_beside(path), readonly=True)
        except OSError as error:
            file._index.close()
            raise DataDirError(f"{extents_beside(path)} can't be read: {error}") from error
        file._partners = started_pool(_PARTNERS, "kvstore-reader-2nd")
        file._blocks = Blocks(FreeSpace(0))
        return file

    def close(self) -> None:
        """Close index and file."""
        self._partners.shutdown()
        self._index.close()
        self._extents.close()

    def probe(self, nbytes: int) -> None:
        """See whether the disk takes about `nbytes`: write, and forget, as many. Raises lmdb.Error or OSError."""
        extents = self._allocate([blocks_for(nbytes) or 1])
        try:
            self._extents.write([(extents[0], memoryview(os.urandom(BLOCK_BYTES) * (blocks_for(nbytes) or 1)))])
            self._extents.sync()
        finally:
            self._blocks.give_back(extents[0])
        self._index.probe(self._open_anew)

    def _open_anew(self) -> lmdb.Environment:
        with self._gate.alone():
            env = self._index.open_anew()
            self._look_through()
        return env

    def mark_damaged(self) -> None:
        """Have the index salvaged when it is opened next."""
        self._index.mark_damaged()

    def no_room(self) -> bool:
        """Whether its files can't grow."""
        return no_room(self._path, extents_beside(self._path))

    def usage(self) -> Usage:
        """Capacity, and the bytes that all blobs take up."""
        return Usage(self.capacity, self._used * BLOCK_BYTES)

    def footprint(self, stored: int) -> int:
        """Bytes that a blob of `stored` bytes takes up."""
        return blocks_for(stored) * BLOCK_BYTES

    # --- writing -------------------------------------------------------------------------------------------------------

    def commit(self, batch: BlobBatch) -> None:
        """Apply a batch; it is durable when this returns. Raises lmdb.Error or OSError: of a large batch, a part may be done then."""
        try:
            self._commit_at_once(batch)
        except lmdb.MapFullError:
            self._commit_step_by_step(batch)

    def _allocate(self, counts: Sequence[int]) -> list[list[Extent]]:
        extents = self._blocks.allocate(counts)
        if extents is None:
            raise lmdb.MapFullError(f"there are not {sum(counts)} blocks of the file of extents that can be written to now")
        return extents

    def _commit_at_once(self, batch: BlobBatch) -> None:
        extents = self._allocate([blocks_for(len(data)) for _, _, data in batch.put])
        try:
            if batch.put:
                self._extents.write([(some, data) for some, (_, _, data) in zip(extents, batch.put, strict=True)])
                self._extents.sync()
            changes = IndexBatch([(number, blob) for number, blob, _ in batch.delete])
            changes.put += [(number, blob, some) for some, (number, blob, _) in zip(extents, batch.put, strict=True)]
            self._last_commit = max(self._last_commit + 1, time.time_ns())  # above those of records that a damaged index has lost, too
            freed = self._index.commit(changes, self._last_commit)
        except BaseException:
            for some in extents:
                self._blocks.give_back(some)
            raise
        self._free(freed)
        self._used += sum(extent.blocks for some in extents for extent in some)

    def _free(self, extents: list[Extent]) -> None:
        self._blocks.retire(extents)
        self._used -= sum(extent.blocks for extent in extents)

    def _commit_step_by_step(self, batch: BlobBatch) -> None:
        """Deletions first, then what is put, a little at a time.

        What a batch frees can be written over only once that is durable, and a page comes with all its ancestors: a batch may be larger
        than the room that the file has beside the tier. It takes what is free, and then what it freed itself.
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

    def drop_namespace(self, number: int, batch: int = 4096) -> None:
        """Delete all blobs of a namespace, in bounded transactions."""
        more = True
        while more:
            freed, more = self._index.delete_some(number, batch)
            self._free(freed)

    # --- reading -------------------------------------------------------------------------------------------------------

    def read(
        self, number: int, blob: bytes, layout: SliceLayout, target: memoryview, *, uncached: bool = False, arrived: Arrived | None = None
    ) -> None:
        """Copy a blob's stored form into `target` and verify all of it: its end and digest table first, then its slices, in order.

        What `target` has behind it, to the end of a block, may be written to. `arrived` is told, about every two MiB until the end, how
        many slices are there and verified. With `uncached`, the disk is asked and not the page cache, as far as the system allows. Raises
        NotFound if there is no such blob, Corrupt if the bytes are not the blob's, Unreadable if the disk gives an error, Busy if the
        system has no memory or descriptors for it now.
        """
        try:
            with self._gate.shared(), self._blocks.reading():
                self._fill(self._find(number, blob, stored_bytes(layout)), blob, layout, target, arrived, uncached=uncached)
        except (lmdb.Error, Damaged) as error:
            if isinstance(error, (*STRUCTURAL, Damaged)):
                self.mark_damaged()
            raise Corrupt(f"blob {blob.hex()} can't be read: {error}") from error
        except OSError as error:
            if error.errno in _NOT_THE_DISK:
                raise Busy(f"blob {blob.hex()} can't be read now: {error}", retry_after_ms=1000) from error
            raise Unreadable(f"blob {blob.hex()} can't be read: {error}") from error

    def _find(self, number: int, blob: bytes, nbytes: int) -> Sequence[Extent]:
        key = blob_key(number, blob)
        value = self._index.find(key)
        if value is None:
            raise NotFound(f"blob {blob.hex()} is not on SSD")
        record = decode_record(key, value)
        if record is None:
            raise Corrupt(f"blob {blob.hex()}: its record in the index does not verify")
        if sum(extent.blocks for extent in record.extents) != blocks_for(nbytes):
            raise Corrupt(f"blob {blob.hex()}: its extents on SSD are not as large as it is")
        return record.extents

    def _fill(
        self, extents: Sequence[Extent], blob: bytes, layout: SliceLayout, out: memoryview, arrived: Arrived | None, *, uncached: bool
    ) -> None:  # fmt: skip
        pieces = pieces_to_read(layout, stored_bytes(layout))
        table_tried, table_good = threading.Event(), False

        def read_end() -> None:
            nonlocal table_good
            try:
                self._extents.read(extents, pieces[0].start, pieces[0].end, out, uncached=uncached, to_end=True)
                verify_table(blob, layout, out)
                table_good = True
            finally:
                table_tried.set()

        def read(number: int) -> None:
            piece = pieces[number]
            if number:
                self._extents.read(extents, piece.start, piece.end, out, uncached=uncached)
                table_tried.wait()  # it was begun before, so somebody reads it
            else:
                read_end()
            if table_good:  # else there is an error already
                verify_slices(blob, layout, out, piece.first, piece.last)

        def upto(count: int) -> None:
            if arrived is not None and 1 < count < len(pieces):
                arrived(pieces[count - 1].last)

        Together(len(pieces), read, upto).run(self._partners)

    # --- what there is -------------------------------------------------------------------------------------------------

    def stored_blobs(self, number: int, after: bytes = b"", limit: int = 1 << 62) -> list[tuple[bytes, int]]:
        """The next (blob id, bytes it takes up) of a namespace as the index has them, by id, behind the id `after`. Raises lmdb.Error.

        A blob whose record does not verify takes up nothing.
        """
        found: list[tuple[bytes, int]] = []
        try:
            with self._gate.shared():
                while len(found) < limit and (some := self._index.next_blobs(number, found[-1][0] if found else after)):
                    found += [(blob_of(key), _footprint(key, value)) for key, value in some]
        except Damaged as error:
            raise lmdb.CorruptedError(f"the blobs of namespace {number} can't be looked through: {error}") from error
        except OSError as error:
            raise lmdb.DiskError(f"the blobs of namespace {number} can't be looked through: {error}") from error
        return found[:limit]

    def namespace_numbers(self) -> list[int]:
        """The namespace numbers that have blobs on SSD."""
        with self._gate.shared():
            return self._index.namespace_numbers()


def _see_that_the_index_is_there(path: Path) -> None:
    """No crash takes it away; and where it is not, all blobs would be lost to it that are in the file of extents."""
    finish_replacing(path)
    if not size_of(path / DATA_FILE) and (nbytes := size_of(extents_beside(path))):
        raise DataDirError(
            f"{path / DATA_FILE} is missing or empty, without which nobody knows what is in the {nbytes} bytes of {extents_beside(path)}: "
            "put it back, or delete that to start without its blobs"
        )


def _footprint(key: bytes, value: bytes) -> int:
    record = decode_record(key, value)
    return 0 if record is None else BLOCK_BYTES * sum(extent.blocks for extent in record.extents)
