"""The bodies of the control plane about recipes, and about computing pages again (see models.py)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvstore.api.models import ReplyModel, WaitS
from kvstore.api.prefix_models import PREFIX, FromToken, PrefixBody, exactly_one
from kvstore.store.settings import Rebuild


class DropBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/drop."""

    from_token: FromToken = 0


class RecipesDeleteBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/recipes/delete: a prefix, or `all`."""

    model_config = exactly_one(*PREFIX, "all")
    one_of: ClassVar[tuple[str, ...]] = (*PREFIX, "all")

    all: Literal[True] = True
    from_token: FromToken = 0


class RebuildBody(PrefixBody):
    """Body of POST /v1/namespaces/{namespace}/rebuild."""

    wait_s: WaitS = 0
    check: Annotated[bool, Field(description="compute pages that are there once more, and compare them")] = False
    from_token: FromToken = 0


class DriftFigures(ReplyModel):
    """How far what was computed again lies from what was there before."""

    elements: Annotated[int, Field(description="compared, in samples of pages that were gone, and in whole pages that were checked")]
    differing: int
    not_finite: Annotated[int, Field(description="of these, infinite or no number; they are in no other figure")]
    max_abs: float
    mean_abs: float


class RebuildProgress(ReplyModel):
    """How a prefix stands."""

    pages: Annotated[int, Field(description="of the prefix that are usable")]
    wanted_pages: int
    waiting_jobs: Annotated[int, Field(description="of the namespace, which no worker has")]
    claimed_jobs: int
    checked_pages: Annotated[int, Field(description="of a check that is done: how many were compared")] = 0
    drift: Annotated[dict[str, DriftFigures], Field(default_factory=dict, description="of a check that is done, by dtype")]


class RebuildState(ReplyModel):
    """What rebuilds of a namespace came to since the daemon's start."""

    policy: Rebuild
    waiting_jobs: int
    claimed_jobs: int
    rebuilt_pages: int
    same_pages: Annotated[int, Field(description="whose bytes were those on record")]
    new_version_pages: Annotated[int, Field(description="in an `exact` namespace, whose bytes were not")]
    uncompared_pages: Annotated[int, Field(description="that came in other parts than they are on record in")]
    checked_pages: int
    checks_that_differed: int
    failed_attempts: int
    failed_jobs: int
    seconds_a_page: Annotated[float, Field(description="from claim to end, over the last jobs; 0 if there were none")]
    drift: Annotated[dict[str, DriftFigures], Field(description="by dtype")]


class RecipeHolding(ReplyModel):
    """The recipes of a namespace."""

    recipes: int
    nbytes: Annotated[int, Field(description="as they are counted against `recipe_bytes`")]


class DeletedRecipes(ReplyModel):
    """How many recipes were deleted."""

    recipes: int
