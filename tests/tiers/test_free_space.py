"""Free blocks against a set of numbers: nothing is given out twice, nothing is lost, and what fits whole is not cut."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.tiers.free_space import Extent, FreeSpace

LIMIT = 60


def runs(blocks: set[int]) -> list[Extent]:
    found: list[Extent] = []
    for block in sorted(blocks):
        if found and found[-1].first + found[-1].blocks == block:
            found[-1] = Extent(found[-1].first, found[-1].blocks + 1)
        else:
            found.append(Extent(block, 1))
    return found


def blocks_of(extents: list[Extent]) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]


class FreeSpaceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.space = FreeSpace(LIMIT)
        self.free = set(range(LIMIT))
        self.taken: list[list[Extent]] = []

    @rule(counts=st.lists(st.integers(1, 20), max_size=5))
    def allocate(self, counts: list[int]) -> None:
        before = runs(self.free)
        largest = max((extent.blocks for extent in before), default=0)
        taken = self.space.allocate(counts)
        if taken is None:
            assert sum(counts) > len(self.free)
            return
        for count, extents in zip(counts, taken, strict=True):
            blocks = blocks_of(extents)
            assert len(blocks) == count == len(set(blocks))
            assert self.free.issuperset(blocks)
            self.free.difference_update(blocks)
        if counts and counts[0] <= largest:
            assert len(taken[0]) == 1, "cut, though there was an extent large enough"
        if counts and min(counts) > largest:  # all were cut
            sizes = sorted((extent.blocks for extent in before), reverse=True)
            fewest = next(n for n in range(len(sizes) + 1) if sum(sizes[:n]) >= sum(counts))
            starts = [piece.first for extents in taken for piece in extents]
            assert sum(any(first <= start < first + count for start in starts) for first, count in before) == fewest
        self.taken += taken

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        some = [self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))) for _ in range(data.draw(st.integers(1, len(self.taken))))]
        given = [extent for extents in some for extent in extents]
        self.space.free(given)
        self.free.update(blocks_of(given))

    @rule()
    def open_anew(self) -> None:
        used = [extent for extents in self.taken for extent in extents]
        self.space = FreeSpace(LIMIT, np.array(used, np.int64).reshape(-1, 2))

    @invariant()
    def as_the_set(self) -> None:
        assert self.space.extents() == runs(self.free)
        assert self.space.blocks == len(self.free)


TestFreeSpace = FreeSpaceMachine.TestCase


def test_what_lies_beyond_the_limit_is_not_given_out() -> None:
    """A tier that was made smaller: what is there stays, and its blocks are not used again."""
    space = FreeSpace(10, np.array([[8, 5], [20, 3]], np.int64))
    assert space.extents() == [Extent(0, 8)]
    space.free([Extent(8, 5), Extent(20, 3)])
    assert space.extents() == [Extent(0, 10)]
    assert space.allocate([11]) is None


def test_what_is_put_together_lies_together() -> None:
    space = FreeSpace(1000)
    taken = space.allocate([7] * 100)
    assert taken is not None
    assert all(len(extents) == 1 for extents in taken)
    assert all(after[0].first == before[0].first + 7 for before, after in pairwise(taken))


def test_what_fits_whole_is_not_cut_for_the_sake_of_what_does_not() -> None:
    space = FreeSpace(11, np.array([[3, 1], [7, 1], [9, 1]], np.int64))
    assert space.extents() == [Extent(0, 3), Extent(4, 3), Extent(8, 1), Extent(10, 1)]
    assert space.allocate([5, 3]) == [[Extent(4, 3), Extent(8, 1), Extent(10, 1)], [Extent(0, 3)]]
    assert space.extents() == []


def test_extents_that_are_used_up_are_taken_out() -> None:
    space = FreeSpace(2_000, np.array([[block, 1] for block in range(1, 2_000, 2)], np.int64))
    taken = [space.allocate([1]) for _ in range(400)]
    assert taken == [[[Extent(2 * number, 1)]] for number in range(400)]
    assert len(space._count) < 700, "each look from the front would go over them"
    space.free([extents[0] for one in taken if one is not None for extents in one])
    assert space.extents() == [Extent(block, 1) for block in range(0, 2_000, 2)]
