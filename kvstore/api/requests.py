"""What the daemon answers to each control request of the data plane. No sockets here: a request in, a reply out."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from kvstore.api import rebuilds
from kvstore.api.auth import Access
from kvstore.api.convert import check_recipe_settings, hints_of, namespace_info, part_list, part_ranges, split_tokens
from kvstore.api.estimates import ask_of, prefill_of
from kvstore.api.replies import OK, Context, Reply, matched, space_of
from kvstore.api.wire.frames import FrameType
from kvstore.api.wire.messages import (
    Affected,
    Close,
    CreateNamespace,
    Empty,
    Leased,
    LeaseRequest,
    MatchRequest,
    Message,
    NamespaceList,
    NamespaceName,
    Pinned,
    Prefetched,
    Prefix,
)
from kvstore.api.wire.put_messages import Commit, Committed, Follow, FollowedPut, FollowedPuts, Outcome, PutHandle, PutReady, PutStart
from kvstore.errors import BadRequest, KVStoreError, NotFound
from kvstore.hints import Hints
from kvstore.kvspec import KVSpec
from kvstore.store import Ack, NamespaceSettings, Put, PutRequest, PutResult
from kvstore.store.settings import Rebuild

MAX_COMMIT_WAIT_MS = 60_000
MAX_COPIED_BYTES = 1 << 40
MAX_COPIED_FETCHES = 1 << 16
"""Of what a client says in one message that it copied, so much is believed."""


def _ping(context: Context, message: Empty, payload: bytes) -> Reply:
    return OK


def _get_namespace(context: Context, message: NamespaceName, payload: bytes) -> Reply:
    return Reply(FrameType.NAMESPACE, namespace_info(space_of(context, message.namespace)))


def _list_namespaces(context: Context, message: Empty, payload: bytes) -> Reply:
    spaces = context.store.namespaces(context.session.tenant)
    return Reply(FrameType.NAMESPACES, NamespaceList(items=[namespace_info(s) for s in spaces]))


def _match(context: Context, message: MatchRequest, payload: bytes) -> Reply:
    store, space = context.store, space_of(context, message.namespace)
    tokens, extras = split_tokens(payload, message.extra_pages)
    later: list[Callable[[], None]] = []
    match = store.match(
        space, tokens, extras, owner=context.session.owner, lease_s=message.lease_ms / 1000, parts=message.parts,
        boundaries=message.boundaries, base=message.base, hints=hints_of(message.hints), ask=ask_of(message.estimate),
        link_bytes_s=context.session.link.bytes_s, holes=message.holes, defer=later.append,
    )  # fmt: skip
    return matched(context, message, match, after=later[0] if later else None)


def _note_copied(context: Context, message: LeaseRequest) -> None:
    """A client with shared memory says what it copied: nobody can check it, so it counts for little, and within bounds."""
    if context.same_host is not None and message.copied_bytes > 0:
        nbytes = min(message.copied_bytes, MAX_COPIED_BYTES)
        context.store.stats.near_fetches += min(max(message.copied_fetches, 0), MAX_COPIED_FETCHES)
        context.store.stats.near_fetch_bytes += nbytes
        context.session.link.told(message.copied_bytes, message.copied_us / 1e6)


def _renew(context: Context, message: LeaseRequest, payload: bytes) -> Reply:
    lease = context.store.renew_lease(context.session.owner, message.lease, message.lease_ms / 1000)
    _note_copied(context, message)
    return Reply(FrameType.LEASED, Leased(lease=lease.id, lease_ms=message.lease_ms))


def _release(context: Context, message: LeaseRequest, payload: bytes) -> Reply | None:
    try:
        context.store.release_lease(context.session.owner, message.lease)
    except NotFound:
        if not message.quiet:
            raise
    _note_copied(context, message)
    return None if message.quiet else OK


def _abort(context: Context, message: PutHandle, payload: bytes) -> Reply:
    context.store.abort_put(context.store.get_put(context.session.owner, message.handle))
    return OK


async def _close(context: Context, message: Close, payload: bytes) -> Reply:
    await context.session.close(message.connection, context.number)
    return OK


async def _create_namespace(context: Context, message: CreateNamespace, payload: bytes) -> Reply:
    settings = NamespaceSettings(
        tenant=context.session.tenant, name=message.name, fingerprint=message.fingerprint,
        spec=KVSpec.from_dict(message.spec), recipes=message.recipes, retention_s=message.retention_s, ttl_s=message.ttl_s,
        rebuild=cast(Rebuild, message.rebuild), lossy=message.lossy,
        prefill=prefill_of(message.prefill_us, message.prefill_ns_per_position),
    )  # fmt: skip
    return Reply(FrameType.NAMESPACE, namespace_info(await context.store.create_namespace(check_recipe_settings(settings))))


async def _drop_namespace(context: Context, message: NamespaceName, payload: bytes) -> Reply:
    await context.store.drop_namespace(space_of(context, message.namespace))
    return OK


async def _put(context: Context, message: PutStart, payload: bytes) -> Reply | None:
    tokens, extras = split_tokens(payload, message.extra_pages)
    try:
        ack = Ack(message.ack)
    except ValueError:
        raise BadRequest(f"ack is {message.ack!r}, not memory or durable") from None
    request = PutRequest(
        message.put_id, tokens, extras, message.first_page, part_ranges(message.parts), ack, tuple(message.spans), hints_of(message.hints)
    )
    space = space_of(context, message.namespace)
    put = await context.store.begin_put(context.session.owner, space, request, message.base, message.handle, message.name)
    if message.recipe_kind:
        rebuilds.give_recipes(context, put, message)
    if put.at_once and put.all_wanted:
        return None  # its COMMIT will be answered
    ready = PutReady(handle=put.handle, first_needed=put.first_needed, total_pages=put.total_pages, wanted=put.wanted_runs())
    return Reply(FrameType.PUT_READY, ready)


async def _commit(context: Context, message: Commit, payload: bytes) -> Reply:
    put = context.store.get_put(context.session.owner, message.handle)
    put.say(payload)
    if message.wait_ms > 0 and not put.settled.is_set():
        missing = put.missing
        try:
            async with asyncio.timeout(min(message.wait_ms, MAX_COMMIT_WAIT_MS) / 1000):
                await put.settled.wait()
        except TimeoutError:
            put.still_coming = put.missing < missing  # commit() says which slices are missing, or that they are still coming
    try:
        await context.store.put_begun(put, 0)
    except KVStoreError:  # spoilt, or there is no room: its client asks before it sends it again, and it must not take room beside that
        context.store.abort_put(put)
        raise
    if (reply := _answered_first(context, put)) is not None:
        return reply
    return _committed(await context.store.commit_put(put, min(message.whole_ms, MAX_COMMIT_WAIT_MS) / 1000))


def commit_now(context: Context, message: Commit, payload: bytes) -> Reply | None:
    """The answer to a COMMIT that has nothing to wait for, which is the rule for one that came behind its slices; None for others."""
    if payload or message.whole_ms > 0:
        return None
    return _answered_first(context, context.store.get_put(context.session.owner, message.handle))


def _answered_first(context: Context, put: Put) -> Reply | None:
    """The answer to the COMMIT of a put that can't but succeed, which is taken in behind it; None, with nothing done, for others."""
    later: list[Callable[[], None]] = []
    result = context.store.commit_put_now(put, later.append)
    return None if result is None else _committed(result, later[0])


def _committed(result: PutResult, after: Callable[[], None] | None = None) -> Reply:
    done = Committed(
        new_pages=result.new_pages, existing_pages=result.existing_pages, pending_pages=result.pending_pages,
        existing=list(result.existing), gained_pages=result.gained_pages,
    )  # fmt: skip
    return Reply(FrameType.COMMITTED, done, after=after)


async def _prefetch(context: Context, message: Prefix, payload: bytes) -> Reply:
    tokens, extras = split_tokens(payload, message.extra_pages)
    store, space = context.store, space_of(context, message.namespace)
    rebuilding, why_not = await store.rebuilding.ahead(space, tokens, extras, message.within_ms / 1000) if message.rebuild else (0, "")
    pages, blobs, nbytes = await store.prefixes.prefetch(space, tokens, extras, message.first_page, message.last_page)
    done = Prefetched(pages=pages, blobs=blobs, nbytes=nbytes, rebuilding_pages=rebuilding, why_not=why_not)
    return Reply(FrameType.PREFETCHED, done)


def _pin(context: Context, message: Prefix, payload: bytes) -> Reply:
    tokens, extras = split_tokens(payload, message.extra_pages)
    pin = context.store.prefixes.pin(space_of(context, message.namespace), tokens, extras, message.ttl_ms / 1000, message.handle)
    return Reply(FrameType.PINNED, Pinned(namespace=message.namespace, pin=pin.id, pages=pin.pages))


def _unpin(context: Context, message: Pinned, payload: bytes) -> Reply:
    context.store.prefixes.unpin(space_of(context, message.namespace), message.pin)
    return OK


def _abandon(context: Context, message: Prefix, payload: bytes) -> Reply:
    space, prefixes = space_of(context, message.namespace), context.store.prefixes
    tokens, extras = split_tokens(payload, message.extra_pages)
    if message.session and tokens:
        raise BadRequest("abandon either a session or a prefix")
    if message.session:
        pages = prefixes.abandon_session(space, Hints(message.session))
    else:
        pages = prefixes.abandon(space, tokens, extras, message.first_page)
    return Reply(FrameType.AFFECTED, Affected(pages=pages))


async def _delete(context: Context, message: Prefix, payload: bytes) -> Reply:
    tokens, extras = split_tokens(payload, message.extra_pages)
    pages = await context.store.prefixes.delete(space_of(context, message.namespace), tokens, extras, message.first_page)
    return Reply(FrameType.AFFECTED, Affected(pages=pages))


async def _follow(context: Context, message: Follow, payload: bytes) -> Reply:
    space, wait_s = space_of(context, message.namespace), min(message.wait_ms, MAX_COMMIT_WAIT_MS) / 1000
    puts = await context.store.following.follow(context.session.owner, space, message.put_id, message.beyond, wait_s)
    items = [
        FollowedPut(
            handle=put.handle, first_page=put.first_page, total_pages=put.total_pages,
            parts=part_list(put.request.ranges), wanted=put.wanted_runs(),
        )
        for put in puts
    ]  # fmt: skip
    return Reply(FrameType.FOLLOWING, FollowedPuts(items=items))


async def _outcome(context: Context, message: Outcome, payload: bytes) -> Reply:
    wait_s = min(message.wait_ms, MAX_COMMIT_WAIT_MS) / 1000
    await context.store.following.outcome(context.session.owner, message.handle, wait_s)
    return OK


Quick = Callable[[Context, Any, bytes], Reply | None]
Slow = Callable[[Context, Any, bytes], Coroutine[None, None, Reply | None]]

QUICK: dict[FrameType, tuple[type[Message], Quick]] = {
    FrameType.PING: (Empty, _ping),
    FrameType.NAMESPACE_GET: (NamespaceName, _get_namespace),
    FrameType.NAMESPACE_LIST: (Empty, _list_namespaces),
    FrameType.MATCH: (MatchRequest, _match),
    FrameType.LEASE_RENEW: (LeaseRequest, _renew),
    FrameType.LEASE_RELEASE: (LeaseRequest, _release),
    FrameType.ABORT: (PutHandle, _abort),
    FrameType.PIN: (Prefix, _pin),
    FrameType.UNPIN: (Pinned, _unpin),
    FrameType.ABANDON: (Prefix, _abandon),
    **rebuilds.QUICK,
}
"""Answered at once, in the order in which they came; a quiet release not at all."""

SLOW: dict[FrameType, tuple[type[Message], Slow]] = {
    FrameType.CLOSE: (Close, _close),
    FrameType.NAMESPACE_CREATE: (CreateNamespace, _create_namespace),
    FrameType.NAMESPACE_DROP: (NamespaceName, _drop_namespace),
    FrameType.PUT: (PutStart, _put),
    FrameType.COMMIT: (Commit, _commit),
    FrameType.FOLLOW: (Follow, _follow),
    FrameType.OUTCOME: (Outcome, _outcome),
    FrameType.PREFETCH: (Prefix, _prefetch),
    FrameType.DELETE: (Prefix, _delete),
    **rebuilds.SLOW,
}
"""Answered by a task each, a PUT by one only if it waits, in any order; a put that is sent at once only if it fails, or not all of it
is wanted."""

ACCESS: dict[FrameType, Access] = {
    FrameType.PING: Access.READ,
    FrameType.CANCEL: Access.READ,
    FrameType.CLOSE: Access.READ,
    FrameType.NAMESPACE_CREATE: Access.WRITE,
    FrameType.NAMESPACE_GET: Access.READ,
    FrameType.NAMESPACE_LIST: Access.READ,
    FrameType.NAMESPACE_DROP: Access.WRITE,
    FrameType.MATCH: Access.READ,
    FrameType.LEASE_RENEW: Access.READ,
    FrameType.LEASE_RELEASE: Access.READ,
    FrameType.FETCH: Access.READ,
    FrameType.PUT: Access.WRITE,
    FrameType.SLICES: Access.WRITE,
    FrameType.COMMIT: Access.WRITE,
    FrameType.ABORT: Access.WRITE,
    FrameType.FOLLOW: Access.READ,
    FrameType.OUTCOME: Access.READ,
    FrameType.PREFETCH: Access.READ,
    FrameType.PIN: Access.WRITE,
    FrameType.UNPIN: Access.WRITE,
    FrameType.ABANDON: Access.WRITE,
    FrameType.DELETE: Access.WRITE,
    FrameType.DROP: Access.WRITE,
    FrameType.RECIPES: Access.READ,
    FrameType.RECIPES_DELETE: Access.WRITE,
    FrameType.REBUILD: Access.READ,
    FrameType.REBUILD_CLAIM: Access.WRITE,
    FrameType.REBUILD_RENEW: Access.WRITE,
    FrameType.REBUILD_END: Access.WRITE,
}
"""What each frame of a client asks for. One that is not here is refused to everybody."""
