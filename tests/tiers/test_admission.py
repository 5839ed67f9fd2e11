"""What is written to SSD: it learns who comes back there, keeps to its budget, and knows what room is worth."""

import numpy as np
import numpy.typing as npt

from kvstore.tiers.reuse.admission import Admission
from kvstore.tiers.reuse.features import Field, request_code
from kvstore.tiers.reuse.score import Score

Bits = npt.NDArray[np.bool_]
KINDS = 12
RNG = np.random.default_rng(5)


def codes_of(kinds: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return np.array([request_code({Field.NEW_PAGES: int(kind)}) for kind in kinds], np.uint64)


def play(admission: Admission, price: float, steps: int = 600, pages: int = 50) -> tuple[float, float, npt.NDArray[np.float64]]:
    """Pages of twelve kinds, of which 0, 5, ... 55% come back. Returns the shares refused and missed, and refused by kind."""
    refused_by_kind, seen = np.zeros(KINDS), np.zeros(KINDS)
    missed = refused_pages = 0
    for step in range(steps):
        kinds = RNG.integers(0, KINDS, pages)
        codes = codes_of(kinds)
        admission.looked_up(pages, 20_000)
        odds = admission.odds(codes)
        refused = ~admission.admits(odds, price)
        back = RNG.random(pages) < kinds * 0.05
        for some in np.array_split(np.flatnonzero(back), 5):
            admission.came_back(codes[some], odds[some], refused[some], np.ones(len(some), np.bool_))
        away = np.flatnonzero(~back)
        admission.stayed_away(codes[away], odds[away], refused[away], RNG.integers(0, 10, len(away)).astype(np.float64))
        if step >= steps // 2:
            missed += int((refused & back).sum())
            refused_pages += int(refused.sum())
            refused_by_kind += np.bincount(kinds[refused], minlength=KINDS)
            seen += np.bincount(kinds, minlength=KINDS)
    total = float(seen.sum())
    return refused_pages / total, missed / total, refused_by_kind / seen


def test_fewer_writes_cost_what_the_budget_allows_and_begin_with_the_least_likely() -> None:
    refused, missed, by_kind = play(Admission(0.01), price=0.0)
    assert 0.005 < missed < 0.02
    assert refused > 0.1
    assert by_kind[0] > 0.95
    assert by_kind[4:].max() < 0.05


def test_no_budget_refuses_only_what_room_is_worth_more_than() -> None:
    assert play(Admission(0.0), price=0.0)[1] < 0.002
    _, _, by_kind = play(Admission(0.0), price=0.22)
    assert by_kind[:2].min() > 0.9
    assert by_kind[8:].max() < 0.1


def test_nothing_is_refused_before_anything_is_learned() -> None:
    admission = Admission(0.002)
    admission.looked_up(1000, 1e6)
    codes = codes_of(np.arange(KINDS))
    assert admission.admits(admission.odds(codes), 0.0).all()
    assert admission.floor_chance < 0.5


def test_a_request_counts_once_whatever_it_is_told_with() -> None:
    together, one_by_one = Score(), Score()
    codes = codes_of(RNG.integers(0, KINDS, 300))
    requests = RNG.integers(0, 100, 300).astype(np.float64)
    together.learn_by_request(codes, requests, used_again=False)
    for request in range(100):
        one_by_one.learn(codes[requests == request], used_again=False)
    kinds = codes_of(np.arange(KINDS))
    assert together.of(kinds).max() < -0.5
    assert one_by_one.of(kinds).max() < -0.5
    assert np.abs(together.of(kinds) / one_by_one.of(kinds) - 1).max() < 0.8
