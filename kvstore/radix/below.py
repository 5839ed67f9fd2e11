"""What is below pages of a tree."""

import numpy as np

from kvstore.radix.pages import Slots
from kvstore.radix.tables import TreeTables


def with_all_below(tree: TreeTables, slots: Slots) -> Slots:
    """Pages (or ghosts) and all below them, ascending: what goes when they are removed."""
    nodes, slots = tree.nodes, np.sort(slots)
    owners, first = np.unique(tree.pages.node[slots], return_index=True)
    firsts = dict(zip(owners.tolist(), slots[first].tolist(), strict=True))
    runs, whole = [np.empty(0, np.int32)], set[int]()
    for node in sorted(firsts, key=lambda node: nodes.depth[node]):
        if node in whole:
            continue
        below = nodes.subtree(node)[1:]
        whole.update(below)
        for at, start in ((node, firsts[node]), *((at, nodes.start[at]) for at in below)):
            runs.append(np.arange(start, nodes.start[at] + nodes.count[at], dtype=np.int32))
    found: Slots = np.sort(np.concatenate(runs))
    return found
