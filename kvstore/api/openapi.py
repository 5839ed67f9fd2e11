"""The OpenAPI document of the control plane, made from the routes and from the models that their handlers use."""

import json
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from kvstore import __version__
from kvstore.api.models import Problem
from kvstore.api.operations import JSON, NDJSON, Reply, Route

_PROBLEM_JSON = "application/problem+json"
_HEADERS = {
    "X-Request-Id": "the request's id, as given in that header of the request or made; it is in the daemon's log",
    "Retry-After": "seconds after which to try again",
}
_Schemas = dict[tuple[type[BaseModel], JsonSchemaMode], dict[str, Any]]


def document(routes: Sequence[Route], *, guarded: bool) -> bytes:
    """The document as JSON. `guarded` says that tokens are needed."""
    schemas, definitions = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, guarded=guarded)
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "kvstore control plane",
                "version": __version__,
                "description": "Every reply carries X-Request-Id. Errors are problem+json; `code` is stable.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": paths,
            "components": {
                "schemas": definitions,
                "headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()},
                "responses": {
                    f"problem{status}": _problem(status, schemas) for status in sorted({s for r in routes for s in _problems(r)})
                },
            }
            | ({"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}} if guarded else {}),
        }
    ).encode()


def _schemas(routes: Iterable[Route]) -> tuple[_Schemas, dict[str, Any]]:
    wanted: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(Problem, "serialization"): None}
    for route in routes:
        if route.body is not None:
            wanted[route.body, "validation"] = None
        wanted.update({(reply.model, "serialization"): None for reply in route.replies if reply.model is not None})
    found, definitions = models_json_schema(list(wanted), ref_template="#/components/schemas/{model}")
    return {(model, mode): found[model, mode] for model, mode in wanted}, definitions["$defs"]


def _problems(route: Route) -> list[int]:
    """All its problems; those of tokens can come from a daemon that has some."""
    return sorted({*route.problems, *(() if route.access is None else (401, 403))})


def _operation(route: Route, schemas: _Schemas, *, guarded: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary}
    if route.access is not None:
        operation["description"] = f"Where tokens are needed, asks for {route.access.name.lower()} access."
        if guarded:
            operation["security"] = [{"token": []}]
    if route.parameters:
        operation["parameters"] = [
            {"name": p.name, "in": p.place, "description": p.description, "required": p.required, "schema": p.schema}
            for p in route.parameters
        ]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[route.body, "validation"]}}}
    answers = {str(reply.status): _reply(reply, schemas, with_body=route.method != "HEAD") for reply in route.replies}
    for status in _problems(route):
        answers[str(status)] = {"$ref": f"#/components/responses/problem{status}"} if route.method != "HEAD" else _headers_only(status)
    return operation | {"responses": answers}


def _reply(reply: Reply, schemas: _Schemas, *, with_body: bool) -> dict[str, Any]:
    headers: dict[str, Any] = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    headers |= {name: {"description": text, "required": True, "schema": {"type": "string"}} for name, text in reply.headers.items()}
    made: dict[str, Any] = {"description": reply.description, "headers": headers}
    if reply.media is not None and with_body:
        schema = None if reply.model is None else schemas[reply.model, "serialization"]
        if reply.media == NDJSON:
            schema = {"type": "array", "items": schema, "description": "one line each"}
        made["content"] = {reply.media: {} if schema is None else {"schema": schema}}
    if reply.links:
        made["links"] = {name: {"operationId": name, "parameters": {"namespace": "$response.body#/id"}} for name in reply.links}
    return made


def _problem(status: int, schemas: _Schemas) -> dict[str, Any]:
    return _headers_only(status) | {"content": {_PROBLEM_JSON: {"schema": schemas[Problem, "serialization"]}}}


def _headers_only(status: int) -> dict[str, Any]:
    names = ("X-Request-Id", "Retry-After") if status == HTTPStatus.SERVICE_UNAVAILABLE else ("X-Request-Id",)
    return {"description": HTTPStatus(status).phrase, "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names}}
