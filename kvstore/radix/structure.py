"""The shape of a radix tree: nodes and the runs of pages they stand for, grown, split, moved, trimmed and merged.

No tokens are looked at here: what matches is decided in tree.py. A node's pages lie in consecutive slots.
"""

import numpy as np

from kvstore.digests import KEY_BYTES
from kvstore.errors import NoSpace
from kvstore.kvspec import PartRange
from kvstore.radix.pages import DURABLE, GHOST, Slots
from kvstore.radix.tables import ROOT, TreeTables
from kvstore.radix.values import NewPages, Path, Removed, geometry

MOVE_LIMIT = 1024
"""A run of at most so many pages is moved to keep paths compressed; a longer one gets a child instead."""


class TreeStructure(TreeTables):
    """Changes the tables, and keeps them consistent."""

    # --- growing ----------------------------------------------------------------------------------------------------------

    def has_room(self, pages: int, parts: int) -> bool:
        """Whether a run of so many pages, with so many parts, can be added below any page without NoSpace."""
        taken, ranges = self._page_count + self._ghost_count, self.pages.ranges
        if taken + pages > self.capacity or ranges.high + pages > ranges.capacity:
            return False
        return self.parts.slots.available >= parts and self.nodes.slots.available >= 2  # one of them where a node has to be split

    def _split_at_end(self, path: Path) -> int:
        if not path.nodes:
            return ROOT
        node = path.nodes[-1]
        return self._split(node, path.tail) if path.tail < self.nodes.count[node] else node

    def _append(self, node: int, new: NewPages, *, sealed: bool) -> tuple[int, int]:
        """Put new pages after `node`: in its own run if it is a leaf and can grow, else in a new child."""
        count = len(new.keys) // KEY_BYTES
        nodes, pages = self.nodes, self.pages
        if self._page_count + self._ghost_count + count > self.capacity:
            raise NoSpace(f"the table of pages is full ({self.capacity})")
        if self.parts.slots.available < new.blobs.size or nodes.slots.available < 1:
            raise NoSpace("the tables of parts or nodes are full")  # before anything is changed
        if node != ROOT and not nodes.children[node] and nodes.sealed[node] == sealed and self._grow(node, count):
            offset = nodes.count[node]
            nodes.count[node] += count
        else:
            start = pages.ranges.allocate(count)
            parent, node, offset = node, nodes.new(node, start, count, count, nodes.depth[node] + nodes.count[node]), 0
            nodes.sealed[node] = sealed
            nodes.link(parent, node)
        first = nodes.start[node] + offset
        run = slice(first, first + count)
        self._enter(run, node, new)
        pages.key_index.add_many(_key_hashes(new.keys), list(range(first, first + count)))
        self._page_count += count
        return node, offset

    def _append_apart(self, new: NewPages) -> tuple[Slots, list[int]]:
        """Put each new page into a node of its own below the root. Returns their slots and nodes. Raises NoSpace, with none added."""
        count = len(new.keys) // KEY_BYTES
        nodes, pages = self.nodes, self.pages
        if self._page_count + self._ghost_count + count > self.capacity or pages.ranges.capacity - pages.ranges.used < count:
            raise NoSpace(f"the table of pages is full ({self.capacity})")
        if self.parts.slots.available < new.blobs.size or nodes.slots.available < count:
            raise NoSpace("the tables of parts or nodes are full")  # before anything is changed
        starts = [pages.ranges.allocate(1) for _ in range(count)]
        made = [nodes.new(ROOT, start, 1, 1, 0) for start in starts]
        for node in made:
            nodes.link(ROOT, node)
        slots = np.array(starts, np.int32)
        self._enter(slots, made, new)
        pages.key_index.add_many(_key_hashes(new.keys), starts)
        self._page_count += count
        return slots, made

    def _enter(self, where: "slice | Slots", nodes: int | list[int], new: NewPages) -> None:
        """Make slots that were free the pages of a node, or each of one of its own."""
        pages = self.pages
        pages.key[where] = np.frombuffer(new.keys, np.uint8).reshape(-1, KEY_BYTES)
        pages.node[where] = nodes
        pages.leases[where] = pages.held[where] = pages.recency[where] = pages.retain[where] = 0
        for recency in pages.part_recency:
            recency[where] = 0
        self._fill(where, new)

    def _fill(self, where: "slice | Slots", new: NewPages) -> None:
        """Give pages that have none their version and parts."""
        pages = self.pages
        pages.part[where] = self.parts.add(new.blobs, *geometry(new.ranges))
        pages.version[where] = np.frombuffer(new.version, np.uint8)
        pages.flags[where] = 0
        pages.components[where] = new.masks() if new.ranges else 0

    def _revive(self, slots: Slots, new: NewPages) -> None:
        """Make ghosts pages again."""
        self._fill(slots, new)
        self._page_count += len(slots)
        self._ghost_count -= len(slots)

    def add_parts(self, slots: Slots, blobs: Slots, ranges: tuple[PartRange, ...]) -> None:
        """Give pages optional components that they lack: `blobs` is (pages, parts), -1 for none, whole components of each page."""
        new = NewPages(b"", b"", blobs, ranges)
        self.pages.part[slots] = self.parts.add(blobs, *geometry(ranges), after=self.pages.part[slots])
        self.pages.components[slots] |= new.masks()
        if self.pages.touched is not None:
            self.pages.touched.append(slots)

    def take_components(self, slot: int, components: int) -> tuple[list[int], list[int]]:
        """Take optional components (a mask) from a page. Returns their blobs, and those of them that its durable record names."""
        first, out = self.parts.take_out(int(self.pages.part[slot]), components)
        self.pages.part[slot] = first
        self.pages.components[slot] &= np.uint16(~components & 0xFFFF)
        blobs = [int(self.parts.blob[part]) for part in out]
        named = [blob for blob, part in zip(blobs, out, strict=True) if self.parts.durable[part]]
        self.parts.slots.free_many(np.array(out, np.int32))
        return blobs, named

    def _grow(self, node: int, extra: int) -> bool:
        """Make room for `extra` more pages at the end of a node's run, moving a short run if it must."""
        nodes, ranges = self.nodes, self.pages.ranges
        start, count, capacity = nodes.start[node], nodes.count[node], nodes.capacity[node]
        wanted = count + extra
        if wanted <= capacity:
            return True
        if ranges.extend(start + capacity, wanted - capacity):
            nodes.capacity[node] = wanted
            return True
        if count > MOVE_LIMIT:
            return False
        for room in (wanted + wanted // 4, wanted):
            try:
                self._move(node, room)
            except NoSpace:
                continue
            return True
        return False

    def _move(self, node: int, capacity: int) -> None:
        nodes, start = self.nodes, self.nodes.start[node]
        target = self.pages.ranges.allocate(capacity)
        self.pages.move(start, target, nodes.count[node])
        self._release_range(start, nodes.capacity[node])
        nodes.start[node], nodes.capacity[node] = target, capacity

    def _release_range(self, start: int, length: int) -> None:
        self.pages.node[start : start + length] = ROOT
        self.pages.flags[start : start + length] = 0
        for kept in self.pages.kept.values():
            kept[start : start + length] = 0
        self.pages.ranges.free(start, length)

    def _write_labels(self, node: int, offset: int, tokens: bytes, extras: bytes) -> None:
        """Store the labels of a run's last pages: their token bytes, and their extra digests (empty if none has any)."""
        width, at = self.pages.token_bytes, self.nodes.start[node] + offset
        self.pages.tokens_memory[at * width : at * width + len(tokens)] = tokens
        if extras or self.has_extras:
            self.has_extras = True
            count = self.nodes.count[node] - offset
            self.pages.extras_memory[at * KEY_BYTES : (at + count) * KEY_BYTES] = extras or bytes(count * KEY_BYTES)

    def _split(self, node: int, pages: int) -> int:
        """Cut a node after `pages` pages. The upper part is a new node, which is returned; the lower keeps the number."""
        nodes, start = self.nodes, self.nodes.start[node]
        parent, sealed = nodes.parent[node], nodes.sealed[node]
        node_hash = 0 if sealed else self._node_hash(node)
        upper = nodes.new(parent, start, pages, pages, nodes.depth[node])
        nodes.sealed[upper] = sealed
        nodes.unlink(node)
        nodes.link(parent, upper)
        self.pages.node[start : start + pages] = upper
        nodes.start[node], nodes.depth[node] = start + pages, nodes.depth[node] + pages
        nodes.count[node] -= pages
        nodes.capacity[node] -= pages
        nodes.link(upper, node)
        if not sealed:
            self.child_index.replace(node_hash, node, upper)
            self.child_index.add(self._node_hash(node), node)
        return upper

    # --- shrinking --------------------------------------------------------------------------------------------------------

    def remove(self, slot: int) -> Removed:
        """Remove the page (or ghost) in `slot` and everything below it. None of it may be leased."""
        nodes, removed = self.nodes, Removed()
        node = int(self.pages.node[slot])
        offset = slot - nodes.start[node]
        below = nodes.subtree(node)
        for at in reversed(below[1:] if offset else below):
            self._clear(at, 0, removed)
            self._forget(at, 0)
            self._drop_node(at)
        if offset:
            self._clear(node, offset, removed)
            self._forget(node, offset)
            self._release_range(slot, nodes.capacity[node] - offset)
            nodes.count[node] = nodes.capacity[node] = offset
        self._merge_only_child(nodes.parent[node])
        return removed

    def bury(self, slot: int) -> Removed:
        """Turn the page in `slot` and everything below it into ghosts. None of it may be leased."""
        removed = Removed()
        node = int(self.pages.node[slot])
        for at in self.nodes.subtree(node):
            self._clear(at, slot - self.nodes.start[node] if at == node else 0, removed)
        return removed

    def bury_many(self, slots: Slots) -> Removed:
        """Turn pages into ghosts, none of them leased. Nothing below them may be left but what is a ghost already or among them."""
        removed = Removed()
        self._bury(slots, removed)
        return removed

    def _clear(self, node: int, offset: int, removed: Removed) -> None:
        """Take the parts of a node's pages from `offset` on, and leave them ghosts."""
        start, end = self.nodes.start[node] + offset, self.nodes.start[node] + self.nodes.count[node]
        self._bury(np.arange(start, end, dtype=np.int32), removed)

    def _bury(self, slots: Slots, removed: Removed) -> None:
        pages = self.pages
        if pages.leases[slots].any():
            raise AssertionError("a leased page was about to be removed")
        slots = slots[(pages.flags[slots] & GHOST) == 0]
        _, part = self.parts.of(pages.part[slots])
        removed.slots.append(slots)
        removed.blobs.append(self.parts.blob[part])
        removed.durable_blobs.append(self.parts.blob[part[self.parts.durable[part]]])
        removed.durable_keys += [pages.key_bytes(s) for s in slots[(pages.flags[slots] & DURABLE) != 0].tolist()]
        removed.pages += len(slots)
        self.parts.slots.free_many(part)
        pages.part[slots] = -1
        pages.components[slots] = pages.retain[slots] = 0
        pages.version[slots] = 0
        pages.flags[slots] = GHOST
        self._page_count -= len(slots)
        self._ghost_count += len(slots)

    def _forget(self, node: int, offset: int) -> None:
        """Take a node's ghosts from `offset` on out of the indices."""
        first, end = self.nodes.start[node] + offset, self.nodes.start[node] + self.nodes.count[node]
        for slot in range(first, end):
            self.pages.key_index.remove(self.pages.key_hash(slot), slot)
        self._ghost_count -= end - first

    def _drop_node(self, node: int) -> None:
        nodes = self.nodes
        if not nodes.sealed[node]:
            self.child_index.remove(self._node_hash(node), node)
        nodes.unlink(node)
        self._release_range(nodes.start[node], nodes.capacity[node])
        nodes.slots.free(node)

    def _merge_only_child(self, node: int) -> None:
        """Keep paths compressed: a node left with one child takes it in, if the run is short enough to move."""
        nodes = self.nodes
        if node == ROOT or nodes.children[node] != 1:
            return
        child = nodes.child[node]
        count, extra = nodes.count[node], nodes.count[child]
        if nodes.sealed[child] != nodes.sealed[node] or count + extra > MOVE_LIMIT or not self._grow(node, extra):
            return
        if not nodes.sealed[child]:
            self.child_index.remove(self._node_hash(child), child)
        self.pages.move(nodes.start[child], nodes.start[node] + count, extra)
        self.pages.node[nodes.start[node] + count : nodes.start[node] + count + extra] = node
        self._release_range(nodes.start[child], nodes.capacity[child])
        nodes.count[node] = count + extra
        nodes.unlink(child)
        nodes.child[node], nodes.children[node] = nodes.child[child], nodes.children[child]
        nodes.sealed_children[node] = nodes.sealed_children[child]
        for grandchild in nodes.children_of(child):
            sealed = nodes.sealed[grandchild]
            old_hash = 0 if sealed else self._node_hash(grandchild)
            nodes.parent[grandchild] = node
            if not sealed:
                self.child_index.remove(old_hash, grandchild)
                self.child_index.add(self._node_hash(grandchild), grandchild)
        nodes.slots.free(child)


def _key_hashes(keys: bytes) -> list[int]:
    """What pages of these keys are indexed under, as `Pages.key_hash` says it."""
    found: list[int] = np.frombuffer(keys, "<u8")[:: KEY_BYTES // 8].tolist()
    return found
