"""Blobs over HTTP: the payload, verified slice by slice, whole or one range of it."""

import asyncio
import re
from dataclasses import dataclass

from aiohttp import web

from kvstore.api.auth import Access
from kvstore.api.http.service import Service
from kvstore.api.models import BLOB_PATTERN
from kvstore.api.operations import ALWAYS, BLOB, NAMESPACE, Parameter, Reply, Route
from kvstore.api.problems import problem, request_id
from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.errors import BadRequest, Corrupt
from kvstore.kvspec import SliceLayout
from kvstore.store import Held, Space

_WRITE_S = 30.0
_BLOB = re.compile(BLOB_PATTERN)
_ASKED = re.compile(r"bytes=([0-9]{0,12})-([0-9]{0,12})")
_BYTES = "application/octet-stream"
_RANGE = Parameter(
    "Range", "header", "one range of bytes; other units are ignored",
    {"type": "string", "anyOf": [{"pattern": r"^bytes=([0-9]{1,12}-[0-9]{0,12}|-[0-9]{1,12})$"}, {"not": {"pattern": "^bytes="}}]},
)  # fmt: skip


class BlobRoutes:
    """A namespace's blobs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The routes of this module."""
        path, asked, problems = "/v1/blobs/{namespace}/{blob}", (NAMESPACE, BLOB, _RANGE), (400, 404, 416, *ALWAYS)
        headers = {"ETag": "the blob id", "Accept-Ranges": "bytes"}
        replies = (
            Reply(200, "the payload", media=_BYTES, headers=headers),
            Reply(206, "the range", media=_BYTES, headers=headers | {"Content-Range": "which bytes, of how many"}),
        )
        summary = "A blob's payload; each slice is verified before any of it is sent"
        return [
            Route("GET", path, "getBlob", summary, self._blob, replies, problems, asked, access=Access.READ),
            Route("HEAD", path, "headBlob", "A blob's size", self._blob, replies, problems, asked, access=Access.READ),
        ]

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        store, space = self._service.store, self._service.space(request)
        name = request.match_info["blob"]
        if not _BLOB.fullmatch(name):
            raise BadRequest("a blob id is 32 lower-case hex digits")
        row = store.reading.find(space, bytes.fromhex(name))
        layout = space.blobs.layout_of(row)
        wanted = _wanted(request, layout.payload_bytes)
        if wanted is None:
            refused = problem(416, "bad_range", f"the blob has {layout.payload_bytes} bytes; ask for one range of them")
            refused.headers["Content-Range"] = f"bytes */{layout.payload_bytes}"
            return refused
        response = web.StreamResponse(status=206 if wanted.partial else 200)
        response.headers["X-Request-Id"] = request_id.get()
        response.headers["ETag"] = f'"{name}"'
        response.headers["Accept-Ranges"] = "bytes"
        if wanted.partial:
            response.headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{layout.payload_bytes}"
        response.content_type = _BYTES
        response.content_length = wanted.stop - wanted.start
        if request.method == "HEAD":
            await response.prepare(request)
            return response
        nbytes = wanted.stop - wanted.start
        store.quotas.start_fetch(space.settings.tenant, nbytes)
        try:
            held = await store.reading.hold(space, row)
            try:
                await self._send(request, response, space, held, layout, wanted)
            finally:
                held.release()
        finally:
            store.quotas.end(space.settings.tenant, nbytes)
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, space: Space, held: Held, layout: SliceLayout, wanted: "_Range"
    ) -> None:
        """Send what is wanted, each slice verified before any of it goes out."""
        store = self._service.store
        table = held.view[layout.payload_bytes :]
        if blob_id(table) != space.blobs.id_of(held.row):
            store.reading.discard_bad_copy(space, held.row, table)
            raise Corrupt("the blob did not verify; that copy was dropped")
        for index in range(layout.count):
            low, high = max(wanted.start, layout.offsets[index]), min(wanted.stop, layout.offsets[index + 1])
            if low >= high:
                continue
            whole = held.view[layout.offsets[index] : layout.offsets[index + 1]]
            if slice_digest(whole) != table[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
                store.reading.discard_bad_copy(space, held.row, whole)
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


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes [start, stop) of a payload; `partial` if the client asked for a range."""

    start: int
    stop: int
    partial: bool


def _wanted(request: web.Request, size: int) -> _Range | None:
    """What the client asks for; None if it can't be had."""
    asked = request.headers.get("Range", "")
    if not asked.startswith("bytes="):  # none, or one of a unit that is not ours, which is to be ignored
        return _Range(0, size, partial=False)
    found = _ASKED.fullmatch(asked)
    if not found or not (found[1] or found[2]):
        return None
    if found[1]:
        start, stop = int(found[1]), min(int(found[2]) + 1, size) if found[2] else size
    else:
        start, stop = max(0, size - int(found[2])), size
    return _Range(start, stop, partial=True) if start < stop else None
