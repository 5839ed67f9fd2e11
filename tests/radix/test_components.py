"""The rule of usable boundaries against a literal reading of it, and optional parts in the tree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.radix import components
from kvstore.radix.check import check
from kvstore.radix.components import ComponentRules
from kvstore.radix.tree import RadixTree
from kvstore.radix.values import NewPages
from tests.radix.test_tree import PAGE_TOKENS, ROOT_KEY, Labels, encode, keys_of

FULL = Component("full", 2, 1, 8)


def window(tokens: int) -> Component:
    return Component("window", 2, 1, 8, window=tokens)


STATE = Component("state", 2, 1, 8)


def literally_usable(spec: KVSpec, masks: list[int], boundary: int) -> bool:
    if boundary == 0:
        return True
    for index, component in enumerate(spec.components):
        bit = 1 << index
        if component.kind == "state" and not masks[boundary - 1] & bit:
            return False
        if component.kind == "window":
            first_token = max(boundary * spec.page_tokens - component.window, 0)
            covering = range(first_token // spec.page_tokens, boundary)
            if not all(masks[page] & bit for page in covering):
                return False
    return True


specs = st.builds(
    lambda page_tokens, optional: KVSpec(page_tokens, (FULL, *optional)),
    st.integers(1, 4),
    st.lists(st.one_of(st.builds(window, st.integers(1, 12)), st.just(STATE)), max_size=3),
)


@given(spec=specs, data=st.data(), chunk=st.sampled_from([1, 3, 4096]))
def test_usable_is_what_the_rule_says(spec: KVSpec, data: st.DataObject, chunk: int) -> None:
    mask = st.integers(0, (1 << len(spec.components)) - 1).map(lambda m: m | 1)
    often_all = st.one_of(mask, st.just((1 << len(spec.components)) - 1))
    masks = data.draw(st.lists(often_all, max_size=20))
    rules = ComponentRules.of(spec)
    column = np.array(masks, np.uint16)
    expected = [literally_usable(spec, masks, b) for b in range(len(masks) + 1)]
    assert rules.usable(column).tolist() == expected
    before, components._CHUNK = components._CHUNK, chunk
    try:
        assert rules.longest(column) == max(b for b, good in enumerate(expected) if good)
    finally:
        components._CHUNK = before
    assert rules.alone(column).tolist() == [literally_usable(spec, [mask], 1) for mask in masks]


@given(spec=specs, data=st.data())
def test_what_the_end_of_a_prefix_lacks_is_what_keeps_it_from_being_usable(spec: KVSpec, data: st.DataObject) -> None:
    masks = data.draw(st.lists(st.integers(0, (1 << len(spec.components)) - 1).map(lambda m: m | 1), max_size=12))
    rules, end = ComponentRules.of(spec), len(masks)
    lacks = rules.lacks(np.array(masks, np.uint16))
    for lack in lacks:
        needed = range(max(end - spec.boundary_pages(lack.component), 0), end)
        missing = [page for page in needed if not masks[page] & 1 << lack.component]
        assert (lack.first_page, lack.last_page, lack.missing_pages) == (missing[0], missing[-1] + 1, len(missing))
        others = [mask | ~(1 << lack.component) & 0xFF for mask in masks]
        assert lack.pages == max(b for b in range(end + 1) if literally_usable(spec, others, b)) < end
    assert bool(lacks) == (not literally_usable(spec, masks, end))


def test_parts_to_load() -> None:
    rules = ComponentRules.of(KVSpec(16, (FULL, window(40), STATE)))
    assert [rules.first_page(c, 10) for c in range(3)] == [0, 7, 9]
    assert [rules.first_page(c, 2) for c in range(3)] == [0, 0, 1]
    assert rules.reach == 3


RANGES = (PartRange(0, 0, 2, 0, 1), PartRange(1, 0, 1, 0, 1), PartRange(1, 1, 2, 0, 1), PartRange(2, 0, 2, 0, 1))
SPEC = KVSpec(PAGE_TOKENS, (FULL, window(4), STATE))


def test_optional_parts_come_and_go() -> None:
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 100, ComponentRules.of(SPEC))
    labels: Labels = tuple((i, False) for i in range(6))
    blobs = np.arange(24, dtype=np.int32).reshape(6, 4)
    blobs[:4, 1:] = -1
    blobs[:5, 3] = -1
    tree.extend(tree.match(b""), *encode(labels), NewPages(b"".join(keys_of(labels)), b"v" * 16, blobs, RANGES))
    check(tree)
    slots = tree.path_slots(tree.match(*encode(labels)))
    assert tree.pages.components[slots].tolist() == [1, 1, 1, 1, 3, 7]
    assert tree.parts_of(slots[4:]).blob.tolist() == [16, 17, 18, 20, 21, 22, 23]
    tree.add_parts(slots[3:4], np.array([[90, 91, -1]], np.int32), (RANGES[1], RANGES[2], RANGES[3]))
    check(tree)
    assert tree.pages.components[slots].tolist() == [1, 1, 1, 3, 3, 7]
    assert sorted(tree.parts_of(slots[3:4]).blob.tolist()) == [12, 90, 91]
    assert tree.take_components(int(slots[5]), 0b010) == ([21, 22], [])
    check(tree)
    assert tree.pages.components[slots].tolist() == [1, 1, 1, 3, 3, 5]
    assert tree.parts_of(slots[5:]).blob.tolist() == [20, 23]
    removed = tree.remove(int(slots[3]))
    assert sorted(np.concatenate(removed.blobs).tolist()) == [12, 16, 17, 18, 20, 23, 90, 91]
    check(tree)


def test_ghosts_come_back_with_other_parts() -> None:
    tree = RadixTree(ROOT_KEY, PAGE_TOKENS, 100, ComponentRules.of(SPEC))
    labels: Labels = tuple((i, False) for i in range(6))
    keys = b"".join(keys_of(labels))
    only_full = np.arange(6, dtype=np.int32).reshape(6, 1)
    tree.extend(tree.match(b""), *encode(labels), NewPages(keys, b"v" * 16, only_full, RANGES[:1]))
    slots = tree.path_slots(tree.match(*encode(labels)))
    tree.touch(slots, 7)
    tree.bury(int(slots[2]))
    check(tree)
    assert tree.match(*encode(labels)).pages == 2
    assert (tree.page_count, tree.ghost_count) == (2, 4)
    base = tree.match(*encode(labels))
    other: Labels = (*labels[:4], (50, False))
    new = NewPages(b"".join(keys_of(other)[2:]), b"w" * 16, np.full((3, 4), 9, np.int32), RANGES)
    tree.extend(base, *encode(other[2:]), new)
    check(tree)
    assert tree.match(*encode(other)).pages == 5
    assert tree.match(*encode(labels)).pages == 4
    assert (tree.page_count, tree.ghost_count) == (5, 2)
    revived = tree.path_slots(tree.match(*encode(other)))[2:]
    assert [tree.version_of(int(s)) for s in revived] == [b"w" * 16] * 3
    assert (tree.pages.recency[revived[:2]] > 0).all(), "a ghost that came back forgot its history"
