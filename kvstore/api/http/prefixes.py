"""What is told about prefixes: bring them up, keep them, give them up, delete them."""

from dataclasses import asdict

from aiohttp import web
from pydantic import BaseModel

from kvstore.api.auth import Access
from kvstore.api.http.service import Service
from kvstore.api.models import lacks_now
from kvstore.api.operations import ALWAYS, NAMESPACE, OF_BODY, Handler, Reply, Route, reply
from kvstore.api.prefix_models import (
    AbandonBody,
    Affected,
    DeleteBody,
    PageEstimate,
    PageWhy,
    PinBody,
    Pinned,
    PrefetchBody,
    Prefetched,
    UnpinBody,
    Why,
    WhyBody,
)
from kvstore.api.problems import body_of
from kvstore.errors import BadRequest
from kvstore.hints import Hints


class PrefixRoutes:
    """The routes of this module."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The routes of this module."""
        return [
            _route("prefetch", "Bring a prefix into DRAM, as far as there is room", self._prefetch,
                   Reply(200, "what was brought up", Prefetched), PrefetchBody, access=Access.READ),
            _route("why", "Where the pages of a prefix are, what is known of them, and which would go first", self._why,
                   Reply(200, "page by page", Why), WhyBody, access=Access.READ),
            _route("pin", "Keep a prefix from being evicted, until an end time", self._pin,
                   Reply(200, "the pin", Pinned), PinBody),
            _route("unpin", "End a pin", self._unpin, Reply(204, "ended", media=None), UnpinBody),
            _route("abandon", "What only this context, or this session, has used is the first to go", self._abandon,
                   Reply(200, "how many pages", Affected), AbandonBody),
            _route("delete", "Delete a prefix from a token on, with all that hangs from it, on every tier; durable at the reply",
                   self._delete, Reply(200, "how many pages", Affected), DeleteBody, 409),
        ]  # fmt: skip

    async def _prefetch(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, PrefetchBody), self._service.space(request)
        prefixes, rebuilding, why_not = self._service.store.prefixes, None, None
        if body.rebuild:
            rebuilding, why_not = await self._service.store.rebuilding.ahead(space, body.token_bytes(space.spec), {}, body.within_s)
        pages, blobs, nbytes = await prefixes.prefetch(space, body.token_bytes(space.spec), {}, body.first_page, body.last_page)
        return reply(Prefetched(pages=pages, blobs=blobs, nbytes=nbytes, rebuilding_pages=rebuilding, why_not=why_not))

    async def _why(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, WhyBody), self._service.space(request)
        await self._service.store.replacement.catch_up()
        told = self._service.store.why(space, body.token_bytes(space.spec), {}, body.first_page, body.last_page)
        found = [
            PageWhy(
                page=one.page, in_dram=one.in_dram, on_ssd=one.on_ssd, leased=one.leased, gone=one.gone, rank=one.rank,
                decision=one.decision, estimate=None if one.explanation is None else PageEstimate(**asdict(one.explanation)),
            )
            for one in told.found
        ]  # fmt: skip
        lacks = lacks_now(space.spec, told.lacks)
        return reply(
            Why(
                policy=told.policy, pages=told.pages, usable_pages=told.usable_pages, lacks=lacks, gone=told.gone,
                candidates=told.candidates, estimated=told.estimated, found=found,
            )
        )  # fmt: skip

    async def _pin(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, PinBody), self._service.space(request)
        pin = self._service.store.prefixes.pin(space, body.token_bytes(space.spec), {}, body.ttl_s)
        return reply(Pinned(pin=str(pin.id), pages=pin.pages, ttl_s=body.ttl_s))

    async def _unpin(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, UnpinBody), self._service.space(request)
        self._service.store.prefixes.unpin(space, int(body.pin))
        return web.Response(status=204)

    async def _abandon(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, AbandonBody), self._service.space(request)
        prefixes = self._service.store.prefixes
        if not body.session:
            pages = prefixes.abandon(space, body.token_bytes(space.spec), {}, space.spec.first_page(from_token=body.from_token))
        elif body.from_token:
            raise BadRequest("from_token goes with a prefix, not with a session")
        else:
            pages = prefixes.abandon_session(space, Hints(body.session))
        return reply(Affected(pages=pages))

    async def _delete(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, DeleteBody), self._service.space(request)
        first = space.spec.first_page(from_token=body.from_token)
        return reply(Affected(pages=await self._service.store.prefixes.delete(space, body.token_bytes(space.spec), {}, first)))


def _route(
    name: str, summary: str, handler: Handler, answer: Reply, body: type[BaseModel], *problems: int, access: Access = Access.WRITE
) -> Route:
    path = f"/v1/namespaces/{{namespace}}/{name}"
    return Route("POST", path, name, summary, handler, (answer,), (404, *OF_BODY, *problems, *ALWAYS), (NAMESPACE,), body, access=access)
