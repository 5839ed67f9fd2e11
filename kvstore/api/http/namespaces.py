"""Namespaces, and matching in them."""

from dataclasses import asdict

import msgspec
from aiohttp import web

from kvstore.api.auth import Access
from kvstore.api.convert import check_recipe_settings, namespace_info, part_runs
from kvstore.api.estimates import prefill_of
from kvstore.api.http.service import Service, tenant
from kvstore.api.models import Estimate, Match, MatchBody, Namespace, NamespaceBody, NamespaceDetail, NamespaceList, PartRun, lacks_now
from kvstore.api.operations import ALWAYS, NAMESPACE, OF_BODY, Reply, Route, reply
from kvstore.api.problems import body_of
from kvstore.digests import DIGEST_BYTES
from kvstore.kvspec import KVSpec
from kvstore.store import NamespaceSettings, Space


def described(space: Space, tenant: str | None = None) -> Namespace:
    """What a namespace is, and what it holds; with its tenant, where several are told of."""
    return Namespace.model_validate(msgspec.to_builtins(namespace_info(space)) | {"tenant": tenant})


class NamespaceRoutes:
    """A tenant's namespaces."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The routes of this module."""
        one, of_one = "/v1/namespaces/{namespace}", (404, *ALWAYS)
        location = {"Location": "the namespace, by id"}
        then = ("describeNamespace", "match", "prefetch", "pin", "unpin", "abandon", "delete", "dropNamespace")
        return [
            Route(
                "GET", "/v1/namespaces", "listNamespaces", "All namespaces of the tenant", self._list,
                (Reply(200, "all", NamespaceList),), ALWAYS, access=Access.READ,
            ),
            Route(
                "POST", "/v1/namespaces", "createNamespace", "Create a namespace, or find it if it is there", self._create,
                tuple(Reply(status, text, Namespace, headers=location, links=then) for status, text in ((201, "made"), (200, "was there"))),
                (*OF_BODY, 409, *ALWAYS), body=NamespaceBody, access=Access.WRITE,
            ),
            Route(
                "GET", one, "describeNamespace", "One namespace", self._describe,
                (Reply(200, "as it is now", NamespaceDetail),), of_one, (NAMESPACE,), access=Access.READ,
            ),
            Route(
                "DELETE", one, "dropNamespace", "Forget a namespace and everything in it; its space is free at the reply", self._drop,
                (Reply(204, "gone", media=None),), of_one, (NAMESPACE,), access=Access.WRITE,
            ),
            Route(
                "POST", one + "/match", "match", "The longest prefix that is in the store; changes nothing", self._match,
                (Reply(200, "what is there, which may be nothing", Match),), (404, *OF_BODY, 409, 502, *ALWAYS), (NAMESPACE,), MatchBody,
                access=Access.READ,
            ),
        ]  # fmt: skip

    async def _list(self, request: web.Request) -> web.Response:
        return reply(NamespaceList(items=[described(space) for space in self._service.store.namespaces(tenant(request))]))

    async def _create(self, request: web.Request) -> web.Response:
        body = await body_of(request, NamespaceBody)
        store = self._service.store
        known = {space.id for space in store.namespaces(tenant(request))}
        settings = NamespaceSettings(
            tenant=tenant(request),
            name=body.name,
            fingerprint=body.fingerprint,
            spec=KVSpec.from_dict(body.spec.model_dump()),
            recipes=body.recipes,
            retention_s=body.retention_s,
            ttl_s=body.ttl_s,
            rebuild=body.rebuild,
            lossy=body.lossy,
            prefill=prefill_of(body.prefill_us, body.prefill_ns_per_position),
        )
        space = await store.create_namespace(check_recipe_settings(settings))
        return reply(described(space), 200 if space.id in known else 201, {"Location": f"/v1/namespaces/{space.id}"})

    async def _describe(self, request: web.Request) -> web.Response:
        space = self._service.space(request)
        return reply(NamespaceDetail.model_validate(described(space).model_dump() | {"memory_bytes": space.tree.memory()}))

    async def _drop(self, request: web.Request) -> web.Response:
        await self._service.store.drop_namespace(self._service.space(request))
        return web.Response(status=204)

    async def _match(self, request: web.Request) -> web.Response:
        body = (await body_of(request, MatchBody)).root
        space, store = self._service.space(request), self._service.store
        tokens = body.token_bytes(space.spec)
        if body.rebuild_s and space.text is not None and not space.loading:
            await store.rebuilding.bring(space, tokens, {}, body.rebuild_s)
        rebuildable = await store.rebuildable_pages(space, tokens, {})
        ask = None if body.estimate is None else body.estimate.ask()
        match = store.match(space, tokens, {}, parts=True, ask=ask)
        runs = blobs = None
        if body.parts and match.parts is not None:
            ids = match.parts.ids
            runs = [PartRun.model_validate(msgspec.to_builtins(run)) for run in part_runs(match.parts)]
            blobs = [ids[i : i + DIGEST_BYTES].hex() for i in range(0, len(ids), DIGEST_BYTES)]
        return reply(
            Match(
                pages=match.pages,
                tokens=match.tokens,
                known_pages=match.known_pages,
                lacks=lacks_now(space.spec, match.lacks),
                dram_pages=match.dram_pages,
                rebuildable_pages=rebuildable,
                epoch=store.epoch,
                endpoints=self._service.endpoints,
                runs=runs,
                blobs=blobs,
                estimate=None if match.estimate is None else Estimate.model_validate(asdict(match.estimate)),
            )
        )
