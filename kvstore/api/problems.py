"""HTTP errors as problem+json (RFC 9457), and the request id that runs through replies and logs."""

import contextvars
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, RootModel, ValidationError

from kvstore.api.invalid import explain
from kvstore.api.models import Problem
from kvstore.errors import BadRequest, KVStoreError

_log = logging.getLogger("kvstore.http")

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")
_ID_HEADER = "X-Request-Id"
_SANE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadBody(BadRequest):
    """The body is not of the right form."""

    http_status = 422


async def body_of(request: web.Request, model: type[Body]) -> Body:
    """A request's body. Raises BadBody, saying which field is wrong."""
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        raise BadBody(explain(error, tagged=issubclass(model, RootModel))[0]) from error


def problem(status: int, code: str, detail: str, retry_after_ms: int | None = None) -> web.Response:
    """A problem+json response; `code` is the same as on the data plane."""
    body = Problem(
        type=f"urn:kvstore:error:{code}",
        title=code.replace("_", " "),
        status=status,
        detail=detail,
        code=code,
        request_id=request_id.get(),
        retry_after_ms=retry_after_ms,
    )
    headers = {} if status != 401 else {"WWW-Authenticate": 'Bearer realm="kvstore"'}
    if retry_after_ms is not None:
        headers["Retry-After"] = str(-(-retry_after_ms // 1000))
    text = f"{body.model_dump_json(exclude_none=True)}\n"
    return web.Response(text=text, status=status, content_type="application/problem+json", headers=headers)


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
    except web.HTTPException as error:
        if error.status < 400:
            raise
        known = "; GET /openapi.json has all that there is" if error.status in (404, 405) else ""
        response = problem(error.status, "http", f"{error.reason}: {request.method} {request.path}{known}")
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except Exception:  # noqa: BLE001 - a bug in one request must not end the others
        _log.exception("%s %s failed [request %s]", request.method, request.path, request_id.get())
        response = problem(500, "internal", "the daemon failed at this request; its log says how, under the request id")
    if not response.prepared:
        response.headers[_ID_HEADER] = request_id.get()
    return response
