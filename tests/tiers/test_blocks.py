"""Blocks that were freed stay as they are for those who were reading then."""

from kvstore.tiers.blocks import Blocks
from kvstore.tiers.free_space import Extent, FreeSpace


def test_what_was_freed_waits_for_those_who_read_then() -> None:
    blocks = Blocks(FreeSpace(10))
    assert blocks.allocate([10]) == [[Extent(0, 10)]]
    with blocks.reading():
        blocks.retire([Extent(0, 4)])
        assert blocks.allocate([1]) is None
        with blocks.reading():  # later ones find nothing that names it
            blocks.retire([Extent(4, 2)])
        assert blocks.allocate([1]) is None, "the first is still reading"
    assert blocks.allocate([6]) == [[Extent(0, 6)]]


def test_who_comes_later_holds_nothing_up() -> None:
    blocks = Blocks(FreeSpace(10))
    blocks.allocate([10])
    blocks.retire([Extent(0, 4)])
    with blocks.reading():
        assert blocks.allocate([4]) == [[Extent(0, 4)]]
        blocks.give_back([Extent(0, 4)])  # what was never named is free at once
        assert blocks.allocate([4]) == [[Extent(0, 4)]]


def test_readers_that_come_and_go_hold_up_only_what_was_freed_under_them() -> None:
    blocks = Blocks(FreeSpace(4))
    blocks.allocate([4])
    first = blocks.reading()
    first.__enter__()
    for block in range(3):
        with blocks.reading():
            blocks.retire([Extent(block, 1)])
    second = blocks.reading()
    second.__enter__()
    blocks.retire([Extent(3, 1)])
    assert blocks.allocate([1]) is None
    first.__exit__(None, None, None)
    assert blocks.allocate([3]) == [[Extent(0, 3)]]
    assert blocks.allocate([1]) is None
    second.__exit__(None, None, None)
    assert blocks.allocate([1]) == [[Extent(3, 1)]]
