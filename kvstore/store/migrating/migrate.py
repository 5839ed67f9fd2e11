"""From format 1 to 2: blobs out of LMDB's own pages into a file of extents. Journal and recipes stay as they are. Blocking.

The new files are written beside the old ones, which are not touched until all is durable, and then put in their place; `format.json`
is written last. Whoever is killed before leaves a directory of format 1, with which the next migration starts over.
"""

import errno
import resource
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvstore.errors import DataDirError, NotFound
from kvstore.folders import sync_folder
from kvstore.lmdb_files import entries_of, is_marked
from kvstore.lmdb_find import Damaged
from kvstore.radix.journal import Journal
from kvstore.store.checking.verify import lost_slots
from kvstore.store.datadir import FORMAT, OLDEST, DataDir
from kvstore.store.migrating.format1 import OldBlobs
from kvstore.store.migrating.report import MAX_LOSSES, Loss, MigrationReport, NamespaceMigrated
from kvstore.store.space import Space
from kvstore.store.stopped import RowBatch, Rows, batches_of, load_stopped, rows_by_page
from kvstore.threads import in_order
from kvstore.tiers.extent_file import BLOCK_BYTES
from kvstore.tiers.ssd import BlobBatch, BlobFile, extents_beside

_BATCH_BYTES = 32 << 20
_THREADS = 2
_RECORD_BYTES = 160
"""Of the new index, for a blob, in pages that are half full."""
_ROOM_BYTES = 64 << 20
"""What the index may have beside it, for pages that a batch frees and can't write over yet."""
_UNREAD = "unread"
"""A mark in the old folder: the disk may still have some of it that could not be read."""

Tell = Callable[[str, int, int], object]
"""Told the namespace's name, the bytes of stored blobs that are done, and those of all."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A batch's blobs, by row: those that verify, and what is wrong with the others. `unread` of these the disk may still have."""

    good: list[tuple[int, memoryview]]
    bad: list[tuple[int, str]]
    unread: int


def migrate(path: Path, tell: Tell) -> MigrationReport:
    """Bring a data directory to today's format. Of that already, what an earlier migration left is deleted.

    Raises DataDirError if there is no store, if somebody has it, or if it can't be done: then it is as it was.
    """
    if not (path / "format.json").exists():
        raise DataDirError(f"there is no store in {path}: give its --data-dir")
    directory = DataDir(path, oldest=OLDEST)
    try:
        return _Migration(directory, tell).run()
    except OSError as error:
        raise DataDirError(f"the migration of {path} stopped ({error}): run it again") from error
    finally:
        directory.close()


class _Migration:
    def __init__(self, directory: DataDir, tell: Tell) -> None:
        self._dir = directory
        self._tell = tell
        self._old = directory.path / "blobs.format1"
        self._new = directory.path / "blobs.next"
        self._report = MigrationReport(directory.format, FORMAT)
        self._spaces: list[tuple[Space, Rows, NamespaceMigrated]] = []
        self._total = self._done = self._unread = 0

    def run(self) -> MigrationReport:
        started = time.monotonic()
        if self._dir.format != FORMAT:
            self._start_over()
            self._load()
            self._see_that_there_is_room()
            self._write()
            self._put_in_place()
        self._leave_the_old()
        self._report.seconds = round(time.monotonic() - started, 3)
        return self._report

    def _start_over(self) -> None:
        """As if no migration had begun. One that ended while it put the new files in place is undone."""
        if self._old.exists():
            (self._old / _UNREAD).unlink(missing_ok=True)
            shutil.rmtree(self._dir.blobs, ignore_errors=True)
            extents_beside(self._dir.blobs).unlink(missing_ok=True)
            self._old.rename(self._dir.blobs)
        shutil.rmtree(self._new, ignore_errors=True)
        extents_beside(self._new).unlink(missing_ok=True)
        sync_folder(self._dir.path)

    # --- what there is -------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """All namespaces, with the rows of the blobs that pages need."""
        if not self._dir.journal.exists():
            if blobs := entries_of(self._dir.blobs):
                raise DataDirError(
                    f"{self._dir.journal} is missing, without which nobody knows what the {blobs} entries in {self._dir.blobs} are: "
                    "put it back; nothing was changed"
                )
            return
        try:
            if is_marked(self._dir.journal):
                raise lmdb.CorruptedError("LMDB met damage there before")
            with closing(Journal(self._dir.journal, readonly=True)) as journal:
                counts = journal.page_counts()
                for record in journal.namespaces()[0]:
                    space = load_stopped(journal, record, counts.get(record.number, 0)).space
                    self._spaces.append((space, rows_by_page(space), NamespaceMigrated(space.id, space.settings.name)))
        except lmdb.Error as error:
            raise DataDirError(
                f"the journal in {self._dir.path} is damaged ({error}), so it is not known which blobs are needed: start the version of "
                "kvstore that wrote it once, which saves what can be read, and migrate then; nothing was changed"
            ) from error
        self._report.namespaces = [migrated for _, _, migrated in self._spaces]
        self._total = sum(int(space.blobs.stored_of(rows).sum()) for space, rows, _ in self._spaces)

    def _extent_bytes(self) -> int:
        stored = [space.blobs.stored_of(rows) for space, rows, _ in self._spaces]
        return BLOCK_BYTES * int(sum((-(-sizes // BLOCK_BYTES)).sum() for sizes in stored))

    def _see_that_there_is_room(self) -> None:
        extents, index = self._extent_bytes(), _RECORD_BYTES * sum(len(rows) for _, rows, _ in self._spaces)
        needed = extents + index + min(2 * index, _ROOM_BYTES) + (1 << 20)
        free = shutil.disk_usage(self._dir.path).free
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        room = f"the blobs in {self._dir.path} are written anew before the old ones are deleted: that takes {needed} bytes"
        if needed > free:
            raise DataDirError(f"{room}, and the disk has {free}; make room, or move the store to a larger disk; nothing was changed")
        if limit != resource.RLIM_INFINITY and extents > limit:
            raise DataDirError(f"{room}, and a file may have {limit} (ulimit -f); nothing was changed")

    # --- writing -------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Bring all blobs into the new files, durably."""
        try:
            with closing(OldBlobs(self._dir.blobs)) as old, closing(BlobFile(self._new, self._extent_bytes())) as new:
                for space, rows, migrated in self._spaces:
                    self._tell(migrated.name, self._done, self._total)
                    self._write_space(old, new, space, rows, migrated)
            sync_folder(self._new)
        except BaseException as error:
            self._start_over()
            if isinstance(error, OSError | lmdb.Error):
                raise DataDirError(f"the blobs can't be written anew in {self._dir.path} ({error}): it is as it was") from error
            raise

    def _write_space(self, old: OldBlobs, new: BlobFile, space: Space, rows: Rows, migrated: NamespaceMigrated) -> None:
        lost: list[int] = []
        with ThreadPoolExecutor(_THREADS, "kvstore-migrate") as pool:
            batches = batches_of(space, rows, _BATCH_BYTES)
            for batch, read in in_order(pool, lambda batch: _read(old, space, batch), batches, _THREADS):
                new.commit(BlobBatch(put=[(space.number, space.blobs.id_of(row), stored) for row, stored in read.good]))
                self._count(migrated, read)
                lost += [row for row, _ in read.bad]
                self._done += batch.nbytes
                self._tell(migrated.name, self._done, self._total)
        if lost:
            migrated.lost_blobs, migrated.lost_pages = len(lost), len(lost_slots(space, lost))

    def _count(self, migrated: NamespaceMigrated, read: _Read) -> None:
        migrated.blobs += len(read.good)
        self._report.moved_blobs += len(read.good)
        self._report.moved_bytes += sum(len(stored) for _, stored in read.good)
        self._unread += read.unread
        room = MAX_LOSSES - len(self._report.losses)
        self._report.losses += [Loss(migrated.id, what) for _, what in read.bad[:room]]

    # --- the end -------------------------------------------------------------------------------------------------------

    def _put_in_place(self) -> None:
        """From here on an error, too, leaves it to the next migration to start over, or to go on behind this."""
        if self._dir.blobs.exists():
            self._dir.blobs.rename(self._old)
        else:
            self._old.mkdir(mode=0o700)
        extents_beside(self._new).rename(extents_beside(self._dir.blobs))
        self._new.rename(self._dir.blobs)
        sync_folder(self._dir.path)
        if self._unread:
            (self._old / _UNREAD).touch(mode=0o600)
            sync_folder(self._old)
        self._dir.set_format(FORMAT)

    def _leave_the_old(self) -> None:
        """Delete the old blobs; if some could not be read, now or by the migration that this goes on behind, keep them for who can."""
        if (self._old / _UNREAD).exists():
            kept = self._dir.path / "blobs.format1.damaged"  # not blobs.damaged: a daemon that salvages its index deletes that
            shutil.rmtree(kept, ignore_errors=True)
            self._old.rename(kept)
            self._report.kept = str(kept)
        elif self._old.exists():
            shutil.rmtree(self._old)
        sync_folder(self._dir.path)


def _read(old: OldBlobs, space: Space, batch: RowBatch) -> _Read:
    good: list[tuple[int, memoryview]] = []
    bad: list[tuple[int, str]] = []
    unread = 0
    for row in batch.rows:
        blob = space.blobs.id_of(row)
        try:
            good.append((row, old.read(space.number, blob, space.blobs.layout_of(row))))
        except NotFound as error:
            bad.append((row, error.message))
        except (Damaged, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # that says nothing of the blob
                raise
            bad.append((row, f"blob {blob.hex()} can't be read: {error}"))
            unread += 1
    return _Read(good, bad, unread)
