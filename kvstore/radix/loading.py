"""Builds a radix tree from journal records. Pure: the records come in as arrays, the blobs as numbers."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import NoSpace
from kvstore.kvspec import PartRange
from kvstore.radix.journal import RecordGroup
from kvstore.radix.pages import DURABLE, MAX_DEPTH, Slots
from kvstore.radix.tree import ROOT, NewPages, RadixTree

_log = logging.getLogger("kvstore.loading")

BlobsOf = Callable[[npt.NDArray[np.void]], Slots]
"""Turns part records (rows of pages, columns of parts) into blob numbers of the same shape."""

_NO_PARENT = -2
_ROOT_PARENT = -1


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load went: pages now in the tree, and the keys of records that hang from nothing and should be deleted."""

    pages: int
    orphans: list[bytes]


def load_tree(tree: RadixTree, groups: list[RecordGroup], blobs_of: BlobsOf) -> LoadResult:
    """Insert all records whose ancestors are all there, in the version they were computed on."""
    pages = 0
    if len(groups) > 1:
        groups = sorted(groups, key=lambda g: len(g.keys), reverse=True)
    forest = _Forest.of(groups, tree.root_key)
    orphans = [forest.keys[index].tobytes() for index in forest.orphans]
    for run in forest.runs():
        group, rows = forest.locate(run)
        try:
            _insert_run(tree, group, rows, forest.parent_key(run[0], tree.root_key), blobs_of)
        except NoSpace as error:  # a smaller `max_pages` than before: open with what fits
            _log.error("%d pages are left out: %s", len(run), error.message)
            continue
        pages += len(run)
    _restore_retention(tree)
    _order_by_depth(tree)
    return LoadResult(pages, orphans)


def _order_by_depth(tree: RadixTree) -> None:
    """Nobody knows when a page read back was used last; but the deepest must be the first to go."""
    nodes, recency = tree.nodes, tree.pages.recency
    for node in nodes.subtree(ROOT)[1:]:
        start, count = nodes.start[node], nodes.count[node]
        recency[start : start + count] = MAX_DEPTH - (nodes.depth[node] + np.arange(count))


def _restore_retention(tree: RadixTree) -> None:
    """A page is kept at least as long as the pages below it; a record only says what was promised of its own page."""
    nodes, retain = tree.nodes, tree.pages.retain
    for node in reversed(nodes.subtree(ROOT)[1:]):
        run = retain[nodes.start[node] : nodes.start[node] + nodes.count[node]]
        below = [int(retain[nodes.start[c]]) for c in nodes.children_of(node)]
        run[-1] = max([int(run[-1]), *below])
        run[:] = np.maximum.accumulate(run[::-1])[::-1]


def _insert_run(tree: RadixTree, group: RecordGroup, rows: Slots, parent_key: bytes, blobs_of: BlobsOf) -> None:
    first = group.parts[rows[0]]
    ranges = tuple(PartRange(int(p["component"]), *(int(x) for x in p["ranges"])) for p in first)
    keys = group.keys[rows].tobytes()
    new = NewPages(keys, group.head["version"][rows[0]].tobytes(), blobs_of(group.parts[rows]), ranges)
    labels = None
    if group.labels is not None:
        run_labels = group.labels[rows]
        extras = run_labels[:, tree.pages.token_bytes :]
        labels = (run_labels[:, : tree.pages.token_bytes].tobytes(), extras.tobytes() if extras.any() else b"")
    if not tree.insert_below(parent_key, new, labels):
        raise NoSpace("their parents were left out")
    last = tree.pages.find_key(keys[-32:])
    run = slice(last - len(rows) + 1, last + 1)
    tree.pages.flags[run] |= DURABLE
    _, parts = tree.parts.of(tree.pages.part[run])
    tree.parts.durable[parts] = True
    tree.pages.retain[run] = group.head["retain"][rows]


@dataclass(slots=True)
class _Forest:
    """All records of a namespace as one list: parents by index, cut into runs of only children of one shape."""

    groups: list[RecordGroup]
    group_start: list[int]
    keys: npt.NDArray[np.uint8]
    parent: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    same_shape: npt.NDArray[np.bool_]
    orphans: list[int]

    @classmethod
    def of(cls, groups: list[RecordGroup], root_key: bytes) -> "_Forest":
        if not groups:
            empty = np.empty(0, np.int64)
            return cls([], [0], np.empty((0, 32), np.uint8), empty, empty, np.empty(0, np.bool_), [])
        keys = np.concatenate([g.keys for g in groups])
        head = np.concatenate([g.head for g in groups])
        parent = _find_parents(keys, head, root_key)
        order = np.argsort(head["depth"], kind="stable")
        reachable = [False] * len(keys)
        parents = parent.tolist()
        for index in order.tolist():
            above = parents[index]
            reachable[index] = above == _ROOT_PARENT or (above >= 0 and reachable[above])
        keep = np.array(reachable)
        starts = np.cumsum([0, *(len(g.keys) for g in groups)]).tolist()
        shape = np.concatenate([_shapes(g) for g in groups])
        safe = np.maximum(parent, 0)
        same = (parent >= 0) & (shape == shape[safe]) & (head["version"] == head["version"][safe])
        return cls(groups, starts, keys, parent, order[keep[order]], same, np.flatnonzero(~keep).tolist())

    def runs(self) -> list[list[int]]:
        """Runs of records in an order in which every parent comes before its children."""
        linked = self.order[self.parent[self.order] >= 0]
        child_count = np.bincount(self.parent[linked], minlength=len(self.keys)) if len(linked) else np.zeros(len(self.keys), np.int64)
        only_child = np.full(len(self.keys), -1, np.int64)
        only = linked[(child_count[self.parent[linked]] == 1) & self.same_shape[linked]]
        only_child[self.parent[only]] = only
        continues = np.zeros(len(self.keys), np.bool_)
        continues[only] = True
        following, runs = only_child.tolist(), []
        for index in self.order[~continues[self.order]].tolist():
            run = [index]
            while (index := following[index]) >= 0:
                run.append(index)
            runs.append(run)
        return runs

    def locate(self, run: list[int]) -> tuple[RecordGroup, Slots]:
        """The group a run lies in, and its rows there."""
        which = int(np.searchsorted(self.group_start, run[0], side="right")) - 1
        return self.groups[which], np.array(run, np.int32) - np.int32(self.group_start[which])

    def parent_key(self, index: int, root_key: bytes) -> bytes:
        """The page key a record hangs from."""
        parent = int(self.parent[index])
        return root_key if parent == _ROOT_PARENT else self.keys[parent].tobytes()


def _find_parents(keys: npt.NDArray[np.uint8], head: npt.NDArray[np.void], root_key: bytes) -> npt.NDArray[np.int64]:
    """Index of each record's parent; -1 for the root, -2 if it is missing, at another depth or of another version."""
    prefix = np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
    by_prefix = np.argsort(prefix, kind="stable")
    parent_keys = np.ascontiguousarray(head["parent"]).view(np.uint8).reshape(-1, 32)
    wanted = np.ascontiguousarray(parent_keys[:, :8]).view("<u8")[:, 0]
    found = by_prefix[np.minimum(np.searchsorted(prefix[by_prefix], wanted), len(keys) - 1)]
    good = (keys[found] == parent_keys).all(axis=1)
    good &= head["depth"][found].astype(np.int64) + 1 == head["depth"]
    good &= head["version"][found] == head["parent_version"]
    is_root = (parent_keys == np.frombuffer(root_key, np.uint8)).all(axis=1) & (head["depth"] == 0)
    return np.where(is_root, _ROOT_PARENT, np.where(good, found, _NO_PARENT))


def _shapes(group: RecordGroup) -> npt.NDArray[np.int64]:
    """A number for the shape of each record: whether it has a label, and its parts' geometry."""
    geometry = np.ascontiguousarray(group.parts[["component", "ranges"]]).copy()
    rows = [repr(row) for row in np.unique(geometry.reshape(len(geometry), -1), axis=0)] if len(geometry) else []
    if len(rows) == 1:
        return np.full(len(group.keys), hash((group.labels is None, rows[0])), np.int64)
    return np.array([hash((group.labels is None, repr(row))) for row in geometry], np.int64)
