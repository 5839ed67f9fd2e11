"""The clairvoyant bound: what nobody can beat who keeps whole prefixes only.

Belady's rule: the page whose next use is farthest goes first, a new one at once if that is its own (a bypass). Whoever uses a page uses all
above it, so of two pages on a path the upper one is never used later than the lower: taking the deepest first among pages of one
next use, the rule never leaves a page without those above it.

So it is enough to count. The pages in the cache whose next use is request n are the first so many pages of n, and what Belady takes from
them comes off their end. (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.)

Where pages differ in bytes or tokens between namespaces, the rule is optimal for none of both. Then each namespace is counted by itself, as
if it had all the room: that is a looser bound, but nobody can beat it either.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.lab.trace import Op, Trace


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of pages of one request with one next use (the number of requests: never), in order; `ends` is where each request's end."""

    next: list[int]
    length: list[int]
    ends: list[int]


def clairvoyant_hits(trace: Trace, capacity: int) -> npt.NDArray[np.int64]:
    """For each request, the pages hit in a cache of `capacity` pages of one size. Only `REQUEST` and `GET` look anything up."""
    return _hits(trace, [0] * len(trace), [capacity])


def hits_apart(trace: Trace, capacities: Sequence[int]) -> npt.NDArray[np.int64]:
    """The same where each namespace has a cache of its own, of so many of its pages."""
    return _hits(trace, trace.space.tolist(), capacities)


def _hits(trace: Trace, cache_of: Sequence[int], capacities: Sequence[int]) -> npt.NDArray[np.int64]:
    runs = _runs(trace)
    held = [0] * (len(trace) + 1)
    """Pages in the cache by the request that uses them next."""
    far: list[list[int]] = [[] for _ in capacities]
    full = [0] * len(capacities)
    hits, at = np.zeros(len(trace), np.int64), 0
    for request, (op, cache) in enumerate(zip(trace.op.tolist(), cache_of, strict=True)):
        farthest, capacity = far[cache], capacities[cache]
        found, held[request] = held[request], 0
        cached = full[cache] - found
        hits[request] = found if op != Op.PUT else 0
        room = found if op == Op.GET else 1 << 62  # what a GET misses comes with a PUT, if at all
        while at < runs.ends[request]:
            following, length = runs.next[at], min(runs.length[at], room)
            at += 1
            room -= length
            if following < len(trace) and length:
                if not held[following]:
                    heapq.heappush(farthest, -following)
                held[following] += length
                cached += length
        while cached > capacity:
            last = -farthest[0]
            gone = min(held[last], cached - capacity)
            held[last] -= gone
            cached -= gone
            if not held[last]:
                heapq.heappop(farthest)
        full[cache] = cached
    return hits


def unlimited_hits(trace: Trace) -> npt.NDArray[np.int64]:
    """For each request, the pages hit in a cache that holds everything."""
    return clairvoyant_hits(trace, trace.unique_pages)


def _runs(trace: Trace) -> _Runs:
    lengths = np.diff(np.append(0, trace.ends))
    owner = np.repeat(np.arange(len(trace)), lengths)
    order = np.argsort(trace.pages, kind="stable")
    again = trace.pages[order[1:]] == trace.pages[order[:-1]]
    following = np.full(len(trace.pages), len(trace), np.int64)
    following[order[:-1][again]] = owner[order[1:][again]]
    begins = np.append(True, (following[1:] != following[:-1]) | (owner[1:] != owner[:-1]))
    first = np.flatnonzero(begins)
    runs = np.diff(np.append(first, len(following)))
    ends = np.searchsorted(first, trace.ends)
    return _Runs(following[first].tolist(), runs.tolist(), ends.tolist())
