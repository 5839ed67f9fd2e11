"""Parts that are dropped as of no use are no loss: no boundary depends on them."""

import numpy as np
import pytest

from kvstore.kvspec import Component, KVSpec
from kvstore.radix.components import ComponentRules
from kvstore.radix.tree import RadixTree
from kvstore.radix.usefulness import useless_parts
from kvstore.radix.values import NewPages
from tests.radix.test_tree import PAGE_TOKENS, ROOT_KEY, Labels, encode, keys_of

SPEC = KVSpec(PAGE_TOKENS, (Component("full", 1, 1, 1), Component("window", 1, 1, 1, window=3 * PAGE_TOKENS)))
RULES = ComponentRules.of(SPEC)
RANGES = (SPEC.whole(0), SPEC.whole(1))


def put(tree: RadixTree, labels: Labels, windows: list[bool]) -> None:
    base = tree.match(*encode(labels))
    blobs = np.array([(0, 0 if window else -1) for window in windows], np.int32)
    new = NewPages(b"".join(keys_of(labels)[base.pages :]), b"v" * 16, blobs, RANGES)
    tree.extend(base, *encode(labels[base.pages :]), new)


@pytest.mark.parametrize("ghosts", [False, True])
def test_windows_that_another_branch_goes_on_from_are_of_use(ghosts: bool) -> None:
    trunk: Labels = ((0, False), (1, False), (2, False))
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 100, RULES)
    put(tree, (*trunk, (3, False)), [False, True, True, True])  # usable after four pages
    put(tree, (*trunk, (4, False)), [False])
    above = tree.match(*encode((*trunk, (4, False))))
    slot = int(tree.path_slots(above)[-1])
    (tree.bury if ghosts else tree.remove)(slot)  # without a ghost, the trunk and the other branch are one node now
    assert useless_parts(tree, RULES.optional[0], tree.shorten(above, 3)) == []
