"""Pages that stand alone: told of together, the policies make of them what they make of one after the other."""

import numpy as np
import pytest

from kvstore.hints import NO_HINTS, Ended, Hints, Turn
from kvstore.tiers.classifier import Classifier
from kvstore.tiers.policies import ARC, S3FIFO, Columns, Policy, Use
from kvstore.tiers.reuse.features import rhythm_octave, rhythm_octaves

_PAGES = 300


def _columns(policy: Policy) -> Columns:
    return {"recency": np.zeros(_PAGES, np.int64), **{spec.name: np.zeros(_PAGES, spec.dtype) for spec in policy.columns}}


def _use(policy: Policy, columns: Columns, slots: list[int], known: int, now: float, hints: Hints, *, apart: bool) -> None:
    """As the store tells of it: the new ones enter, the first of them the first in line."""
    pages = np.array(slots, np.int32)
    children = np.zeros(len(pages), np.int32)
    if apart:
        policy.used(columns, Use(pages, known, known, now, children, 16, hints, 1, apart=True))
        policy.entered(columns, pages[known:][::-1], now)
        return
    for at in range(len(pages)):
        there = int(at < known)
        policy.used(columns, Use(pages[at : at + 1], there, there, now, children[:1], 16, hints, 1))
        policy.entered(columns, pages[at : at + 1][there:], now)


@pytest.mark.parametrize(
    "policy", [lambda: Classifier(100, 0.002), lambda: ARC(100), lambda: S3FIFO(100)], ids=["classifier", "arc", "s3fifo"]
)
def test_columns_are_the_same_as_page_by_page(policy: type[Policy]) -> None:
    together, apart = policy(), policy()
    ours, theirs = _columns(together), _columns(apart)
    rng, seen, now = np.random.default_rng(3), set[int](), 100.0
    for _ in range(60):
        now += float(rng.exponential(40.0))
        named = rng.permutation(_PAGES)[: int(rng.integers(1, 40))].tolist()
        slots = [slot for slot in named if slot in seen] + [slot for slot in named if slot not in seen]
        known = len(seen & set(named))
        hints = Hints("a", Turn.MAIN, Ended.TOOL_CALL) if rng.random() < 0.3 else NO_HINTS
        seen |= set(named)
        _use(together, ours, slots, known, now, hints, apart=True)
        _use(apart, theirs, slots, known, now, hints, apart=False)
    assert len(seen) > 200
    for name in ours:
        if name != "class":  # what was learned: of many at once, or of each in turn
            assert np.array_equal(ours[name], theirs[name]) or (name == "rhythm" and np.allclose(ours[name], theirs[name], rtol=1e-6)), name


def test_of_several_rhythms_the_bins_are_those_of_each() -> None:
    rhythms = np.linspace(-9.0, 20.0, 233)
    assert rhythm_octaves(rhythms).tolist() == [rhythm_octave(rhythm) for rhythm in rhythms.tolist()]
