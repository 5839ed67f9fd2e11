"""The files of a store: the data directory, and in it the journal, the blobs and the recipes, opened and closed together."""

import inspect
import logging
from collections.abc import Callable

import lmdb

from kvstore.errors import DataDirError
from kvstore.fault_note import FaultNote
from kvstore.lmdb_files import DATA_FILE, entries_of, finish_replacing, is_marked, mark_damaged, size_of
from kvstore.radix.journal import Journal
from kvstore.store.datadir import DataDir
from kvstore.store.store_config import StoreConfig
from kvstore.tiers.blob_index import BlobIndex
from kvstore.tiers.ssd import BlobFile, extents_beside
from kvstore.tiers.text import RecipeFile

_log = logging.getLogger("kvstore.store")

_FAULT = "fault"

_DEATHS = 2
"""LMDB itself can end the process at a damaged page; but one kill in the middle of loading is no damage."""


class Files:
    """Opens them; raises DataDirError if that can't be done. `not_before` is told when the journal was last written. All of it blocks."""

    def __init__(self, config: StoreConfig, not_before: Callable[[float], None]) -> None:
        self.dir = DataDir(config.data_dir)
        self._note = FaultNote(self.dir.path / _FAULT)
        try:
            self._mark_what_was_died_of()
            if config.note_faults:
                self._note.arm()
            self._see_that_the_journal_is_there()
            if (journal := self.dir.journal / DATA_FILE).exists():  # until its records say it better
                not_before(journal.stat().st_mtime)
            if self.dir.begin_loading() >= _DEATHS:
                _log.error("the last %d starts died while they read the journal: it is salvaged", _DEATHS)
                for path in (self.dir.journal, self.dir.recipes):
                    if path.exists():
                        mark_damaged(path)
            self.journal = Journal(self.dir.journal, config.journal_bytes)
            self.blobs = BlobFile(self.dir.blobs, config.ssd_bytes)
            self.recipes = RecipeFile(self.dir.recipes, config.recipe_bytes)
        except BaseException as error:
            self.give_up()
            if isinstance(error, lmdb.Error | OSError):
                raise DataDirError(self._why(error)) from error
            raise
        usage = self.blobs.usage()
        if usage.used > usage.capacity:
            _log.warning(
                "the SSD tier holds %d bytes, more than its new capacity of %d: it shrinks as new pages are written",
                usage.used,
                usage.capacity,
            )

    def _see_that_the_journal_is_there(self) -> None:
        """No crash takes it away; and without it all blobs would be swept, as nothing names them."""
        finish_replacing(self.dir.journal)
        finish_replacing(self.dir.blobs)
        if not size_of(self.dir.journal / DATA_FILE) and (blobs := entries_of(self.dir.blobs)):
            raise DataDirError(
                f"{self.dir.journal / DATA_FILE} is missing or empty, without which nobody knows what the {blobs} blobs in "
                f"{self.dir.blobs} are: put it back, or delete {self.dir.blobs} and {extents_beside(self.dir.blobs)} to start without them"
            )

    def _mark_what_was_died_of(self) -> None:
        """Have the file salvaged at whose page the last run was ended by LMDB. It would be at each start, or whenever it is read."""
        if (fault := self._note.take()) is None:
            return
        _log.error("the last run was ended by a fault: %s", fault)
        paths = {
            inspect.getfile(Journal): self.dir.journal,
            inspect.getfile(BlobIndex): self.dir.blobs,
            inspect.getfile(RecipeFile): self.dir.recipes,
        }
        if (module := fault.innermost_of(list(paths))) is not None and paths[module].exists():
            _log.error("that was at a page of %s: it is salvaged", paths[module])
            mark_damaged(paths[module])
        self._note.forget()

    def _why(self, error: lmdb.Error | OSError) -> str:
        for path in (self.dir.journal, self.dir.blobs, self.dir.recipes):
            if is_marked(path) and (path / DATA_FILE).exists():
                size = (path / DATA_FILE).stat().st_size
                return (
                    f"{path} is damaged, and what can be read of it can't be copied to a fresh file beside it ({error}): "
                    f"see that there is room for its {size} bytes again, or move it away and start without it"
                )
        return f"the files in {self.dir.path} can't be opened: {error}"

    def give_up(self) -> None:
        """The store can't start, and says why: that is not the death that the note about loading is for."""
        self.dir.end_loading()
        self._note.disarm()
        self.dir.close()

    def close(self) -> None:
        """Close the journal and the blobs, which nobody uses any more. The directory stays ours, and the recipes close by themselves."""
        self.dir.end_loading()
        self.journal.close()
        self.blobs.close()
        self._note.disarm()
