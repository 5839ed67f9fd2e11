"""The radix tree of one namespace: which prefixes exist, and which parts their pages are made of.

Path-compressed, at page granularity, over exact labels. A node is a run of pages; its labels are one run of bytes, so a
match is one hash look-up and one memcmp a node. Pure: no I/O, no clock, no idea of tiers. A part's blob is a number that
means something to the caller.

Nodes read back from a journal that holds no token ids are *sealed*: known only by their page keys. They are matched
through the key chain, and opened (labels filled in) the first time a path through them is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.digests import DIGEST_BYTES, KEY_BYTES, NO_EXTRA, page_key
from kvstore.errors import BadRequest, MissingParent
from kvstore.hash_index import TAG_MASK, HashIndex
from kvstore.kvspec import PartRange
from kvstore.radix.pages import DURABLE, MAX_DEPTH, RECENCY_DEPTH_BITS, Nodes, Pages, PartColumns, Parts, Slots

ROOT = 0
Extras = Mapping[int, bytes]
"""Extra digests by page index; a page that is not in it has none."""

MOVE_LIMIT = 1024
"""A run of at most so many pages is moved to keep paths compressed; a longer one gets a child instead."""

_NO_EXTRAS: Extras = {}


@dataclass(frozen=True, slots=True)
class Path:
    """A matched prefix: the nodes from below the root, and how many pages of the last one belong to it.

    Valid until the tree changes.
    """

    nodes: list[int]
    pages: int
    tail: int


@dataclass(frozen=True, slots=True)
class NewPages:
    """Pages to insert: keys (32 bytes each), version (put id), and parts: blobs (pages, parts) with one geometry a part."""

    keys: bytes
    version: bytes
    blobs: Slots
    ranges: tuple[PartRange, ...]


@dataclass(slots=True)
class Removed:
    """What a removal took out: the blobs of all parts, with repeats, and the keys of durable pages with their blobs."""

    blobs: list[Slots] = field(default_factory=list)
    durable_keys: list[bytes] = field(default_factory=list)
    durable_blobs: list[Slots] = field(default_factory=list)
    pages: int = 0


class RadixTree:
    """See the module's text. `root_key` is the namespace digest (32 bytes), `capacity` the most pages it can hold."""

    def __init__(self, root_key: bytes, page_tokens: int, capacity: int) -> None:
        self.root_key = root_key
        self.page_tokens = page_tokens
        self.pages = Pages(capacity, page_tokens)
        self.parts = Parts(4 * capacity)
        self.nodes = Nodes(capacity + 1)
        self.child_index = HashIndex()
        self.has_extras = False
        self.ever_sealed = False
        self.nodes.new(-1, 0, 0, 0, 0)

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def page_count(self) -> int:
        """Pages in the tree."""
        return self._page_count

    _page_count = 0

    def match(self, tokens: bytes, extras: Extras = _NO_EXTRAS) -> Path:
        """The longest prefix of `tokens` (uint32, little-endian) in the tree, in whole pages. Changes nothing."""
        path = None if extras or self.has_extras else self._match_runs(tokens)
        return self._match_nodes(tokens, extras) if path is None else path

    def _match_runs(self, tokens: bytes) -> Path | None:
        """Follow the hashes of first labels, and compare the labels of nodes in consecutive slots in one go.

        Nodes that were split off one long run lie so, which is what the paths of long contexts are made of. None where only
        a comparison node by node can decide: a sealed node, or another label under an equal hash.
        """
        nodes, width = self.nodes, self.pages.token_bytes
        parent, start, count = nodes.parent, nodes.start, nodes.count
        labels, shards = self.pages.tokens_memory, self.child_index.shards
        path: list[int] = []
        at, end, node = 0, len(tokens) // width * width, ROOT
        run, run_end, run_at = 0, 0, 0
        while at < end:
            child_hash = hash((node, tokens[at : at + width]))
            shard = shards[child_hash & 0xFF]
            ids, tags, mask = shard.ids, shard.tags, shard.mask
            tag = (child_hash >> 8) & TAG_MASK
            slot = tag & mask
            while (child := ids[slot]) >= 0:
                if tags[slot] == tag and parent[child] == node:
                    break
                slot = (slot + 1) & mask
            else:
                if nodes.sealed_children[node]:
                    return None
                break
            first = start[child] * width
            if first != run_end:
                if not tokens.startswith(labels[run:run_end], run_at):
                    return self._cut(path, tokens, run, run_end, run_at)
                run, run_at = first, at
            path.append(child)
            node = child
            length = count[child] * width
            run_end = first + length
            at += length
        if not tokens.startswith(labels[run:run_end], run_at):
            return self._cut(path, tokens, run, run_end, run_at)
        return Path(path, at // width, count[node])

    def _cut(self, path: list[int], tokens: bytes, run: int, run_end: int, run_at: int) -> Path | None:
        """End a path where its last run of labels differs from the tokens; None if that is at the first label of a node."""
        width = self.pages.token_bytes
        length = min(run_end - run, len(tokens) - run_at) // width
        ours = self.pages.tokens[run // width : run // width + length]
        same = (ours == np.frombuffer(tokens, np.uint8, length * width, run_at).reshape(length, width)).all(axis=1)
        pages = run_at // width + (length if same.all() else int(same.argmin()))
        while path and self.nodes.depth[path[-1]] > pages:
            path.pop()
        tail = pages - self.nodes.depth[path[-1]] if path else 0
        return Path(path, pages, tail) if tail else None

    def _match_nodes(self, tokens: bytes, extras: Extras) -> Path:
        """Compare node by node, with extra digests and sealed nodes."""
        nodes, width = self.nodes, self.pages.token_bytes
        path: list[int] = []
        at, end, node = 0, len(tokens) // width * width, ROOT
        while at < end:
            child_hash = _child_hash(node, tokens[at : at + width], extras.get(at // width, NO_EXTRA))
            for child in self.child_index.candidates(child_hash):
                if nodes.parent[child] == node and (equal := self._equal_pages(child, tokens, extras, at)):
                    break
            else:
                if not nodes.sealed_children[node]:
                    break
                child, equal = self._match_sealed(node, tokens, extras, at)
                if not equal:
                    break
            path.append(child)
            node, at = child, at + equal * width
            if equal < nodes.count[child]:
                return Path(path, at // width, equal)
        return Path(path, at // width, nodes.count[node])

    def _equal_pages(self, node: int, tokens: bytes, extras: Extras, at: int) -> int:
        width, first = self.pages.token_bytes, self.nodes.start[node]
        length = min(self.nodes.count[node], len(tokens) // width - at // width)
        ours = self.pages.tokens[first : first + length]
        theirs = np.frombuffer(tokens, np.uint8, length * width, at).reshape(length, width)
        same = (ours == theirs).all(axis=1)
        if extras or self.has_extras:
            wanted = extra_run(extras, at // width, length) or bytes(length * KEY_BYTES)
            same &= (self.pages.extras[first : first + length] == np.frombuffer(wanted, np.uint8).reshape(length, KEY_BYTES)).all(axis=1)
        return length if same.all() else int(same.argmin())

    def _match_sealed(self, node: int, tokens: bytes, extras: Extras, at: int) -> tuple[int, int]:
        """The sealed child of `node` that continues with `tokens`, by page keys, and how many of its pages do."""
        width, first_page = self.pages.token_bytes, at // self.pages.token_bytes
        key = page_key(self.last_key(node), self._label(tokens, extras, first_page))
        slot = self.pages.find_key(key)
        if slot < 0:
            return -1, 0
        child = int(self.pages.node[slot])
        if self.nodes.parent[child] != node or self.nodes.start[child] != slot:
            return -1, 0
        length = min(self.nodes.count[child], len(tokens) // width - first_page)
        equal = 1
        while equal < length:
            key = page_key(key, self._label(tokens, extras, first_page + equal))
            if self.pages.key_bytes(slot + equal) != key:
                break
            equal += 1
        return child, equal

    def _label(self, tokens: bytes, extras: Extras, page: int) -> bytes:
        width = self.pages.token_bytes
        return tokens[page * width : (page + 1) * width] + extras.get(page, NO_EXTRA)

    def _token_run(self, tokens: bytes, first: int, count: int) -> bytes:
        return tokens[first * self.pages.token_bytes : (first + count) * self.pages.token_bytes]

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

    def path_slots(self, path: Path, first: int = 0) -> Slots:
        """The page slots of a path in order, from page `first` on (int32)."""
        if path.pages <= first:
            return np.empty(0, np.int32)
        starts = np.fromiter((self.nodes.start[n] for n in path.nodes), np.int64, len(path.nodes))
        depths = np.fromiter((self.nodes.depth[n] for n in path.nodes), np.int64, len(path.nodes))
        lengths = np.append(depths[1:], path.pages) - depths
        return (np.arange(path.pages) + np.repeat(starts - depths, lengths))[first:].astype(np.int32)

    def parts_of(self, slots: Slots) -> PartColumns:
        """The parts of pages, in the order of `slots`."""
        owner, part = self.parts.of(self.pages.part[slots])
        return PartColumns(owner, self.parts.blob[part], self.parts.component[part], self.parts.ranges[part])

    def live_slots(self) -> Slots:
        """The slots of all pages."""
        return np.flatnonzero(self.pages.node[: self.pages.ranges.high] > ROOT).astype(np.int32)

    # --- use ---------------------------------------------------------------------------------------------------------

    def touch(self, slots: Slots, tick: int) -> None:
        """Record a use at `tick` of the pages of a path that begins at the root.

        Recency orders pages by last use and, within one use, the deepest first: the k least recent pages never include
        one with a descendant outside them, so evicting in this order is leaf-first LRU.
        """
        self.pages.recency[slots] = (tick << RECENCY_DEPTH_BITS) + (MAX_DEPTH - np.arange(len(slots)))

    def open_path(self, path: Path, tokens: bytes, extras: Extras = _NO_EXTRAS) -> Path:
        """Give the sealed nodes of a path just matched against `tokens` their labels. Returns the path as it is now."""
        if not any(self.nodes.sealed[node] for node in path.nodes):
            return path
        last = path.nodes[-1]
        if self.nodes.sealed[last] and path.tail < self.nodes.count[last]:
            path = Path([*path.nodes[:-1], self._split(last, path.tail)], path.pages, path.tail)
        for node in path.nodes:
            if self.nodes.sealed[node]:
                first, count = self.nodes.depth[node], self.nodes.count[node]
                self._write_labels(node, 0, self._token_run(tokens, first, count), extra_run(extras, first, count))
                self.nodes.sealed[node] = 0
                parent = self.nodes.parent[node]
                self.nodes.sealed_children[parent] -= 1
                self.child_index.add(self._node_hash(node), node)
        return path

    def pin(self, path: Path) -> bytes:
        """Lease a path's pages, so that none can be removed. Returns the key of its boundary, which `unpin` takes."""
        self.pages.leases[self.path_slots(path)] += 1
        return self.key_at(path)

    def unpin(self, boundary_key: bytes) -> Slots:
        """Undo one `pin`. Returns the page slots it held."""
        slots = self.path_slots(self.path_to(self.pages.find_key(boundary_key)))
        self.pages.leases[slots] -= 1
        return slots

    # --- growing -----------------------------------------------------------------------------------------------------

    def insert(self, tokens: bytes, extras: Extras, first: int, new: NewPages) -> Path:
        """Add the pages of `tokens` from page `first` on, those that are there already left as they are: first commit wins.

        Returns the path matched before, whose `pages` says how many existed (at least `first`). The caller's blobs of
        those are not taken. Raises MissingParent if the prefix before `first` is not in the tree.
        """
        total = len(tokens) // self.pages.token_bytes
        if total > MAX_DEPTH:
            raise BadRequest(f"a prefix of {total} pages: at most {MAX_DEPTH}")
        path = self.match(tokens, extras)
        if path.pages < first:
            raise MissingParent(f"the put starts at page {first}, but only {path.pages} pages of its prefix are in the store")
        if path.pages >= total:
            return path
        node = self._split_at_end(self.open_path(path, tokens, extras))
        skip = path.pages - first
        rest = NewPages(new.keys[skip * KEY_BYTES :], new.version, new.blobs[skip:], new.ranges)
        node, offset = self._append(node, rest, sealed=False)
        added = total - path.pages
        self._write_labels(node, offset, self._token_run(tokens, path.pages, added), extra_run(extras, path.pages, added))
        if offset == 0:
            self.child_index.add(self._node_hash(node), node)
        return path

    def insert_below(self, parent_key: bytes, new: NewPages, labels: tuple[bytes, bytes] | None) -> bool:
        """Add a run read from a journal below the page `parent_key`; False if that page is not in the tree.

        `labels` are its token bytes and extra digests (empty if no page has any); without them the run is sealed.
        """
        node = ROOT
        if parent_key != self.root_key:
            slot = self.pages.find_key(parent_key)
            if slot < 0:
                return False
            node = self._split_at_end(self.path_to(slot))
        node, offset = self._append(node, new, sealed=labels is None)
        if labels is None:
            self.ever_sealed = True
            return True
        self._write_labels(node, offset, *labels)
        if offset == 0:
            self.child_index.add(self._node_hash(node), node)
        return True

    def _split_at_end(self, path: Path) -> int:
        if not path.nodes:
            return ROOT
        node = path.nodes[-1]
        return self._split(node, path.tail) if path.tail < self.nodes.count[node] else node

    def _append(self, node: int, new: NewPages, *, sealed: bool) -> tuple[int, int]:
        """Put new pages after `node`: in its own run if it is a leaf and can grow, else in a new child."""
        count = len(new.keys) // KEY_BYTES
        component = np.array([r.component for r in new.ranges], np.uint8)
        ranges = np.array([(r.layer_lo, r.layer_hi, r.head_lo, r.head_hi) for r in new.ranges], np.uint16).reshape(-1, 4)
        nodes, pages = self.nodes, self.pages
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
        pages.part[run] = self.parts.add(new.blobs, component, ranges)
        pages.key[run] = np.frombuffer(new.keys, np.uint8).reshape(count, KEY_BYTES)
        pages.version[run] = np.frombuffer(new.version, np.uint8)
        pages.node[run] = node
        pages.leases[run] = pages.recency[run] = pages.retain[run] = pages.flags[run] = 0
        for slot in range(first, first + count):
            pages.key_index.add(pages.key_hash(slot), slot)
        self._page_count += count
        return node, offset

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
        self._move(node, wanted + wanted // 4)
        return True

    def _move(self, node: int, capacity: int) -> None:
        nodes, start = self.nodes, self.nodes.start[node]
        target = self.pages.ranges.allocate(capacity)
        self.pages.move(start, target, nodes.count[node])
        self._release_range(start, nodes.capacity[node])
        nodes.start[node], nodes.capacity[node] = target, capacity

    def _release_range(self, start: int, length: int) -> None:
        self.pages.node[start : start + length] = ROOT
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

    # --- shrinking ---------------------------------------------------------------------------------------------------

    def remove(self, slot: int) -> Removed:
        """Remove the page in `slot` and everything below it. None of it may be leased."""
        nodes, removed = self.nodes, Removed()
        node = int(self.pages.node[slot])
        offset = slot - nodes.start[node]
        below = nodes.subtree(node)
        for at in reversed(below[1:] if offset else below):
            self._clear(at, 0, removed)
            self._drop_node(at)
        if offset:
            self._clear(node, offset, removed)
            self._release_range(slot, nodes.capacity[node] - offset)
            nodes.count[node] = nodes.capacity[node] = offset
            self._merge_only_child(nodes.parent[node])
        else:
            self._merge_only_child(nodes.parent[node])
        return removed

    def _clear(self, node: int, offset: int, removed: Removed) -> None:
        pages = self.pages
        start, end = self.nodes.start[node] + offset, self.nodes.start[node] + self.nodes.count[node]
        slots = np.arange(start, end, dtype=np.int32)
        if pages.leases[start:end].any():
            raise AssertionError("a leased page was about to be removed")
        _, part = self.parts.of(pages.part[slots])
        removed.blobs.append(self.parts.blob[part])
        durable = slots[(pages.flags[slots] & DURABLE) != 0]
        removed.durable_keys += [pages.key_bytes(s) for s in durable.tolist()]
        _, durable_part = self.parts.of(pages.part[durable])
        removed.durable_blobs.append(self.parts.blob[durable_part])
        removed.pages += end - start
        self.parts.slots.free_many(part)
        for slot in range(start, end):
            pages.key_index.remove(pages.key_hash(slot), slot)
        self._page_count -= end - start

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

    # --- policy ------------------------------------------------------------------------------------------------------

    def coldest(self, slots: Slots, count: int) -> Slots:
        """The `count` least recent of the given pages, coldest first: leaf-first LRU order (see `touch`)."""
        recency = self.pages.recency[slots]
        if count < len(slots):
            chosen = np.argpartition(recency, count)[:count]
            slots, recency = slots[chosen], recency[chosen]
        return slots[np.argsort(recency, kind="stable")]

    # --- hashes ------------------------------------------------------------------------------------------------------

    def _node_hash(self, node: int) -> int:
        width, first = self.pages.token_bytes, self.nodes.start[node]
        label = self.pages.tokens_memory[first * width : (first + 1) * width]
        extra = self.pages.extras_memory[first * KEY_BYTES : (first + 1) * KEY_BYTES] if self.has_extras else NO_EXTRA
        return _child_hash(self.nodes.parent[node], label, extra)

    # --- memory ------------------------------------------------------------------------------------------------------

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


def extra_run(extras: Extras, first: int, count: int) -> bytes:
    """The extra digests of `count` pages from `first` on, 32 bytes each; empty if none of them has any."""
    if not any(first <= page < first + count for page in extras):
        return b""
    return b"".join(extras.get(page, NO_EXTRA) for page in range(first, first + count))


def _child_hash(parent: int, tokens: bytes, extra: bytes) -> int:
    """The hash a child is indexed under: its parent and the first page's label. Python's keyed hash, so nobody can aim."""
    return hash((parent, tokens)) if extra == NO_EXTRA else hash((parent, tokens, extra))


def as_token_bytes(tokens: npt.NDArray[np.uint32] | bytes | bytearray | memoryview) -> bytes:
    """Tokens as the tree takes them: uint32 little-endian bytes. Raises BadRequest for any other type or a torn length."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.uint32 or tokens.ndim != 1:
            raise BadRequest(f"tokens are a {tokens.ndim}-d array of {tokens.dtype}; give a 1-d array of uint32")
        return tokens.astype("<u4", copy=False).tobytes()
    data = bytes(tokens)
    if len(data) % 4:
        raise BadRequest(f"tokens are {len(data)} bytes, not a multiple of 4")
    return data
