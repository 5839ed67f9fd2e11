"""Prometheus metrics, collected from the store when they are asked for."""

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.api.data_plane import DataPlane
from kvstore.api.request_stats import RequestStats
from kvstore.store import Store
from kvstore.store.ssd.state import SSD_STATES
from kvstore.store.stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StoreCollector(Collector):
    """Reads a store's counters and gauges."""

    def __init__(self, store: Store, data_plane: DataPlane) -> None:
        self._store = store
        self._data_plane = data_plane

    def collect(self) -> Iterator[Metric]:
        """All metrics, named `kvstore_*`."""
        for field in fields(Stats):
            text = field.name.replace("_", " ")
            yield CounterMetricFamily(f"kvstore_{field.name}", f"Total of {text} since start", value=getattr(self._store.stats, field.name))
        used = GaugeMetricFamily("kvstore_tier_used_bytes", "Bytes in use", labels=["tier"])
        capacity = GaugeMetricFamily("kvstore_tier_capacity_bytes", "Bytes the tier may hold", labels=["tier"])
        for tier, usage in self._store.figures.usage().items():
            used.add_metric([tier], usage.used)
            capacity.add_metric([tier], usage.capacity)
        yield from (used, capacity)
        pages = GaugeMetricFamily("kvstore_pages", "Pages in the tree", labels=["namespace"])
        blobs = GaugeMetricFamily("kvstore_blobs", "Blobs in the tiers", labels=["namespace"])
        for space in self._store.all_spaces():
            pages.add_metric([space.id], space.tree.page_count)
            blobs.add_metric([space.id], space.blobs.count)
        yield from (pages, blobs)
        yield from _request_metrics(self._data_plane.request_stats)
        yield from _rebuild_metrics(self._store)
        state = GaugeMetricFamily("kvstore_ssd_state", "1 for the state that the disk under the SSD tier is in", labels=["state"])
        for known in SSD_STATES:
            state.add_metric([known], self._store.figures.ssd_state.state == known)
        yield state
        yield InfoMetricFamily("kvstore_policy", "Which pages leave a tier first", value={"policy": self._store.config.policy})
        yield from self._single_gauges()

    def _single_gauges(self) -> Iterator[Metric]:
        """Gauges that are one number each."""
        segments = self._store.figures.dram_segments
        for name, text, value in (
            ("dram_segments", "DRAM segments", segments.count),
            ("dram_segment_bytes", "Bytes of DRAM segments, free slots included", segments.reserved),
            ("dram_segment_held_bytes", "Bytes of DRAM segments that are not empty", segments.held),
            ("loading_pages", "Pages still to come back from the journal, about", _still_loading(self._store)),
            ("scrub_last_pass_seconds", "When the last whole scrub ended, Unix time", self._store.scrubber.progress.last_pass),
            ("policy_follows_lru", "1 while pages leave DRAM by recency, though the policy may estimate", self._store.figures.follows_lru),
            (
                "ssd_read_bytes_per_second",
                "What reads of pages from SSD reached, smoothed; a guess until there was one",
                self._store.rates.ssd.bytes_s,
            ),
            (
                "fetch_bytes_per_second",
                "What fetches from DRAM reached, smoothed; a guess until there was one",
                self._store.rates.link.bytes_s,
            ),
            ("leases", "Leases held by clients", len(self._store.leases)),
            ("puts_open", "Puts under way", self._store.figures.puts_open),
            ("writeback_backlog_pages", "Pages waiting to be written to SSD", len(self._store.figures.backlog)),
            ("writeback_backlog_bytes", "Bytes waiting to be written to SSD", self._store.figures.backlog.nbytes),
            ("writeback_backlog_bytes_smoothed", "The same, averaged over ten seconds", self._store.figures.backlog.smoothed_bytes),
            (
                "ssd_written_per_hit_byte",
                "Bytes written to SSD for each that a hit read from there",
                self._store.stats.written_per_hit_byte,
            ),
            ("sessions", "Client sessions", len(self._data_plane.sessions)),
            ("connections", "Data-plane connections", self._data_plane.connection_count),
        ):
            yield GaugeMetricFamily(f"kvstore_{name}", text, value=value)


def _request_metrics(stats: RequestStats) -> Iterator[Metric]:
    times = HistogramMetricFamily("kvstore_request_seconds", "What requests of the data plane took that went well", labels=["request"])
    for kind, histogram in stats.by_kind():
        times.add_metric([kind], histogram.cumulative(), histogram.total_ns / 1e9)
    errors = CounterMetricFamily("kvstore_request_errors", "Errors that requests of the data plane were answered with", labels=["code"])
    for code, count in sorted(stats.errors.items()):
        errors.add_metric([code], count)
    yield from (times, errors)


def _rebuild_metrics(store: Store) -> Iterator[Metric]:
    recipes = GaugeMetricFamily("kvstore_recipes", "Recipes", labels=["namespace"])
    jobs = GaugeMetricFamily("kvstore_rebuild_jobs_open", "Jobs to compute pages again", labels=["namespace", "state"])
    largest = GaugeMetricFamily("kvstore_rebuild_drift_max_abs", "Largest absolute difference", labels=["namespace", "dtype"])
    mean = GaugeMetricFamily("kvstore_rebuild_drift_mean_abs", "Mean absolute difference", labels=["namespace", "dtype"])
    for space in store.all_spaces():
        if space.text is None:
            continue
        recipes.add_metric([space.id], store.recipes.holding(space).recipes)
        for state, count in zip(("waiting", "claimed"), store.rebuilding.jobs_of(space), strict=True):
            jobs.add_metric([space.id, state], count)
        for dtype, drift in store.rebuilding.report(space).drift.items():
            largest.add_metric([space.id, dtype], drift.max_abs)
            mean.add_metric([space.id, dtype], drift.mean_abs)
    yield from (recipes, jobs, largest, mean)


def _still_loading(store: Store) -> int:
    return max(store.figures.loading.of_about - store.figures.loading.pages, 1) if store.figures.loading is not None else 0


def render(store: Store, data_plane: DataPlane) -> bytes:
    """The metrics page."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, data_plane))
    return generate_latest(registry)
