"""The clairvoyant bound against trying everything."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.lab.bound import clairvoyant_hits, unlimited_hits
from kvstore.lab.trace import Op
from tests.lab.traces import Prompt, trace_of

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=7)
Cache = frozenset[Prompt]


def best_hits(requests: list[Prompt], capacity: int) -> int:
    """The most hits of any way to keep whole prefixes."""
    reached: dict[Cache, int] = {frozenset(): 0}
    for prompt in requests:
        path = [prompt[: length + 1] for length in range(len(prompt))]
        after: dict[Cache, int] = {}
        for cache, before in reached.items():
            hits = before + sum(page in cache for page in path)
            for kept in closed_subsets(cache | frozenset(path), capacity):
                after[kept] = max(after.get(kept, 0), hits)
        reached = after
    return max(reached.values())


def closed_subsets(pages: Cache, capacity: int) -> set[Cache]:
    """All subsets of at most so many pages that have the parent of each page."""
    found: set[Cache] = {frozenset()}
    for page in sorted(pages, key=len):
        found |= {one | {page} for one in found if len(one) < capacity and (len(page) == 1 or page[:-1] in one)}
    return found


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(1, 5))
def test_nobody_does_better_and_it_can_be_reached(requests: list[Prompt], capacity: int) -> None:
    assert clairvoyant_hits(trace_of(requests), capacity).sum() == best_hits(requests, capacity)


@given(prompts)
def test_unlimited_hits_all_that_was_there_before(requests: list[Prompt]) -> None:
    seen: set[Prompt] = set()
    for prompt, hits in zip(requests, unlimited_hits(trace_of(requests)).tolist(), strict=True):
        path = [prompt[: length + 1] for length in range(len(prompt))]
        assert hits == sum(page in seen for page in path)
        seen.update(path)


def test_a_get_brings_nothing_and_a_put_hits_nothing() -> None:
    trace = trace_of([(1, 2), (1, 2), (1, 2), (1, 2)], [Op.GET, Op.PUT, Op.GET, Op.REQUEST])
    assert clairvoyant_hits(trace, 10).tolist() == [0, 0, 2, 2]
    assert clairvoyant_hits(trace, 1).tolist() == [0, 0, 1, 1]
