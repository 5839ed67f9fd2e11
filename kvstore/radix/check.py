"""Recomputes every invariant of a radix tree from its columns, for tests and for `check` commands."""

import numpy as np

from kvstore.digests import page_key
from kvstore.radix.pages import DURABLE, GHOST
from kvstore.radix.structure import MOVE_LIMIT
from kvstore.radix.tables import ROOT
from kvstore.radix.tree import RadixTree


def check(tree: RadixTree, *, compressed: bool = True) -> None:
    """Raise AssertionError, saying which invariant broke where. Without `compressed`, paths may be cut into more nodes than needed."""
    nodes = tree.nodes.subtree(ROOT)
    assert len(nodes) == len(set(nodes)) == tree.nodes.slots.used, "a node is linked twice, or lost"
    owner = np.full(tree.pages.ranges.high, -1, np.int64)
    for start, length in tree.pages.ranges.free_ranges.items():
        assert (owner[start : start + length] == -1).all(), "free ranges overlap"
        owner[start : start + length] = ROOT
        assert not any(kept[start : start + length].any() for kept in tree.pages.kept.values()), "a free slot holds something"
    for node in nodes:
        _check_node(tree, node, owner, compressed=compressed)
    assert (owner >= ROOT).all(), "a page slot belongs to no node and is not free"
    live, ghosts = tree.live_slots(), tree.ghost_slots()
    assert len(live) == tree.page_count, "page count and page slots differ"
    assert len(ghosts) == tree.ghost_count, "ghost count and ghosts differ"
    assert len(live) + len(ghosts) == len(tree.pages.key_index), "the key index holds other pages than the tree"
    assert (tree.pages.part[ghosts] == -1).all(), "a ghost has parts"
    unsealed = [n for n in nodes if n != ROOT and not tree.nodes.sealed[n]]
    assert len(tree.child_index) == len(unsealed), "the child index holds other nodes than the tree"
    owner_of_part, part = tree.parts.of(tree.pages.part[live])
    assert len(np.unique(part)) == len(part) == tree.parts.slots.used, "a part is shared, lost or leaked"
    masks = np.zeros(len(live), np.uint16)
    np.bitwise_or.at(masks, owner_of_part, np.left_shift(1, tree.parts.component[part]).astype(np.uint16))
    assert (masks == tree.pages.components[live]).all(), "a page's mask names other components than it has parts of"
    assert (masks & tree.rules.required == tree.rules.required).all(), "a page lacks a component that every page has"
    named = owner_of_part[tree.parts.durable[part]]
    assert ((tree.pages.flags[live[named]] & DURABLE) != 0).all(), "a part is named by a record that does not exist"


def is_node(tree: RadixTree, node: int) -> bool:
    """Whether a node number is in use now."""
    return node == ROOT or (tree.nodes.count[node] > 0 and int(tree.pages.node[tree.nodes.start[node]]) == node)


def _check_node(tree: RadixTree, node: int, owner: "np.ndarray[tuple[int], np.dtype[np.int64]]", *, compressed: bool) -> None:
    check_links(tree, node, compressed=compressed)
    if node == ROOT:
        return
    start, capacity = tree.nodes.start[node], tree.nodes.capacity[node]
    assert (owner[start : start + capacity] == -1).all(), f"node {node} overlaps another run"
    owner[start : start + capacity] = node
    check_run(tree, node, 0, tree.nodes.count[node])


def check_links(tree: RadixTree, node: int, *, compressed: bool = True) -> None:
    """Raise AssertionError unless a node's links and counts are right. True between any two changes of the tree."""
    nodes = tree.nodes
    children = nodes.children_of(node)
    assert len(children) == nodes.children[node], f"node {node} counts {nodes.children[node]} children, has {len(children)}"
    assert sum(nodes.sealed[c] for c in children) == nodes.sealed_children[node], f"node {node}: sealed children"
    labels = [tree._node_hash(c) for c in children if not nodes.sealed[c]]
    assert len(set(labels)) == len(labels), f"two children of node {node} begin with one label"
    for child in children:
        assert nodes.parent[child] == node, f"node {child} does not name its parent"
    if node != ROOT:
        check_place(tree, node)
    if compressed and node != ROOT and not tree.ever_sealed and len(children) == 1:
        assert nodes.count[node] + nodes.count[children[0]] > MOVE_LIMIT, f"node {node} and its only child should be one"


def check_place(tree: RadixTree, node: int) -> None:
    """Raise AssertionError unless a node (not the root) lies where it says. True between any two changes of the tree."""
    nodes, pages = tree.nodes, tree.pages
    parent = nodes.parent[node]
    assert nodes.depth[node] == nodes.depth[parent] + nodes.count[parent], f"node {node} has the wrong depth"
    start, count = nodes.start[node], nodes.count[node]
    assert 0 < count <= nodes.capacity[node], f"node {node} has {count} pages of {nodes.capacity[node]}"
    assert (pages.node[start : start + count] == node).all(), f"a page of node {node} names another node"
    if not nodes.sealed[node]:
        found = list(tree.child_index.candidates(tree._node_hash(node)))
        assert node in found, f"node {node} is not in the child index"


def check_run(tree: RadixTree, node: int, first: int, last: int) -> None:
    """Raise AssertionError unless pages [first, last) of a node's run are right. True between any two changes of the tree."""
    nodes, pages = tree.nodes, tree.pages
    parent, start = nodes.parent[node], nodes.start[node]
    above = start + first - 1 if first else (nodes.start[parent] + nodes.count[parent] - 1 if parent != ROOT else -1)
    for slot in range(start + first, start + min(last, nodes.count[node])):
        assert pages.find_any(pages.key_bytes(slot)) == slot, f"page slot {slot} is not found by its key"
        if not nodes.sealed[node]:
            label = pages.tokens[slot].tobytes() + pages.extras[slot].tobytes()
            key = tree.root_key if above < 0 else pages.key_bytes(above)
            assert page_key(key, label) == pages.key_bytes(slot), f"the key of page slot {slot} is not its chain's"
        if above >= 0:
            _check_order(tree, above, slot)
        above = slot


def _check_order(tree: RadixTree, above: int, below: int) -> None:
    pages = tree.pages
    assert (pages.flags[above] & GHOST) <= (pages.flags[below] & GHOST), f"page slot {below} has a ghost above it"
    assert pages.leases[above] >= pages.leases[below], f"page slot {below} is leased, the page before it is not"
    assert pages.held[above] >= pages.held[below], f"page slot {below} is held, the page before it is not"
    assert 0 <= pages.held[below] <= pages.leases[below], f"page slot {below} has more holds than leases"
    assert pages.retain[above] >= pages.retain[below], f"page slot {below} is retained longer than the page before it"
    assert (pages.flags[above] & DURABLE) >= (pages.flags[below] & DURABLE), f"page slot {below} is durable, the one before is not"
    assert pages.recency[above] > pages.recency[below] or pages.recency[below] == 0, f"page slot {below} is more recent than the one before"
    for part_recency in pages.part_recency:
        assert part_recency[below] <= pages.recency[below], f"an optional part of page slot {below} is more recent than its page"
