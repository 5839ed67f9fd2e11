"""Which parts make up a prefix: what `match` tells a client that is going to fetch. Pure."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.columns import distinct
from kvstore.kvspec import PartRange
from kvstore.radix.pages import PartColumns, Slots
from kvstore.store.space import Space
from kvstore.tiers.blobs import NO_SLOT


@dataclass(frozen=True, slots=True)
class PartRun:
    """Consecutive pages whose parts have one geometry."""

    first_page: int
    pages: int
    ranges: tuple[PartRange, ...]


@dataclass(frozen=True, slots=True)
class PartTable:
    """Which parts to load for a prefix: runs in page order, and for each part of each page in order 16 bytes of `ids`, and its blob row."""

    runs: tuple[PartRun, ...]
    ids: bytes
    rows: Slots

    def scattered(self, numbers: list[int]) -> "PartTable":
        """The same parts, where page number `i` is to be called `numbers[i]` (rising)."""
        runs: list[PartRun] = []
        for run in self.runs:
            names = numbers[run.first_page : run.first_page + run.pages]
            starts = [0, *(i for i in range(1, len(names)) if names[i] != names[i - 1] + 1), len(names)]
            runs += [PartRun(names[low], high - low, run.ranges) for low, high in pairwise(starts)]
        return replace(self, runs=tuple(runs))


def part_table(space: Space, slots: Slots, *, alone: bool = False) -> tuple[PartTable, int]:
    """The parts to load to go on from the end of a path, and how many of its pages are in DRAM with them.

    Of pages that stand `alone` all are to be loaded.
    """
    rules = space.tree.rules
    if len(slots) == 1 and not rules.optional:
        return _of_page(space, int(slots[0]))
    columns = space.tree.parts_of(slots)
    if rules.optional and not alone:
        first = np.array([rules.first_page(component, len(slots)) for component in range(len(space.spec.components))])
        needed = columns.page >= first[columns.component]
        columns = PartColumns(columns.page[needed], columns.blob[needed], columns.component[needed], columns.ranges[needed])
    resident = space.blobs.slot[columns.blob] != NO_SLOT
    in_dram = len(slots) - (0 if resident.all() else len(distinct(columns.page[~resident])))
    counts = np.bincount(columns.page, minlength=len(slots)).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    runs: list[PartRun] = []
    page = 0
    while page < len(slots):
        mine = slice(starts[page], starts[page + 1])
        end = _same_geometry_until(columns, counts, starts, page)
        ranges = zip(columns.component[mine].tolist(), columns.ranges[mine].tolist(), strict=True)
        runs.append(PartRun(page, end - page, tuple(PartRange(component, *where) for component, where in ranges)))
        page = end
    return PartTable(tuple(runs), space.blobs.ids_of(columns.blob), columns.blob), in_dram


def _of_page(space: Space, slot: int) -> tuple[PartTable, int]:
    """A look at one page, all of whose parts are needed: what numpy costs for each call would be all there is to it."""
    parts, blobs = space.tree.parts, space.blobs
    mine = parts.of_one(int(space.tree.pages.part[slot]))
    rows = [int(parts.blob[part]) for part in mine]
    run = PartRun(0, 1, tuple(PartRange(int(parts.component[part]), *parts.ranges[part].tolist()) for part in mine))
    here = all(blobs.slot[row] != NO_SLOT for row in rows)
    return PartTable((run,), b"".join(map(blobs.id_of, rows)), np.array(rows, np.int32)), int(here)


def _same_geometry_until(columns: PartColumns, counts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], page: int) -> int:
    """The first page after `page` whose parts have another geometry."""
    per_page = int(counts[page])
    differing = np.flatnonzero(counts[page:] != per_page)
    end = page + int(differing[0]) if len(differing) else len(counts)
    ranges = np.ascontiguousarray(columns.ranges).view(np.uint64)[:, 0]
    differs = np.zeros(end - page, np.bool_)
    for column in (columns.component, ranges):
        rows = column[starts[page] : starts[end]].reshape(end - page, per_page)
        if (other := rows != rows[0]).any():
            differs |= other.any(axis=1)
    return page + int(differs.argmax()) if differs.any() else end
