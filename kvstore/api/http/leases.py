"""What leases and pins hold, the largest first: why DRAM does not empty."""

import re
import time
from typing import Annotated, Literal

from aiohttp import web
from pydantic import Field

from kvstore.api.auth import Access
from kvstore.api.http.admission import grant_of
from kvstore.api.http.service import Service
from kvstore.api.models import NAME_PATTERN, PinId, ReplyModel
from kvstore.api.operations import ALWAYS, Parameter, Reply, Route, reply
from kvstore.errors import BadRequest
from kvstore.store import Space
from kvstore.store.matching.holding import Holding, holdings

_MOST, _USUALLY = 200, 50
_CLIENT_CHARACTERS = 100
_LIMIT = Parameter(
    "limit", "query", f"how many are listed; {_USUALLY} if not given", {"type": "integer", "minimum": 1, "maximum": _MOST}
)  # fmt: skip
_OF = Parameter("namespace", "query", "only those on this namespace, by id or name", {"type": "string", "pattern": NAME_PATTERN})


class LeaseItem(ReplyModel):
    """A lease, which ends with its client, or a pin, which does not."""

    kind: Literal["lease", "pin"]
    namespace: Annotated[str, Field(description="its id")]
    name: Annotated[str, Field(description="of the namespace")]
    tenant: Annotated[str | None, Field(description="whose it is, where those of several are told of")] = None
    client: Annotated[str | None, Field(description="what the client of a lease calls itself")] = None
    pin: Annotated[PinId | None, Field(description="what ends a pin of the own tenant")] = None
    pages: int
    nbytes: Annotated[int, Field(description="payload bytes of its pages, wherever they are")]
    dram_bytes: Annotated[int, Field(description="bytes of its pages that are in DRAM, and can't leave it")]
    ends_s: Annotated[float, Field(description="seconds until it ends, unless it is renewed")]


class LeaseList(ReplyModel):
    """How many there are, and the largest of them; a page that several hold counts for each."""

    leases: int
    pins: int
    nbytes: Annotated[int, Field(description="payload bytes of all of them")]
    items: Annotated[list[LeaseItem], Field(description="the largest first")]


class LeaseRoutes:
    """The route of this module."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The routes of this module."""
        summary = "Leases and pins, the largest first; without admin access those of the tenant"
        return [Route("GET", "/v1/leases", "leases", summary, self._list, (Reply(200, "as it is now", LeaseList),), (400, 404, *ALWAYS),
                      (_OF, _LIMIT), access=Access.READ)]  # fmt: skip

    async def _list(self, request: web.Request) -> web.Response:
        store, grant = self._service.store, grant_of(request)
        watches_all = grant.access >= Access.ADMIN
        spaces = _named(request, store.all_spaces()) if watches_all else _named(request, store.namespaces(grant.tenant))
        if not spaces and (name := request.query.get("namespace")) is not None:
            store.space(grant.tenant, name)  # says that it is not there
        found = await holdings(store.leases, store.pins, spaces, _limit(request))
        clients, now = self._service.data_plane.sessions.clients(), time.monotonic()

        def item(one: Holding) -> LeaseItem:
            lease, settings = one.lease, one.lease.space.settings
            return LeaseItem(
                kind="pin" if one.is_pin else "lease", namespace=lease.space.id, name=settings.name,
                tenant=settings.tenant if watches_all else None,
                client=None if one.is_pin else clients.get(lease.owner, "")[:_CLIENT_CHARACTERS],
                pin=str(lease.id) if one.is_pin and settings.tenant == grant.tenant else None,
                pages=lease.pages, nbytes=lease.nbytes, dram_bytes=one.dram_bytes, ends_s=round(max(lease.expires - now, 0), 3),
            )  # fmt: skip

        return reply(LeaseList(leases=found.leases, pins=found.pins, nbytes=found.nbytes, items=[item(one) for one in found.largest]))


def _named(request: web.Request, visible: list[Space]) -> list[Space]:
    """Those that were asked about; several tenants may have one of a name."""
    name = request.query.get("namespace")
    if name is None:
        return visible
    if not re.fullmatch(NAME_PATTERN, name):
        raise BadRequest("namespace is the id or the name of one")
    return [space for space in visible if name in (space.id, space.settings.name)]


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(_USUALLY))
    if not re.fullmatch(r"[0-9]{1,3}", text) or not 1 <= int(text) <= _MOST:
        raise BadRequest(f"limit is a whole number from 1 to {_MOST}, not {text[:40]!r}")
    return int(text)
