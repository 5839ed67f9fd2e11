"""Checks a store that no daemon has open: the directory's lock is held meanwhile, and no byte of the data is changed."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb

from kvstore.errors import DataDirError, KVStoreError, NotFound
from kvstore.lmdb_files import is_marked
from kvstore.radix.check import check as check_tree
from kvstore.radix.journal import Journal, NamespaceRecord
from kvstore.store.checking.check import check_blobs
from kvstore.store.checking.verify import MAX_DAMAGE, CheckProgress, CheckReport, NamespaceChecked, check_recipes, needed_by, note_losses
from kvstore.store.datadir import DataDir
from kvstore.store.space import Space
from kvstore.store.stopped import batches_of, load_stopped, rows_by_id
from kvstore.threads import in_order
from kvstore.tiers.ssd import BlobFile
from kvstore.tiers.text import RecipeFile

_THREADS = 4
_BATCH_BYTES = 8 << 20

Bad = list[tuple[int, str]]
"""(row of the blob table, what is wrong)."""


def check_stopped(path: Path, tell: Callable[[CheckProgress], None]) -> CheckReport:
    """Check everything in a data directory, and tell of progress. Blocking.

    Raises DataDirError if there is no store, or if a daemon has it.
    """
    if not (path / "format.json").exists():
        raise DataDirError(f"there is no store in {path}: give its --data-dir")
    directory = DataDir(path)
    try:
        return _Check(directory, tell).run()
    finally:
        directory.close()


class _Check:
    def __init__(self, directory: DataDir, tell: Callable[[CheckProgress], None]) -> None:
        self._directory = directory
        self._tell = tell
        self._report = CheckReport()
        self._spaces: list[tuple[Space, NamespaceChecked]] = []

    def run(self) -> CheckReport:
        started = time.monotonic()
        for path in (self._directory.journal, self._directory.blobs, self._directory.recipes):
            if is_marked(path):
                self._report.add("structure", "", f"{path.name}: LMDB met damage here before; the next start saves what can be read")
        self._read_journal()
        self._read_blobs()
        self._read_recipes()
        self._report.seconds = round(time.monotonic() - started, 3)
        return self._report

    def _structure(self, what: str, error: Exception) -> None:
        self._report.add("structure", "", f"{what}: LMDB's own structure is damaged ({error}); the next start saves what can be read")

    # --- the journal ---------------------------------------------------------------------------------------------------

    def _read_journal(self) -> None:
        if not self._directory.journal.exists():
            self._report.notes.append("there is no journal: the store was never used")
            return
        try:
            journal = Journal(self._directory.journal, readonly=True)
        except (lmdb.Error, DataDirError) as error:
            self._journal_lost(error)
            return
        try:
            self._load_namespaces(journal)
        except lmdb.Error as error:
            self._journal_lost(error)
        finally:
            journal.close()

    def _journal_lost(self, error: Exception) -> None:
        """It can't be read (on): who knows what else it named."""
        self._structure("journal", error)
        self._report.all_read = False

    def _load_namespaces(self, journal: Journal) -> None:
        records, bad = journal.namespaces()
        counts = journal.page_counts()
        for number in bad:
            pages = counts.get(number, 0)
            self._report.add("namespace", "", f"the record of namespace number {number} does not verify: all its {pages} pages are lost")
            self._report.unnamed_lost_pages += pages
        known = {record.number for record in records} | set(bad)
        for number in counts.keys() - known:
            self._report.unnamed_lost_pages += counts[number]
            self._report.add("namespace", "", f"{counts[number]} page records belong to namespace number {number}, which has no record")
        for record in records:
            self._load_namespace(journal, record, counts.get(record.number, 0))

    def _load_namespace(self, journal: Journal, record: NamespaceRecord, count: int) -> None:
        loaded = load_stopped(journal, record, count)
        space, plan = loaded.space, loaded.plan
        checked = NamespaceChecked(space.id, space.settings.name, 0, 0, lost_keys=[key.hex() for key in loaded.lost[:20]])
        self._report.namespaces.append(checked)
        for key in loaded.lost:
            self._report.add("record", space.id, f"the record of page {key.hex()[:16]}… does not verify")
        if plan is None:
            self._report.add("namespace", space.id, "the record's digest is not that of its settings")
            return
        checked.pages, checked.blobs = space.tree.page_count, space.blobs.count
        checked.lost_pages = len(loaded.lost) + len(plan.orphans)
        if plan.orphans:
            self._report.add(
                "record", space.id,
                f"{len(plan.orphans)} page records hang from nothing: a page before them is missing or of another version",
            )  # fmt: skip
        try:
            check_tree(space.tree, compressed=False)
            check_blobs(space)
        except AssertionError as error:
            self._report.add("tree", space.id, f"the tree built from the records breaks a rule: {error}")
        self._spaces.append((space, checked))

    # --- blobs ---------------------------------------------------------------------------------------------------------

    def _read_blobs(self) -> None:
        if not self._directory.blobs.exists():
            for space, checked in self._spaces:
                self._lose_all(space, checked)
            return
        try:
            blob_file = BlobFile.readonly(self._directory.blobs)
        except (lmdb.Error, DataDirError) as error:
            self._structure("blobs", error)
            for space, checked in self._spaces:
                self._lose_all(space, checked)
            return
        try:
            self._verify_all(blob_file)
            try:
                self._note_orphans(blob_file)
            except lmdb.Error as error:
                self._structure("blobs", error)
        finally:
            blob_file.close()

    def _read_recipes(self) -> None:
        if not self._directory.recipes.exists():  # as daemons left it that knew of none
            return
        try:
            recipes = RecipeFile(self._directory.recipes, readonly=True)
        except (lmdb.Error, DataDirError) as error:
            self._structure("recipes", error)
            return
        try:
            known = {space.number: (space, checked) for space, checked in self._spaces}
            for number in recipes.numbers():
                if number in known:
                    check_recipes(self._report, recipes, *known[number])
                else:
                    self._report.notes.append(f"recipes of namespace number {number}, which is no more: they go at the next start")
            if not recipes.sound:
                self._report.add("recipe", "", "recipes: the indices do not account for what is there; the next start makes them anew")
        except lmdb.Error as error:
            self._structure("recipes", error)
        finally:
            recipes.close()

    def _lose_all(self, space: Space, checked: NamespaceChecked) -> None:
        if checked.blobs:
            self._report.add("blob", space.id, f"none of the {checked.blobs} blobs can be read")
            note_losses(space, checked, range(space.blobs.slots.high))

    def _verify_all(self, blob_file: BlobFile) -> None:
        total = sum(int(space.blobs.stored_of(rows_by_id(space)).sum()) for space, _ in self._spaces)
        with ThreadPoolExecutor(_THREADS, "kvstore-check") as pool:
            try:
                for space, checked in self._spaces:
                    bad = self._verify_space(pool, blob_file, space, total)
                    if bad:
                        note_losses(space, checked, [row for row, _ in bad])
                        words = needed_by(space, [row for row, _ in bad[:MAX_DAMAGE]])
                        for row, what in bad:
                            self._report.add("blob", space.id, f"{what}; {words.get(row, '')}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _verify_space(self, pool: ThreadPoolExecutor, blob_file: BlobFile, space: Space, total: int) -> Bad:
        bad: Bad = []
        self._tell(CheckProgress(space.settings.name, self._report.checked_bytes, total))
        batches = batches_of(space, rows_by_id(space), _BATCH_BYTES)
        for batch, found in in_order(pool, lambda batch: _verify(blob_file, space, batch.rows), batches, 2 * _THREADS):
            bad += found
            self._report.checked_blobs += len(batch.rows)
            self._report.checked_bytes += batch.nbytes
            self._tell(CheckProgress(space.settings.name, self._report.checked_bytes, total))
        return bad

    def _note_orphans(self, blob_file: BlobFile) -> None:
        known = {space.number: space for space, _ in self._spaces}
        count = taken = 0
        for number in blob_file.namespace_numbers():
            space = known.get(number)
            for blob, nbytes in blob_file.stored_blobs(number):
                if space is None or space.blobs.find(blob) < 0:
                    count, taken = count + 1, taken + nbytes
        if count and not self._report.all_read:
            self._report.notes.append(
                f"blobs named by nothing that could be read of the journal: {count} ({taken} bytes); the daemon "
                "keeps those that are named in what its next start saves of the journal, and sweeps the others"
            )
        elif count and not any(damage.kind == "structure" for damage in self._report.damage):
            self._report.notes.append(
                f"blobs named by no record, as a crash can leave them: {count} ({taken} bytes); the daemon sweeps them after its next start"
            )


def _verify(blob_file: BlobFile, space: Space, rows: list[int]) -> Bad:
    bad: Bad = []
    buffer = memoryview(bytearray(max(space.stored_bytes(row) for row in rows)))
    for row in rows:
        blob = space.blobs.id_of(row)
        try:
            blob_file.read(space.number, blob, space.blobs.layout_of(row), buffer[: space.stored_bytes(row)])
        except NotFound as error:
            bad.append((row, error.message))
        except (KVStoreError, lmdb.Error, OSError) as error:
            bad.append((row, f"blob {blob.hex()} can't be read: {error}"))
    return bad
