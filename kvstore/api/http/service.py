"""What every handler needs: the store once it is loaded, and whose request it is."""

import time

from aiohttp import web

from kvstore.api.data_plane import DataPlane
from kvstore.api.http.admission import grant_of
from kvstore.store import Space, Store


def tenant(request: web.Request) -> str:
    """The tenant a request speaks for."""
    return grant_of(request).tenant


class Service:
    """The daemon as the handlers see it. `ready` is set once the store is loaded, and taken back when the daemon drains."""

    def __init__(self, endpoints: list[str]) -> None:
        self.ready: tuple[Store, DataPlane] | None = None
        self.endpoints = endpoints
        self.started = time.monotonic()

    @property
    def store(self) -> Store:
        """The store, or 503."""
        return self._parts[0]

    @property
    def data_plane(self) -> DataPlane:
        """The data plane, or 503."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[Store, DataPlane]:
        if self.ready is None:
            raise web.HTTPServiceUnavailable(reason="the store is not ready: it is loading or stopping")
        return self.ready

    def space(self, request: web.Request) -> Space:
        """The namespace in a request's path, if it is its tenant's. Raises UnknownNamespace."""
        return self.store.space(tenant(request), request.match_info["namespace"])
