"""Which segments are vacated: the plan by itself, and the arena under random use, with every invariant recomputed."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.tiers.dram import Arena
from kvstore.tiers.segments import SlotClass, close_segments, make_segment
from kvstore.tiers.vacating import Candidate, MoveBudget, choose


def anything(_: int) -> bool:
    return True


def segment(number: int, slots: int, used: int, slot_class: str = "a", slot_bytes: int = 10) -> Candidate:
    return Candidate(number, slot_class, slot_bytes, slots, used)


def test_the_sparsest_segment_is_vacated_if_the_others_have_room() -> None:
    segments = [segment(1, 10, 9), segment(2, 10, 4), segment(3, 10, 6)]
    assert choose(segments, 1, 1000, anything) == [2]
    assert choose(segments, 101, 1000, anything) == []
    assert choose([segment(1, 10, 9), segment(2, 10, 4)], 1, 1000, anything) == []


def test_classes_do_not_lend_each_other_slots() -> None:
    assert choose([segment(1, 10, 5, "a"), segment(2, 10, 5, "b")], 1, 1000, anything) == []
    assert choose([segment(1, 10, 5, "a"), segment(2, 10, 6, "b"), segment(3, 10, 4, "b")], 1, 1000, anything) == [3]


def test_several_segments_are_vacated_for_a_large_slot_but_none_in_vain() -> None:
    small = [segment(n, 10, 5) for n in range(6)]
    assert len(choose(small, 250, 1000, anything)) == 3
    assert choose(small, 310, 1000, anything) == []
    needless = [segment(1, 2, 1), segment(2, 40, 25), segment(3, 40, 25), segment(4, 40, 20)]
    assert choose(needless, 400, 1000, anything) == [4]


def test_what_may_not_be_moved_and_what_is_over_the_budget_stays() -> None:
    segments = [segment(1, 10, 4), segment(2, 10, 5), segment(3, 10, 5)]
    assert choose(segments, 1, 1000, lambda number: number != 1) == [2]
    assert choose(segments, 1, 39, anything) == []


def test_the_budget_follows_what_is_asked_for_and_saves_only_so_much() -> None:
    budget = MoveBudget(0.5, 30, 100)
    assert budget.available == 30
    budget.earn(20)
    assert budget.available == 40
    budget.earn(1_000_000)
    assert budget.available == 100
    budget.spend(130)
    assert budget.available == -30
    assert MoveBudget(0.0, 30, 100).available == 0


CLASSES = tuple(Arena.slot_class(tenant, size) for tenant, size in (("t", 300), ("t", 1000), ("u", 300), ("t", 5000)))


class ArenaMachine(RuleBasedStateMachine):
    """The model: what every slot holds, by its owner, and which owners are leased."""

    @initialize()
    def start(self) -> None:
        self.arena = Arena(1 << 18, segment_bytes=1 << 14)
        self.arena._most_bytes = 1 << 13  # more slots a segment than the shares of so small an arena give
        self.slots: dict[int, int] = {}
        self.leased: dict[int, int] = {}
        self.next_owner = 0

    def write(self, slot: int, owner: int) -> None:
        view = self.arena.view(slot)
        view[:] = owner.to_bytes(4, "little") * (len(view) // 4)

    @rule(slot_class=st.sampled_from(CLASSES), count=st.integers(1, 40))
    def allocate(self, slot_class: SlotClass, count: int) -> None:
        for _ in range(count):
            slot = self.arena.allocate(slot_class)
            if slot is None:
                room = self.arena.reserve_segment(slot_class)
                if room is None:
                    return
                self.arena.add_segment(room, make_segment(room))
                slot = self.arena.allocate(slot_class)
            assert slot is not None
            assert slot not in self.slots.values()
            assert self.arena.class_of(slot) == slot_class
            self.arena.set_owner(slot, self.next_owner)
            self.write(slot, self.next_owner)
            self.slots[self.next_owner] = slot
            self.next_owner += 1

    @rule(data=st.data(), share=st.floats(0.05, 0.9))
    def free(self, data: st.DataObject, share: float) -> None:
        owners = [owner for owner in self.slots if owner not in self.leased]
        data.draw(st.randoms(use_true_random=False)).shuffle(owners)
        for owner in owners[: int(share * len(owners))]:
            self.arena.free(self.slots.pop(owner))

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        if self.slots:
            owner = data.draw(st.sampled_from(sorted(self.slots)))
            self.leased[owner] = self.slots[owner]

    @rule()
    def end_leases(self) -> None:
        self.leased.clear()

    @rule(wanted=st.integers(1, 20_000), most_moved=st.sampled_from([0, 3000, 1 << 18]))
    def vacate(self, wanted: int, most_moved: int) -> None:
        before = self.arena.room
        candidates = {segment.number: segment for segment in self.arena.candidates()}
        chosen = choose(candidates.values(), wanted, most_moved, self.movable)
        assert sum(candidates[number].cost for number in chosen) <= most_moved
        for number in chosen:
            self.arena.shut(number)
        for number in chosen:
            found = self.arena.owned_slots(number)
            assert found is not None
            targets = self.arena.allocate_dense(self.arena.class_of(int(found[0][0])), len(found[0]))
            assert len(targets) == len(found[0])
            for source, target, owner in zip(found[0].tolist(), targets, found[1].tolist(), strict=True):
                assert target >> 32 not in chosen
                self.arena.view(target)[:] = self.arena.view(source)
                self.arena.moved(target)
                self.arena.free(source)
                self.arena.set_owner(target, owner)
                self.slots[owner] = target
        retired = [self.arena.retire(number) for number in chosen]
        close_segments(retired)
        self.arena.release(retired)
        assert self.arena.room == before + sum(segment.nbytes for segment in retired)
        assert not chosen or self.arena.room >= before + wanted
        if not chosen and not self.leased and most_moved == 1 << 18 and wanted == 1:
            self.nothing_was_possible()

    def movable(self, number: int) -> bool:
        found = self.arena.owned_slots(number)
        assert found is not None
        return not set(found[1].tolist()) & set(self.leased)

    def nothing_was_possible(self) -> None:
        free: Counter[object] = Counter()
        for candidate in self.arena.candidates():
            free[candidate.slot_class] += candidate.slots - candidate.used
        assert all(free[c.slot_class] < c.slots for c in self.arena.candidates())

    @rule(spare=st.sampled_from([0, 1 << 14]))
    def give_back_what_is_idle(self, spare: int) -> None:
        retired = self.arena.retire_idle(spare)
        close_segments(retired)
        self.arena.release(retired)

    @rule(slot_class=st.sampled_from(CLASSES), most=st.sampled_from([0, 1 << 13, 1 << 16]), there=st.booleans())
    def make_a_spare(self, slot_class: SlotClass, most: int, there: bool) -> None:
        segments = self.arena.segments()
        empty = segments.reserved - segments.held
        room = self.arena.reserve_spare(slot_class, most)
        if room is not None:
            assert empty + room.nbytes <= most
            if there:
                self.arena.add_segment(room, make_segment(room))
            else:
                self.arena.cancel_segment(room)

    @rule(slot_class=st.sampled_from(CLASSES))
    def give_up_a_segment(self, slot_class: SlotClass) -> None:
        room = self.arena.reserve_segment(slot_class, whole=True)
        if room is not None:
            close_segments(room.retired)
            self.arena.cancel_segment(room)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "arena"):
            return
        arena = self.arena
        assert len(set(self.slots.values())) == len(self.slots)
        assert arena.usage().used == sum(arena.slot_bytes(slot) for slot in self.slots.values())
        segments = arena._segments
        assert arena.segments().reserved == sum(s.nbytes for s in segments.values()) <= arena.capacity
        assert arena.segments().held == sum(s.nbytes for s in segments.values() if not s.empty)
        taken = Counter(slot >> 32 for slot in self.slots.values())
        for number, s in segments.items():
            assert s.slots - len(s.free) == taken[number]
            assert (number in arena._open.get(s.slot_class, [])) == bool(s.free)
        for owner, slot in self.slots.items():
            view = arena.view(slot)
            assert view == owner.to_bytes(4, "little") * (len(view) // 4), "wrong bytes"
        assert all(self.slots[owner] == slot for owner, slot in self.leased.items()), "a leased slot was moved"

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
