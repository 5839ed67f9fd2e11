"""Times of requests: the buckets, and what is read off them."""

import time

from hypothesis import given
from hypothesis import strategies as st

from kvstore.api.request_stats import BOUNDS_S, Histogram, RequestStats, quantile_s


@given(st.lists(st.integers(0, 1 << 36), min_size=1))
def test_each_time_is_in_the_bucket_that_bounds_it(times: list[int]) -> None:
    histogram = Histogram()
    for took in times:
        histogram.add(took)
    assert histogram.count == len(times)
    assert histogram.total_ns == sum(times)
    for bound, (_, count) in zip(BOUNDS_S, histogram.cumulative(), strict=False):
        assert count == sum(took / 1e9 < bound for took in times)
    assert histogram.cumulative()[-1] == ("+Inf", len(times))


@given(st.lists(st.integers(0, 1 << 33), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_of_the_request_it_is_of(times: list[int], share: float) -> None:
    histogram = Histogram()
    for took in times:
        histogram.add(took)
    found = quantile_s(histogram.counts, share)
    assert found is not None
    rank = next(rank for rank in range(1, len(times) + 1) if rank >= share * len(times))
    exact = sorted(times)[rank - 1] / 1e9
    low = max((bound for bound in BOUNDS_S if bound <= exact), default=0.0)
    assert low <= found <= next(bound for bound in BOUNDS_S if bound > exact)


def test_no_requests_have_no_quantile_and_the_longest_count_as_the_last_bound() -> None:
    assert quantile_s(Histogram().counts, 0.5) is None
    histogram = Histogram()
    histogram.add(1 << 40)
    assert quantile_s(histogram.counts, 0.5) == BOUNDS_S[-1]


def test_kinds_are_apart() -> None:
    stats = RequestStats()
    stats.answered("PING", time.perf_counter_ns())
    stats.answered("FETCH", time.perf_counter_ns() - 10**9)
    found = dict(stats.by_kind())
    assert [kind for kind, _ in stats.by_kind()] == ["fetch", "ping"]
    assert found["fetch"].total_ns >= 10**9
    assert found["ping"].count == 1
