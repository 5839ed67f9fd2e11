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
        largest = max((extent.blocks for extent in runs(self.free)), default=0)
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
