"""Which access each HTTP route asks for, and the middleware that insists on it."""

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvstore.api.auth import Access, Grant, forbidden
from kvstore.api.guard import Guard

OPEN = None
ROUTES: dict[tuple[str, str], Access | None] = {
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/metrics"): Access.ADMIN,
    ("GET", "/v1/stat"): Access.READ,
    ("GET", "/v1/namespaces"): Access.READ,
    ("POST", "/v1/namespaces"): Access.WRITE,
    ("GET", "/v1/namespaces/{namespace}"): Access.READ,
    ("DELETE", "/v1/namespaces/{namespace}"): Access.WRITE,
    ("POST", "/v1/namespaces/{namespace}/match"): Access.READ,
    ("GET", "/v1/blobs/{namespace}/{blob}"): Access.READ,
}
"""HEAD is as GET. A route that is not here is refused to everybody."""

_GRANT = "kvstore_grant"


def grant_of(request: web.Request) -> Grant:
    """Who asks."""
    grant: Grant = request[_GRANT]
    return grant


def guarded(guard: Guard) -> Middleware:
    """Middleware: let through what the request's bearer token allows. Put it inside `problems`."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None:
            return await handler(request)  # no such route: its 404 or 405 is the same for everybody
        needed = ROUTES.get(("GET" if request.method == "HEAD" else request.method, resource.canonical), "nobody")
        if needed is OPEN:
            return await handler(request)
        request[_GRANT] = grant = guard.admit(_bearer(request))
        if not isinstance(needed, Access) or grant.access < needed:
            raise forbidden(grant, needed if isinstance(needed, Access) else None)
        return await handler(request)

    return check


def _bearer(request: web.Request) -> str:
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
