"""Health, readiness, metrics and stat."""

import os
import time

from aiohttp import web

from kvstore import __version__
from kvstore.api.auth import Access
from kvstore.api.http.admission import grant_of
from kvstore.api.http.namespaces import described
from kvstore.api.http.service import Service
from kvstore.api.metrics import CONTENT_TYPE, render
from kvstore.api.operations import ALWAYS, Reply, Route, reply
from kvstore.api.process import process_stat
from kvstore.api.stat_models import Health, RateNow, Readiness, RequestTimes, Stat, TierUsage
from kvstore.store import Store


class StatusRoutes:
    """How the daemon is."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The routes of this module."""
        return [
            Route(
                "GET", "/healthz", "health", "Whether the process lives", self._health,
                (Reply(200, "it does", Health),), (500,), access=None,
            ),
            Route(
                "GET", "/readyz", "readiness", "Whether the store is loaded, and where its data plane is", self._readiness,
                (Reply(200, "it is", Readiness),), ALWAYS, access=None,
            ),
            Route(
                "GET", "/metrics", "metrics", "Metrics for Prometheus", self._metrics,
                (Reply(200, "Prometheus text", media="text/plain"),), ALWAYS, access=Access.ADMIN,
            ),
            Route(
                "GET", "/v1/stat", "stat", "Tiers, totals and namespaces; without admin access those of the tenant", self._stat,
                (Reply(200, "what it holds", Stat),), ALWAYS, access=Access.READ,
            ),
        ]  # fmt: skip

    async def _health(self, request: web.Request) -> web.Response:
        return reply(Health(version=__version__))

    async def _readiness(self, request: web.Request) -> web.Response:
        store, loading = self._service.store, self._service.store.figures.loading
        return reply(
            Readiness(
                status="ready" if loading is None else "loading", loading=loading,
                ssd_state=None if store.figures.ssd_state.ok else store.figures.ssd_state,  # ready all the same
                epoch=store.epoch, endpoints=self._service.endpoints,
            )
        )  # fmt: skip

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=render(self._service.store, self._service.data_plane), headers={"Content-Type": CONTENT_TYPE})

    async def _stat(self, request: web.Request) -> web.Response:
        service, grant = self._service, grant_of(request)
        store = service.store
        common = {
            "version": __version__,
            "epoch": store.epoch,
            "uptime_s": round(time.monotonic() - service.started, 3),
            "endpoints": service.endpoints,
            "tenant": grant.tenant,
        }
        found = self._of_all(store) if grant.access >= Access.ADMIN else self._of_tenant(store, grant.tenant)
        return reply(Stat.model_validate(common | found))

    def _of_all(self, store: Store) -> dict[str, object]:
        requests = self._service.data_plane.request_stats
        return {
            "pid": os.getpid(),
            "policy": store.config.policy,
            "follows_lru": store.figures.follows_lru,
            "rates": {"ssd": RateNow.of(store.rates.ssd), "link": RateNow.of(store.rates.link)},
            "tiers": {name: TierUsage(capacity=usage.capacity, used=usage.used) for name, usage in store.figures.usage().items()},
            "requests": {kind: RequestTimes.of(times) for kind, times in requests.by_kind()},
            "errors": dict(requests.errors),
            "dram_segments": store.figures.dram_segments,
            "totals": store.stats,
            "leases": len(store.leases),
            "puts_open": store.figures.puts_open,
            "pending_pages": store.figures.pending_pages,
            "pinned_blobs": store.figures.pinned_blobs,
            "writeback_backlog_pages": len(store.figures.backlog),
            "writeback_backlog_bytes": store.figures.backlog.nbytes,
            "writeback_backlog_bytes_smoothed": round(store.figures.backlog.smoothed_bytes),
            "loading": store.figures.loading,
            "ssd_state": store.figures.ssd_state,
            "scrub": store.scrubber.progress,
            "sessions": len(self._service.data_plane.sessions),
            "connections": self._service.data_plane.connection_count,
            **process_stat(),
            "namespaces": [described(space, space.settings.tenant) for space in store.all_spaces()],
        }

    def _of_tenant(self, store: Store, tenant: str) -> dict[str, object]:
        sessions, connections = self._service.data_plane.sessions.of(tenant)
        return {
            "tiers": {name: TierUsage(capacity=usage.capacity, used=usage.used) for name, usage in store.figures.usage_of(tenant).items()},
            "leases": store.leases.of_tenant(tenant),
            "puts_open": store.figures.puts_open_of(tenant),
            "sessions": sessions,
            "connections": connections,
            "namespaces": [described(space) for space in store.namespaces(tenant)],
        }
