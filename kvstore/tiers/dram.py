"""The DRAM tier: memfd segments cut into slots of one size each (see segments.py).

`Arena` is bookkeeping on the loop's thread. A segment holds one slot size and one tenant's bytes, and is given back once it
is empty: at once if its room is wanted, or after a while. What is still in it can be moved first (see kvstore/store/dram/vacate.py).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.tiers import Usage
from kvstore.tiers.segments import NO_OWNER, Room, Segment, SlotClass, close_segments, slot_bytes_of
from kvstore.tiers.sharing import NOWHERE, PLACE, RETIRED, STATE, is_sealed
from kvstore.tiers.vacating import Candidate

_SEGMENT_SHIFT = 32
_SLOT_MASK = (1 << _SEGMENT_SHIFT) - 1
_MOST_SHARE, _LEAST_SHARE = 256, 1024
_GROWTH = 8
_FEW = 8


@dataclass(frozen=True, slots=True)
class SegmentUsage:
    """Segments that exist, and the bytes reserved for them (never more than the capacity), of which `held` are not empty.

    Segments that are just being made or closed are counted in the bytes.
    """

    count: int
    reserved: int
    held: int


class Arena:
    """Slots of all segments. A slot is named by one int: segment number and slot number.

    The more a class has, the larger its next segment: an eighth of it, between 1/1024 and 1/256 of the capacity, at most
    `segment_bytes`, at least one slot. So what is free in half-used segments stays small beside what is used, with few
    classes and with many.
    """

    def __init__(self, capacity: int, segment_bytes: int = 64 << 20) -> None:
        self.capacity = capacity
        self._most_bytes = min(segment_bytes, capacity // _MOST_SHARE)
        self._least_bytes = min(segment_bytes, capacity // _LEAST_SHARE)
        self._segments: dict[int, Segment] = {}
        self._open: dict[SlotClass, list[int]] = {}
        self._class_bytes: Counter[SlotClass] = Counter()
        self._empty: dict[int, int] = {}
        self._empty_bytes = 0
        self._sweeps = 0
        self._reserved = 0
        self._used = 0
        self._used_by: Counter[str] = Counter()
        self._next = 0
        self._closed = False
        self.opened = 0
        """Times that an empty segment got something into it."""

    def usage(self) -> Usage:
        """Capacity, and the bytes of slots in use."""
        return Usage(self.capacity, self._used)

    def segments(self) -> SegmentUsage:
        """How many segments there are, and what they take."""
        return SegmentUsage(len(self._segments), self._reserved, self._reserved - self._empty_bytes)

    def used_by(self, tenant: str) -> int:
        """The bytes of a tenant's slots in use."""
        return self._used_by[tenant]

    def empty_bytes(self, slot_class: SlotClass) -> int:
        """Bytes of a class's empty segments that are handed out from."""
        segments = (self._segments[number] for number in self._empty)
        return sum(segment.nbytes for segment in segments if segment.slot_class == slot_class and not segment.shut)

    def held_by(self, slot_class: SlotClass) -> int:
        """Bytes of a class's segments that are not empty."""
        return self._class_bytes[slot_class] - self.empty_bytes(slot_class)

    @property
    def room(self) -> int:
        """Bytes that new segments can have without moving anything: outside segments, and in empty ones."""
        return self.capacity - self._reserved + self._empty_bytes

    @staticmethod
    def slot_class(tenant: str, nbytes: int) -> SlotClass:
        """The class whose slots hold `nbytes`."""
        return SlotClass(tenant, slot_bytes_of(nbytes))

    # --- slots ---------------------------------------------------------------------------------------------------------

    def allocate(self, slot_class: SlotClass) -> int | None:
        """A free slot, or None: then a segment has to be added first, or something freed."""
        numbers = self._open.get(slot_class)
        if not numbers:
            return None
        number = numbers[-1]
        segment = self._segments[number]
        if segment.empty:
            del self._empty[number]
            self._empty_bytes -= segment.nbytes
            self.opened += 1
        slot = segment.free.pop()
        if not segment.free:
            numbers.pop()
        self._used += slot_class.slot_bytes
        self._used_by[slot_class.tenant] += slot_class.slot_bytes
        return number << _SEGMENT_SHIFT | slot

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, writable."""
        segment = self._segments[slot >> _SEGMENT_SHIFT]
        size = segment.slot_class.slot_bytes
        start = (slot & _SLOT_MASK) * size
        return segment.view[start : start + size]

    def fronts(self, slots: npt.NDArray[np.int64], nbytes: int, behind: int) -> tuple[list[memoryview], bytes]:
        """The first bytes of several slots, so many of each, and a copy of so many `behind` those, one slot's after the other's."""
        found: list[memoryview] = []
        tables: list[bytes] = []
        start, count = int(slots[0]), len(slots)
        if count > 1 and int(slots[-1]) == start + count - 1 and (slots[1:] - slots[:-1]).max() == 1:  # as of what was put at once
            segment = self._segments[start >> _SEGMENT_SHIFT]
            size = segment.slot_class.slot_bytes
            start = (start & _SLOT_MASK) * size
            view = segment.view[start : start + count * size]
            table = np.frombuffer(view, np.uint8).reshape(-1, size)[:, nbytes : nbytes + behind].tobytes()
            return [view[at : at + nbytes] for at in range(0, count * size, size)], table
        numbers, first = slots >> _SEGMENT_SHIFT, 0
        changes = [] if numbers[0] == numbers[-1] and numbers.min() == numbers.max() else (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        for last in (*changes, len(slots)):
            segment, inside = self._segments[int(numbers[first])], slots[first:last] & _SLOT_MASK
            size, view, first = segment.slot_class.slot_bytes, segment.view, last
            found += [view[start : start + nbytes] for start in (inside * size).tolist()]
            tables.append(np.frombuffer(view, np.uint8, segment.nbytes).reshape(-1, size)[inside, nbytes : nbytes + behind].tobytes())
        return found, b"".join(tables)

    def set_owner(self, slot: int, owner: int) -> None:
        """Note whose a slot is (any number from 0 on), so that its bytes can be moved. Forgotten when it is freed."""
        self._segments[slot >> _SEGMENT_SHIFT].owner[slot & _SLOT_MASK] = owner

    def free(self, slot: int) -> None:
        """Give a slot back. After `close` nothing: a reader lets go of what it had."""
        if self._closed:
            return
        number = slot >> _SEGMENT_SHIFT
        segment = self._segments[number]
        if not segment.free and not segment.shut:
            self._open.setdefault(segment.slot_class, []).append(number)
        segment.free.append(slot & _SLOT_MASK)
        segment.owner[slot & _SLOT_MASK] = NO_OWNER
        segment.words[1 + (slot & _SLOT_MASK)] += np.uint64(1)  # before anybody can write here again
        self._used -= segment.slot_class.slot_bytes
        self._used_by[segment.slot_class.tenant] -= segment.slot_class.slot_bytes
        if segment.empty:
            self._note_empty(number)
            if not segment.shut:  # to the end of the queue: so that it stays empty while there is room elsewhere
                numbers = self._open[segment.slot_class]
                numbers.remove(number)
                numbers.insert(0, number)

    def class_of(self, slot: int) -> SlotClass:
        """The class of a slot's segment."""
        return self._segments[slot >> _SEGMENT_SHIFT].slot_class

    def slot_bytes(self, slot: int) -> int:
        """Bytes a slot takes up."""
        return self.class_of(slot).slot_bytes

    def places(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        """Where slots lie, as those see it who have the segments mapped (PLACE); a negative slot is nowhere."""
        if len(slots) <= _FEW:
            return np.array([self._place(slot) for slot in slots.tolist()], PLACE)
        found = np.zeros(len(slots), PLACE)
        found["segment"] = NOWHERE
        numbers = slots >> _SEGMENT_SHIFT
        there = numbers[slots >= 0]
        changes = np.append(True, there[1:] != there[:-1])[: len(there)]  # mostly few: what was put at once lies together
        for number in dict.fromkeys(there[changes].tolist()):
            mine = numbers == number
            segment, inside = self._segments[number], slots[mine] & _SLOT_MASK
            found["segment"][mine] = number
            found["slot"][mine] = inside
            found["offset"][mine] = inside * segment.slot_class.slot_bytes
            found["generation"][mine] = segment.words[1 + inside]
        return found

    def _place(self, slot: int) -> tuple[int, int, int, int]:
        if slot < 0:
            return NOWHERE, 0, 0, 0
        number, inside = slot >> _SEGMENT_SHIFT, slot & _SLOT_MASK
        segment = self._segments[number]
        return number, inside, inside * segment.slot_class.slot_bytes, int(segment.words[1 + inside])

    def shareable(self, tenant: str, number: int) -> Segment | None:
        """A segment, if it is there, the tenant's, and sealed."""
        segment = self._segments.get(number)
        return segment if segment is not None and segment.slot_class.tenant == tenant and is_sealed(segment.fd) else None

    # --- segments ------------------------------------------------------------------------------------------------------

    def reserve_segment(self, slot_class: SlotClass, *, whole: bool = False) -> Room | None:
        """Set room aside for a new segment; None if there is no room for one slot, or with `whole` for a full-sized one.

        Empty segments of other classes make room if need be. Follow with `add_segment` or `cancel_segment`.
        """
        size, wanted = slot_class.slot_bytes, self._next_slots(slot_class)
        empty = [n for n in self._empty if self._segments[n].slot_class != slot_class and not self._segments[n].shut]
        free = self.capacity - self._reserved
        slots = min(wanted, (free + sum(self._segments[n].nbytes for n in empty)) // size)
        if not slots or (whole and slots < wanted):
            return None
        retired: list[Segment] = []
        while free < slots * size:
            retired.append(self.retire(empty.pop(0)))
            free += retired[-1].nbytes
        room = Room(slot_class, slots, tuple(retired))
        self._reserved += room.held - sum(segment.nbytes for segment in retired)
        return room

    def _next_slots(self, slot_class: SlotClass) -> int:
        return min(self._most_bytes, max(self._least_bytes, self._class_bytes[slot_class] // _GROWTH)) // slot_class.slot_bytes or 1

    def reserve_spare(self, slot_class: SlotClass, most: int) -> Room | None:
        """Set room aside for a segment that nobody waits for; None if nothing is left outside the segments, or more than `most` bytes
        would lie in empty ones. Follow with `add_segment` or `cancel_segment`.
        """
        room = Room(slot_class, self._next_slots(slot_class), ())
        if room.nbytes > self.capacity - self._reserved or self._empty_bytes + room.nbytes > most:
            return None
        self._reserved += room.held
        return room

    def cancel_segment(self, room: Room) -> None:
        """Undo `reserve_segment`, once its retired segments are closed."""
        self._reserved -= room.held

    def add_segment(self, room: Room, segment: Segment) -> None:
        """Take in a segment whose room was reserved."""
        self._reserved -= room.held - segment.nbytes
        self._segments[self._next] = segment
        self._open.setdefault(segment.slot_class, []).insert(0, self._next)  # it stays empty while there is room elsewhere
        self._class_bytes[segment.slot_class] += segment.nbytes
        self._note_empty(self._next)
        self._next += 1

    def _note_empty(self, number: int) -> None:
        self._empty[number] = self._sweeps
        self._empty_bytes += self._segments[number].nbytes

    def retire(self, number: int) -> Segment:
        """Take out an empty segment. Its bytes stay reserved until it is closed, and `release` is called."""
        segment = self._segments.pop(number)
        segment.words[STATE] = RETIRED
        del self._empty[number]
        self._empty_bytes -= segment.nbytes
        if not segment.shut:
            self._open[segment.slot_class].remove(number)
        if not self._open.get(segment.slot_class):
            self._open.pop(segment.slot_class, None)
        self._class_bytes[segment.slot_class] -= segment.nbytes
        if not self._class_bytes[segment.slot_class]:
            del self._class_bytes[segment.slot_class]
        return segment

    def retire_idle(self, spare: int = 0) -> list[Segment]:
        """Take out what has been empty since before the last call, but for one segment and `spare` bytes."""
        idle = [number for number, sweep in self._empty.items() if sweep < self._sweeps and not self._segments[number].shut]
        self._sweeps += 1
        return [self.retire(n) for n in idle if len(self._empty) > 1 and self._empty_bytes - self._segments[n].nbytes >= spare]

    def release(self, segments: Iterable[Segment]) -> None:
        """Retired segments are closed: their room is free."""
        self._reserved -= sum(segment.nbytes for segment in segments)

    def close(self) -> None:
        """Give back every segment. Views still held elsewhere stay readable until they are dropped."""
        self._closed = True
        close_segments(self._segments.values())
        self._segments.clear()
        self._open.clear()
        self._empty.clear()
        self._class_bytes.clear()
        self._reserved = self._used = self._empty_bytes = 0

    # --- vacating ------------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """The segments with something in them, as the planning of moves wants to see them."""
        return [
            Candidate(number, s.slot_class, s.slot_class.slot_bytes, s.slots, s.slots - len(s.free))
            for number, s in self._segments.items()
            if not s.shut and not s.empty
        ]

    def allocate_dense(self, slot_class: SlotClass, count: int) -> list[int]:
        """Up to `count` free slots where the fewest are left: for what is moved together.

        They count for their tenant only after `moved`, so that a move takes nothing from its quota.
        """
        found: list[int] = []
        for number in sorted(self._open.get(slot_class, ()), key=lambda n: len(self._segments[n].free)):
            segment = self._segments[number]
            if segment.empty:
                continue
            taken = segment.free[: -1 - (count - len(found)) : -1]
            del segment.free[len(segment.free) - len(taken) :]
            if not segment.free:
                self._open[slot_class].remove(number)
            found += [number << _SEGMENT_SHIFT | slot for slot in taken]
            if len(found) == count:
                break
        self._used += len(found) * slot_class.slot_bytes
        return found

    def moved(self, slot: int) -> None:
        """A move to a slot from `allocate_dense` has ended, well or not."""
        slot_class = self.class_of(slot)
        self._used_by[slot_class.tenant] += slot_class.slot_bytes

    def owned_slots(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """The slots in use of a segment, and their owners; None if one of them has no owner (yet)."""
        segment = self._segments[number]
        taken = np.flatnonzero(segment.owner != NO_OWNER)
        if len(taken) != segment.slots - len(segment.free):
            return None
        return taken | number << _SEGMENT_SHIFT, segment.owner[taken]

    def shut(self, number: int) -> None:
        """Hand out no slot of a segment any more, until `retire` or `reopen`."""
        segment = self._segments[number]
        segment.shut = True
        if segment.free:
            self._open[segment.slot_class].remove(number)

    def reopen(self, number: int) -> None:
        """Undo `shut`."""
        segment = self._segments[number]
        segment.shut = False
        if segment.free:
            self._open.setdefault(segment.slot_class, []).append(number)

    def is_empty(self, number: int) -> bool:
        """Whether no slot of a segment is taken."""
        return self._segments[number].empty
