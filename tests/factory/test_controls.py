"""The controls by themselves: admission, lanes, reserved capacity, and when a worker changes its kind."""

import random

import pytest

from kvstore_workers.factory.controls import (
    DirectAdmission,
    Kind,
    Lanes,
    Reconfiguration,
    SmoothedAdmission,
    Smoother,
    View,
    may_take,
)


def view(**changes: float) -> View:
    plain = {"waiting": 100, "filling": 0, "due": 0, "ready": 0, "decoding": 0, "slots": 16, "retired": 0, "fill_s": 1.0, "decode_s": 4.0}
    values = plain | changes
    return View(**values)  # type: ignore[arg-type]


def test_direct_admission_acts_at_retirements_only_and_does_not_see_what_is_filled() -> None:
    admission = DirectAdmission()
    assert admission.admit(view(waiting=10), 0.0) == 10, "an empty factory opens"
    assert admission.admit(view(filling=10, due=10), 0.1) == 6
    assert admission.admit(view(filling=16, due=16), 0.1) == 0, "for all slots, and no more"
    assert admission.admit(view(filling=0), 0.2) == 16, "nothing came of them"
    assert admission.admit(view(decoding=16), 1.0) == 0
    assert admission.admit(view(decoding=13, retired=3), 2.0) == 3
    assert admission.admit(view(decoding=13, filling=3, due=3, retired=3), 2.1) == 0, "nothing has retired"
    assert admission.admit(view(decoding=12, filling=3, due=3, retired=4), 2.2) == 4, "it sees that three are being filled"
    assert admission.admit(view(decoding=15, ready=5, retired=5), 3.0) == 0
    assert DirectAdmission(8).admit(view(decoding=15, ready=5, retired=5), 3.0) == 4


def test_smoothed_admission_paces_itself_by_the_predicted_rate() -> None:
    admission = SmoothedAdmission(8.0)
    settled = view(decoding=16, ready=8, due=4)  # 16 slots / 4 s = 4 a second, 1 s of fills under way
    admission.admit(settled, 0.0)
    admitted = sum(admission.admit(settled, n / 10) for n in range(1, 501))
    assert admitted == pytest.approx(200, abs=3), "in balance it admits what decode serves"
    assert max(admission.admit(settled, 60 + n / 10) for n in range(50)) <= 2, "in bursts"


def test_smoothed_admission_answers_to_what_is_missing_and_to_what_is_too_much() -> None:
    def rate(**changes: float) -> float:
        admission = SmoothedAdmission(8.0)
        admission.admit(view(**changes), 0.0)
        return sum(admission.admit(view(**changes), n / 10) for n in range(1, 101)) / 10

    assert rate(decoding=16, ready=0, due=4) > 5 > rate(decoding=16, ready=8, due=4) > 3
    assert rate(decoding=16, ready=30, due=4) == 0
    assert rate(decoding=16, ready=0, due=30) == 0, "what is being filled counts"
    assert rate(decoding=16, ready=0, due=4, waiting=0) == 0


def test_a_smoother_forgets_by_time_and_not_by_calls() -> None:
    seldom, often = Smoother(2.0), Smoother(2.0)
    seldom.add(0.0, 0.0)
    often.add(0.0, 0.0)
    seldom.add(10.0, 4.0)
    for n in range(1, 401):
        often.add(10.0, n / 100)
    assert seldom.value == pytest.approx(often.value) == pytest.approx(8.647, abs=0.01)


def test_short_turns_have_a_share_and_no_more() -> None:
    lanes = Lanes(0.25)
    first = [lanes.short_next(5.0, 1.0) for _ in range(100)]  # the long ones have waited longer
    assert sum(first) == pytest.approx(25, abs=1)
    assert all(Lanes(0.25).short_next(1.0, 5.0) for _ in range(3)), "the oldest goes first"
    assert lanes.short_next(None, 1.0) is False
    assert lanes.short_next(1.0, None) is True


def test_the_last_places_are_for_short_turns() -> None:
    assert [may_take(False, free, 2) for free in range(4)] == [False, False, False, True]
    assert [may_take(True, free, 2) for free in range(3)] == [False, True, True]


WORKERS = {Kind.PREFILL: 2, Kind.MIDFILL: 2, Kind.DECODE: 2}


def pressures(prefill: float, midfill: float, decode: float) -> dict[Kind, float]:
    return {Kind.PREFILL: prefill, Kind.MIDFILL: midfill, Kind.DECODE: decode}


def test_noise_changes_no_worker() -> None:
    control, random_ = Reconfiguration(), random.Random(1)
    for second in range(600):
        swing = 12.0 if second % 10 < 5 else 0.5  # far over every threshold, but never for long
        found = control.decide(pressures(swing * random_.uniform(0.5, 1.5), 4.0, 12.5 - swing), WORKERS, float(second))
        assert found is None
    assert control.changes == 0


def test_a_lasting_shift_changes_one_worker_and_then_it_waits() -> None:
    control, changes = Reconfiguration(), []
    workers = dict(WORKERS)
    for second in range(120):
        found = control.decide(pressures(20.0, 0.2, 3.0), workers, float(second))
        if found is not None:
            changes.append((second, found))
            workers[found.source] -= 1
            workers[found.target] += 1
    assert [c.target for _, c in changes] == [Kind.PREFILL, Kind.PREFILL]
    assert changes[0][1].source is Kind.MIDFILL
    assert changes[0][0] >= control.hold_s
    assert changes[1][0] - changes[0][0] >= control.dwell_s
    assert workers[Kind.MIDFILL] == 1, "the last of a kind stays"


def test_the_last_worker_of_a_kind_never_changes() -> None:
    control = Reconfiguration()
    ones = {Kind.PREFILL: 1, Kind.MIDFILL: 1, Kind.DECODE: 1}
    assert all(control.decide(pressures(99.0, 0.0, 0.0), ones, float(s)) is None for s in range(100))
