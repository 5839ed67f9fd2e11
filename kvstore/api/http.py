"""The HTTP control plane: health, metrics, namespaces, match, stat and blobs. See docs/http.md."""

import asyncio
import base64
import binascii
import dataclasses
import time
from typing import Annotated

import msgspec
import numpy as np
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvstore import __version__
from kvstore.api.auth import Access
from kvstore.api.convert import namespace_info, part_runs
from kvstore.api.data_plane import DataPlane
from kvstore.api.guard import Guard
from kvstore.api.metrics import CONTENT_TYPE, render
from kvstore.api.problems import problem, problems, request_id
from kvstore.api.process import process_stat
from kvstore.api.routes import grant_of, guarded
from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.errors import BadRequest, Corrupt
from kvstore.kvspec import KVSpec, SliceLayout
from kvstore.store import Held, NamespaceSettings, Space, Store

MAX_BODY = 32 << 20
_WRITE_S = 30.0


class NamespaceBody(BaseModel):
    """Body of POST /v1/namespaces."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=200)]
    fingerprint: Annotated[str, Field(min_length=1, max_length=200)]
    spec: dict[str, object]
    recipes: bool = False
    retention_s: Annotated[int, Field(ge=0)] = 86_400


class MatchBody(BaseModel):
    """Body of POST /v1/namespaces/{namespace}/match: `tokens` as numbers, or their uint32 little-endian bytes in base64."""

    model_config = ConfigDict(extra="forbid")

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = None
    tokens_base64: str | None = None
    parts: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "MatchBody":
        if (self.tokens is None) == (self.tokens_base64 is None):
            raise ValueError("give either tokens or tokens_base64")
        return self

    def token_bytes(self) -> bytes:
        """The tokens as the tree takes them."""
        if self.tokens is not None:
            return np.array(self.tokens, "<u4").tobytes()
        try:
            return base64.b64decode(self.tokens_base64 or "", validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadRequest(f"tokens_base64 is not base64: {error}") from error


def describe(space: Space) -> dict[str, object]:
    """A namespace as JSON."""
    described: dict[str, object] = msgspec.to_builtins(namespace_info(space))
    return described


class ControlPlane:
    """The HTTP application. `ready` is set once the store is loaded, and taken back when the daemon drains."""

    def __init__(self, endpoints: list[str], guard: Guard) -> None:
        self.ready: tuple[Store, DataPlane] | None = None
        self.endpoints = endpoints
        self.started = time.monotonic()
        self.app = web.Application(middlewares=[problems, guarded(guard)], client_max_size=MAX_BODY)
        self.app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
                web.get("/metrics", self._metrics),
                web.get("/v1/stat", self._stat),
                web.get("/v1/namespaces", self._list),
                web.post("/v1/namespaces", self._create),
                web.get("/v1/namespaces/{namespace}", self._describe),
                web.delete("/v1/namespaces/{namespace}", self._drop),
                web.post("/v1/namespaces/{namespace}/match", self._match),
                web.get("/v1/blobs/{namespace}/{blob}", self._blob),
            ]
        )

    @property
    def _store(self) -> Store:
        if self.ready is None:
            raise web.HTTPServiceUnavailable(reason="the store is not ready: it is loading or stopping")
        return self.ready[0]

    def _space(self, request: web.Request) -> Space:
        return self._store.space(grant_of(request).tenant, request.match_info["namespace"])

    # --- health --------------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "version": __version__})

    async def _readiness(self, request: web.Request) -> web.Response:
        store = self._store
        state: dict[str, object] = {"status": "ready", "epoch": store.epoch, "endpoints": self.endpoints}
        if store.loading is not None:
            state |= {"status": "loading", "loading": dataclasses.asdict(store.loading)}
        if not store.ssd_state.ok:  # ready all the same: it serves from DRAM
            state["ssd_state"] = store.ssd_state.as_dict()
        return web.json_response(state)

    async def _metrics(self, request: web.Request) -> web.Response:
        store = self._store
        assert self.ready is not None
        return web.Response(body=render(store, self.ready[1]), headers={"Content-Type": CONTENT_TYPE})

    async def _stat(self, request: web.Request) -> web.Response:
        store, grant = self._store, grant_of(request)
        assert self.ready is not None
        data_plane = self.ready[1]
        found: dict[str, object] = {
            "version": __version__,
            "epoch": store.epoch,
            "uptime_s": round(time.monotonic() - self.started, 3),
            "endpoints": self.endpoints,
            "tenant": grant.tenant,
        }
        if grant.access >= Access.ADMIN:
            found |= {
                "tiers": {name: dataclasses.asdict(usage) for name, usage in store.usage().items()},
                "dram_segments": dataclasses.asdict(store.dram_segments),
                "totals": dataclasses.asdict(store.stats),
                "loading": dataclasses.asdict(store.loading) if store.loading is not None else None,
                "leases": len(store.leases),
                "puts_open": store.puts_open,
                "pending_pages": store.pending_pages,
                "pinned_blobs": store.pinned_blobs,
                "writeback_backlog_pages": len(store.backlog),
                "writeback_backlog_bytes": store.backlog.nbytes,
                "writeback_backlog_bytes_smoothed": round(store.backlog.smoothed_bytes),
                "ssd_state": store.ssd_state.as_dict(),
                "scrub": dataclasses.asdict(store.scrubber.progress),
                "sessions": len(data_plane.sessions),
                "connections": data_plane.connection_count,
                **process_stat(),
                "namespaces": [describe(s) | {"tenant": s.settings.tenant} for s in store.all_spaces()],
            }
        else:
            sessions, connections = data_plane.sessions.of(grant.tenant)
            found |= {
                "tiers": {name: dataclasses.asdict(usage) for name, usage in store.usage_of(grant.tenant).items()},
                "leases": store.leases.of_tenant(grant.tenant),
                "puts_open": store.puts_open_of(grant.tenant),
                "sessions": sessions,
                "connections": connections,
                "namespaces": [describe(s) for s in store.namespaces(grant.tenant)],
            }
        return web.json_response(found)

    # --- namespaces ----------------------------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"items": [describe(s) for s in self._store.namespaces(grant_of(request).tenant)]})

    async def _create(self, request: web.Request) -> web.Response:
        body = NamespaceBody.model_validate_json(await request.read())
        tenant = grant_of(request).tenant
        known = {s.id for s in self._store.namespaces(tenant)}
        settings = NamespaceSettings(
            tenant=tenant,
            name=body.name,
            fingerprint=body.fingerprint,
            spec=KVSpec.from_dict(body.spec),
            recipes=body.recipes,
            retention_s=body.retention_s,
        )
        space = await self._store.create_namespace(settings)
        status = 200 if space.id in known else 201
        return web.json_response(describe(space), status=status, headers={"Location": f"/v1/namespaces/{space.id}"})

    async def _describe(self, request: web.Request) -> web.Response:
        space = self._space(request)
        return web.json_response(describe(space) | {"memory_bytes": space.tree.memory()})

    async def _drop(self, request: web.Request) -> web.Response:
        await self._store.drop_namespace(self._space(request))
        return web.Response(status=204)

    async def _match(self, request: web.Request) -> web.Response:
        body = MatchBody.model_validate_json(await request.read())
        space = self._space(request)
        match = self._store.match(space, body.token_bytes(), {}, parts=True)
        found: dict[str, object] = {
            "pages": match.pages,
            "tokens": match.tokens,
            "dram_pages": match.dram_pages,
            "epoch": self._store.epoch,
            "endpoints": self.endpoints,
        }
        if body.parts and match.parts is not None:
            ids = match.parts.ids
            found["runs"] = [msgspec.to_builtins(run) for run in part_runs(match.parts)]
            found["blobs"] = [ids[i : i + DIGEST_BYTES].hex() for i in range(0, len(ids), DIGEST_BYTES)]
        return web.json_response(found)

    # --- blobs ---------------------------------------------------------------------------------------------------------

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        space = self._space(request)
        try:
            name = bytes.fromhex(request.match_info["blob"])
        except ValueError:
            raise BadRequest("a blob id is 32 hex digits") from None
        row = self._store.find_blob(space, name)
        layout = space.blobs.layout_of(row)
        try:
            wanted = request.http_range
        except ValueError as error:
            return problem(416, "bad_range", str(error))
        start, stop, _ = wanted.indices(layout.payload_bytes)
        partial = wanted.start is not None or wanted.stop is not None
        if partial and start >= stop:
            refused = problem(416, "bad_range", f"the blob has {layout.payload_bytes} bytes")
            refused.headers["Content-Range"] = f"bytes */{layout.payload_bytes}"
            return refused
        response = web.StreamResponse(status=206 if partial else 200)
        response.headers["X-Request-Id"] = request_id.get()
        response.headers["ETag"] = f'"{name.hex()}"'
        response.headers["Accept-Ranges"] = "bytes"
        if partial:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{layout.payload_bytes}"
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        if request.method == "HEAD":
            await response.prepare(request)
            return response
        self._store.quotas.start_fetch(space.settings.tenant, stop - start)
        try:
            held = await self._store.hold(space, row)
            try:
                await self._send_blob(request, response, space, held, layout, start, stop)
            finally:
                held.release()
        finally:
            self._store.quotas.end(space.settings.tenant, stop - start)
        return response

    async def _send_blob(
        self, request: web.Request, response: web.StreamResponse, space: Space, held: Held, layout: SliceLayout, start: int, stop: int
    ) -> None:
        """Send bytes [start, stop), each slice verified before any of it goes out."""
        table = held.view[layout.payload_bytes :]
        if blob_id(table) != space.blobs.id_of(held.row):
            self._store.discard_bad_copy(space, held.row)
            raise Corrupt("the blob did not verify; that copy was dropped")
        for index in range(layout.count):
            low, high = max(start, layout.offsets[index]), min(stop, layout.offsets[index + 1])
            if low >= high:
                continue
            whole = held.view[layout.offsets[index] : layout.offsets[index + 1]]
            if slice_digest(whole) != table[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
                self._store.discard_bad_copy(space, held.row)
                if response.prepared and request.transport is not None:
                    request.transport.abort()  # too late for a problem: cut the body short instead
                    return
                raise Corrupt(f"slice {index} of the blob did not verify; that copy was dropped")
            if not response.prepared:
                await response.prepare(request)
            try:
                async with asyncio.timeout(_WRITE_S):
                    await response.write(bytes(held.view[low:high]))
            except TimeoutError:  # a client that does not read must not hold the blob for ever
                if request.transport is not None:
                    request.transport.abort()
                return
        await response.write_eof()
