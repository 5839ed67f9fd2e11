"""What stages cost, and the decode batch: time that passes becomes tokens, in whatever steps it is looked at."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.api.wire import BadRequest
from kvstore_workers.factory.cost import CostModel, DecodeBatch, OutputLengths
from kvstore_workers.factory.load import cached_in_order
from kvstore_workers.trace import excerpt_path, model_hits, read_mooncake

COST = CostModel(start_s=0.5, token_s=0.01, attention_s=1e-4, step_s=0.1, sequence_s=0.01, context_s=1e-3)


def test_a_midfill_costs_what_its_new_tokens_attend_to() -> None:
    assert COST.fill_s(100, 0) == pytest.approx(0.5 + 1.0 + 1e-4 * 100 * 50)
    assert COST.fill_s(100, 1000) == pytest.approx(0.5 + 1.0 + 1e-4 * 100 * 1050)
    whole = CostModel(start_s=0.0, token_s=0.01, attention_s=1e-4)
    assert whole.fill_s(300, 0) == pytest.approx(whole.fill_s(200, 0) + whole.fill_s(100, 200)), "cutting a prompt changes its cost"


def test_output_lengths_are_those_of_their_seed() -> None:
    lengths, again, other = OutputLengths(1), OutputLengths(1), OutputLengths(2)
    drawn = [lengths.of(n) for n in range(2000)]
    assert drawn == [again.of(n) for n in range(2000)]
    assert drawn != [other.of(n) for n in range(2000)]
    assert float(np.median(drawn)) == pytest.approx(250, rel=0.1)
    assert min(drawn) >= 1
    assert max(drawn) == lengths.most


def test_a_batch_retires_in_the_order_of_what_is_left() -> None:
    batch = DecodeBatch(COST)
    batch.add(1, 10, 10, 0.0)
    alone = COST.decode_step_s(1, 10)
    assert batch.next_end() == pytest.approx(10 * alone)
    batch.add(2, 20, 3, 5 * alone)
    both = COST.decode_step_s(2, 30)
    assert batch.next_end() == pytest.approx(5 * alone + 3 * both)
    assert batch.ended(5 * alone + 3 * both) == [2]
    assert batch.ended(5 * alone + 3 * both + 2 * alone) == [1]
    assert batch.tokens == pytest.approx(13)
    assert batch.next_end() is None
    batch.add(3, 1, 1, 100.0)
    with pytest.raises(BadRequest, match="already"):
        batch.add(3, 1, 1, 100.0)


def test_a_paused_batch_makes_no_tokens() -> None:
    batch = DecodeBatch(COST)
    batch.add(1, 0, 10, 0.0)
    step = COST.decode_step_s(1, 0)
    batch.pause(5.0, 0.0)
    assert batch.ended(4.9) == []
    assert batch.tokens == 0
    assert batch.next_end() == pytest.approx(5.0 + 10 * step)
    assert batch.ended(5.0 + 10 * step) == [1]
    assert batch.busy_s == pytest.approx(10 * step)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 3)), min_size=1, max_size=8), st.integers(1, 200))
def test_looking_more_often_changes_nothing(arrivals: list[tuple[int, float]], looks: int) -> None:
    def run(extra: list[float]) -> dict[int, float]:
        batch, ends, at = DecodeBatch(COST), dict[int, float](), 0.0
        joins = []
        for number, (tokens, gap) in enumerate(arrivals):
            at += gap
            joins.append((at, number, tokens))
        times = sorted(extra)
        while joins or len(batch):
            due, join = batch.next_end(), joins[0][0] if joins else None
            now = min(t for t in (due, join, times[0] if times else None) if t is not None)
            if times and now == times[0]:
                times.pop(0)
            for done in batch.ended(now):
                ends[done] = now
            if join is not None and now == join:
                _, number, tokens = joins.pop(0)
                batch.add(number, 5, tokens, now)
        return ends

    plain, looked = run([]), run([n * 0.37 for n in range(looks)])
    assert plain.keys() == looked.keys()
    for number, end in plain.items():
        assert looked[number] == pytest.approx(end, rel=1e-6, abs=1e-4)


def test_what_is_cached_in_order_is_what_an_infinite_cache_hits() -> None:
    requests = read_mooncake(excerpt_path())
    assert sum(cached_in_order(requests)) == model_hits(requests)[0]
