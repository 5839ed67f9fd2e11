"""Works out how a tree is built from journal records, with whole-array work only. Pure; meant for an executor thread.

The plan is a list of pages in the order in which they are inserted, parents first and every long path in consecutive places,
cut into runs (the nodes to be), those into pieces, and pieces into steps of a few milliseconds for the loop's thread.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES
from kvstore.radix.journal import RecordGroup

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

PIECE_PAGES = 2048
_STEP_COST = 2048
_PIECE_COST = 8
"""What a node costs beside its pages, in pages."""

_NO_PARENT = -2
_ROOT_PARENT = -1


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of pages to insert in one go: where each starts, what it hangs from, and whether it goes on in its parent's node."""

    start: Ints
    """Position of its first page; one more at the end."""
    parent: Ints
    """Position of the page it hangs from, -1 for the root."""
    parent_piece: Ints
    continues: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Pages in the order in which they are inserted. `part_start[i]` is the first of page i's rows in `parts`."""

    keys: Bytes
    version: Bytes
    depth: Ints
    retain: npt.NDArray[np.uint32]
    label_row: Ints
    """Row in `labels`, -1 where there is none."""
    labels: Bytes
    part_start: Ints
    parts: npt.NDArray[np.void]
    pieces: Pieces
    steps: list[int]
    """Piece at which each step begins, and one more at the end."""
    orphans: list[bytes]
    """Keys of records that hang from nothing."""
    left_out: int
    """Pages that do not fit into the tables."""

    @property
    def pages(self) -> int:
        """Pages to insert."""
        return len(self.keys)


def plan_load(groups: list[RecordGroup], root_key: bytes, max_pages: int, max_parts: int) -> LoadPlan:
    """The plan for all records whose ancestors are all there, in the version they were computed on."""
    if not groups:
        return _empty()
    keys = np.concatenate([g.keys for g in groups])
    head = np.concatenate([g.head for g in groups])
    labelled = np.concatenate([np.full(len(g.keys), g.labels is not None) for g in groups])
    parent = _find_parents(keys, head, root_key)
    reachable = _reachable(parent)
    depth = head["depth"].astype(np.int64)
    runs = _Runs.of(parent, reachable, depth, labelled)
    part_count = np.concatenate([np.full(len(g.keys), g.parts.shape[1], np.int64) for g in groups])
    fits = _how_many_fit(part_count[runs.order], max_pages, max_parts)
    order, runs_retain = runs.order[:fits], runs.retention(head["retain"])[:fits]
    part_start = np.concatenate([[0], np.cumsum(part_count[order])])
    pieces = _cut(runs, fits)
    return LoadPlan(
        keys[order], np.ascontiguousarray(head["version"][order]).view(np.uint8).reshape(-1, 16), depth[order], runs_retain,
        *_labels(groups, labelled, order), part_start, _parts(groups, part_count, order, part_start), pieces, _steps(pieces),
        [keys[i].tobytes() for i in np.flatnonzero(~reachable).tolist()], len(runs.order) - fits,
    )  # fmt: skip


def _empty() -> LoadPlan:
    none, few = np.empty(0, np.int64), np.zeros(1, np.int64)
    pieces = Pieces(few, none, none, np.empty(0, np.bool_))
    no_bytes = np.empty((0, KEY_BYTES), np.uint8)
    return LoadPlan(
        no_bytes, no_bytes, none, np.empty(0, np.uint32), none, no_bytes, few, np.empty(0, np.dtype("V1")), pieces, [0], [], 0
    )  # fmt: skip


def _find_parents(keys: Bytes, head: npt.NDArray[np.void], root_key: bytes) -> Ints:
    """Index of each record's parent; -1 for the root, -2 if it is missing, at another depth or of another version."""
    words = np.ascontiguousarray(keys).view("<u8")
    by_prefix = np.argsort(words[:, 0])
    parent_keys = np.ascontiguousarray(head["parent"]).view(np.uint8).reshape(-1, KEY_BYTES)
    wanted = parent_keys.view("<u8")
    found = by_prefix[np.minimum(np.searchsorted(words[by_prefix, 0], wanted[:, 0]), len(keys) - 1)]
    good = (words[found] == wanted).all(axis=1)
    good &= head["depth"][found].astype(np.int64) + 1 == head["depth"]
    good &= head["version"][found] == head["parent_version"]
    is_root = (parent_keys == np.frombuffer(root_key, np.uint8)).all(axis=1) & (head["depth"] == 0)
    return np.where(is_root, _ROOT_PARENT, np.where(good, found, _NO_PARENT))


def _reachable(parent: Ints) -> npt.NDArray[np.bool_]:
    """Which records have all their ancestors: every record follows its parent's parent until all are at an end."""
    count = len(parent)
    to = np.where(parent >= 0, parent, np.where(parent == _ROOT_PARENT, count, count + 1))
    to = np.append(to, [count, count + 1])
    while True:
        further = to[to]
        if (further == to).all():
            found: npt.NDArray[np.bool_] = to[:count] == count
            return found
        to = further


@dataclass(frozen=True, slots=True)
class _Runs:
    """Maximal chains of only children that are all sealed or all not, in preorder, the heaviest child first."""

    order: Ints
    """Record index by position."""
    start: Ints
    """Position of each run's first page; one more at the end."""
    parent: Ints
    """Run that each hangs from, -1 for the root."""

    @classmethod
    def of(cls, parent: Ints, reachable: npt.NDArray[np.bool_], depth: Ints, labelled: npt.NDArray[np.bool_]) -> "_Runs":
        count = len(parent)
        linked = np.flatnonzero(reachable & (parent >= 0))
        above = parent[linked]
        children = np.bincount(above, minlength=count)
        only = linked[(children[above] == 1) & (labelled[linked] == labelled[above])]
        first = np.arange(count)
        first[only] = parent[only]
        while not np.array_equal(further := first[first], first):
            first = further
        heads = np.flatnonzero(reachable & (first == np.arange(count)))
        number = np.full(count, -1, np.int64)
        number[heads] = np.arange(len(heads))
        run = number[first]
        length = np.bincount(run[reachable], minlength=len(heads))
        run_parent = np.where(parent[heads] >= 0, run[np.maximum(parent[heads], 0)], -1)
        start = _preorder(depth[heads], length, run_parent)
        order = np.empty(int(length.sum()), np.int64)
        members = np.flatnonzero(reachable)
        order[start[run[members]] + depth[members] - depth[first[members]]] = members
        rank = np.argsort(start)
        new_number = np.empty(len(rank), np.int64)
        new_number[rank] = np.arange(len(rank))
        moved = run_parent[rank]
        return cls(order, np.append(start[rank], len(order)), np.where(moved >= 0, new_number[np.maximum(moved, 0)], -1))

    def retention(self, retain: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """By position: a page is kept at least as long as the pages below it; a record only says what was promised of its own page."""
        if not len(self.order):
            return np.empty(0, np.uint32)
        own = retain[self.order].astype(np.uint64)
        total = np.maximum.reduceat(own, self.start[:-1]).tolist()
        below, parents = [0] * len(total), self.parent.tolist()
        for run in range(len(total) - 1, -1, -1):
            kept = total[run] if total[run] > below[run] else below[run]
            above = parents[run]
            if above >= 0 and kept > below[above]:
                below[above] = kept
        last = self.start[1:] - 1
        own[last] = np.maximum(own[last], np.array(below, np.uint64))
        # One pass from the end over all runs: each begins above everything that the ones after it hold.
        level = np.repeat(np.arange(len(total), dtype=np.uint64)[::-1], np.diff(self.start)) << np.uint64(32)
        kept_until = np.maximum.accumulate((own | level)[::-1])[::-1]
        return (kept_until & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _preorder(depth: Ints, length: Ints, parent: Ints) -> Ints:
    """First position of each run. The heaviest child comes right behind its parent, so that long paths lie in one piece."""
    size, parents, lengths = length.tolist(), parent.tolist(), length.tolist()
    for run in np.argsort(-depth, kind="stable").tolist():
        if parents[run] >= 0:
            size[parents[run]] += size[run]
    start, free, root = [0] * len(size), [0] * len(size), 0
    for run in np.lexsort((-np.array(size, np.int64), depth)).tolist():  # children of one run all begin at one depth
        above = parents[run]
        if above >= 0:
            at = free[above]
            free[above] = at + size[run]
        else:
            at, root = root, root + size[run]
        start[run], free[run] = at, at + lengths[run]
    return np.array(start, np.int64)


def _how_many_fit(part_count: Ints, max_pages: int, max_parts: int) -> int:
    """Pages from the beginning of the order, which never leave a parent behind, that the tables can hold."""
    return min(max_pages, int(np.searchsorted(np.cumsum(part_count), max_parts, side="right")))


def _labels(groups: list[RecordGroup], labelled: npt.NDArray[np.bool_], order: Ints) -> tuple[Ints, Bytes]:
    labels = [g.labels for g in groups if g.labels is not None]
    row = np.where(labelled, np.cumsum(labelled) - 1, -1)
    return row[order], np.concatenate(labels) if labels else np.empty((0, KEY_BYTES), np.uint8)


def _parts(groups: list[RecordGroup], part_count: Ints, order: Ints, part_start: Ints) -> npt.NDArray[np.void]:
    """The parts of all pages in their order."""
    flat = np.concatenate([g.parts.reshape(-1) for g in groups])
    first = np.cumsum(part_count) - part_count
    source = np.repeat(first[order] - part_start[:-1], part_count[order]) + np.arange(part_start[-1])
    found: npt.NDArray[np.void] = flat[source]
    return found


def _cut(runs: _Runs, fits: int) -> Pieces:
    """Long runs in pieces; a piece that is not its run's first hangs from the one before."""
    kept = runs.start[:-1] < fits
    start, parent = runs.start[:-1][kept], runs.parent[kept]
    end = np.minimum(runs.start[1:][kept], fits)
    count = -(-(end - start) // PIECE_PAGES)
    run = np.repeat(np.arange(len(count)), count)
    first_piece = np.concatenate([[0], np.cumsum(count)])
    index = np.arange(len(run)) - first_piece[run]
    begin = start[run] + index * PIECE_PAGES
    from_root = parent[run] < 0
    above = np.where(from_root, -1, runs.start[np.maximum(parent[run], 0) + 1] - 1)
    above_piece = np.where(from_root, -1, first_piece[np.maximum(parent[run], 0) + 1] - 1)
    later = index > 0
    return Pieces(
        np.append(begin, fits), np.where(later, begin - 1, above), np.where(later, np.arange(len(run)) - 1, above_piece), later
    )  # fmt: skip


def _steps(pieces: Pieces) -> list[int]:
    cost = np.diff(pieces.start) + _PIECE_COST
    step = (np.cumsum(cost) - cost) // _STEP_COST
    return [0, *(np.flatnonzero(np.diff(step)) + 1).tolist(), len(cost)] if len(cost) else [0]
