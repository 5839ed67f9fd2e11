"""Who asks over HTTP, and the middleware that insists on the access that a route asks for."""

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvstore.api.auth import Access, Grant, forbidden
from kvstore.api.guard import Guard

AccessTable = Mapping[tuple[str, str], Access | None]
"""For a method and a path, the access it asks for; None lets everybody in. HEAD is as GET. What is not here is refused to everybody."""

_GRANT = "kvstore_grant"


def grant_of(request: web.Request) -> Grant:
    """Who asks."""
    grant: Grant = request[_GRANT]
    return grant


def guarded(guard: Guard, table: AccessTable) -> Middleware:
    """Middleware: let through what the request's bearer token allows. Put it inside `problems`."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None:
            return await handler(request)  # no such route: its 404 or 405 is the same for everybody
        needed = table.get(("GET" if request.method == "HEAD" else request.method, resource.canonical), "nobody")
        if needed is None:
            return await handler(request)
        request[_GRANT] = grant = guard.admit(_bearer(request))
        if not isinstance(needed, Access) or grant.access < needed:
            raise forbidden(grant, needed if isinstance(needed, Access) else None)
        return await handler(request)

    return check


def _bearer(request: web.Request) -> str:
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
