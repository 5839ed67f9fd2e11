"""Builds a radix tree from a load plan, step by step, so that what is there already can be served meanwhile."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.radix.load_plan import LoadPlan
from kvstore.radix.pages import DURABLE, MAX_DEPTH, Slots
from kvstore.radix.tables import ROOT
from kvstore.radix.tree import RadixTree

_LOST = -2


@dataclass(slots=True)
class _Places:
    """Where the pieces of a step go: node (or _LOST), whether that node was there before, first page slot."""

    nodes: list[int]
    grown: list[bool]
    starts: list[int]


@dataclass(slots=True)
class TreeLoad:
    """Inserts a plan's pages into a tree to which nobody else adds pages. `blob` is the blob number of each of the plan's parts.

    Between steps the tree may be matched, opened, split, and may lose pages; what hangs from a page that is gone is not
    inserted, and its positions in the plan are in `lost`.
    """

    tree: RadixTree
    plan: LoadPlan
    blob: Slots
    lost: list[int] = field(default_factory=list)
    _step: int = 0

    def __post_init__(self) -> None:
        self.tree.pages.key_index.reserve(self.plan.pages)

    def step(self) -> bool:
        """Insert the next few thousand pages; False once there are none left."""
        steps = self.plan.steps
        if self._step + 1 >= len(steps):
            return False
        first, last = steps[self._step], steps[self._step + 1]
        self._step += 1
        places = self._place(first, last)
        kept = np.flatnonzero(np.array(places.nodes) != _LOST)
        if len(kept):
            start = self.plan.pieces.start
            begin, counts = start[first + kept], start[first + kept + 1] - start[first + kept]
            nodes = np.array(places.nodes, np.int32)[kept]
            slots = _spread(np.array(places.starts, np.int64)[kept], counts).astype(np.int32)
            self._write(_spread(begin, counts), slots, np.repeat(nodes, counts))
            self._index([places.nodes[i] for i in kept.tolist() if not places.grown[i]])
        return True

    def _place(self, first: int, last: int) -> _Places:
        """Find a node and page slots for each piece of a step. The pages are not written yet, so none of these nodes may be split."""
        tree, plan, count = self.tree, self.plan, last - first
        nodes, pages, pieces = tree.nodes, tree.pages, plan.pieces
        begin, parent = pieces.start[first : last + 1].tolist(), pieces.parent[first:last].tolist()
        above, continues = pieces.parent_piece[first:last].tolist(), pieces.continues[first:last].tolist()
        sealed = (plan.label_row[pieces.start[first:last]] < 0).tolist()
        places = _Places([_LOST] * count, [False] * count, [0] * count)
        for i in range(count):
            length = begin[i + 1] - begin[i]
            node = ROOT if parent[i] < 0 else places.nodes[above[i] - first] if above[i] >= first else self._end_at(parent[i])
            if node == _LOST:
                self.lost += range(begin[i], begin[i + 1])
                continue
            leaf = continues[i] and not nodes.children[node] and nodes.sealed[node] == sealed[i]
            if leaf and tree._grow(node, length):
                places.grown[i] = True
                places.starts[i] = nodes.start[node] + nodes.count[node]
                nodes.count[node] += length
            else:
                places.starts[i] = start = pages.ranges.allocate(length)
                above_node, node = node, nodes.new(node, start, length, length, nodes.depth[node] + nodes.count[node])
                nodes.sealed[node] = sealed[i]
                nodes.link(above_node, node)
                tree.ever_sealed |= sealed[i]
            places.nodes[i] = node
        return places

    def _end_at(self, position: int) -> int:
        """The node that ends at a page inserted in an earlier step, split there if need be; _LOST if the page is gone."""
        tree = self.tree
        slot = tree.pages.find_key(self.plan.keys[position].tobytes())
        if slot < 0:
            return _LOST
        node = int(tree.pages.node[slot])
        offset = slot - tree.nodes.start[node] + 1
        return tree._split(node, offset) if offset < tree.nodes.count[node] else node

    def _write(self, at: npt.NDArray[np.int64], slots: Slots, nodes: Slots) -> None:
        """Fill the columns of pages and parts; `at` are positions in the plan."""
        plan, pages = self.plan, self.tree.pages
        keys = plan.keys[at]
        pages.key[slots] = keys
        pages.version[slots] = plan.version[at]
        pages.node[slots] = nodes
        pages.part[slots], pages.components[slots] = self._write_parts(at)
        pages.leases[slots] = pages.held[slots] = 0
        # Nobody knows when a page read back was used last; but the deepest must be the first to go.
        pages.recency[slots] = MAX_DEPTH - plan.depth[at]
        pages.retain[slots] = plan.retain[at]
        pages.flags[slots] = DURABLE
        for recency in pages.part_recency:
            recency[slots] = 0
        rows = plan.label_row[at]
        if (rows >= 0).any():
            self._write_labels(slots[rows >= 0], plan.labels[rows[rows >= 0]])
        pages.key_index.add_many(keys.view("<u8")[:, 0].tolist(), slots.tolist())
        self.tree._page_count += len(slots)

    def _write_parts(self, at: npt.NDArray[np.int64]) -> tuple[Slots, npt.NDArray[np.uint16]]:
        """The first part slot of each page, and which components it has."""
        plan, parts = self.plan, self.tree.parts
        counts = plan.part_start[at + 1] - plan.part_start[at]
        rows = _spread(plan.part_start[at], counts)
        taken = parts.slots.allocate_many(len(rows))
        parts.blob[taken] = self.blob[rows]
        parts.component[taken] = plan.parts["component"][rows]
        parts.ranges[taken] = plan.parts["ranges"][rows]
        parts.durable[taken] = True
        following = np.append(taken[1:], np.int32(-1))[: len(taken)]
        ends = np.cumsum(counts)
        following[ends[counts > 0] - 1] = -1
        parts.next[taken] = following
        first, components = np.full(len(at), -1, np.int32), np.zeros(len(at), np.uint16)
        first[counts > 0] = taken[(ends - counts)[counts > 0]]
        bits = np.left_shift(1, plan.parts["component"][rows].astype(np.int64)).astype(np.uint16)
        components[counts > 0] = np.bitwise_or.reduceat(bits, (ends - counts)[counts > 0])
        return first, components

    def _write_labels(self, slots: Slots, labels: npt.NDArray[np.uint8]) -> None:
        pages = self.tree.pages
        pages.tokens[slots] = labels[:, : pages.token_bytes]
        extras = labels[:, pages.token_bytes :]
        if self.tree.has_extras or extras.any():
            self.tree.has_extras = True
            pages.extras[slots] = extras

    def _index(self, nodes: list[int]) -> None:
        for node in nodes:
            if not self.tree.nodes.sealed[node]:
                self.tree.child_index.add(self.tree._node_hash(node), node)


def _spread(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers of all runs (start, count), one behind the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)
