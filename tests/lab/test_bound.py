"""The clairvoyant bound against trying everything."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.lab.bound import clairvoyant_hits, unlimited_hits
from kvstore.lab.cost import PrefillCost
from kvstore.lab.measure import Measure
from kvstore.lab.simulation import LabConfig, Simulation
from kvstore.lab.trace import Op
from kvstore.tiers.policies.make import NAMES, make_policies
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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=12), st.integers(1, 12))
def test_no_policy_beats_it_where_pages_differ(requests: list[tuple[int, int]], room: int) -> None:
    """Pages of 40 bytes in one namespace, of 4 in the other."""
    trace = trace_of([(label,) for _, label in requests], spaces=[space for space, _ in requests])
    sizes = [40, 4][: len(trace.spaces)]
    measure = Measure(trace, sizes, PrefillCost())
    bound = measure.bound(room * 4, 0)
    for policy in NAMES:
        dram, ssd = make_policies(policy, measure.pages(room * 4), 1)
        outcome = Simulation(trace, sizes, LabConfig(room * 4, 0), dram, ssd).run()
        assert measure.row(policy, room * 4, 0, outcome).hit_ratio <= bound.hit_ratio + 1e-9


def test_namespaces_of_other_page_sizes_are_counted_apart() -> None:
    prompts = [(label,) for label in (1, 2, 3, 4)]
    trace = trace_of([*prompts, (9,), *prompts], spaces=[0] * 4 + [1] + [0] * 4)
    assert Measure(trace, [4, 400], PrefillCost()).bound(16, 0).hit_ratio == 4 / 9
