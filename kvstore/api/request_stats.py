"""How long the daemon takes over requests, a histogram for each kind with bounds that double; and how many it refused."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

_FINEST_BITS = 16
BOUNDS_S = tuple((1 << (_FINEST_BITS + step)) / 1e9 for step in range(19))
"""Upper bounds of the buckets in seconds, from 66 µs to 17 s; one more bucket has what took longer."""


class Histogram:
    """Counts of requests by how long they took."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_ns = 0

    @property
    def count(self) -> int:
        """Requests."""
        return sum(self.counts)

    def add(self, took_ns: int) -> None:
        """Count one."""
        self.counts[min((took_ns >> _FINEST_BITS).bit_length(), len(BOUNDS_S))] += 1
        self.total_ns += took_ns

    def cumulative(self) -> list[tuple[str, int]]:
        """How many took less than each bound, as Prometheus wants it."""
        bounds = (*map(repr, BOUNDS_S), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """The time, in seconds, within which that share of the requests was done: read off within its bucket, as `histogram_quantile` of
    Prometheus does. None without requests; the last bound for what took longer than that.
    """
    rank = share * sum(counts)
    if not rank:
        return None
    before = 0
    for count, low, high in zip(counts, (0.0, *BOUNDS_S), BOUNDS_S, strict=False):
        if before + count >= rank:
            return low + (high - low) * (rank - before) / count
        before += count
    return BOUNDS_S[-1]


class RequestStats:
    """Of all connections: times by kind of request, from when all of it had come until it was answered, and errors by code."""

    def __init__(self) -> None:
        self._kinds: dict[str, Histogram] = {}
        self.errors: Counter[str] = Counter()
        """Answers that were an error, by its code."""

    def answered(self, kind: str, began_ns: int) -> None:
        """A request went well that began at `time.perf_counter_ns()`."""
        took_ns = time.perf_counter_ns() - began_ns
        histogram = self._kinds.get(kind)
        if histogram is None:
            histogram = self._kinds[kind] = Histogram()
        histogram.add(took_ns)

    def by_kind(self) -> Iterable[tuple[str, Histogram]]:
        """All that there were, by name, in lower case."""
        return [(kind.lower(), histogram) for kind, histogram in sorted(self._kinds.items())]
