"""The application: all routes, put together."""

from aiohttp import web

from kvstore.api.data_plane import DataPlane
from kvstore.api.guard import Guard
from kvstore.api.http.admission import guarded
from kvstore.api.http.blobs import BlobRoutes
from kvstore.api.http.check import CheckRoutes
from kvstore.api.http.leases import LeaseRoutes
from kvstore.api.http.namespaces import NamespaceRoutes
from kvstore.api.http.prefixes import PrefixRoutes
from kvstore.api.http.recipes import RecipeRoutes
from kvstore.api.http.service import Service
from kvstore.api.http.status import StatusRoutes
from kvstore.api.openapi import document
from kvstore.api.operations import Reply, Route
from kvstore.api.problems import problems
from kvstore.store import Store

MAX_BODY = 32 << 20


class ControlPlane:
    """The HTTP application. `ready` is set once the store is loaded, and taken back when the daemon drains."""

    def __init__(self, endpoints: list[str], guard: Guard) -> None:
        self._service = Service(endpoints)
        own = Route(
            "GET", "/openapi.json", "openapi", "This document", self._openapi,
            (Reply(200, "OpenAPI 3.1", media="application/json"),), (500,), access=None,
        )  # fmt: skip
        parts = (StatusRoutes, NamespaceRoutes, LeaseRoutes, PrefixRoutes, RecipeRoutes, BlobRoutes, CheckRoutes)
        self.routes = [own, *(route for part in parts for route in part(self._service).routes())]
        self.access = {(r.method, r.path): r.access for r in self.routes if r.method != "HEAD"}
        self._guarded = guard.table is not None
        self._document: bytes | None = None
        self.app = web.Application(middlewares=[problems, guarded(guard, self.access)], client_max_size=MAX_BODY)
        # A GET of aiohttp answers HEAD too, so a HEAD in the list is there for the document.
        self.app.add_routes([web.route(r.method, r.path, r.handler) if r.method != "GET" else web.get(r.path, r.handler)
                             for r in self.routes if r.method != "HEAD"])  # fmt: skip

    @property
    def ready(self) -> tuple[Store, DataPlane] | None:
        """What requests are served from."""
        return self._service.ready

    @ready.setter
    def ready(self, parts: tuple[Store, DataPlane] | None) -> None:
        self._service.ready = parts

    async def _openapi(self, request: web.Request) -> web.Response:
        if self._document is None:  # made when somebody asks, as it takes some tens of milliseconds
            self._document = document(self.routes, guarded=self._guarded)
        return web.Response(body=self._document, content_type="application/json")
