"""The radix tree of one namespace: which prefixes exist, and which parts their pages are made of.

Path-compressed, at page granularity, over exact labels. A node is a run of pages; its labels are one run of bytes, so a
match is one hash look-up and one memcmp a node. Pure: no I/O, no clock, no idea of tiers. A part's blob is a number that
means something to the caller.

Nodes read back from a journal that holds no token ids are *sealed*: known only by their page keys. They are matched
through the key chain, and opened (labels filled in) the first time a path through them is used.

A page that lost its bytes may stay as a ghost, with its label and history. A ghost is never matched; all below it are ghosts.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES, NO_EXTRA, page_key
from kvstore.errors import BadRequest, NoSpace
from kvstore.hash_index import TAG_MASK
from kvstore.radix.pages import GHOST, MAX_DEPTH, RECENCY_DEPTH_BITS, Slots
from kvstore.radix.structure import TreeStructure
from kvstore.radix.tables import FEW_NODES, ROOT, child_hash
from kvstore.radix.values import EMPTY_PATH, NewPages, Path

Extras = Mapping[int, bytes]
"""Extra digests by page index, counted from the first of the tokens they go with; a page that is not in it has none."""

_NO_EXTRAS: Extras = {}


class RadixTree(TreeStructure):
    """See the module's text."""

    # --- matching ---------------------------------------------------------------------------------------------------------

    def match(self, tokens: bytes, extras: Extras = _NO_EXTRAS, base: Path = EMPTY_PATH) -> Path:
        """The longest prefix of `tokens` (uint32, little-endian) in the tree, in whole pages. Changes nothing.

        With a `base` the tokens are those after it; the path returned begins at the root all the same.
        """
        return self._without_ghosts(self._match_all(tokens, extras, base))

    def match_with_ghosts(self, tokens: bytes, extras: Extras = _NO_EXTRAS, base: Path = EMPTY_PATH) -> Path:
        """As `match`, but ghosts count: the longest prefix that the tree knows of."""
        return self._match_all(tokens, extras, base)

    def _match_all(self, tokens: bytes, extras: Extras, base: Path) -> Path:
        path = None if extras or self.has_extras or base.pages else self._match_runs(tokens)
        return self._match_nodes(tokens, extras, base) if path is None else path

    def _without_ghosts(self, path: Path) -> Path:
        """The part of a path before its first ghost."""
        flags = self.pages.flags
        if not path.pages or not flags[self.nodes.start[path.nodes[-1]] + path.tail - 1] & GHOST:
            return path
        slots = self.path_slots(path)
        return self.shorten(path, int(np.flatnonzero(flags[slots] & GHOST)[0]))

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
            first_hash = hash((node, tokens[at : at + width]))
            shard = shards[first_hash & 0xFF]
            ids, tags, mask = shard.ids, shard.tags, shard.mask
            tag = (first_hash >> 8) & TAG_MASK
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

    def _match_nodes(self, tokens: bytes, extras: Extras, base: Path = EMPTY_PATH) -> Path:
        """Compare node by node, with extra digests and sealed nodes, from below `base` on."""
        nodes, width = self.nodes, self.pages.token_bytes
        path, total, at = list(base.nodes), len(tokens) // width, 0
        node = path[-1] if path else ROOT
        if path and base.tail < nodes.count[node]:
            at = self._equal_pages(node, base.tail, tokens, extras, 0)
            if base.tail + at < nodes.count[node]:
                return Path(path, base.pages + at, base.tail + at)
        while at < total:
            child, equal = self._child_for(node, tokens, extras, at)
            if not equal:
                break
            path.append(child)
            node, at = child, at + equal
            if equal < nodes.count[child]:
                return Path(path, base.pages + at, equal)
        return Path(path, base.pages + at, nodes.count[node])

    def _child_for(self, node: int, tokens: bytes, extras: Extras, at: int) -> tuple[int, int]:
        """The child of `node` that goes on with the tokens from page `at` on, and how many of its pages do (0: there is none)."""
        nodes, width = self.nodes, self.pages.token_bytes
        first_hash = child_hash(node, tokens[at * width : (at + 1) * width], extras.get(at, NO_EXTRA))
        for child in self.child_index.candidates(first_hash):
            if nodes.parent[child] == node and (equal := self._equal_labels(child, 0, tokens, extras, at)):
                return child, equal
        if not nodes.sealed_children[node]:
            return -1, 0
        slot = self.pages.find_any(page_key(self.last_key(node), self._label(tokens, extras, at)))
        child = int(self.pages.node[slot]) if slot >= 0 else ROOT
        if child == ROOT or nodes.parent[child] != node or nodes.start[child] != slot:
            return -1, 0
        return child, self._equal_keys(child, 0, tokens, extras, at)

    def _equal_pages(self, node: int, offset: int, tokens: bytes, extras: Extras, at: int) -> int:
        """How many pages of a node, from `offset` on, are those of the tokens from page `at` on."""
        compare = self._equal_keys if self.nodes.sealed[node] else self._equal_labels
        return compare(node, offset, tokens, extras, at)

    def _equal_labels(self, node: int, offset: int, tokens: bytes, extras: Extras, at: int) -> int:
        width, first = self.pages.token_bytes, self.nodes.start[node] + offset
        length = min(self.nodes.count[node] - offset, len(tokens) // width - at)
        ours = self.pages.tokens[first : first + length]
        theirs = np.frombuffer(tokens, np.uint8, length * width, at * width).reshape(length, width)
        same = (ours == theirs).all(axis=1)
        if extras or self.has_extras:
            wanted = extra_run(extras, at, length) or bytes(length * KEY_BYTES)
            same &= (self.pages.extras[first : first + length] == np.frombuffer(wanted, np.uint8).reshape(length, KEY_BYTES)).all(axis=1)
        return length if same.all() else int(same.argmin())

    def _equal_keys(self, node: int, offset: int, tokens: bytes, extras: Extras, at: int) -> int:
        """As `_equal_labels`, by the key chain: for a node whose labels are not known."""
        first = self.nodes.start[node] + offset
        key = self.pages.key_bytes(first - 1) if offset else self.last_key(self.nodes.parent[node])
        length = min(self.nodes.count[node] - offset, len(tokens) // self.pages.token_bytes - at)
        for equal in range(length):
            key = page_key(key, self._label(tokens, extras, at + equal))
            if self.pages.key_bytes(first + equal) != key:
                return equal
        return length

    def _label(self, tokens: bytes, extras: Extras, page: int) -> bytes:
        width = self.pages.token_bytes
        return tokens[page * width : (page + 1) * width] + extras.get(page, NO_EXTRA)

    def _token_run(self, tokens: bytes, first: int, count: int) -> bytes:
        return tokens[first * self.pages.token_bytes : (first + count) * self.pages.token_bytes]

    def children_on(self, path: Path) -> npt.NDArray[np.int32]:
        """How many different pages follow on each page of a path."""
        found = np.ones(path.pages, np.int32)
        children, depth, last = self.nodes.children, self.nodes.depth, path.nodes[-1]
        if len(path.nodes) <= FEW_NODES:
            for above, node in pairwise(path.nodes):
                found[depth[node] - 1] = children[above]
        else:
            nodes = np.fromiter(path.nodes, np.int64, len(path.nodes))
            found[np.asarray(depth)[nodes[1:]] - 1] = np.asarray(children)[nodes[:-1]]
        if path.tail == self.nodes.count[last]:
            found[-1] = children[last]
        return found

    # --- use --------------------------------------------------------------------------------------------------------------

    def touch(self, slots: Slots, tick: int) -> None:
        """Record a use at `tick` of the pages of a path that begins at the root and ends at a usable boundary.

        Recency orders pages by last use and, within one use, the deepest first: the k least recent pages never include
        one with a descendant outside them, so evicting in this order is leaf-first LRU. Optional components are used only
        where the boundary needs them.
        """
        most = (tick << RECENCY_DEPTH_BITS) + MAX_DEPTH
        recency = np.arange(most, most - len(slots), -1)
        self.pages.recency[slots] = recency
        for rule, part_recency in zip(self.rules.optional, self.pages.part_recency, strict=True):
            first = max(len(slots) - rule.pages, 0)
            part_recency[slots[first:]] = recency[first:]

    def touch_alone(self, slots: Slots, tick: int) -> None:
        """As `touch`, of pages that each stand alone: the first was used at `tick`, each next one a tick later."""
        recency = (np.arange(tick, tick + len(slots), dtype=np.int64) << RECENCY_DEPTH_BITS) + MAX_DEPTH
        self.pages.recency[slots] = recency
        for part_recency in self.pages.part_recency:
            part_recency[slots] = recency

    def cool(self, slots: Slots, depth: int) -> None:
        """Make pages the first to go: consecutive ones, the first at `depth`, and nothing below them is to stay."""
        self.pages.recency[slots] = MAX_DEPTH - np.arange(depth, depth + len(slots))
        for part_recency in self.pages.part_recency:
            part_recency[slots] = 0

    def open_path(self, path: Path, tokens: bytes, extras: Extras = _NO_EXTRAS, base_pages: int = 0) -> Path:
        """Give the sealed nodes of a path just matched against `tokens` their labels. Returns the path as it is now.

        With `base_pages` the tokens are those after so many pages, and what is before has been opened already.
        """
        if not self.ever_sealed or not any(self.nodes.sealed[node] for node in path.nodes):
            return path
        last = path.nodes[-1]
        if self.nodes.sealed[last] and path.tail < self.nodes.count[last]:
            path = Path([*path.nodes[:-1], self._split(last, path.tail)], path.pages, path.tail)
        for node in path.nodes:
            if self.nodes.sealed[node]:
                first, count = self.nodes.depth[node] - base_pages, self.nodes.count[node]
                self._write_labels(node, 0, self._token_run(tokens, first, count), extra_run(extras, first, count))
                self.nodes.sealed[node] = 0
                parent = self.nodes.parent[node]
                self.nodes.sealed_children[parent] -= 1
                self.child_index.add(self._node_hash(node), node)
        return path

    def pin(self, path: Path, slots: Slots | None = None) -> bytes:
        """Lease a path's pages, so that none can be removed. Returns the key of its boundary, which `unpin` takes.

        `slots` are those of the path, if they are known.
        """
        run = self.path_run(path) if slots is None or len(path.nodes) == 1 else slots
        self.pages.leases[run] += 1
        if self.pages.touched is not None:
            self.pages.touched.append(run)
        return self.key_at(path)

    def unpin(self, boundary_key: bytes) -> Path:
        """Undo one `pin`. Returns the path that it held."""
        path = self.path_to(self.pages.find_key(boundary_key))
        self.pages.leases[self.path_run(path)] -= 1
        return path

    def hold(self, path: Path) -> bytes:
        """As `pin`, but only for the pages to stay in the tree: their bytes may leave DRAM. Undone by `let_go`."""
        self.pages.held[self.path_run(path)] += 1
        return self.pin(path)

    def let_go(self, boundary_key: bytes) -> None:
        """Undo one `hold`."""
        self.pages.held[self.path_run(self.unpin(boundary_key))] -= 1

    def coldest(self, slots: Slots, count: int) -> Slots:
        """The `count` least recent of the given pages, coldest first: leaf-first LRU order (see `touch`)."""
        recency = self.pages.recency[slots]
        if count < len(slots):
            chosen = np.argpartition(recency, count)[:count]
            slots, recency = slots[chosen], recency[chosen]
        return slots[np.argsort(recency, kind="stable")]

    def forget_ghosts(self, count: int) -> None:
        """Remove at least `count` ghosts for good, the coldest first, if there are so many."""
        pages = self.pages
        for key in [pages.key_bytes(slot) for slot in self.coldest(self.ghost_slots(), count).tolist()]:
            slot = pages.find_any(key)  # each removal may move others, or take them along
            if slot >= 0 and pages.flags[slot] & GHOST:
                self.remove(slot)

    # --- growing ----------------------------------------------------------------------------------------------------------

    def extend(self, base: Path, tokens: bytes, extras: Extras, new: NewPages, known: Path | None = None) -> None:
        """Add the pages of `tokens` right below `base`, which is as far as they match; ghosts among them come back to life.

        `known` is as far as they match with ghosts, if the caller knows that. Raises NoSpace, with no page added.
        """
        total = len(tokens) // self.pages.token_bytes
        if base.pages + total > MAX_DEPTH:
            raise BadRequest(f"a prefix of {base.pages + total} pages: at most {MAX_DEPTH}")
        if self.parts.slots.available < new.blobs.size and self.parts.slots.available < int((new.blobs >= 0).sum()):
            raise NoSpace("the table of parts is full")
        if known is None:
            known = self._match_all(tokens, extras, base) if self._ghost_count else base
        back = known.pages - base.pages
        if back:
            known = self.open_path(known, tokens, extras, base.pages)
        if back < total:
            node = self._split_at_end(known)
            try:
                node, offset = self._append(node, _rows(new, back, total), sealed=False)
            except NoSpace:
                self._merge_only_child(node)  # it may have been cut off for what does not come
                raise
            self._write_labels(node, offset, self._token_run(tokens, back, total - back), extra_run(extras, back, total - back))
            if offset == 0:
                self.child_index.add(self._node_hash(node), node)
        if back:  # last, as it can't fail; the ghosts may have moved
            last = self.pages.find_any(new.keys[(back - 1) * KEY_BYTES : back * KEY_BYTES])
            self._revive(self.path_slots(self.path_to(last), base.pages), _rows(new, 0, back))

    def extend_alone(self, labels: bytes, extras: Extras, new: NewPages) -> None:
        """Add pages that each stand alone, right below the root, as those of a flat namespace do; ghosts among them come back to life.

        None of them is there, and no two are the same. Raises NoSpace, with no page added.
        """
        width, pages = self.pages.token_bytes, self.pages
        ghosts: list[tuple[int, int]] = []
        if self._ghost_count:
            found = [pages.find_any(new.keys[at : at + KEY_BYTES]) for at in range(0, len(new.keys), KEY_BYTES)]
            ghosts = [(page, slot) for page, slot in enumerate(found) if slot >= 0]
        back = {page for page, _ in ghosts}
        fresh = [page for page in range(len(new.blobs)) if page not in back]
        if self.parts.slots.available < int((new.blobs >= 0).sum()):
            raise NoSpace("the table of parts is full")
        if fresh:
            mine = [self._label(labels, extras, page) for page in fresh]
            slots, nodes = self._append_apart(_chosen(new, fresh) if back else new)
            pages.tokens[slots] = np.frombuffer(b"".join(label[:width] for label in mine), np.uint8).reshape(len(slots), width)
            if extras or self.has_extras:
                self.has_extras = True
                pages.extras[slots] = np.frombuffer(b"".join(label[width:] for label in mine), np.uint8).reshape(len(slots), KEY_BYTES)
            self.child_index.add_many([child_hash(ROOT, label[:width], label[width:]) for label in mine], nodes)
        if back:  # last, as it can't fail
            self._revive(np.array([slot for _, slot in ghosts], np.int32), _chosen(new, [page for page, _ in ghosts]))

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


def _rows(new: NewPages, first: int, last: int) -> NewPages:
    if not first and last == len(new.blobs):
        return new
    return NewPages(new.keys[first * KEY_BYTES : last * KEY_BYTES], new.version, new.blobs[first:last], new.ranges)


def _chosen(new: NewPages, which: list[int]) -> NewPages:
    keys = b"".join(new.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES] for page in which)
    return NewPages(keys, new.version, new.blobs[which], new.ranges)


def extra_run(extras: Extras, first: int, count: int) -> bytes:
    """The extra digests of `count` pages from `first` on, 32 bytes each; empty if none of them has any."""
    if not extras or not any(first <= page < first + count for page in extras):
        return b""
    return b"".join(extras.get(page, NO_EXTRA) for page in range(first, first + count))


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
