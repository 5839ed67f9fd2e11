"""Recipes over HTTP: what there is, dropping pages to text, deleting recipes, and computing pages again."""

from collections.abc import Iterable
from dataclasses import asdict

from aiohttp import web

from kvstore.api.auth import Access
from kvstore.api.http.service import Service
from kvstore.api.operations import ALWAYS, NAMESPACE, OF_BODY, Reply, Route, reply
from kvstore.api.prefix_models import Affected
from kvstore.api.problems import body_of
from kvstore.api.rebuild_models import (
    DeletedRecipes,
    DriftFigures,
    DropBody,
    RebuildBody,
    RebuildProgress,
    RebuildState,
    RecipeHolding,
    RecipesDeleteBody,
)
from kvstore.drift import Drift

_ONE = "/v1/namespaces/{namespace}"


class RecipeRoutes:
    """The routes of this module."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The routes of this module."""
        return [
            Route(
                "GET", _ONE + "/recipes", "recipes", "How many recipes a namespace has", self._count,
                (Reply(200, "as it is now", RecipeHolding),), (404, *ALWAYS), (NAMESPACE,), access=Access.READ,
            ),
            Route(
                "POST", _ONE + "/recipes/delete", "deleteRecipes", "Delete the recipes of pages that are gone, durably", self._delete,
                (Reply(200, "how many", DeletedRecipes),), (404, *OF_BODY, *ALWAYS), (NAMESPACE,), RecipesDeleteBody, access=Access.WRITE,
            ),
            Route(
                "POST", _ONE + "/drop", "drop", "Give up the pages of a prefix from a token on, and all below, but keep their recipes",
                self._drop, (Reply(200, "how many pages", Affected),), (404, *OF_BODY, 409, *ALWAYS), (NAMESPACE,), DropBody,
                access=Access.WRITE,
            ),
            Route(
                "GET", _ONE + "/rebuild", "rebuildState", "What computing pages again came to", self._state,
                (Reply(200, "as it is now", RebuildState),), (404, *ALWAYS), (NAMESPACE,), access=Access.READ,
            ),
            Route(
                "POST", _ONE + "/rebuild", "rebuild", "Have the missing pages of a prefix computed again, or compare those there are",
                self._rebuild, (Reply(200, "how it stands", RebuildProgress),), (404, *OF_BODY, 409, 502, *ALWAYS), (NAMESPACE,),
                RebuildBody, access=Access.READ,
            ),
        ]  # fmt: skip

    async def _count(self, request: web.Request) -> web.Response:
        found = self._service.store.recipes.holding(self._service.space(request))
        return reply(RecipeHolding(recipes=found.recipes, nbytes=found.nbytes))

    async def _delete(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, RecipesDeleteBody), self._service.space(request)
        recipes = self._service.store.recipes
        if "all" in body.model_fields_set:
            return reply(DeletedRecipes(recipes=await recipes.delete_all(space)))
        key = await recipes.key_at(space, body.token_bytes(space.spec), {}, space.spec.first_page(from_token=body.from_token))
        return reply(DeletedRecipes(recipes=0 if key is None else await recipes.delete(space, key)))

    async def _drop(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, DropBody), self._service.space(request)
        first = space.spec.first_page(from_token=body.from_token)
        return reply(Affected(pages=await self._service.store.prefixes.drop_to_text(space, body.token_bytes(space.spec), {}, first)))

    async def _state(self, request: web.Request) -> web.Response:
        space, rebuilding = self._service.space(request), self._service.store.rebuilding
        waiting, claimed = rebuilding.jobs_of(space)
        report = asdict(rebuilding.report(space))
        drift = _figures(rebuilding.report(space).drift.items())
        return reply(
            RebuildState.model_validate(
                report | {"policy": space.settings.rebuild, "waiting_jobs": waiting, "claimed_jobs": claimed, "drift": drift}
            )
        )

    async def _rebuild(self, request: web.Request) -> web.Response:
        body, space = await body_of(request, RebuildBody), self._service.space(request)
        rebuilding, tokens = self._service.store.rebuilding, body.token_bytes(space.spec)
        if body.check:
            done = await rebuilding.check(space, tokens, {}, space.spec.first_page(from_token=body.from_token), body.wait_s)
        else:
            done = await rebuilding.bring(space, tokens, {}, body.wait_s, strict=True)
        drift = _figures(done.drift)
        return reply(RebuildProgress.model_validate(asdict(done) | {"drift": drift}))


def _figures(measured: Iterable[tuple[str, Drift]]) -> dict[str, DriftFigures]:
    return {
        dtype: DriftFigures(
            elements=one.elements, differing=one.differing, not_finite=one.not_finite, max_abs=one.max_abs, mean_abs=one.mean_abs
        )
        for dtype, one in measured
    }
