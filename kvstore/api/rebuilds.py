"""What the daemon answers to requests of the data plane that are about recipes, and about computing pages again."""

from typing import Any

from kvstore.api.convert import hints_of, part_list, split_tokens
from kvstore.api.estimates import ask_of
from kvstore.api.replies import OK, Context, Reply, matched, space_of
from kvstore.api.wire.frames import MAX_CONTROL_PAYLOAD, MAX_META, FrameType
from kvstore.api.wire.messages import Affected, MatchRequest, Message, NamespaceName, PartRunMeta, Prefix, pack
from kvstore.api.wire.put_messages import PutStart
from kvstore.api.wire.rebuild_messages import (
    RebuildClaim,
    RebuildEnd,
    RebuildJob,
    RebuildProgress,
    RebuildRenew,
    RebuildRequest,
    RecipeCounts,
)
from kvstore.drift import Drift
from kvstore.errors import BadRequest, DiskFailing
from kvstore.store.puts.put import Put
from kvstore.tiers.recipe import RecipeKind


def _recipes(context: Context, message: NamespaceName, payload: bytes) -> Reply:
    found = context.store.recipes.holding(space_of(context, message.namespace))
    return Reply(FrameType.RECIPE_COUNTS, RecipeCounts(recipes=found.recipes, nbytes=found.nbytes))


async def _recipes_delete(context: Context, message: Prefix, payload: bytes) -> Reply:
    tokens, extras = split_tokens(payload, message.extra_pages)
    space, recipes = space_of(context, message.namespace), context.store.recipes
    if not tokens:
        return Reply(FrameType.AFFECTED, Affected(pages=await recipes.delete_all(space)))
    key = await recipes.key_at(space, tokens, extras, message.first_page)
    return Reply(FrameType.AFFECTED, Affected(pages=0 if key is None else await recipes.delete(space, key)))


async def _drop(context: Context, message: Prefix, payload: bytes) -> Reply:
    tokens, extras = split_tokens(payload, message.extra_pages)
    pages = await context.store.prefixes.drop_to_text(space_of(context, message.namespace), tokens, extras, message.first_page)
    return Reply(FrameType.AFFECTED, Affected(pages=pages))


def waits(context: Context, kind: FrameType, message: Message) -> bool:
    """Whether a request that is answered at once as a rule has to look on disk first, so that it takes a task."""
    if kind is not FrameType.MATCH or not isinstance(message, MatchRequest) or not (message.rebuildable or message.rebuild_ms):
        return False
    return space_of(context, message.namespace).text is not None


async def slow_match(context: Context, message: MatchRequest, payload: bytes) -> Reply:
    """A match that also says how much of the rest can be computed again, or waits until it is."""
    store, space, owner = context.store, space_of(context, message.namespace), context.session.owner
    tokens, extras = split_tokens(payload, message.extra_pages)
    if message.rebuild_ms > 0 and not space.loading:
        base = store.base_path(owner, space, message.base)
        await store.rebuilding.bring(space, tokens, extras, message.rebuild_ms / 1000, base)
    try:
        pages = await store.rebuildable_pages(space, tokens, extras, owner=owner, base=message.base)
    except DiskFailing:  # what is there is there all the same
        pages = -1
    match = store.match(
        space, tokens, extras, owner=owner, lease_s=message.lease_ms / 1000, parts=message.parts,
        boundaries=message.boundaries, base=message.base, hints=hints_of(message.hints), ask=ask_of(message.estimate),
        link_bytes_s=context.session.link.bytes_s,
    )  # fmt: skip
    return matched(context, message, match, pages)


async def _rebuild(context: Context, message: RebuildRequest, payload: bytes) -> Reply:
    tokens, extras = split_tokens(payload, message.extra_pages)
    space, rebuilding, wait_s = space_of(context, message.namespace), context.store.rebuilding, message.wait_ms / 1000
    if message.check:
        done = await rebuilding.check(space, tokens, extras, message.first_page, wait_s)
    else:
        done = await rebuilding.bring(space, tokens, extras, wait_s, strict=True)
    progress = RebuildProgress(
        pages=done.pages, wanted_pages=done.wanted_pages, waiting_jobs=done.waiting_jobs, claimed_jobs=done.claimed_jobs,
        checked_pages=done.checked_pages,
        drift=[(dtype, d.elements, d.differing, d.not_finite, d.max_abs, d.sum_abs) for dtype, d in done.drift],
    )  # fmt: skip
    return Reply(FrameType.REBUILT, progress)


async def _claim(context: Context, message: RebuildClaim, payload: bytes) -> Reply:
    space = space_of(context, message.namespace) if message.namespace else None
    session = context.session
    work = await context.store.rebuilding.claim(session.owner, session.tenant, space, message.wait_ms / 1000, message.lease_ms / 1000)
    if work is None:
        return Reply(FrameType.REBUILD_JOB, RebuildJob())
    job, extra_pages = work.job, sorted(work.extras)
    answer = RebuildJob(
        job=job.id, namespace=work.space.id, put_id=work.put_id, first_page=job.first, last_page=job.last, lease_ms=message.lease_ms,
        attempt=job.attempts, check=job.check, extra_pages=extra_pages,
        bodies=[(body.page, body.kind.name.lower(), len(body.body)) for body in work.bodies],
        runs=[PartRunMeta(first_page=run.first, pages=run.last - run.first, parts=part_list(run.parts)) for run in work.runs],
    )  # fmt: skip
    payload = b"".join((work.tokens, *(work.extras[page] for page in extra_pages), *(body.body for body in work.bodies)))
    if len(payload) > MAX_CONTROL_PAYLOAD or len(pack(answer)) > MAX_META:
        context.store.rebuilding.give_up(job, "what a worker would have to be told of these pages does not fit into a message")
        return Reply(FrameType.REBUILD_JOB, RebuildJob())
    return Reply(FrameType.REBUILD_JOB, answer, payload)


def _renew(context: Context, message: RebuildRenew, payload: bytes) -> Reply:
    context.store.rebuilding.renew(context.session.owner, message.job, message.lease_ms / 1000)
    return OK


def _end(context: Context, message: RebuildEnd, payload: bytes) -> Reply:
    measured = [(dtype, Drift(n, differing, odd, most, total)) for dtype, n, differing, odd, most, total in message.drift]
    context.store.rebuilding.end(context.session.owner, message.job, message.error, measured)
    return OK


def give_recipes(context: Context, put: Put, message: PutStart) -> None:
    """Keep what a put brings in place of its token ids. Raises BadRequest, with the put ended."""
    try:
        if message.recipe_kind not in ("text", "reference"):
            raise BadRequest(f"recipe_kind is {message.recipe_kind[:40]!r}, not text or reference")
        if not message.recipes:
            raise BadRequest("a put with a recipe_kind brings recipes: one for all its pages, or one a page")
        context.store.recipes.source.give(put, RecipeKind[message.recipe_kind.upper()], message.recipes)
    except BaseException:
        context.store.abort_put(put)
        raise


QUICK: dict[FrameType, tuple[type[Message], Any]] = {
    FrameType.RECIPES: (NamespaceName, _recipes),
    FrameType.REBUILD_RENEW: (RebuildRenew, _renew),
    FrameType.REBUILD_END: (RebuildEnd, _end),
}
SLOW: dict[FrameType, tuple[type[Message], Any]] = {
    FrameType.RECIPES_DELETE: (Prefix, _recipes_delete),
    FrameType.DROP: (Prefix, _drop),
    FrameType.REBUILD: (RebuildRequest, _rebuild),
    FrameType.REBUILD_CLAIM: (RebuildClaim, _claim),
}
