"""The page and part columns of a radix tree, and the node columns that give them shape."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec, RangeAllocator, SlotAllocator, column, reserve
from kvstore.digests import DIGEST_BYTES, KEY_BYTES
from kvstore.hash_index import HashIndex

Slots = npt.NDArray[np.int32]

DURABLE = 1
GHOST = 4
ANONYMOUS = 8
"""Page flag: somebody who named no session has used it."""
BRANCHED = 16
"""Page flag: a sub-agent has used it."""
RECIPE = 32
"""Page flag: what it takes to compute it again is durable."""
RECENCY_DEPTH_BITS = 24
MAX_DEPTH = (1 << RECENCY_DEPTH_BITS) - 1
_FEW = 8
"""Parts of one page that are dealt with one by one: up to here that is cheaper than calls of numpy are."""


@dataclass(frozen=True, slots=True)
class PartColumns:
    """Parts of some pages, as parallel arrays; `page` is an index into whatever list of pages was asked about."""

    page: Slots
    blob: Slots
    component: npt.NDArray[np.uint8]
    ranges: npt.NDArray[np.uint16]
    """(n, 4): layer_lo, layer_hi, head_lo, head_hi."""


def _bytes_column(capacity: int, width: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    memory = reserve(capacity * width)
    return memory, np.frombuffer(memory, dtype=np.uint8, count=capacity * width).reshape(capacity, width)


class Pages:
    """One slot a page. The pages of a node are consecutive slots, so that a run's labels are one memcmp."""

    def __init__(self, capacity: int, label_words: int, optional: int, kept: Sequence[ColumnSpec] = ()) -> None:
        self.capacity = capacity
        self.token_bytes = label_words * 4
        self.ranges = RangeAllocator(capacity, "pages")
        self.tokens_memory, self.tokens = _bytes_column(capacity, self.token_bytes)
        self.extras_memory, self.extras = _bytes_column(capacity, KEY_BYTES)
        self.key_memory, self.key = _bytes_column(capacity, KEY_BYTES)
        _, self.version = _bytes_column(capacity, DIGEST_BYTES)
        self.node: npt.NDArray[np.int32] = column(capacity, np.int32)
        self.part: npt.NDArray[np.int32] = column(capacity, np.int32)
        self.leases: npt.NDArray[np.int32] = column(capacity, np.int32)
        self.held: npt.NDArray[np.int16] = column(capacity, np.int16)
        """How many of the leases are only holds: the page stays in the tree, but nobody needs its bytes in DRAM."""
        self.recency: npt.NDArray[np.int64] = column(capacity, np.int64)
        self.retain: npt.NDArray[np.uint32] = column(capacity, np.uint32)
        self.flags: npt.NDArray[np.uint8] = column(capacity, np.uint8)
        self.components: npt.NDArray[np.uint16] = column(capacity, np.uint16)
        self.part_recency: list[npt.NDArray[np.int64]] = [column(capacity, np.int64) for _ in range(optional)]
        """For each optional component, when a boundary that needs the page's part of it was used last."""
        self.kept: dict[str, npt.NDArray[Any]] = {spec.name: column(capacity, spec.dtype) for spec in kept}
        """What others keep for each page. It moves with the page and stays with its ghost; free slots and new pages have zeros."""
        self.key_index = HashIndex()
        self.touched: list[slice | Slots] | None = None
        """While somebody looks for leased pages (store/dram/leased.py): the places of those leased, moved or given parts since."""

    def row_bytes(self) -> int:
        """Bytes of one page's row, labels left out."""
        return sum(a.itemsize * (a.shape[1] if a.ndim == 2 else 1) for a in self._moved())

    def _moved(self) -> tuple[npt.NDArray[Any], ...]:
        leases = (self.leases, self.held)
        fixed = (self.key, self.version, self.node, self.part, *leases, self.recency, self.retain, self.flags, self.components)
        return (*fixed, *self.part_recency, *self.kept.values())

    def move(self, source: int, target: int, count: int) -> None:
        """Copy a run of rows, labels included, to other slots, and point the key index at them."""
        for array in (*self._moved(), self.tokens, self.extras):
            array[target : target + count] = array[source : source + count]
        if self.touched is not None:
            self.touched.append(slice(target, target + count))
        for offset in range(count):
            self.key_index.replace(self.key_hash(target + offset), source + offset, target + offset)

    def key_bytes(self, slot: int) -> bytes:
        """The page key in a slot."""
        return self.key_memory[slot * KEY_BYTES : (slot + 1) * KEY_BYTES]

    def key_hash(self, slot: int) -> int:
        """The hash a slot's page is indexed under: the first 8 bytes of its key."""
        return int.from_bytes(self.key_memory[slot * KEY_BYTES : slot * KEY_BYTES + 8], "little")

    def find_key(self, key: bytes) -> int:
        """The slot of the page with this key, or -1; a ghost is no page."""
        slot = self.find_any(key)
        return -1 if slot >= 0 and self.flags[slot] & GHOST else slot

    def find_any(self, key: bytes) -> int:
        """The slot of the page or ghost with this key, or -1."""
        for slot in self.key_index.candidates(int.from_bytes(key[:8], "little")):
            if self.key_bytes(slot) == key:
                return slot
        return -1


class Parts:
    """One slot a part, linked from its page."""

    def __init__(self, capacity: int) -> None:
        self.slots = SlotAllocator(capacity, "parts")
        self.blob: npt.NDArray[np.int32] = column(capacity, np.int32)
        self.next: npt.NDArray[np.int32] = column(capacity, np.int32)
        self.component: npt.NDArray[np.uint8] = column(capacity, np.uint8)
        self.durable: npt.NDArray[np.bool_] = column(capacity, np.bool_)
        """Whether the durable record of the page names the part."""
        self.ranges: npt.NDArray[np.uint16] = column(capacity, np.uint16, 4)

    ROW_BYTES = 4 + 4 + 1 + 1 + 8

    def add(self, blobs: Slots, component: npt.NDArray[np.uint8], ranges: npt.NDArray[np.uint16], after: Slots | None = None) -> Slots:
        """Store the parts of some pages. `blobs` is (pages, parts a page), -1 where a page lacks the part; the geometry is per part.

        Returns the first part slot of every page, -1 for none. `after` are the first slots of parts that the pages have already.
        """
        if after is None and not blobs.size:
            return np.full(len(blobs), -1, np.int32)
        if after is None and len(blobs) == 1 and blobs.size <= _FEW:
            return np.array([self._add_page(blobs[0].tolist(), component.tolist(), ranges)], np.int32)
        present = blobs >= 0
        if after is None and present.all():
            return self._add_all(blobs, component, ranges)
        taken = self.slots.allocate_many(int(present.sum()))
        first = np.full(len(blobs), -1, np.int32) if after is None else after.copy()
        for part in reversed(range(blobs.shape[1])):
            pages = np.flatnonzero(present[:, part])
            mine, taken = taken[: len(pages)], taken[len(pages) :]
            self.blob[mine] = blobs[pages, part]
            self.component[mine] = component[part]
            self.ranges[mine] = ranges[part]
            self.durable[mine] = False
            self.next[mine] = first[pages]
            first[pages] = mine
        return first

    def _add_page(self, blobs: list[int], component: list[int], ranges: npt.NDArray[np.uint16]) -> int:
        """As `add`, for one page. Returns its first part slot."""
        present = [part for part, blob in enumerate(blobs) if blob >= 0]
        first = -1
        for part, slot in zip(reversed(present), self.slots.allocate_few(len(present)), strict=True):
            self.blob[slot], self.component[slot], self.next[slot] = blobs[part], component[part], first
            self.ranges[slot], self.durable[slot] = ranges[part], False
            first = slot
        return first

    def _add_all(self, blobs: Slots, component: npt.NDArray[np.uint8], ranges: npt.NDArray[np.uint16]) -> Slots:
        """As `add`, for pages that lack nothing."""
        taken = self.slots.allocate_many(blobs.size).reshape(blobs.shape)
        self.blob[taken] = blobs
        self.component[taken] = component
        self.ranges[taken] = ranges
        self.durable[taken] = False
        self.next[taken[:, :-1]] = taken[:, 1:]
        self.next[taken[:, -1]] = -1
        return taken[:, 0]

    def take_out(self, first: int, components: int) -> tuple[int, list[int]]:
        """Unlink the parts of some components (a mask) from a page's list. Returns its first slot now, and the slots taken out.

        They are still to be freed.
        """
        kept: list[int] = []
        out: list[int] = []
        at = first
        while at >= 0:
            (out if components >> int(self.component[at]) & 1 else kept).append(at)
            at = int(self.next[at])
        for here, following in zip(kept, [*kept, -1][1:], strict=True):
            self.next[here] = following
        return (kept[0] if kept else -1), out

    def of_one(self, first: int) -> list[int]:
        """The slots of one page's parts."""
        slots: list[int] = []
        while first >= 0:
            slots.append(first)
            first = int(self.next[first])
        return slots

    def of(self, first: Slots) -> tuple[Slots, Slots]:
        """(index into `first`, part slot) of every part, in page order."""
        owners, slots = [], []
        owner = np.arange(len(first), dtype=np.int32)
        while len(first):
            keep = first >= 0
            if not keep.all():
                owner, first = owner[keep], first[keep]
            owners.append(owner)
            slots.append(first)
            first = self.next[first]
        if not owners:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        if len(owners) == 1 or not len(slots[1]):
            return owners[0], slots[0]
        all_owners = np.concatenate(owners)
        order = np.argsort(all_owners, kind="stable")
        return all_owners[order], np.concatenate(slots)[order]


class Nodes:
    """One slot a node: where its run of pages lies, and its links. Scalars are read through memoryviews, which give ints."""

    _INT_FIELDS = ("parent", "start", "count", "capacity", "depth", "child", "next", "prev", "children", "sealed_children")

    def __init__(self, capacity: int) -> None:
        self.slots = SlotAllocator(capacity, "nodes")
        self.parent, self.start, self.count, self.capacity, self.depth = (self._ints(capacity) for _ in range(5))
        self.child, self.next, self.prev, self.children, self.sealed_children = (self._ints(capacity) for _ in range(5))
        self.sealed = column(capacity, np.uint8).data

    @staticmethod
    def _ints(capacity: int) -> memoryview:
        return column(capacity, np.int32).data

    ROW_BYTES = 4 * len(_INT_FIELDS) + 1

    def new(self, parent: int, start: int, count: int, capacity: int, depth: int) -> int:
        """A node without links and children."""
        node = self.slots.allocate()
        self.parent[node], self.start[node], self.count[node] = parent, start, count
        self.capacity[node], self.depth[node] = capacity, depth
        self.child[node] = self.next[node] = self.prev[node] = -1
        self.children[node] = self.sealed_children[node] = self.sealed[node] = 0
        return node

    def link(self, parent: int, node: int) -> None:
        """Make `node` the first child of `parent`."""
        first = self.child[parent]
        self.parent[node], self.next[node], self.prev[node] = parent, first, -1
        if first >= 0:
            self.prev[first] = node
        self.child[parent] = node
        self.children[parent] += 1
        self.sealed_children[parent] += self.sealed[node]

    def unlink(self, node: int) -> None:
        """Take `node` out of its parent's list of children."""
        parent, before, after = self.parent[node], self.prev[node], self.next[node]
        if before >= 0:
            self.next[before] = after
        else:
            self.child[parent] = after
        if after >= 0:
            self.prev[after] = before
        self.children[parent] -= 1
        self.sealed_children[parent] -= self.sealed[node]

    def children_of(self, node: int) -> list[int]:
        """The children of a node, in no particular order."""
        found, at = [], self.child[node]
        while at >= 0:
            found.append(at)
            at = self.next[at]
        return found

    def subtree(self, node: int) -> list[int]:
        """A node and all nodes below it, parents first."""
        found = [node]
        for at in found:
            found.extend(self.children_of(at))
        return found
