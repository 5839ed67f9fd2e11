"""The arena: memfd segments cut into slots, within a strict budget."""

import numpy as np
import pytest

from kvstore.tiers.dram import Arena
from kvstore.tiers.segments import SlotClass, close_segments, make_segment
from kvstore.tiers.sharing import NOWHERE, RETIRED, STATE
from tests.descriptors import descriptors


def fill(arena: Arena, slot_class: SlotClass, most: int = 10_000) -> list[int]:
    """Allocate until there is no room."""
    found: list[int] = []
    while len(found) < most:
        slot = arena.allocate(slot_class)
        if slot is None:
            room = arena.reserve_segment(slot_class)
            if room is None:
                break
            arena.add_segment(room, make_segment(room))
            continue
        found.append(slot)
    return found


def test_slots_are_apart_and_within_the_budget() -> None:
    before = descriptors()
    arena = Arena(1 << 20, segment_bytes=1 << 18)
    slot_class = Arena.slot_class("t", 10_000)
    slots = fill(arena, slot_class)
    assert len(slots) == (1 << 20) // slot_class.slot_bytes
    assert arena.usage().used == len(slots) * slot_class.slot_bytes <= 1 << 20
    for number, slot in enumerate(slots):
        arena.view(slot)[:] = bytes([number]) * slot_class.slot_bytes
    assert all(bytes(arena.view(s)) == bytes([n]) * slot_class.slot_bytes for n, s in enumerate(slots))
    for slot in slots:
        arena.free(slot)
    assert arena.usage().used == 0
    arena.close()
    assert descriptors() <= before


def test_the_fronts_of_slots_are_theirs_whatever_segments_they_lie_in() -> None:
    arena = Arena(1 << 20, segment_bytes=1 << 18)
    slots = fill(arena, Arena.slot_class("t", 10_000))
    for number, slot in enumerate(slots):
        arena.view(slot)[:] = bytes([number]) * 8 + bytes([255 - number]) * (len(arena.view(slot)) - 8)
    several = [slots[i] for i in (*range(20), 90, 3, 91, 50, *range(49, 40, -1))]
    assert len({slot >> 32 for slot in several}) > 2
    for asked in (several, slots[5:9], slots[:1]):
        fronts, behind = arena.fronts(np.array(asked), 8, 3)
        numbers = [slots.index(slot) for slot in asked]
        assert [bytes(front) for front in fronts] == [bytes([number]) * 8 for number in numbers]
        assert behind == b"".join(bytes([255 - number]) * 3 for number in numbers)
    del fronts
    arena.close()


def test_empty_segments_are_given_back_to_other_sizes_and_tenants() -> None:
    arena = Arena(1 << 20, segment_bytes=1 << 18)
    small, large, foreign = Arena.slot_class("t", 4096), Arena.slot_class("t", 100_000), Arena.slot_class("u", 4096)
    held = fill(arena, small)
    assert not fill(arena, large)
    for slot in held:
        arena.free(slot)
    taken = fill(arena, large)
    assert len(taken) >= 8
    for slot in taken:
        arena.free(slot)
    assert len(fill(arena, foreign)) == (1 << 20) // 4096
    arena.close()


def test_a_segment_made_ahead_stays_empty_while_there_is_room_elsewhere() -> None:
    arena = Arena(64 << 20)
    slot_class = Arena.slot_class("t", 1000)
    (slot,) = fill(arena, slot_class, 1)
    room = arena.reserve_spare(slot_class, 1 << 20)
    assert room is not None
    arena.add_segment(room, make_segment(room))
    usage = arena.segments()
    other = arena.allocate(slot_class)
    assert other is not None
    assert other >> 32 == slot >> 32
    assert (arena.opened, arena.segments()) == (1, usage)
    arena.close()


def test_a_view_outlives_the_segment() -> None:
    arena = Arena(1 << 20)
    slot_class = Arena.slot_class("t", 1000)
    view = arena.view(fill(arena, slot_class, 1)[0])
    view[:3] = b"abc"
    arena.close()
    assert bytes(view[:3]) == b"abc"


def test_a_slot_larger_than_a_segment_gets_one_of_its_own() -> None:
    arena = Arena(8 << 20, segment_bytes=1 << 20)
    assert len(fill(arena, Arena.slot_class("t", 3 << 20))) == 2
    arena.close()


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 65536])
def test_slot_sizes_are_rounded_up(nbytes: int) -> None:
    assert nbytes <= Arena.slot_class("t", nbytes).slot_bytes < nbytes + 256


def test_a_place_holds_until_its_slot_is_freed() -> None:
    arena = Arena(1 << 20, segment_bytes=1 << 16)
    slots = fill(arena, Arena.slot_class("t", 5000), most=20)
    places = arena.places(np.array([*slots, -1], np.int64))
    assert places["segment"][-1] == NOWHERE
    for slot, place in zip(slots, places, strict=False):
        arena.view(slot)[:3] = b"abc"
        segment = arena.shareable("t", int(place["segment"]))
        assert segment is not None
        at = int(place["offset"])
        assert bytes(segment.view[at : at + 3]) == b"abc"
        assert segment.words[1 + int(place["slot"])] == place["generation"]
    gone = slots[7]
    arena.free(gone)
    again = arena.allocate(Arena.slot_class("t", 5000))
    assert again == gone, "the slot is used again"
    now = arena.places(np.array(slots, np.int64))
    assert now["generation"][7] == places["generation"][7] + 1
    rest = [n for n in range(20) if n != 7]
    assert (now[rest] == places[rest]).all()
    arena.close()


def test_segments_are_one_tenants_and_their_memory_is_never_used_again() -> None:
    arena = Arena(1 << 20, segment_bytes=1 << 16)
    mine = fill(arena, Arena.slot_class("mine", 5000))
    numbers = {int(n) for n in arena.places(np.array(mine, np.int64))["segment"]}
    assert all(arena.shareable("mine", n) is not None and arena.shareable("other", n) is None for n in numbers)
    words = {n: segment.words for n in numbers if (segment := arena.shareable("mine", n)) is not None}
    for slot in mine:
        arena.free(slot)
    room = arena.reserve_segment(Arena.slot_class("other", 5000))
    assert room is not None
    assert room.retired
    assert sum(int(words[n][STATE]) == RETIRED for n in numbers) == len(room.retired), "who has it mapped is told"
    words.clear()
    old = {segment.fd: segment for segment in room.retired}
    close_segments(old.values())
    segment = make_segment(type(room)(room.slot_class, room.slots, ()))
    arena.add_segment(room, segment)
    assert all(arena.shareable("mine", n) is None or n in numbers for n in range(100))
    assert arena.shareable("other", max(numbers) + 1) is segment, "segments are numbered anew"
    assert not any(segment.view[: 1 << 12]), "a new segment begins with zeros"
    arena.close()
