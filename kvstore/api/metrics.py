"""Prometheus metrics, collected from the store when they are asked for."""

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.api.data_plane import DataPlane
from kvstore.api.metric_texts import COUNTERS
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
            yield CounterMetricFamily(f"kvstore_{field.name}", COUNTERS[field.name], value=getattr(self._store.stats, field.name))
        used = GaugeMetricFamily(
            "kvstore_tier_used_bytes", "Bytes taken up in a tier: DRAM slots, extents on SSD, recipes in the text tier", labels=["tier"]
        )
        capacity = GaugeMetricFamily("kvstore_tier_capacity_bytes", "Bytes that a tier may take up, as it is configured", labels=["tier"])
        for tier, usage in self._store.figures.usage().items():
            used.add_metric([tier], usage.used)
            capacity.add_metric([tier], usage.capacity)
        yield from (used, capacity)
        pages = GaugeMetricFamily("kvstore_pages", "Pages of a namespace that can be matched, wherever they are", labels=["namespace"])
        blobs = GaugeMetricFamily("kvstore_blobs", "Different blobs of a namespace in DRAM, on SSD, or in both", labels=["namespace"])
        names = InfoMetricFamily("kvstore_namespace", "What a namespace is called, and whose it is; always 1", labels=["namespace"])
        for space in self._store.all_spaces():
            pages.add_metric([space.id], space.tree.page_count)
            blobs.add_metric([space.id], space.blobs.count)
            names.add_metric([space.id], {"name": space.settings.name, "tenant": space.settings.tenant})
        yield from (pages, blobs, names)
        yield from _request_metrics(self._data_plane.request_stats)
        yield from _rebuild_metrics(self._store)
        state = GaugeMetricFamily(
            "kvstore_ssd_state",
            "1 for the state that the disk under the SSD tier is in (ok, full, failing), 0 for the others; worth an alert",
            labels=["state"],
        )
        for known in SSD_STATES:
            state.add_metric([known], self._store.figures.ssd_state.state == known)
        yield state
        yield InfoMetricFamily(
            "kvstore_policy", "The policy, as a label, by which pages leave a tier; always 1", value={"policy": self._store.config.policy}
        )
        yield from self._single_gauges()

    def _single_gauges(self) -> Iterator[Metric]:
        """Gauges that are one number each."""
        segments = self._store.figures.dram_segments
        for name, text, value in (
            ("dram_segments", "DRAM segments there are, empty ones included", segments.count),
            ("dram_segment_bytes", "Bytes of memory in DRAM segments, free slots included", segments.reserved),
            ("dram_segment_held_bytes", "Bytes of DRAM segments that are not empty", segments.held),
            (
                "loading_pages",
                "Pages still to come back from the journal after a start, about; 0 once the store is whole",
                _still_loading(self._store),
            ),
            (
                "scrub_last_pass_seconds",
                "When the last whole pass of the scrubber ended, in Unix time; 0 as long as none has",
                self._store.scrubber.progress.last_pass,
            ),
            (
                "policy_follows_lru",
                "1 while pages leave DRAM by recency: the policy is lru, or the classifier does no better than it now; else 0",
                self._store.figures.follows_lru,
            ),
            (
                "ssd_read_bytes_per_second",
                "Bytes a second that reads of pages from SSD reached, smoothed; a guess until there was one",
                self._store.rates.ssd.bytes_s,
            ),
            (
                "fetch_bytes_per_second",
                "Bytes a second that fetches from DRAM reached, smoothed; a guess until there was one",
                self._store.rates.link.bytes_s,
            ),
            ("leases", "Leases that clients hold now; `kvstore leases` lists the largest", len(self._store.leases)),
            ("pins", "Pins there are now; they end by their time or by unpin", len(self._store.pins)),
            ("puts_open", "Puts that have begun, and are neither committed nor aborted", self._store.figures.puts_open),
            (
                "writeback_backlog_pages",
                "Pages whose write to SSD is waiting; those before them in their prefix go along",
                len(self._store.figures.backlog),
            ),
            (
                "writeback_backlog_bytes",
                "Bytes waiting to be written to SSD; bounded at 256 MiB, beyond which durable puts wait",
                self._store.figures.backlog.nbytes,
            ),
            (
                "writeback_backlog_bytes_smoothed",
                "writeback_backlog_bytes, averaged over about ten seconds",
                self._store.figures.backlog.smoothed_bytes,
            ),
            (
                "ssd_written_per_hit_byte",
                "Bytes written to SSD for each byte that came back from there, since start; 0 as long as none did",
                self._store.stats.written_per_hit_byte,
            ),
            ("sessions", "Clients connected now, each with one or more connections", len(self._data_plane.sessions)),
            ("connections", "Connections of the data plane that are open, over TCP and the Unix socket", self._data_plane.connection_count),
        ):
            yield GaugeMetricFamily(f"kvstore_{name}", text, value=value)


def _request_metrics(stats: RequestStats) -> Iterator[Metric]:
    times = HistogramMetricFamily(
        "kvstore_request_seconds",
        "Seconds that the daemon took for requests of the data plane that went well, by kind; not the link",
        labels=["request"],
    )
    for kind, histogram in stats.by_kind():
        times.add_metric([kind], histogram.cumulative(), histogram.total_ns / 1e9)
    errors = CounterMetricFamily(
        "kvstore_request_errors", "Requests of the data plane that were answered with an error, by its code", labels=["code"]
    )
    for code, count in sorted(stats.errors.items()):
        errors.add_metric([code], count)
    yield from (times, errors)


def _rebuild_metrics(store: Store) -> Iterator[Metric]:
    recipes = GaugeMetricFamily("kvstore_recipes", "Recipes of a namespace in the text tier", labels=["namespace"])
    jobs = GaugeMetricFamily(
        "kvstore_rebuild_jobs_open",
        "Jobs to compute pages again that are not done: waiting for a worker, or claimed by one",
        labels=["namespace", "state"],
    )
    largest = GaugeMetricFamily(
        "kvstore_rebuild_drift_max_abs",
        "Largest absolute difference of an element computed again from that on record, since start",
        labels=["namespace", "dtype"],
    )
    mean = GaugeMetricFamily(
        "kvstore_rebuild_drift_mean_abs",
        "Mean absolute difference of elements computed again from those on record, since start",
        labels=["namespace", "dtype"],
    )
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
