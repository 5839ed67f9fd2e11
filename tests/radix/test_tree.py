"""The radix tree against a set of prefixes, with every invariant checked after each step."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.digests import NO_EXTRA, page_key_chain
from kvstore.kvspec import PartRange
from kvstore.radix.check import check
from kvstore.radix.tree import Extras, RadixTree
from kvstore.radix.values import NewPages

PAGE_TOKENS = 2
ROOT_KEY = b"n" * 32
EXTRA = b"image".ljust(32, b"\0")
RANGES = (PartRange(0, 0, 1, 0, 1), PartRange(0, 1, 2, 0, 1))

Label = tuple[int, bool]
Labels = tuple[Label, ...]
labels_strategy = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([False, False, False, True])), min_size=1, max_size=9).map(tuple)


def encode(labels: Labels) -> tuple[bytes, Extras]:
    tokens = np.array([token for token, _ in labels], np.uint32).repeat(PAGE_TOKENS).tobytes()
    return tokens, {i: EXTRA for i, (_, extra) in enumerate(labels) if extra}


def keys_of(labels: Labels) -> list[bytes]:
    tokens, extras = encode(labels)
    width = PAGE_TOKENS * 4
    return list(page_key_chain(ROOT_KEY, (tokens[i * width : (i + 1) * width] + extras.get(i, NO_EXTRA) for i in range(len(labels)))))


def insert(tree: RadixTree, labels: Labels, version: bytes, blob: int = 0) -> int:
    """Insert what is not there yet; returns how many pages were."""
    path = tree.match(*encode(labels))
    there = path.pages
    if there < len(labels):
        blobs = np.full((len(labels) - there, len(RANGES)), blob, np.int32)
        path = tree.open_path(path, *encode(labels))
        tree.extend(path, *encode(labels[there:]), NewPages(b"".join(keys_of(labels)[there:]), version, blobs, RANGES))
    return there


class TreeMachine(RuleBasedStateMachine):
    """The model: the set of all prefixes, each with the version that was first."""

    @initialize()
    def start(self) -> None:
        self.tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 4096)
        self.model: dict[Labels, bytes] = {}
        self.pinned: list[tuple[bytes, Labels]] = []
        self.held: list[tuple[bytes, Labels]] = []
        """Those of them that are holds."""
        self.tick = 0

    def depth(self, labels: Labels) -> int:
        return next((n for n in range(len(labels), 0, -1) if labels[:n] in self.model), 0)

    @rule(labels=labels_strategy, version=st.binary(min_size=16, max_size=16))
    def insert(self, labels: Labels, version: bytes) -> None:
        there = self.depth(labels)
        assert insert(self.tree, labels, version) == there
        for n in range(there + 1, len(labels) + 1):
            self.model[labels[:n]] = version

    @rule(labels=labels_strategy, at=st.integers(0, 8))
    def match_from_a_page_on(self, labels: Labels, at: int) -> None:
        whole = self.tree.match(*encode(labels))
        base = self.tree.match(*encode(labels[: min(at, whole.pages)]))
        assert self.tree.match(*encode(labels[base.pages :]), base) == whole

    @rule(labels=labels_strategy)
    def match(self, labels: Labels) -> None:
        path = self.tree.match(*encode(labels))
        assert path.pages == self.depth(labels)
        slots = self.tree.path_slots(path)
        assert [self.tree.pages.key_bytes(s) for s in slots] == keys_of(labels)[: path.pages]
        assert [self.tree.version_of(s) for s in slots] == [self.model[labels[: i + 1]] for i in range(path.pages)]

    @rule(labels=labels_strategy)
    def use(self, labels: Labels) -> None:
        self.tick += 1
        self.tree.touch(self.tree.path_slots(self.tree.match(*encode(labels))), self.tick)

    @rule(labels=labels_strategy)
    def pin(self, labels: Labels) -> None:
        path = self.tree.match(*encode(labels))
        if path.pages:
            self.pinned.append((self.tree.pin(path), labels[: path.pages]))

    @rule(labels=labels_strategy)
    def hold(self, labels: Labels) -> None:
        path = self.tree.match(*encode(labels))
        if path.pages:
            self.pinned.append((self.tree.hold(path), labels[: path.pages]))
            self.held.append(self.pinned[-1])

    @rule(which=st.integers(0, 5))
    def unpin(self, which: int) -> None:
        if self.pinned:
            key, labels = lease = self.pinned.pop(which % len(self.pinned))
            if lease in self.held:
                self.held.remove(lease)
                self.tree.let_go(key)
            else:
                assert self.tree.unpin(key).pages == len(labels)

    @rule(labels=labels_strategy, at=st.integers(0, 8), to_ghosts=st.booleans())
    def remove(self, labels: Labels, at: int, to_ghosts: bool) -> None:
        path = self.tree.match(*encode(labels))
        if at >= path.pages:
            return
        prefix = labels[: at + 1]
        if any(leased[: at + 1] == prefix for _, leased in self.pinned):
            return
        gone = [known for known in self.model if known[: at + 1] == prefix]
        slot = int(self.tree.path_slots(path)[at])
        removed = self.tree.bury(slot) if to_ghosts else self.tree.remove(slot)
        assert removed.pages == len(gone)
        assert sum(len(b) for b in removed.blobs) == len(RANGES) * len(gone)
        for known in gone:
            del self.model[known]

    @rule()
    def forget_a_ghost(self) -> None:
        ghosts = self.tree.coldest(self.tree.ghost_slots(), 1)
        if len(ghosts):
            assert self.tree.remove(int(ghosts[0])).pages == 0

    @rule()
    def coldest_is_leaf_first(self) -> None:
        live = self.tree.live_slots()
        chosen = set(self.tree.coldest(live, len(live) // 2).tolist())
        used = self.tree.pages.recency
        for slot in chosen:
            path = self.tree.path_slots(self.tree.path_to(slot))
            for other in live.tolist():
                below = set(self.tree.path_slots(self.tree.path_to(other)).tolist())
                if slot in below and other not in chosen:
                    assert used[other] == 0 or used[path[-1]] == 0

    @invariant()
    def sound(self) -> None:
        check(self.tree)
        assert self.tree.page_count == len(self.model)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_long_run_is_not_moved_but_gets_a_child() -> None:
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 10_000)
    long = tuple((i, False) for i in range(2000))
    insert(tree, long, b"a" * 16)
    blocker = ((9999, False),)
    insert(tree, blocker, b"b" * 16)
    insert(tree, (*long, (7, False)), b"c" * 16)
    check(tree)
    assert len(tree.match(*encode((*long, (7, False)))).nodes) == 2


def test_growing_a_leaf_page_by_page_keeps_one_node() -> None:
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 10_000)
    ours: Labels = ()
    for i in range(300):
        ours = (*ours, (i, False))
        insert(tree, ours, b"a" * 16)
        insert(tree, ((100_000 + i, False),), b"b" * 16)  # takes the slots next to ours
    check(tree)
    assert len(tree.match(*encode(ours)).nodes) == 1


def test_sealed_pages_match_by_key_and_open_on_use() -> None:
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 1000)
    labels = tuple((i % 3, i == 4) for i in range(10))
    blobs = np.zeros((10, len(RANGES)), np.int32)
    assert tree.insert_below(ROOT_KEY, NewPages(b"".join(keys_of(labels)), b"v" * 16, blobs, RANGES), None)
    check(tree)
    half = (*labels[:6], (8, False))
    before = tree.match(*encode(half))
    assert before.pages == 6
    assert tree.match(*encode(labels)).pages == 10
    opened = tree.open_path(before, *encode(half))
    check(tree)
    assert opened.pages == 6
    assert tree.match(*encode(labels)).pages == 10
    assert insert(tree, half, b"w" * 16) == 6
    check(tree)
    assert tree.match(*encode(half)).pages == 7
