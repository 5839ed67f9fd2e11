"""HTTP errors as problem+json (RFC 9457), and the request id that runs through replies and logs."""

import contextvars
import logging
import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web
from pydantic import ValidationError

from kvstore.errors import BadRequest, KVStoreError

_log = logging.getLogger("kvstore.http")

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")
_ID_HEADER = "X-Request-Id"
_SANE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def problem(status: int, code: str, detail: str, retry_after_ms: int | None = None) -> web.Response:
    """A problem+json response; `code` is the same as on the data plane."""
    body: dict[str, object] = {"type": f"urn:kvstore:error:{code}", "title": code.replace("_", " "), "status": status, "detail": detail}
    body |= {"code": code, "request_id": request_id.get()}
    headers = {} if status != 401 else {"WWW-Authenticate": 'Bearer realm="kvstore"'}
    if retry_after_ms is not None:
        body["retry_after_ms"] = retry_after_ms
        headers["Retry-After"] = str(-(-retry_after_ms // 1000))
    return web.json_response(body, status=status, content_type="application/problem+json", headers=headers)


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id, and turn every error into a problem."""
    given = request.headers.get(_ID_HEADER, "")
    request_id.set(given if _SANE_ID.fullmatch(given) else secrets.token_hex(8))
    response: web.StreamResponse
    try:
        response = await handler(request)
    except KVStoreError as error:
        response = problem(error.http_status, error.code, error.message, error.retry_after_ms)
    except ValidationError as error:
        first = error.errors()[0]
        response = problem(422, BadRequest.code, f"{'.'.join(str(p) for p in first['loc']) or 'body'}: {first['msg']}")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = problem(error.status, "http", f"{error.reason}: {request.method} {request.path}")
    except Exception:  # noqa: BLE001 - a bug in one request must not end the others
        _log.exception("%s %s failed [request %s]", request.method, request.path, request_id.get())
        response = problem(500, "internal", "the daemon failed at this request; its log says how, under the request id")
    if not response.prepared:
        response.headers[_ID_HEADER] = request_id.get()
    return response
