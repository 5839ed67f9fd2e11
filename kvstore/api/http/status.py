"""Health, readiness, metrics and stat."""

import os
import time

from aiohttp import web

from kvstore import __version__
from kvstore.api.http.namespaces import described
from kvstore.api.http.service import Service, tenant
from kvstore.api.metrics import CONTENT_TYPE, render
from kvstore.api.models import Health, Readiness, Stat, TierUsage
from kvstore.api.operations import ALWAYS, Reply, Route, reply
from kvstore.api.process import process_stat


class StatusRoutes:
    """How the daemon is."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The routes of this module."""
        return [
            Route("GET", "/healthz", "health", "Whether the process lives", self._health, (Reply(200, "it does", Health),), (500,)),
            Route(
                "GET", "/readyz", "readiness", "Whether the store is loaded, and where its data plane is", self._readiness,
                (Reply(200, "it is", Readiness),), ALWAYS,
            ),
            Route(
                "GET", "/metrics", "metrics", "Metrics for Prometheus", self._metrics,
                (Reply(200, "Prometheus text", media="text/plain"),), ALWAYS,
            ),
            Route("GET", "/v1/stat", "stat", "Tiers, totals and namespaces", self._stat, (Reply(200, "what it holds", Stat),), ALWAYS),
        ]  # fmt: skip

    async def _health(self, request: web.Request) -> web.Response:
        return reply(Health(version=__version__))

    async def _readiness(self, request: web.Request) -> web.Response:
        return reply(Readiness(epoch=self._service.store.epoch, endpoints=self._service.endpoints))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=render(self._service.store, self._service.data_plane), headers={"Content-Type": CONTENT_TYPE})

    async def _stat(self, request: web.Request) -> web.Response:
        store, data_plane = self._service.store, self._service.data_plane
        return reply(
            Stat(
                version=__version__,
                pid=os.getpid(),
                epoch=store.epoch,
                uptime_s=round(time.monotonic() - self._service.started, 3),
                endpoints=self._service.endpoints,
                tiers={name: TierUsage(capacity=usage.capacity, used=usage.used) for name, usage in store.usage().items()},
                dram_segments=store.dram_segments,
                totals=store.stats,
                leases=len(store.leases),
                puts_open=store.puts_open,
                pending_pages=store.pending_pages,
                pinned_blobs=store.pinned_blobs,
                writeback_backlog_pages=store.backlog,
                sessions=len(data_plane.sessions),
                connections=data_plane.connection_count,
                **process_stat(),
                namespaces=[described(space) for space in store.namespaces(tenant(request))],
            )
        )
