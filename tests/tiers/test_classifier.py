"""The reuse classifier's parts: what they learn from a stream of which the truth is known."""

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.hints import Ended, Hints, Turn
from kvstore.tiers.classifier import Classifier
from kvstore.tiers.policies import Columns, Pages, Use
from kvstore.tiers.reuse.ages import AgeTables
from kvstore.tiers.reuse.duel import Duel
from kvstore.tiers.reuse.features import Field, field, gap_octaves, hint_code, octave, page_codes, request_code
from kvstore.tiers.reuse.score import Score

RNG = np.random.default_rng(7)


def codes_of(gaps: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    count = len(gaps)
    return page_codes(
        uses=np.ones(count, np.uint8), gaps=gaps, first=0, known=count, end=count, children=np.ones(count, np.int32), base_uses=3, shared=0,
    )  # fmt: skip


def test_each_number_of_a_code_is_read_back() -> None:
    gaps = np.array([1, 4, 15, 0], np.int64)
    codes = codes_of(gaps) | np.uint64(request_code({Field.NEW_PAGES: 5, Field.RHYTHM: 15, Field.HINT: 13}))
    assert field(codes, Field.GAP).tolist() == gaps.tolist()
    assert field(codes, Field.DEPTH).tolist() == [0, 1, 2, 3]
    assert field(codes, Field.FROM_END).tolist() == [3, 2, 1, 0]
    assert set(field(codes, Field.NEW_PAGES).tolist()) == {5}
    assert set(field(codes, Field.RHYTHM).tolist()) == {15}
    assert set(field(codes, Field.HINT).tolist()) == {13}
    assert set(field(codes, Field.USES).tolist()) == {1}
    assert [octave(count) for count in (0, 1, 2, 3, 4, 5, 8, 9, 1 << 40)] == [0, 1, 2, 3, 3, 4, 4, 5, 15]
    octaves = gap_octaves(np.exp2(np.arange(-5, 20))).tolist()
    assert octaves == sorted(octaves)


def test_paths_beyond_the_tables_have_codes_like_their_ends() -> None:
    deep = page_codes(
        uses=np.ones(3, np.uint8), gaps=np.array([2, 2], np.int64), first=(1 << 16) - 1, known=(1 << 16) + 1, end=1 << 18,
        children=np.array([1, 1 << 17, 2], np.int32), base_uses=3, shared=0,
    )  # fmt: skip
    assert field(deep, Field.DEPTH).tolist() == [15, 15, 15]
    assert field(deep, Field.FROM_END).tolist() == [7, 7, 7]
    assert field(deep, Field.CHILDREN).tolist() == [1, 7, 8 + 2]
    assert field(deep, Field.BASE_USES).tolist() == [3, 3, 8 + 3]
    assert field(deep, Field.GAP).tolist() == [2, 2, 0]


def test_a_long_path_is_scored_and_learned_by_runs_as_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.repeat(codes_of(RNG.integers(1, 16, 300)), RNG.integers(1, 9, 300))
    again = np.repeat(RNG.random(len(codes)) < 0.5, 3)[: len(codes)]

    def learned() -> npt.NDArray[np.float64]:
        score = Score()
        for _ in range(20):
            score.learn(codes, used_again=again)
            score.learn(codes, used_again=True)
        return score.of(codes)

    by_runs = learned()
    monkeypatch.setattr("kvstore.tiers.reuse.score.MANY", len(codes) + 1)
    by_page = learned()
    assert np.ptp(by_page) > 0.1
    assert np.allclose(by_runs, by_page)


def test_every_hint_has_a_code_of_its_own() -> None:
    codes = [hint_code(Hints("s", turn, ended)) for turn in (None, *Turn) for ended in (None, *Ended)]
    assert len(set(codes)) == len(codes)
    assert codes[0] == 0
    assert max(codes) < 16


def test_the_score_learns_what_tells_reuse_and_unlearns_it() -> None:
    score = Score()
    long, short = codes_of(np.full(4, 12)), codes_of(np.full(4, 3))
    for _ in range(100):
        score.learn(short, used_again=True)
        score.learn(long, used_again=False)
    assert score.of(short).min() > 1
    assert score.of(long).max() < -1
    for _ in range(400):
        score.forget(0.9)
        score.learn(short, used_again=False)
        score.learn(long, used_again=True)
    assert score.of(short).max() < 0 < score.of(long).min()


def tables_of(reused: npt.NDArray[np.float64], idle: npt.NDArray[np.float64]) -> AgeTables:
    tables = AgeTables()
    tables.reused(np.zeros(len(reused), np.uint8), reused)
    tables.rebuild(np.zeros(len(idle), np.uint8), idle, np.ones(len(idle), np.int64))
    return tables


def worth(tables: AgeTables, *ages: float) -> npt.NDArray[np.float64]:
    return tables.worth(np.zeros(len(ages), np.uint8), np.array(ages, np.float64))


def test_pages_used_at_random_are_worth_the_same_at_every_age() -> None:
    values = worth(tables_of(RNG.exponential(100, 200_000), np.empty(0)), 2, 20, 100, 200)
    assert values.max() / values.min() < 1.3
    assert 0.007 < values.mean() < 0.013, "a reuse in a hundred seconds"


def test_in_a_loop_the_oldest_is_worth_most() -> None:
    values = worth(tables_of(np.full(10_000, 100.0), np.empty(0)), 1, 30, 60, 90)
    assert (np.diff(values) > 0).all()


def test_where_half_never_comes_back_the_old_are_worth_least() -> None:
    values = worth(tables_of(RNG.exponential(10, 10_000), np.full(10_000, 5000.0)), 1, 20, 60, 200)
    assert (np.diff(values) < 0).all()
    chances = tables_of(RNG.exponential(10, 10_000), np.full(10_000, 5000.0)).chance(np.zeros(2, np.uint8), np.array([0.0, 200.0]), 100)
    assert 0.4 < chances[0] < 0.6
    assert chances[1] < 0.1


def test_the_duel_follows_who_wins() -> None:
    duel = Duel()
    for _ in range(200):
        duel.played(*RNG.permutation([3, 3]))
    assert not duel.follow_lru
    for _ in range(50):
        duel.played(1, 4)
    assert duel.follow_lru
    assert duel.lead < -1
    for _ in range(400):
        duel.played(4, 1)
    assert not duel.follow_lru


def columns_for(policy: Classifier, slots: int) -> Columns:
    return {"recency": np.zeros(slots, np.int64), **{spec.name: np.zeros(slots, spec.dtype) for spec in policy.columns}}


def use(policy: Classifier, columns: Columns, page: int, now: float, hints: Hints | None = None) -> None:
    """One page alone is a request."""
    slots = np.array([page], np.int32)
    known = int((columns["state"][slots] & 1).sum())
    policy.used(columns, Use(slots, known, known, now, np.ones(1, np.int32), 16, hints or Hints()))
    policy.entered(columns, slots, now)
    columns["recency"][slots] = int(now * 1000)


def test_hints_are_looked_at_from_the_first_on_and_tell_pages_apart() -> None:
    policy, pages = Classifier(40), 4000
    columns = columns_for(policy, 2 * pages)
    now = 0.0
    soon, never = Hints("a", Turn.MAIN, Ended.TOOL_CALL), Hints("b", Turn.SUB_AGENT, Ended.SUBAGENT_DONE)
    for page in range(0, pages, 2):
        now += 1
        use(policy, columns, page, now, soon)
        use(policy, columns, page + 1, now, never)
        if page >= 20:
            use(policy, columns, page - 20, now, soon)
        known = np.arange(page + 2, dtype=np.int32)
        policy.values([Pages(columns, known[-40:], page + 2, lambda _, values: values)], 1, now)
    late = [Pages(columns, np.array([pages - 10 + odd], np.int32), pages, lambda _, values: values) for odd in (0, 1)]
    told = [policy.explain(one, now)[0] for one in late]
    assert told[0].score > 0.6 > 0.4 > told[1].score
    assert told[0].value > told[1].value
    assert told[0].follows == "estimates"


def test_abandoned_pages_are_worth_least_until_they_are_used_again() -> None:
    policy = Classifier(10)
    columns = columns_for(policy, 10)
    for page in range(6):
        use(policy, columns, page, float(page))
    policy.abandoned(columns, np.array([5], np.int32), 6.0)
    everything = Pages(columns, np.arange(6, dtype=np.int32), 6, lambda _, values: values)
    assert int(np.argmin(policy.values([everything], 1, 7.0))) == 5
    use(policy, columns, 5, 8.0)
    assert not policy.explain(everything, 8.0)[5].abandoned


def test_a_clock_that_goes_back_or_stands_is_borne() -> None:
    policy = Classifier(10)
    columns = columns_for(policy, 10)
    for now in (10.0, 5.0, 5.0, 1e9, 0.0):
        use(policy, columns, 0, now)
    policy.forgotten(columns, np.array([0], np.int32), -1.0)
    use(policy, columns, 1, 0.0)
    everything = Pages(columns, np.arange(2, dtype=np.int32), 2, lambda _, values: values)
    assert np.isfinite(policy.values([everything], 1, -5.0)).all()
