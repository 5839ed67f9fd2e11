"""The policies in the lab against plain models that take a page at a time."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.lab.simulation import LabConfig, Simulation
from kvstore.lab.tiers import DRAM, SSD
from kvstore.lab.trace import Trace
from kvstore.tiers.policies.make import make_policies
from tests.lab.models import ARCModel, LRUModel, Model, S3FIFOModel
from tests.lab.traces import Prompt, trace_of

MODELS: dict[str, Callable[[int], Model]] = {"lru": LRUModel, "arc": ARCModel, "s3fifo": S3FIFOModel}


def run(trace: Trace, name: str, capacity: int, *, batch: float = 0.0) -> list[int]:
    simulation = Simulation(trace, [1] * len(trace.spaces), LabConfig(capacity, batch=batch), *make_policies(name, capacity, 1))
    hits: list[int] = simulation.run().hit_pages.tolist()
    return hits


def skewed(seed: int, count: int, pages: int) -> list[Prompt]:
    """Prompts of one page each, some far more often than others, with scans in between."""
    rng = np.random.default_rng(seed)
    drawn = np.minimum(rng.zipf(1.3, count), pages)
    scan = rng.random(count) < 0.3
    return [(int(1000 + n) if s else int(d),) for n, (d, s) in enumerate(zip(drawn, scan, strict=True))]


@pytest.mark.parametrize("capacity", [1, 10, 37])
@pytest.mark.parametrize("name", MODELS)
def test_single_pages_fare_as_in_the_model(name: str, capacity: int) -> None:
    prompts = skewed(7, 1500, 200)
    model = MODELS[name](capacity)
    assert run(trace_of(prompts), name, capacity) == [int(model.use(prompt[0:1])) for prompt in prompts]


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=30)


@settings(max_examples=50, deadline=None)
@given(prompts, st.integers(1, 12))
def test_leaf_lru_is_lru_with_the_deepest_used_first(requests: list[Prompt], capacity: int) -> None:
    used: dict[Prompt, tuple[int, int]] = {}
    wanted = []
    for number, prompt in enumerate(requests):
        path = [prompt[: length + 1] for length in range(len(prompt))]
        wanted.append(next((n for n, page in enumerate(path) if page not in used), len(path)))
        used.update({page: (number, -len(page)) for page in path})
        for page in sorted(used, key=lambda page: used[page])[: max(0, len(used) - capacity)]:
            del used[page]
    assert run(trace_of(requests), "lru", capacity) == wanted


@settings(max_examples=30, deadline=None)
@given(prompts, st.integers(1, 12), st.integers(0, 20), st.sampled_from(list(MODELS)), st.sampled_from([0.0, 0.3]))
def test_the_tree_and_the_tiers_stay_sound(requests: list[Prompt], dram: int, ssd: int, name: str, batch: float) -> None:
    """No page is without the one above it, nobody holds more than it may, and the tree's own checks pass."""
    trace = trace_of(requests, spaces=[sum(prompt) % 2 for prompt in requests])
    config = LabConfig(dram, ssd, batch, max_ghosts=5)
    simulation = Simulation(trace, [1, 3][: len(trace.spaces)], config, *make_policies(name, dram, ssd))
    outcome = simulation.run()
    assert (outcome.hit_pages <= np.diff(np.append(0, trace.ends))).all()
    assert (outcome.ssd_pages <= outcome.hit_pages).all()
    assert all(space.tree.ghost_count <= 5 for space in simulation.spaces)
    check_places(simulation, dram, ssd)


@pytest.mark.parametrize("name", MODELS)
def test_forgotten_ghosts_leave_places_sound(name: str) -> None:
    """Forgetting a ghost moves pages of its tree: nobody may hold on to slots meanwhile."""
    rng = np.random.default_rng(10)
    requests = [tuple(int(x) for x in np.minimum(rng.zipf(1.5, rng.integers(1, 12)), 6)) for _ in range(250)]
    trace = trace_of(requests, spaces=[sum(prompt) % 2 for prompt in requests])
    simulation = Simulation(trace, [1, 1], LabConfig(30, 40, 0.2, max_ghosts=8), *make_policies(name, 30, 40))
    simulation.run()
    check_places(simulation, 30, 40)


def check_places(simulation: Simulation, dram: int, ssd: int) -> None:
    """Every page is in a tier with all above it, no ghost is, and no tier holds more than it may."""
    for space in simulation.spaces:
        tree, place = space.tree, space.place
        for slot in tree.live_slots().tolist():
            assert place[slot]
            assert place[tree.path_slots(tree.path_to(slot))].all()
        assert not place[tree.ghost_slots()].any()
        assert (place[: tree.pages.ranges.high] != 0).sum() == tree.page_count
    for tier, capacity in ((DRAM, dram), (SSD, ssd)):
        held = sum(int(((space.place & tier) != 0).sum()) * space.page_bytes for space in simulation.spaces)
        assert held == simulation.used(tier) <= capacity
