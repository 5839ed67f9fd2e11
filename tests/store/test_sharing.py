"""Who has which segments, and how much of what was given back may be kept mapped."""

import os

import pytest

from kvstore.errors import Busy
from kvstore.store.dram.sharing import SharedSegment, Sharing
from kvstore.store.stats import Stats
from kvstore.tiers.dram import Arena
from kvstore.tiers.segments import close_segments, make_segment

ALICE, ALICE_TOO, BOB = 1, 2, 3


def test_a_tenant_that_keeps_too_much_mapped_gets_no_more() -> None:
    arena = Arena(1 << 20, segment_bytes=1 << 16)
    sharing = Sharing(arena, None, Stats())  # type: ignore[arg-type] # no blobs here, so nothing is brought up

    def give(owner: int, tenant: str, asked: list[int], dropped: list[int]) -> list[SharedSegment]:
        found = sharing.segments(owner, tenant, asked, dropped)
        sharing.give(owner, tenant, found)
        return found

    mine = Arena.slot_class("alice", 4096)
    numbers = []
    for number in range(60):
        room = arena.reserve_segment(mine)
        assert room is not None
        arena.add_segment(room, make_segment(room))
        numbers.append(number)
    assert [s.number for s in sharing.segments(BOB, "bob", numbers, [])] == []
    given = give(ALICE, "alice", [*numbers, 99, 99], [])
    assert [s.number for s in given] == numbers
    assert all(os.fstat(s.descriptor).st_size == s.nbytes for s in given)
    assert [s.number for s in give(ALICE_TOO, "alice", numbers[:2], [])] == numbers[:2]
    assert sharing.lingering("alice") == 0

    assert sharing.give(BOB, "bob", given) == numbers
    assert sharing.give(BOB, "bob", given[:1]) == [], "it has it already"
    sharing.take_back(BOB, numbers)

    gone, kept = numbers[:40], 0
    for number in gone:
        segment = arena.retire(number)
        kept += len(segment.view)
        close_segments([segment])
        arena.release([segment])
    assert sharing.lingering("alice") == kept > arena.capacity // 8, "what two clients have counts once"
    assert sharing.lingering("bob") == 0
    with pytest.raises(Busy):
        sharing.segments(ALICE, "alice", numbers[40:41], [])
    sharing.segments(BOB, "bob", [], [])
    still = give(ALICE, "alice", numbers[40:41], gone)
    assert [s.number for s in still] == numbers[40:41], "it has let go of them"
    assert sharing.lingering("alice") > 0, "the other client has not"
    sharing.release_owner(ALICE_TOO)
    assert sharing.lingering("alice") == 0
    arena.close()
