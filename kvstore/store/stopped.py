"""A namespace of a store that no daemon has open, loaded from its journal: to check it, or to bring it into another format. Blocking."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES
from kvstore.radix.journal import Journal, NamespaceRecord
from kvstore.radix.load_plan import LoadPlan
from kvstore.radix.loading import TreeLoad
from kvstore.store.settings import NamespaceSettings
from kvstore.store.space import Space
from kvstore.store.ssd.recovery import prepare
from kvstore.store.stats import Stats
from kvstore.store.trash import Trash
from kvstore.tiers.dram import Arena

_MIN_PAGES = 1024

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LoadedSpace:
    """A namespace with all its pages, and the keys of those whose records do not verify.

    Without a plan it is empty: the record's digest is not that of its settings.
    """

    space: Space
    plan: LoadPlan | None
    lost: list[bytes]


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of blobs that are read together, and their bytes."""

    rows: list[int]
    nbytes: int


def load_stopped(journal: Journal, record: NamespaceRecord, count: int) -> LoadedSpace:
    """Load a namespace of about so many pages. Raises lmdb.Error."""
    settings = NamespaceSettings.from_dict(record.settings)
    label_bytes = settings.spec.label_words * 4 + KEY_BYTES
    groups, lost = journal.load(record.number, record.digest, label_bytes)
    parts = sum(group.parts.size for group in groups)
    space = Space(record.number, settings, max(_MIN_PAGES, count, parts), Arena(0), Trash(), Stats())
    if space.digest != record.digest:
        return LoadedSpace(space, None, lost)
    plan, blob = prepare(space, groups)
    load = TreeLoad(space.tree, plan, blob)
    while load.step():
        pass
    return LoadedSpace(space, plan, lost)


def rows_by_id(space: Space) -> Rows:
    """Every blob's row, by blob id."""
    rows = np.flatnonzero(space.blobs.pages[: space.blobs.slots.high] > 0).astype(np.int32)
    return np.array(sorted(rows.tolist(), key=space.blobs.id_of), np.int32)


def rows_by_page(space: Space) -> Rows:
    """The row of every blob that a page needs, as pages follow each other in their prefixes."""
    rows = space.tree.parts_of(space.tree.live_slots()).blob
    _, first = np.unique(rows, return_index=True)
    return np.array(rows[np.sort(first)], np.int32)


def batches_of(space: Space, rows: Rows, most_bytes: int) -> Iterator[RowBatch]:
    """These rows by about so many bytes, a blob at least."""
    batch, nbytes = list[int](), 0
    for row, stored in zip(rows.tolist(), space.blobs.stored_of(rows).tolist(), strict=True):
        batch.append(row)
        nbytes += stored
        if nbytes >= most_bytes:
            yield RowBatch(batch, nbytes)
            batch, nbytes = [], 0
    if batch:
        yield RowBatch(batch, nbytes)
