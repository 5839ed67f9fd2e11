"""A namespace as a client sees it: match, fetch, put; what is told about prefixes is in prefixes.py."""

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.api.wire import DIGEST_BYTES, BadRequest, FrameType, Hints, KVSpec, PartRange
from kvstore.api.wire.messages import Empty, Matched, MatchRequest, NamespaceInfo, NamespaceName
from kvstore.api.wire.put_messages import PutStart
from kvstore_client.arguments import FLAG, PUT_ID, checked, instance, writable
from kvstore_client.blocks import PageShape
from kvstore_client.convert import hints_meta, part_runs
from kvstore_client.direct import Elsewhere, current
from kvstore_client.estimate import Costs, Estimate, ask_meta, estimate_of
from kvstore_client.fetching import OnGroup, fetch_blocks
from kvstore_client.match import Lack, Match
from kvstore_client.plan import Priority, layer_groups, page_parts
from kvstore_client.prefixes import PrefixCalls
from kvstore_client.put import PutResult
from kvstore_client.put_flat import flat_commits, put_flat
from kvstore_client.put_layout import by_default, check_alone
from kvstore_client.put_prefix import prefix_put, put_prefix
from kvstore_client.scattered import Scattered
from kvstore_client.session import Session
from kvstore_client.streams import Follower, PutStream
from kvstore_client.text import Given, TextCalls
from kvstore_client.times import milliseconds, waiting_until
from kvstore_client.tokens import Extras, Tokens, token_view, with_extras
from kvstore_client.transfer import Progress
from kvstore_client.view import LocalView, view_now, view_parts
from kvstore_client.whole import Whole

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient

_SHAPES = 256
"""How many shapes of pages are kept."""


class Namespace(PrefixCalls, TextCalls):
    """A namespace as this client sees it."""

    def __init__(self, client: "AsyncClient", info: NamespaceInfo) -> None:
        self.client = client
        self.info = info
        self.id = info.id
        self.name = info.name
        self.spec = KVSpec.from_dict(info.spec)
        self._whole = self.spec.whole()
        self._shapes: dict[tuple[tuple[PartRange, ...], PartRange], PageShape] = {}

    def __repr__(self) -> str:
        kinds = ", ".join(component.kind for component in self.spec.components)
        return f"<Namespace {self.name!r} ({self.id}): {kinds}; {self.spec.page_tokens} tokens and {self.spec.page_bytes:,} bytes a page>"

    def shape(self, stored: tuple[PartRange, ...], wanted: PartRange) -> PageShape:
        """What a wanted range takes of a page that is stored so; kept, as there are few in use. Raises BadRequest if it is not covered."""
        found = self._shapes.get((stored, wanted))
        if found is None:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            found = self._shapes[stored, wanted] = PageShape(page_parts(self.spec, stored, wanted))
        return found

    def _check_own(self, match: Match) -> None:
        """Raise BadRequest for a match of another client or namespace: its lease, its places in memory and its pages are not ours."""
        other = match.namespace
        if other is self:
            return
        if other.client is not self.client:
            raise BadRequest("this match is of another client, and its lease with it: match with this one")
        if other.id != self.id:
            raise BadRequest(f"this match is of the namespace {other.name!r}, not of {self.name!r}: match in this one")

    def _lease_of(self, base: Match | None) -> int:
        """What a request says of its base. Raises BadRequest for what is none here, and NotFound for one that is over."""
        if base is None:
            return 0
        self._check_own(base)
        if self.spec.flat:
            raise BadRequest("in a flat namespace every page stands alone: there is no base")
        return base.as_base()

    async def drop(self) -> None:
        """Forget the namespace and everything in it."""
        await self.client.call(FrameType.NAMESPACE_DROP, NamespaceName(namespace=self.id), Empty)

    @checked(parts=FLAG, base=instance(Match))
    async def match(
        self, tokens: Tokens, *, lease_s: float = 30.0, parts: bool = True, boundaries: bool = False, base: Match | None = None,
        extras: Extras | None = None, hints: Hints | None = None, estimate: Costs | bool = False, rebuildable: bool = False,
        rebuild_s: float = 0.0, holes: bool = False, timeout: float | None = None,
    ) -> Match:  # fmt: skip
        """The longest usable prefix of `tokens` (uint32) in the store, in whole pages.

        It is leased for `lease_s` seconds (0: not at all, then it is only a look). `parts` brings what `fetch` needs;
        without, the answer is smaller. `boundaries` brings all that are usable. Where more pages are there than can be used, its `lacks`
        says which component is missing, and where.
        In a namespace of digests, `tokens` are those (see Tokens). `extras` gives
        32-byte digests of extra keys by page. With a leased `base` the tokens (and the pages of `extras`) are those after it:
        a long context need not travel again. Raises NotFound if that lease is over. `hints` say whose turn it is; they count with a lease
        only. `estimate` asks what loading it costs beside computing it: `fetch(..., plan=match.estimate)` then loads what is better loaded.
        `rebuildable` asks how many of the missing pages can be computed again from their recipes (`rebuildable_pages`); `rebuild_s` asks to
        have that done, and waits for it so many seconds at most. Raises RebuildFailed if the workers that tried could not do it. `holes`
        asks a flat namespace for all pages of the list that are there with all their components (`match.there()`), not for its front only.
        """
        after = self._lease_of(base)
        extra_pages, payload = with_extras(token_view(tokens, self.spec), extras)
        near = bool(lease_s and parts) and await self._near(timeout)
        message = MatchRequest(
            namespace=self.id, lease_ms=milliseconds("lease_s", lease_s), parts=parts, boundaries=boundaries, extra_pages=extra_pages,
            base=after, hints=hints_meta(hints), estimate=ask_meta(estimate), rebuildable=rebuildable,
            rebuild_ms=milliseconds("rebuild_s", rebuild_s), places=near, holes=holes,
        )  # fmt: skip
        started = time.monotonic()
        bound = self.client.timeout + rebuild_s if timeout is None and rebuild_s else timeout
        before = waiting_until(message, "rebuild_ms", started + rebuild_s) if rebuild_s else None
        found, ids = await self.client.call(FrameType.MATCH, message, Matched, payload, bound, before)
        runs, cut_runs = part_runs(found.runs), part_runs(found.cut_runs)
        own, cut = (DIGEST_BYTES * sum(pages * len(parts) for _, pages, parts in of) for of in (runs, cut_runs))
        match = Match(
            found.pages, found.tokens, found.known_pages, found.boundaries, found.dram_pages, found.lease, found.endpoint, found.epoch,
            self, runs, ids[:own], estimate_of(found.estimate, self.spec.page_tokens), rebuildable_pages=found.rebuildable_pages,
            lacks=tuple(Lack(*lack) for lack in found.lacks),
            _ends=started + found.lease_ms / 1000, _session=self.client.pool.session, _places=ids[own + cut :],
        )  # fmt: skip
        if cut_runs and match.estimate is not None:
            plan = match.estimate
            match._cut = replace(
                match, pages=plan.pages, tokens=plan.tokens, lease=0, _runs=cut_runs, _ids=ids[own : own + cut], _by_blob=match.places()
            )
        return match

    async def _near(self, timeout: float | None) -> bool:
        """Whether there is shared memory with the daemon."""
        same_host = self.client.same_host
        if same_host.now is not None or same_host.hopeless:
            return same_host.now is not None
        if current() is not None:
            raise Elsewhere
        async with self.client.deadline(timeout):
            return await self.client.pool.retry(same_host.connection) is not None

    @checked(match=instance(Match, optional=False), plan=instance(Estimate))
    async def fetch(
        self, match: Match, out: Any, *, pages: tuple[int, int] | None = None, wanted: PartRange | None = None, group_layers: int = 0,
        on_group: OnGroup | None = None, progress: Progress | None = None, plan: Estimate | None = None, priority: Priority | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Fetch matched pages [first, last) into `out`, page after page; by default all that `wanted` is needed on.

        `out` is any writable buffer of (last - first) * part_bytes(wanted) bytes, or says where they go (Scattered, of a match that is
        fetched whole, without groups or a plan). `wanted` is a range of layers and heads,
        by default all of component 0. Every piece is verified. Returns the bytes fetched.

        With `group_layers` the bytes come in layer order, so many layers of all pages at a time, and `on_group(lo, hi)` is
        called as soon as the layers [lo, hi) are there. `progress(bytes, total)` is called as bytes arrive. A connection
        that breaks, or a daemon that restarts, is waited for within the timeout.

        With the match's estimate as `plan`, only its first `plan.pages` pages count: the rest is better computed. `out` may then be
        larger than what comes; the bytes are at its front.

        What is `interactive` goes before what is `bulk`, here and in the daemon; by default a fetch of up to 4 MiB is interactive.

        Raises NotFound (Corrupt) if something is no longer there (did not verify): treat it as a miss.
        """
        self._check_own(match)
        if wanted is None:
            wanted = self._whole
        else:
            self.spec.check_range(wanted)
        if priority not in (None, "interactive", "bulk"):
            raise BadRequest(f"priority is {priority!r}: interactive or bulk")
        if plan is not None:
            match = match.up_to(plan)
        first, last = pages or match.pages_of(wanted.component)
        match.check_pages(first, last)
        if isinstance(out, Scattered):
            if group_layers or plan is not None:
                raise BadRequest("scattered pages are fetched without layer groups and without a plan")
            if first == last:
                return 0
            ahead = match.in_order.after(match, first, last, wanted)
            async with self.client.deadline(timeout):
                return await fetch_blocks(match, out.blocks(match, first, last, wanted), out.writable(), None, progress, ahead=ahead)
        target = writable(out, (last - first) * self.spec.part_bytes(wanted), at_least=plan is not None)
        if not len(target):
            return 0
        groups = layer_groups(wanted, group_layers)
        blocks = match.blocks(first, last, wanted, groups)
        tell = None if on_group is None else lambda number: on_group(groups[number].layer_lo, groups[number].layer_hi)
        ahead = match.in_order.after(match, first, last, wanted)
        async with self.client.deadline(timeout):
            return await fetch_blocks(match, blocks, target, tell, progress, priority, ahead)

    @checked(match=instance(Match, optional=False))
    async def view(
        self, match: Match, *, component: int = 0, pages: tuple[int, int] | None = None, timeout: float | None = None
    ) -> LocalView:
        """The parts of matched pages [first, last) where they lie in the daemon's memory, without a copy (see LocalView).

        By default all pages on which the component is needed. What is on SSD is brought up first. Only for a leased match, with a
        daemon on this machine: raises Unsupported without shared memory, NotFound for what is not there (any more).
        """
        self._check_own(match)
        if (view := view_now(match, component, pages)) is not None:
            return view
        async with self.client.deadline(timeout):
            return await view_parts(match, component, pages)

    @checked(match=instance(Match, optional=False))
    def view_now(self, match: Match, *, component: int = 0, pages: tuple[int, int] | None = None) -> LocalView | None:
        """As `view`, if the daemon need not be asked, which is the rule for what is in DRAM; else None."""
        self._check_own(match)
        return view_now(match, component, pages)

    @checked(base=instance(Match), recipe=instance(Given))
    async def put(
        self, tokens: Tokens, data: Any, *, first_page: int = 0, parts: tuple[PartRange, ...] | None = None,
        spans: tuple[tuple[int, int], ...] | None = None, durable: bool = False, whole_s: float = 0.0,
        base: Match | None = None, extras: Extras | None = None, put_id: bytes | None = None, hints: Hints | None = None,
        progress: Progress | None = None, recipe: Given | None = None, timeout: float | None = None,
    ) -> PutResult:  # fmt: skip
        """Put the pages of `tokens` (the whole prefix, whole pages) from `first_page` on.

        `data` holds them page after page, each as its `parts` in order (by default one part: all of component 0), or says where one part
        of them lies (Scattered); `spans` are the pages [first, last) that carry each part, if not all do. With `durable`, returns once
        they would survive a power cut. Waits for room while the daemon is busy.

        Shards of one computation give the same `put_id` (16 bytes) and each its own parts; a page counts once all of them
        have put it, so parts of a component's layers or heads without a `put_id` are refused. Of a hybrid model, `parts` names all
        components that are put: a prefix is usable only where those are that its boundary needs.
        `whole_s`: how long to wait for the others, all commits of the call together, however often they are sent. With a leased `base`,
        `tokens` (and the pages of `extras`) are those after it, while `first_page` and `spans` still count from the root; by default the
        put starts at the base. Raises NotFound if that lease is over.
        `hints` say whose turn it was, and how it ended. `recipe` is what is kept in place of the token ids, to compute the pages again,
        where the namespace keeps recipes.

        In a flat namespace `tokens` are the digests of pages that each stand alone, in any order, each once. They go in commits of at most
        256 pages and about 16 MiB: of each, all pages are put or none. The first that fails ends the put: its error's `done_pages` says
        that the pages before that one are put, and durable if they were to be: of a commit that SSD took only a part of, too.

        Raises MissingParent if the pages before are not in the store, and NoSpace: also where there is no room for all of it, so that
        what had come of it went again. In a tree the error's `done_pages` (also of DiskFailing) are the pages of the prefix, counted from
        the root, that are there, and durable if they were to be.
        """
        after = self._lease_of(base)  # once: it may be released while this goes on
        parts = by_default(self.spec, parts, put_id, wrapped=1) or (self.spec.whole(),)
        if put_id is None:
            check_alone(self.spec, parts)
        raw = token_view(tokens, self.spec)
        whole = Whole(whole_s)
        put_id, ack = put_id or secrets.token_bytes(DIGEST_BYTES), "durable" if durable else "memory"
        message = PutStart(namespace=self.id, put_id=put_id, first_page=0, parts=[], ack=ack, base=after, hints=hints_meta(hints))
        if self.spec.flat:
            if first_page or recipe is not None:
                raise BadRequest("in a flat namespace every page stands alone: there is no first page and no recipe")
            commits = flat_commits(self.client.pool, self.spec, parts, raw, data, spans, extras)
            return await put_flat(self.client, commits, message, whole, progress, timeout)
        start = base.pages if base is not None else 0
        asked = prefix_put(self.spec, parts, raw, start, first_page, data, spans, extras, recipe)
        return await put_prefix(self.client, asked, message, whole, progress, timeout)

    # --- streams -------------------------------------------------------------------------------------------------------

    @checked()
    def stream_put(
        self, tokens: Tokens, *, first_page: int = 0, part: PartRange | None = None, durable: bool = False, whole_s: float = 0.0,
        extras: Extras | None = None, put_id: bytes | None = None, hints: Hints | None = None, timeout: float | None = None,
    ) -> PutStream:  # fmt: skip
        """A put whose layers are sent as they are computed: `async with namespace.stream_put(...) as put` (see PutStream).

        Entering it waits for room while the daemon is busy, `timeout` seconds at most; `send` and `commit` have their own.
        """
        part, put_id = part or self.spec.whole(), put_id or secrets.token_bytes(DIGEST_BYTES)
        return PutStream(
            self, token_view(tokens, self.spec), first_page, part, durable, whole_s, extras, put_id, hints_meta(hints), timeout
        )

    @checked(put_id=PUT_ID)
    def follow(self, put_id: bytes, *, wanted: PartRange | None = None, timeout: float | None = None) -> Follower:
        """Read what a computation is putting while it does: `async with namespace.follow(put_id) as follower` (see Follower)."""
        return Follower(self, put_id, wanted or self.spec.whole(), timeout)

    @checked()
    def session(self, *, lease_s: float = 60.0, hints: Hints | None = None, costs: Costs | bool = False) -> Session:
        """A conversation that grows, of which only new tokens travel: `async with namespace.session() as session` (see Session)."""
        milliseconds("lease_s", lease_s)
        ask_meta(costs, "costs")
        return Session(self, lease_s=lease_s, hints=hints, costs=costs)
