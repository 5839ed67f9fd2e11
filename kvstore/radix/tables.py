"""The tables of a radix tree: columns of nodes, pages and parts with their indices, and the paths through them.

No tokens are looked at here, and nothing is changed: what matches is decided in tree.py, what changes in structure.py.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec
from kvstore.digests import DIGEST_BYTES, KEY_BYTES, NO_EXTRA
from kvstore.hash_index import HashIndex
from kvstore.radix.components import ComponentRules
from kvstore.radix.pages import GHOST, Nodes, Pages, PartColumns, Parts, Slots
from kvstore.radix.values import Path

ROOT = 0
FULL_ONLY = ComponentRules(1, ())
FEW_NODES = 12
"""Paths of so many nodes are put together node by node."""


class TreeTables:
    """Columns, links and indices. `root_key` is the namespace digest (32 bytes), `capacity` the most pages it can hold.

    A label is `label_words` uint32 words: token ids, or a digest. `kept` are columns that others want beside those of the pages.
    """

    def __init__(
        self, root_key: bytes, label_words: int, capacity: int, rules: ComponentRules = FULL_ONLY, kept: Sequence[ColumnSpec] = ()
    ) -> None:
        self.root_key = root_key
        self.capacity = capacity
        self.rules = rules
        # Twice as many: room for runs to move in. Slots cost nothing until they are used.
        self.pages = Pages(2 * capacity, label_words, len(rules.optional), kept)
        self.parts = Parts(4 * capacity)
        self.nodes = Nodes(capacity + 1)
        self.child_index = HashIndex()
        self.has_extras = False
        self.ever_sealed = False
        self.nodes.new(-1, 0, 0, 0, 0)
        self._page_count = 0
        self._ghost_count = 0

    @property
    def page_count(self) -> int:
        """Pages in the tree."""
        return self._page_count

    @property
    def ghost_count(self) -> int:
        """Ghosts: pages that lost their bytes, and of which the tree still knows label and history."""
        return self._ghost_count

    # --- reading ----------------------------------------------------------------------------------------------------------

    def last_key(self, node: int) -> bytes:
        """The key of a node's last page; the root's is the namespace digest."""
        if node == ROOT:
            return self.root_key
        return self.pages.key_bytes(self.nodes.start[node] + self.nodes.count[node] - 1)

    def key_at(self, path: Path) -> bytes:
        """The page key of a path's boundary."""
        if not path.nodes:
            return self.root_key
        return self.pages.key_bytes(self.nodes.start[path.nodes[-1]] + path.tail - 1)

    def path_to(self, slot: int) -> Path:
        """The path whose last page is in `slot`."""
        node = int(self.pages.node[slot])
        tail, nodes, at = slot - self.nodes.start[node] + 1, [], node
        while at != ROOT:
            nodes.append(at)
            at = self.nodes.parent[at]
        return Path(nodes[::-1], self.nodes.depth[node] + tail, tail)

    def shorten(self, path: Path, pages: int) -> Path:
        """The first `pages` pages of a path."""
        nodes = list(path.nodes)
        while nodes and self.nodes.depth[nodes[-1]] >= pages:
            nodes.pop()
        return Path(nodes, pages if nodes else 0, pages - self.nodes.depth[nodes[-1]] if nodes else 0)

    def path_slots(self, path: Path, first: int = 0) -> Slots:
        """The page slots of a path in order, from page `first` on (int32)."""
        if path.pages <= first:
            return np.empty(0, np.int32)
        count, start_of, depth_of = len(path.nodes), self.nodes.start, self.nodes.depth
        if count == 1:
            start = start_of[path.nodes[0]]
            return np.arange(start + first, start + path.pages, dtype=np.int32)
        if count <= FEW_NODES:
            ends = [*(depth_of[node] for node in path.nodes[1:]), path.pages]
            runs = [
                np.arange(start_of[node] + max(first - depth_of[node], 0), start_of[node] + end - depth_of[node], dtype=np.int32)
                for node, end in zip(path.nodes, ends, strict=True)
                if end > first
            ]
            return runs[0] if len(runs) == 1 else np.concatenate(runs)
        nodes = np.fromiter(path.nodes, np.int64, count)
        depths = np.asarray(depth_of)[nodes]
        found: Slots = np.arange(path.pages, dtype=np.int32)
        found += np.repeat(np.asarray(start_of)[nodes] - depths, np.diff(depths, append=path.pages))
        return found[first:]

    def path_run(self, path: Path) -> "slice | Slots":
        """The page slots of a path as an index: a slice where they are consecutive, which costs numpy far less."""
        if len(path.nodes) != 1:
            return self.path_slots(path)
        start = self.nodes.start[path.nodes[0]]
        return slice(start, start + path.pages)

    def parts_of(self, slots: Slots) -> PartColumns:
        """The parts of pages, in the order of `slots`."""
        owner, part = self.parts.of(self.pages.part[slots])
        return PartColumns(owner, self.parts.blob[part], self.parts.component[part], np.take(self.parts.ranges, part, axis=0))

    def live(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which of the slots [first, last) hold a page."""
        alive: npt.NDArray[np.bool_] = self.pages.node[first:last] > ROOT
        alive &= (self.pages.flags[first:last] & GHOST) == 0
        return alive

    def live_slots(self) -> Slots:
        """The slots of all pages."""
        return np.flatnonzero(self.live(0, self.pages.ranges.high)).astype(np.int32)

    def ghost_slots(self) -> Slots:
        """The slots of all ghosts."""
        high = self.pages.ranges.high
        return np.flatnonzero((self.pages.node[:high] > ROOT) & ((self.pages.flags[:high] & GHOST) != 0)).astype(np.int32)

    # --- indices and memory -----------------------------------------------------------------------------------------------

    def _node_hash(self, node: int) -> int:
        width, first = self.pages.token_bytes, self.nodes.start[node]
        label = self.pages.tokens_memory[first * width : (first + 1) * width]
        extra = self.pages.extras_memory[first * KEY_BYTES : (first + 1) * KEY_BYTES] if self.has_extras else NO_EXTRA
        return child_hash(self.nodes.parent[node], label, extra)

    def memory(self) -> dict[str, int]:
        """Bytes in use by pages (with nodes and indices), parts and labels, each for the highest slot ever used."""
        high = self.pages.ranges.high
        pages = high * self.pages.row_bytes() + self.nodes.slots.high * Nodes.ROW_BYTES
        indices = self.child_index.nbytes + self.pages.key_index.nbytes
        labels = high * (self.pages.token_bytes + (KEY_BYTES if self.has_extras else 0))
        return {"pages": pages + indices, "parts": self.parts.slots.high * Parts.ROW_BYTES, "labels": labels}

    def version_of(self, slot: int) -> bytes:
        """The put id of the computation a page came from; zero for the root (slot -1)."""
        return bytes(DIGEST_BYTES) if slot < 0 else self.pages.version[slot].tobytes()


def child_hash(parent: int, tokens: bytes, extra: bytes) -> int:
    """The hash a child is indexed under: its parent and the first page's label. Python's keyed hash, so nobody can aim."""
    return hash((parent, tokens)) if extra == NO_EXTRA else hash((parent, tokens, extra))
