"""Checking the store while it serves: progress and a result as lines of JSON. One check at a time."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator

from aiohttp import web

from kvstore.api.auth import Access
from kvstore.api.http.service import Service
from kvstore.api.models import CheckLine, CheckProblemLine, CheckProgressLine, CheckResultLine
from kvstore.api.operations import ALWAYS, NDJSON, Parameter, Reply, Route
from kvstore.api.problems import request_id
from kvstore.errors import BadRequest, Conflict, KVStoreError
from kvstore.store.checking.running import check_running
from kvstore.store.checking.verify import CheckProgress, CheckReport

_log = logging.getLogger("kvstore.http")

_WRITE_S = 30.0
_MIN_RATE, _MAX_RATE = 1 << 20, 1 << 50
_RATE = Parameter(
    "bytes_per_s", "query", "how fast blobs are read at most; as fast as it goes if not given",
    {"type": "integer", "minimum": _MIN_RATE, "maximum": _MAX_RATE},
)  # fmt: skip


class CheckRoutes:
    """One check at a time, for whoever came first."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._under_way = False

    def routes(self) -> list[Route]:
        """The routes of this module."""
        summary = "Verify the trees and every blob while serving; changes nothing. Hang up to end it"
        replies = (Reply(200, "a line of JSON for each step, and one for the result", CheckLine, media=NDJSON),)
        return [Route("POST", "/v1/check", "check", summary, self._check, replies, (400, 409, *ALWAYS), (_RATE,), access=Access.ADMIN)]

    async def _check(self, request: web.Request) -> web.StreamResponse:
        store, rate = self._service.store, _rate(request)
        if self._under_way:
            raise Conflict("a check is under way: wait for its end")
        self._under_way = True
        try:
            response = web.StreamResponse(headers={"X-Request-Id": request_id.get(), "Content-Type": NDJSON})
            spaces = store.all_spaces()
            steps = check_running(store, spaces, lambda: self._service.ready is not None, rate)
            await response.prepare(request)
            async with contextlib.aclosing(_lines(steps)) as lines:
                async for line in lines:
                    async with asyncio.timeout(_WRITE_S):
                        await response.write(line.model_dump_json().encode() + b"\n")
            await response.write_eof()
        except (ConnectionError, TimeoutError):  # the client is gone, or does not read
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._under_way = False
        return response


async def _lines(steps: AsyncGenerator[CheckProgress | CheckReport, None]) -> AsyncGenerator[CheckLine, None]:
    try:
        async with contextlib.aclosing(steps):
            async for step in steps:
                if isinstance(step, CheckReport):
                    yield CheckLine(CheckResultLine(report=step))
                else:
                    yield CheckLine(CheckProgressLine.model_validate(step, from_attributes=True))
    except KVStoreError as error:
        yield CheckLine(CheckProblemLine(code=error.code, detail=error.message))
    except Exception:  # noqa: BLE001 - the head of the answer is sent, so it is too late for another status
        _log.exception("a check failed [request %s]", request_id.get())
        yield CheckLine(CheckProblemLine(code="internal", detail="the check failed; the daemon's log says how, under the request id"))


def _rate(request: web.Request) -> int | None:
    text = request.query.get("bytes_per_s")
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,16}", text) or not _MIN_RATE <= int(text) <= _MAX_RATE:
        raise BadRequest(f"bytes_per_s is a whole number from {_MIN_RATE} to {_MAX_RATE}, not {text[:40]!r}")
    return int(text)
