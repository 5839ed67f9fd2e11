"""A route and all that can be said of it: the router and the OpenAPI document are made from the same list."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from kvstore.api.auth import Access
from kvstore.api.models import BLOB_PATTERN, NAME_PATTERN

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

JSON = "application/json"
NDJSON = "application/x-ndjson"
ALWAYS = (500, 503)
"""Errors of every request that needs the store: a bug, and a store that is loading, stopping or busy."""
OF_BODY = (400, 413, 422)
"""Errors of every request with a body: contradictions, too large, not of the right form."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a request. `schema` is JSON Schema."""

    name: str
    place: str
    description: str
    schema: dict[str, Any]
    required: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One way a request goes well. Without a model the body is not JSON; without a media type there is none."""

    status: int
    description: str
    model: type[BaseModel] | None = None
    media: str | None = JSON
    headers: dict[str, str] = field(default_factory=dict)
    """Name and meaning."""
    links: tuple[str, ...] = ()
    """Operations that take the `id` of this reply as their namespace."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. `problems` are the status codes it answers with problem+json."""

    method: str
    path: str
    name: str
    summary: str
    handler: Handler
    replies: tuple[Reply, ...]
    problems: tuple[int, ...]
    parameters: tuple[Parameter, ...] = ()
    body: type[BaseModel] | None = None
    access: Access | None = field(kw_only=True)
    """What a token must allow; None lets everybody in."""


NAMESPACE = Parameter("namespace", "path", "a namespace, by id or name", {"type": "string", "pattern": NAME_PATTERN}, required=True)
BLOB = Parameter("blob", "path", "a blob id", {"type": "string", "pattern": BLOB_PATTERN}, required=True)


def reply(model: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response, a line for those who type; fields that are None are left out."""
    return web.Response(text=f"{model.model_dump_json(exclude_none=True)}\n", status=status, headers=headers, content_type=JSON)
