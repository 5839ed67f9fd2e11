"""Whose turn it is, of those who have something waiting."""

import random

import pytest

from kvstore.store.dram.in_turn import InTurn

MOST = 8


def taken(waiting: InTurn[str]) -> list[str]:
    """All of it, in turn."""
    found = []
    while waiting:
        found.append(waiting.first()[1])
        waiting.take()
    return found


def test_owners_are_served_one_after_the_other_and_each_in_order() -> None:
    waiting: InTurn[str] = InTurn()
    for thing in ("a1", "a2", "a1", "a3", "b1", "c1", "b2"):
        assert waiting.add(thing[0], thing, MOST)
    assert len(waiting) == 6
    assert taken(waiting) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_has_most_gives_up_its_last_for_who_has_less() -> None:
    waiting: InTurn[str] = InTurn()
    for number in range(4):
        assert waiting.add("a", f"a{number}", 4)
    assert not waiting.add("a", "a4", 4)
    assert waiting.add("b", "b0", 4)
    assert waiting.add("b", "b1", 4)
    assert not waiting.add("b", "b2", 4), "they have as much"
    assert taken(waiting) == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_done_the_count_is_right_and_nobody_has_an_empty_turn(seed: int) -> None:
    waiting: InTurn[str] = InTurn()
    chance = random.Random(seed)
    for _ in range(2000):
        owner = chance.choice("abcde")
        what = chance.random()
        if what < 0.7:
            waiting.add(owner, f"{owner}{chance.randrange(20)}", MOST)
        elif what < 0.95 and waiting:
            waiting.take()
        elif what < 0.99:
            waiting.forget(owner)
        else:
            waiting.clear()
        assert len(waiting) == sum(len(own) for own in waiting._of.values()) <= MOST
        assert all(waiting._of.values())
