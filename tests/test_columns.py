"""Columns: the slot and range allocators and the hash index, against simple models."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.columns import RangeAllocator, SlotAllocator, nth_least, nth_least_of_many, runs_of
from kvstore.errors import NoSpace
from kvstore.hash_index import HashIndex


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 1 << 30)), max_size=80))
def test_ranges_never_overlap_and_coalesce(steps: list[tuple[bool, int, int]]) -> None:
    ranges = RangeAllocator(200, "pages")
    held: list[tuple[int, int]] = []
    for allocate, length, pick in steps:
        if allocate:
            try:
                start = ranges.allocate(length)
            except NoSpace:
                continue
            assert all(start + length <= s or s + n <= start for s, n in held)
            assert start + length <= 200
            held.append((start, length))
        elif held:
            start, length = held.pop(pick % len(held))
            cut = pick % (length + 1)  # any part of a run may be freed alone
            ranges.free(start + cut, length - cut)
            ranges.free(start, cut)
        assert ranges.used == sum(n for _, n in held)
        free = sorted(ranges.free_ranges.items())
        assert all(a + n < b for (a, n), (b, _) in pairwise(free)), "free neighbours were not joined"
    for start, length in held:
        ranges.free(start, length)
    assert ranges.used == ranges.high == 0


def test_a_range_grows_in_place_only_into_free_slots() -> None:
    ranges = RangeAllocator(100, "pages")
    first, second = ranges.allocate(10), ranges.allocate(10)
    assert not ranges.extend(first + 10, 1)
    assert ranges.extend(second + 10, 5)
    ranges.free(second, 15)
    assert ranges.extend(first + 10, 90)
    assert not ranges.extend(first + 100, 1)


def test_slots_are_used_again_and_bounded() -> None:
    slots = SlotAllocator(5, "parts")
    taken = slots.allocate_many(4)
    slots.free_many(taken[1:3])
    assert sorted(slots.allocate_many(3).tolist()) == [1, 2, 4]
    with pytest.raises(NoSpace):
        slots.allocate()
    with pytest.raises(NoSpace):
        slots.allocate_many(1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=300), st.integers(1, 8))
def test_hash_index_is_a_multimap(steps: list[tuple[bool, int]], bits: int) -> None:
    index, model = HashIndex(), set[tuple[int, int]]()
    for add, slot in steps:
        hash64 = (slot * 0x9E3779B97F4A7C15) & ((1 << bits) - 1) << 6  # few distinct hashes: long probe chains in one shard
        if add and (hash64, slot) not in model:
            index.add(hash64, slot)
            model.add((hash64, slot))
        elif not add and (hash64, slot) in model:
            index.remove(hash64, slot)
            model.discard((hash64, slot))
        assert len(index) == len(model)
    for hash64, slot in model:
        assert slot in index.candidates(hash64)
    with pytest.raises(KeyError):
        index.remove(1, 1000)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20_000), st.integers(0, 2**32), st.sampled_from(["spread", "few", "rising", "waves"]), st.floats(0, 1))
def test_the_nth_least_of_many_is_found_with_a_sample_or_without(count: int, seed: int, kind: str, share: float) -> None:
    random = np.random.default_rng(seed)
    values = {
        "spread": random.random(count), "few": random.integers(0, 3, count).astype(float), "rising": np.arange(count) * 1.0,
        "waves": np.sin(np.arange(count) * (2 * np.pi / max(count // 1024, 1))),  # in step with the sample
    }[kind]  # fmt: skip
    number = int(share * share * share * (count - 1))
    assert nth_least(values, number) == np.sort(values)[number]


@pytest.mark.parametrize("count", [1, 7, 300, 20_000])
def test_the_nth_least_of_values_that_each_stand_for_many_is_that_of_all(count: int) -> None:
    rng = np.random.default_rng(count)
    values, counts = rng.integers(0, 1000, count), rng.integers(1, 30, count)
    every = np.sort(np.repeat(values, counts))
    for number in {0, len(every) // 100, len(every) // 10, len(every) // 2, len(every) - 1}:
        assert nth_least_of_many(values, counts, number) == every[number]
    heavy = np.where(values < 500, 1, counts * 100)  # so that a share of the values is no share of what they stand for
    every = np.sort(np.repeat(values, heavy))
    for number in (len(every) // 1000, len(every) // 3):
        assert nth_least_of_many(values, heavy, number) == every[number]


def test_runs_are_of_rows_that_are_equal_in_all_columns() -> None:
    one, other = np.array([1, 1, 2, 2, 2, 1]), np.array([5.0, 5.0, 5.0, 6.0, 6.0, 6.0])
    starts, lengths = runs_of(one, other)
    assert starts.tolist() == [0, 2, 3, 5]
    assert lengths.tolist() == [2, 1, 2, 1]
    assert [part.tolist() for part in runs_of(one)] == [[0, 2, 5], [2, 3, 1]]
    assert [part.tolist() for part in runs_of(one[:0], other[:0])] == [[], []]
