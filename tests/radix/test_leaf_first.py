"""The leaf-first rule against a brute force over parents, on random trees with any pages taken out."""

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.columns import ColumnSpec
from kvstore.radix.check import check
from kvstore.radix.leaf_first import depth_of, in_order, least, raised
from kvstore.radix.pages import Slots
from kvstore.radix.tree import RadixTree
from tests.radix.test_tree import PAGE_TOKENS, ROOT_KEY, Labels, encode, insert

prompts = st.lists(st.lists(st.tuples(st.integers(0, 2), st.just(False)), min_size=1, max_size=12).map(tuple), min_size=1, max_size=14)


def tree_of(inserted: list[Labels], kept: tuple[ColumnSpec, ...] = ()) -> RadixTree:
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 4096, kept=kept)
    for labels in inserted:
        insert(tree, labels, bytes(16))
    return tree


def ancestors(tree: RadixTree, slot: int) -> list[int]:
    found: list[int] = tree.path_slots(tree.path_to(slot)).tolist()
    return found[:-1]


@settings(deadline=None, max_examples=60)
@given(prompts, st.data())
def test_raised_is_the_highest_below(inserted: list[Labels], data: st.DataObject) -> None:
    tree = tree_of(inserted)
    slots = tree.live_slots()
    slots = slots[np.array(data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots))), bool)]
    values = np.array(data.draw(st.lists(st.integers(0, 6), min_size=len(slots), max_size=len(slots))), np.int64)
    wanted = values.copy()
    for at, slot in enumerate(slots.tolist()):
        above = np.isin(slots, ancestors(tree, slot))
        wanted[above] = np.maximum(wanted[above], values[at])
    for kind in (np.int64, np.float64):
        assert (raised(tree, slots, values.astype(kind)) == wanted.astype(kind)).all()
    assert (raised(tree, slots, values > 3) == (wanted > 3)).all()


@settings(deadline=None, max_examples=60)
@given(prompts, st.data())
def test_the_least_leave_no_descendant_behind(inserted: list[Labels], data: st.DataObject) -> None:
    tree = tree_of(inserted)
    slots = tree.live_slots()
    values = np.array(data.draw(st.lists(st.integers(0, 4), min_size=len(slots), max_size=len(slots))), np.int64)
    count = data.draw(st.integers(0, len(slots) + 1))
    lifted, depth = raised(tree, slots, values), depth_of(tree, slots)
    assert depth.tolist() == [len(ancestors(tree, slot)) for slot in slots.tolist()]
    chosen = least(lifted, count)
    recency = np.array(data.draw(st.sampled_from([np.zeros(len(slots), np.int64), -depth])))
    chosen = chosen[in_order(lifted[chosen], recency[chosen], depth[chosen])][:count]
    assert len(chosen) == min(count, len(slots))
    assert (np.diff(lifted[chosen]) >= 0).all()
    assert not len(chosen) or lifted[chosen].max() <= np.delete(lifted, chosen).min(initial=10)
    gone = slots[chosen].tolist()
    for number, slot in enumerate(gone):
        assert set(ancestors(tree, slot)).isdisjoint(gone[:number])
    for slot in np.delete(slots, chosen).tolist():
        assert set(ancestors(tree, slot)).isdisjoint(gone)


@settings(deadline=None, max_examples=60)
@given(prompts, prompts, st.data())
def test_kept_columns_stay_with_their_pages(first: list[Labels], then: list[Labels], data: st.DataObject) -> None:
    """A number written for each page is still there after moves, splits, merges, as a ghost, and when it comes back."""
    tree = tree_of(first, (ColumnSpec("mine", "u4"),))
    mine = tree.pages.kept["mine"]
    numbers = {tree.pages.key_bytes(slot): slot + 1 for slot in tree.live_slots().tolist()}
    for key, number in numbers.items():
        mine[tree.pages.find_key(key)] = number
    leaves = data.draw(st.integers(0, 5))
    slots = tree.live_slots()
    depth = depth_of(tree, slots)
    bury: Slots = slots[in_order(raised(tree, slots, slots.astype(np.int64)), 0 * depth, depth)[:leaves]]
    tree.bury_many(bury)
    check(tree)
    for labels in then:
        insert(tree, labels, bytes(16))
        check(tree)
    known: npt.NDArray[np.int32] = np.concatenate([tree.live_slots(), tree.ghost_slots()])
    for slot in known.tolist():
        assert mine[slot] == numbers.get(tree.pages.key_bytes(slot), 0)
    if (found := tree.ghost_slots()).size:
        tree.remove(int(found[0]))
        check(tree)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 40), st.data())
def test_a_path_of_any_number_of_nodes_has_the_slots_of_its_nodes(splits: int, data: st.DataObject) -> None:
    long: Labels = tuple((0, False) for _ in range(2 * splits))
    tree = tree_of([long, *((*long[: 2 * at], (1, False)) for at in range(1, splits))])
    nodes = tree.nodes
    path = tree.match(encode(long)[0])
    assert len(path.nodes) == splits
    wanted = [slot for node in path.nodes for slot in range(nodes.start[node], nodes.start[node] + nodes.count[node])]
    first = data.draw(st.integers(0, len(wanted) + 1))
    assert tree.path_slots(path).tolist() == wanted
    assert tree.path_slots(path, first).tolist() == wanted[first:]
    children = np.array([1] * (len(wanted) - 1) + [0])
    children[[2 * at - 1 for at in range(1, splits)]] = 2
    assert tree.children_on(path).tolist() == children.tolist()
