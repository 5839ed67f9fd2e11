"""Load or recompute: the best cut against trying all, and what a real store says of its pages."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadRequest
from kvstore.kvspec import Component, KVSpec
from kvstore.prefill import Prefill
from kvstore.radix.components import ComponentRules
from kvstore.store import Ack, Store
from kvstore.store.matching.cut import Ask, best_cut, load_seconds, recompute_seconds
from kvstore.store.matching.rates import ClientLink, Meter, Rate, Rates
from tests.store.test_store import PAGE_TOKENS, PARTS, SPEC, config, put, settings_named, tokens_of

HYBRID = KVSpec(4, (Component("full", 2, 1, 8), Component("window", 2, 1, 8, window=8), Component("state", 1, 1, 8)))
RULES = ComponentRules.of(HYBRID)
seconds = st.floats(0, 10)


@given(st.lists(st.tuples(seconds, seconds, seconds, st.integers(0, 7)), max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_no_other_usable_boundary_is_better(pages: list[tuple[float, float, float, int]], base_s: float, slope_s: float) -> None:
    """Pages with what their full, window and state parts take to load, and which of the optional ones they have."""
    masks = np.array([1 | present & 6 for *_, present in pages], np.uint16)
    full, window, state = (np.array([page[which] for page in pages], np.float64) for which in range(3))
    prefill = Prefill(base_s, slope_s)

    def total(cut: int) -> float:
        loaded = sum(full[:cut]) + sum(window[max(cut - 2, 0) : cut]) + sum(state[max(cut - 1, 0) : cut])
        return loaded + sum(base_s + slope_s * position for position in range(cut * 4, len(pages) * 4))

    usable = RULES.usable(masks)
    load = load_seconds(full, [(2, window), (1, state)])
    cut, best = best_cut(load, recompute_seconds(prefill, len(pages), 4), usable)
    assert usable[cut]
    assert best == pytest.approx(total(cut), abs=1e-6)
    assert best <= min(total(other) for other in np.flatnonzero(usable).tolist()) + 1e-6


def test_of_pages_in_one_tier_all_or_none_are_loaded() -> None:
    load = load_seconds(np.full(10, 1.0))
    everywhere = np.ones(11, np.bool_)
    assert best_cut(load, recompute_seconds(Prefill(0.24), 10, 4), everywhere)[0] == 0
    assert best_cut(load, recompute_seconds(Prefill(0.25), 10, 4), everywhere)[0] == 10, "of equals the last"
    assert best_cut(load, recompute_seconds(Prefill(0.2, 0.002), 10, 4), everywhere)[0] == 0
    assert best_cut(load, recompute_seconds(Prefill(0.2, 0.003), 10, 4), everywhere)[0] == 10


def test_slow_pages_at_the_end_are_computed() -> None:
    load = load_seconds(np.array([1.0] * 6 + [5.0] * 4))
    assert best_cut(load, recompute_seconds(Prefill(0.5), 10, 4), np.ones(11, np.bool_)) == (6, 6 + 4 * 4 * 0.5)


def test_an_empty_prefix_has_nothing_to_cut() -> None:
    assert best_cut(load_seconds(np.empty(0)), recompute_seconds(Prefill(1.0), 0, 4), np.ones(1, np.bool_)) == (0, 0.0)


@pytest.mark.parametrize("link", [-1.0, 0.5, float("inf"), float("nan")])
def test_a_link_that_makes_no_sense_is_refused(link: float) -> None:
    with pytest.raises(BadRequest, match="a link of"):
        Ask(link_bytes_s=link)


# --- rates -----------------------------------------------------------------------------------------------------------------


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_moves_at_the_same_time_is_measured_as_one() -> None:
    clock, rate = _Clock(), Rate(1.0)
    meter = Meter(rate, now=clock)
    meter.begin()
    meter.begin()
    clock.now = 0.2
    meter.end(100)
    assert not rate.measured
    clock.now = 0.4
    meter.end(300)
    assert rate.bytes_s == pytest.approx(1000)
    clock.now = 100.0  # nothing moves
    meter.begin()
    clock.now = 100.4
    meter.end(400)
    assert rate.bytes_s == pytest.approx(1000)


def test_what_is_never_idle_is_measured_too_and_what_was_held_up_is_not() -> None:
    clock, rate = _Clock(), Rate(1.0)
    meter = Meter(rate, now=clock)
    for number in range(10):
        meter.begin()
        if number:
            meter.end(100)
        clock.now += 0.1
    assert rate.bytes_s == pytest.approx(1000, rel=0.2)
    before = rate.bytes_s
    meter.end(0, spoiled=True)
    meter.begin()
    clock.now += 50
    meter.end(1, spoiled=True)
    assert rate.bytes_s == before


def test_small_reads_tell_nothing_of_the_disk() -> None:
    rates = Rates()
    for _ in range(20):
        rates.reads.begin()
        rates.reads.end(256)
    assert not rates.ssd.measured
    rates.reads.begin()
    rates.reads.end(1 << 20)
    assert rates.ssd.measured


def test_old_samples_fade() -> None:
    rate = Rate(1.0)
    for _ in range(50):
        rate.add(100, 1.0)
    for _ in range(20):
        rate.add(1000, 1.0)
    assert 980 < rate.bytes_s < 1000


def test_what_a_client_says_of_itself_is_bounded_and_its_own() -> None:
    rates = Rates()
    mine, other = ClientLink(rates, "alice"), ClientLink(rates, "alice")
    start = mine.bytes_s
    for nbytes, seconds in ((1 << 62, 1e-6), (1 << 30, 0.0), (1 << 30, -1.0), (1 << 20, 1e9), (1000, 1e-6), (-5, 1.0)):
        mine.told(nbytes, seconds)
    assert mine.bytes_s == start, "what can't be true counts"
    mine.told(1 << 60, 2.0**60 / (4 << 30))
    assert mine.bytes_s == pytest.approx(4 << 30)
    assert other.bytes_s == rates.link.bytes_s == start
    for _ in range(40):  # what was said of very much at once does not weigh for ever
        mine.told(64 << 20, 1 / 16)
    assert mine.bytes_s == pytest.approx(1 << 30, rel=0.05)


def test_a_client_counts_for_its_tenant_and_for_no_other() -> None:
    rates = Rates()
    mine, other = ClientLink(rates, "alice"), ClientLink(rates, "bob")
    start = other.bytes_s
    mine.meter.begin()
    mine.meter.end(1 << 20)
    assert mine.bytes_s == ClientLink(rates, "alice").bytes_s == rates.link.bytes_s != start
    assert other.bytes_s == start


# --- a store ---------------------------------------------------------------------------------------------------------------


async def test_where_pages_are_decides_what_is_loaded(tmp_path: Path) -> None:
    """The front is in DRAM, the end on SSD only."""
    async with Store(config(tmp_path / "d", dram_bytes=60 * 5000)) as store:
        space = await store.create_namespace(settings_named())
        prefix = tuple(range(8))
        await put(store, space, prefix, b"v" * 16, Ack.DURABLE)
        for slot in space.tree.path_slots(space.tree.match(tokens_of(prefix)))[5:].tolist():
            for row in space.rows_of(slot):
                space.clear_slot(row)
        page_bytes = sum(SPEC.part_bytes(part) for part in PARTS) + 16 * sum(SPEC.slice_layout(part).count for part in PARTS)
        store.rates.ssd.add(page_bytes, 10.0)
        link, page_s = page_bytes / 1.0, 2.0

        def ask(a_page_s: float) -> Ask:
            return Ask(Prefill(a_page_s / PAGE_TOKENS), link)

        found = store.match(space, tokens_of(prefix), {}, ask=ask(page_s)).estimate
        assert found is not None
        assert [(run.tier, run.first_page, run.pages) for run in found.runs] == [("dram", 0, 5), ("ssd", 5, 3)]
        assert [run.load_s for run in found.runs] == pytest.approx([5.0, 30.0])
        assert [run.recompute_s for run in found.runs] == pytest.approx([10.0, 6.0])
        assert found.pages == 5
        assert [found.load_s, found.recompute_s] == pytest.approx([35.0, 16.0])
        assert found.seconds == pytest.approx(5 + 6)
        for a_page_s, cut in ((0.5, 0), (20.0, 8)):
            found = store.match(space, tokens_of(prefix), {}, ask=ask(a_page_s)).estimate
            assert found is not None
            assert found.pages == cut
        without = store.match(space, tokens_of(prefix), {}, ask=Ask()).estimate
        assert without is not None
        assert (without.recompute_s, without.pages) == (None, 8)
        assert store.match(space, tokens_of(prefix), {}).estimate is None


async def test_pages_that_alternate_make_a_bounded_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.matching.estimating.MAX_RUNS", 3)
    async with Store(config(tmp_path / "d", dram_bytes=60 * 5000)) as store:
        space = await store.create_namespace(settings_named())
        prefix = tuple(range(8))
        await put(store, space, prefix, b"v" * 16, Ack.DURABLE)
        for slot in space.tree.path_slots(space.tree.match(tokens_of(prefix)))[1::2].tolist():
            for row in space.rows_of(slot):
                space.clear_slot(row)
        found = store.match(space, tokens_of(prefix), {}, ask=Ask(Prefill(1.0))).estimate
        assert found is not None
        assert [(run.tier, run.first_page, run.pages) for run in found.runs] == [("dram", 0, 1), ("ssd", 1, 1), ("mixed", 2, 6)]
        assert sum(run.load_s for run in found.runs) == pytest.approx(found.load_s)
        assert sum(run.recompute_s or 0 for run in found.runs) == pytest.approx(found.recompute_s)


async def test_reads_from_ssd_are_measured(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2), b"v" * 16, Ack.DURABLE)
        await store._residency.reclaim(1 << 30)
        assert not store.rates.ssd.measured
        store.rates.reads._least_bytes = 1
        await store.prefixes.prefetch(space, tokens_of((1, 2)), {})
        assert store.rates.ssd.measured


async def test_a_prefill_cost_can_be_given_later_and_outlives_a_restart(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2), b"v" * 16, Ack.DURABLE)
        assert await store.create_namespace(settings_named(prefill=Prefill(1e-4, 1e-9))) is space
        assert await store.create_namespace(settings_named()) is space
    async with Store(config(tmp_path / "d")) as store:
        space = store.space("default", "ns")
        assert space.settings.prefill == Prefill(1e-4, 1e-9)
        found = store.match(space, tokens_of((1, 2)), {}, ask=Ask()).estimate
        assert found is not None
        assert found.recompute_s == pytest.approx(Prefill(1e-4, 1e-9).seconds(2 * PAGE_TOKENS))
