"""The façade: match, put, fetch, leases and namespaces. No sockets in it.

The tree decides what exists, the tiers hold the bytes, and this joins them. All methods run on one event loop; what can
block is in two bounded executors.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.errors import Busy, MissingParent, UnknownNamespace
from kvstore.hints import NO_HINTS, Hints
from kvstore.radix.tree import Extras
from kvstore.radix.values import Path
from kvstore.store.checking.scrub import Scrubber
from kvstore.store.clock import Clock
from kvstore.store.dram.copies import Copies
from kvstore.store.dram.reading import Reading
from kvstore.store.dram.replacement import SSD, Replacement
from kvstore.store.dram.residency import Residency
from kvstore.store.dram.sharing import Sharing
from kvstore.store.dram.spares import bytes_on_ssd
from kvstore.store.dram.vacate import Vacator
from kvstore.store.expiry import Expiry
from kvstore.store.figures import Figures
from kvstore.store.files import Files
from kvstore.store.matching.cut import Ask
from kvstore.store.matching.leases import Lease, Leases
from kvstore.store.matching.matching import Match, Matching
from kvstore.store.matching.rates import Rates
from kvstore.store.namespaces import Namespaces
from kvstore.store.prefixes import Prefixes
from kvstore.store.puts.following import Following
from kvstore.store.puts.put import Put
from kvstore.store.puts.putting import Puts
from kvstore.store.puts.request import PutRequest, PutResult
from kvstore.store.quotas import Quotas
from kvstore.store.rebuilding.gaps import find_gap, rebuildable_keys
from kvstore.store.rebuilding.rebuilding import Rebuilding
from kvstore.store.recipes.recipes import Recipes
from kvstore.store.session_ends import SessionEnds
from kvstore.store.settings import NamespaceSettings
from kvstore.store.space import Space
from kvstore.store.spaces import Spaces
from kvstore.store.ssd.recovery import Recovery
from kvstore.store.ssd.upkeep import Orphans, flush
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.stats import Stats
from kvstore.store.store_config import StoreConfig
from kvstore.store.tier_events import BothWatch, TierEvents
from kvstore.store.trash import Trash
from kvstore.store.uses import Defer, Uses
from kvstore.store.why import Why, why
from kvstore.threads import started_pool
from kvstore.tiers.dram import Arena
from kvstore.tiers.policies.make import make_policies
from kvstore.tiers.ssd import BlobFile
from kvstore.tiers.vacating import MoveBudget

_log = logging.getLogger("kvstore.store")

_SWEEP_S = 0.5
_PAGE = 1 << 20
"""Bytes of a page, as long as none is known: policies learn how many pages a tier holds when it is full."""
_SETTLE_POLL_S = 0.001


class Store:
    """Use as an async context manager: it opens the data directory, runs the background tasks, and flushes at the end."""

    def __init__(self, config: StoreConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.stats = Stats()
        self.epoch = time.time_ns()
        self.died = asyncio.Event()
        """Set when a background task has died of a bug: the daemon should then end, and be started anew."""
        self.loaded = asyncio.Event()
        """Set once all pages are back from the journal."""
        self.stuck = False
        """Whether a read or a write did not end when the store was closed; then a thread is left that only the end of the process ends."""
        self.leases = Leases(config.lease_bytes or (config.dram_bytes + config.ssd_bytes) // 2)
        self.pins = Leases.of_pins(config.pin_bytes or (config.dram_bytes + config.ssd_bytes) // 2)
        self._clock = clock or Clock()
        self.uses = Uses(self._clock.now, self.stats)
        policies = make_policies(config.policy, config.dram_bytes // _PAGE, config.ssd_bytes // _PAGE, config.ssd_loss)
        self.replacement = Replacement(*policies, self._clock.now)
        self.uses.observers.append(self.replacement)
        self.tier_events = TierEvents(tokens=config.event_tokens) if config.events else None
        """Which pages come to and leave which tier, if somebody is to follow."""
        self._watcher = self.replacement if self.tier_events is None else BothWatch(self.replacement, self.tier_events)
        self.rates = Rates()
        """How fast SSD is read, and pages are fetched."""
        self._matching = Matching(self.leases, self.stats, self.uses, self.rates)
        self._spaces = Spaces()
        self.quotas = Quotas(config.quotas)
        self._trash = Trash()
        self._arena = Arena(config.dram_bytes, config.segment_bytes)
        self._writer = started_pool(1, "kvstore-writer")
        self._readers = started_pool(config.reader_threads, "kvstore-reader")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def id(self) -> bytes:
        """16 bytes that stay the same as long as the data directory is there."""
        return self._files.dir.id

    # --- life ----------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "Store":
        loop = asyncio.get_running_loop()
        self._files = await loop.run_in_executor(self._writer, Files, self.config, self._clock.not_before)
        try:
            self._wire_up()
            spaces, self._namespaces.next_number = await self._recovery.find(self._new_space)
            for space in spaces:
                self._spaces.add(space)
            await self.recipes.sweep({space.number for space in spaces})
        except BaseException:
            self._files.give_up()
            self._writer.shutdown(wait=False)
            self._readers.shutdown(wait=False)
            raise
        self._writeback_task = self._watched(self._writeback.run(), "kvstore-writeback")
        load = self._watched(self._load(), "kvstore-load")
        self._tasks = [
            load,
            self._watched(self._residency.run(), "kvstore-mover"),
            self._watched(self._sweep_leases(), "kvstore-leases"),
            *(self._watched(kind.let_go(), "kvstore-ended-leases") for kind in (self.leases, self.pins)),
            self._watched(self._puts.give_up_shards(), "kvstore-shards"),
            self._watched(self._once_loaded(self._orphans.sweep), "kvstore-sweep"),
            self._watched(self._once_loaded(self.scrubber.run), "kvstore-scrub"),
            self._watched(self._expiry.run(), "kvstore-expiry"),
            self._watched(self.replacement.run(), "kvstore-replacement"),
            self._watched(self.recipes.run(), "kvstore-recipes"),
        ]
        if not self.config.serve_while_loading:
            try:
                await asyncio.shield(load)
            except BaseException:
                await self.__aexit__()
                raise
        return self

    def _watched(self, job: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(job, name=name)
        task.add_done_callback(self._note_death)
        return task

    def _note_death(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the background task %s died", task.get_name(), exc_info=error)
            self.died.set()

    def _wire_up(self) -> None:
        config = self.config
        budget = MoveBudget(config.move_share, config.dram_bytes // 20, config.dram_bytes // 8)
        self._residency = Residency(
            self._arena, self._files.blobs, lambda: self._spaces, self.stats, config.watermarks, config.put_wait_s,
            Vacator(self._arena, self._readers, lambda: self._spaces, self.stats, budget), self.quotas, self.replacement,
            config.ahead_bytes,
        )  # fmt: skip
        self._writeback = Writeback(
            self._files.blobs, self._files.journal, self._writer, self._trash, self.stats,
            lambda wanted, tenant: self._residency.make_ssd_room(wanted, self._clock.now(), tenant), self._arena.view, config.batch_bytes,
            self._clock.now,
            self._residency.ssd_budget, config.durable_wait_s, lambda: self.replacement.ready(SSD),
            self._residency.ssd_is_full,
        )  # fmt: skip
        self._residency.writeback = self._writeback
        self.reading = Reading(
            self._arena, self._files.blobs, self._readers, self.stats, self._residency.allocate, config.put_wait_s,
            self._writeback, self.rates.reads,
        )  # fmt: skip
        self._puts = Puts(
            self._arena, self._residency, self._writeback, self.stats, self.uses, config.put_idle_s, self._files.blobs.footprint,
            config.ssd_bytes, self.quotas, Copies(self._arena, self._readers),
        )  # fmt: skip
        self.scrubber = Scrubber(
            self._files.blobs, self._writeback, self._readers, lambda: self._spaces, self._arena.view,
            self.reading.discard_bad_copy, self.stats, config.scrub_bytes_s,
        )  # fmt: skip
        self._orphans = Orphans(self._files.blobs, self._writeback, self._readers, self._writer, lambda: self._spaces, self._trash)
        self._recovery = Recovery(self._files.journal, self._writeback, self._readers, self._writer, self.stats, self._clock.not_before)
        self.recipes = Recipes(
            self._files.recipes, lambda: self._spaces, self._arena.view, self._clock.now, self.stats, config.recipe_ttl_s, self._readers
        )
        self.rebuilding = Rebuilding(self.recipes, self.stats)
        self.prefixes = Prefixes(self.reading, self._writeback, self.pins, self.uses, self.recipes)
        self._expiry = Expiry(lambda: self._spaces, self.uses, self._clock.now, self._writeback.poke)
        self.following = Following(self._puts.open, config.put_idle_s)
        self.sharing = Sharing(self._arena, self.reading, self.stats)
        self._namespaces = Namespaces(
            self._spaces, self._files.journal, self._writer, self._writeback, self._trash, self.recipes, self._new_space, self._forgotten,
            self._residency.announce_room,
        )  # fmt: skip
        self.figures = Figures(
            self._arena, self._files, self._spaces, self.quotas, self._puts, self._writeback, self._recovery, self.replacement
        )

    async def _load(self) -> None:
        await self._recovery.run()
        if self.config.ahead_bytes:
            self._residency.spares.expect(await asyncio.to_thread(bytes_on_ssd, list(self._spaces)))
        for space in self._spaces:
            if space.text is not None:
                self.recipes.look_through(space)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._files.dir.end_loading)
        self.loaded.set()

    async def __aexit__(self, *_: object) -> None:
        self.rebuilding.close()
        self._puts.close()
        self.following.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not (reads_ended := await self.reading.stop(self.config.shutdown_s)):
            _log.critical("a read from SSD does not end: it is left behind, unfinished")
        await flush(self._spaces, self._writeback, self.config.shutdown_s)
        text_is_closed = await self.recipes.stop(self.config.shutdown_s)
        if not (writes_ended := await self._writeback.stop(self._writeback_task, self.config.shutdown_s)):
            _log.critical("a write to SSD does not end: it is left behind, unfinished")
        if reads_ended and writes_ended:
            await asyncio.to_thread(self._close)
        self.stuck = not (reads_ended and writes_ended and text_is_closed)
        self._arena.close()
        self._files.dir.close()

    def _close(self) -> None:
        self._files.dir.end_loading()
        self._writer.shutdown()
        self._readers.shutdown()
        self._files.close()

    async def _sweep_leases(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for kind in (self.leases, self.pins):
                kind.expire(now)
            self._puts.sweep(now)
            self.following.sweep(now)
            self.rebuilding.sweep(now)
            self.uses.note_time()

    async def _once_loaded(self, job: Callable[[], Awaitable[None]]) -> None:
        """If loading dies, never: what it did not get to must not be taken for what nobody names."""
        await self.loaded.wait()
        await job()

    # --- namespaces ----------------------------------------------------------------------------------------------------

    def _new_space(self, number: int, settings: NamespaceSettings) -> Space:
        space = Space(number, settings, self.config.max_pages, self._arena, self._trash, self.stats, self.config.max_ghosts, self._watcher)
        space.end_holds = self._end_holds
        space.ends = SessionEnds(self.config.max_sessions)
        space.text = self.rebuilding if settings.recipes else None
        if self.tier_events is not None:
            self.tier_events.follow(space)
        return space

    def _end_holds(self, space: Space, slot: int) -> None:
        """The bytes of the page in `slot` are lost: leases hold only what is before it, and puts below it fail."""
        tree, key = space.tree, space.tree.pages.key_bytes(slot)
        self.leases.cut(space, slot)
        self.pins.cut(space, slot)
        for put in self._puts.open.of_space(space):
            if space.spec.flat:
                if key in put.anchors:
                    put.fail(Busy("a page of the put was lost, its bytes did not verify: put it again", retry_after_ms=10))
                    self.abort_put(put)
            elif any(slot in tree.path_slots(tree.path_to(tree.pages.find_key(anchor))) for anchor in put.anchors):
                put.fail(MissingParent("a page before the put was lost: its bytes did not verify"))
                self.abort_put(put)

    def _forgotten(self, space: Space) -> None:
        """A namespace is dropped: nothing holds it any more, or works at it."""
        if self.tier_events is not None:
            self.tier_events.dropped(space)
        for kind in (self.leases, self.pins):
            for lease in kind.of_space(space):
                kind.release(lease)
        self._puts.end_space(space)
        self.rebuilding.end_space(space)

    async def create_namespace(self, settings: NamespaceSettings) -> Space:
        """The namespace of these settings, made if it is not there (see Namespaces.create)."""
        return await self._namespaces.create(settings)

    async def drop_namespace(self, space: Space) -> None:
        """Forget a namespace and everything in it (see Namespaces.drop)."""
        await self._namespaces.drop(space)

    def namespaces(self, tenant: str) -> list[Space]:
        """A tenant's namespaces."""
        return self._spaces.of(tenant)

    def all_spaces(self) -> list[Space]:
        """The namespaces of all tenants, for those who watch over the daemon."""
        return list(self._spaces)

    def space(self, tenant: str, name_or_id: str) -> Space:
        """A tenant's namespace by id or name. Raises UnknownNamespace."""
        found = self._spaces.by_id(tenant, name_or_id) or self._spaces.by_name(tenant, name_or_id)
        if found is not None:
            return found
        raise UnknownNamespace(
            f"there is no namespace {name_or_id!r}: `kvstore ns list` shows those that there are, `kvstore ns create` makes one"
        )

    # --- reading -------------------------------------------------------------------------------------------------------

    def match(
        self, space: Space, tokens: bytes, extras: Extras, *, owner: int = 0, lease_s: float = 0.0, parts: bool = False,
        boundaries: bool = False, base: int = 0, hints: Hints = NO_HINTS, ask: Ask | None = None, link_bytes_s: float = 0.0,
        holes: bool = False, defer: Defer | None = None,
    ) -> Match:  # fmt: skip
        """The longest usable prefix of `tokens` (see Matching.match)."""
        return self._matching.match(
            space, tokens, extras, owner=owner, lease_s=lease_s, parts=parts, boundaries=boundaries, base=base, hints=hints, ask=ask,
            link_bytes_s=link_bytes_s, holes=holes, defer=defer,
        )  # fmt: skip

    async def rebuildable_pages(self, space: Space, tokens: bytes, extras: Extras, *, owner: int = 0, base: int = 0) -> int:
        """How many pages after the longest usable prefix are gone, or lack something, but can be computed again from their recipes."""
        if space.text is None or space.loading:
            return 0
        gap = find_gap(space, tokens, extras, self._matching.base_path(owner, space, base))
        return 0 if gap is None else len(await rebuildable_keys(self.recipes, space, gap))

    def base_path(self, owner: int, space: Space, base: int) -> Path:
        """The path of a lease that a request builds on; empty for 0. Raises NotFound."""
        return self._matching.base_path(owner, space, base)

    def why(self, space: Space, tokens: bytes, extras: Extras, first: int = 0, last: int = -1) -> Why:
        """Where the pages [first, last) of a prefix are, and why (see `kvstore.store.why`)."""
        return why(self.replacement, self.config.policy, space, tokens, extras, first, last)

    def renew_lease(self, owner: int, lease_id: int, ttl_s: float) -> Lease:
        """Let a lease end `ttl_s` seconds from now."""
        return self.leases.renew(owner, lease_id, time.monotonic(), ttl_s)

    def release_lease(self, owner: int, lease_id: int) -> None:
        """End a lease."""
        self.leases.release(self.leases.get(owner, lease_id))

    # --- writing -------------------------------------------------------------------------------------------------------

    async def begin_put(self, owner: int, space: Space, request: PutRequest, base: int = 0, handle: int = 0, name: int = 0) -> Put:
        """Start a put, after the boundary of a lease of this owner if a `base` is given (see Puts.begin)."""
        return await self._puts.begin(owner, space, request, self._matching.base_path(owner, space, base), handle, name)

    def get_put(self, owner: int, handle: int) -> Put:
        """An owner's own put under way; NotFound otherwise."""
        return self._puts.open.get(owner, handle)

    async def put_begun(self, put: Put, wait_s: float) -> None:
        """Wait a little until a put can take what is sent (see Puts.begun)."""
        await self._puts.begun(put, wait_s)

    async def commit_put(self, put: Put, wait_s: float = 0.0) -> PutResult:
        """Make a put's pages visible (see Commits.commit)."""
        return await self._puts.commits.commit(put, wait_s)

    def commit_put_now(self, put: Put, defer: Defer) -> PutResult | None:
        """As `commit_put`, if nothing has to be waited for; None if it has (see Commits.commit_now)."""
        return self._puts.commits.commit_now(put, defer)

    def abort_put(self, put: Put) -> None:
        """End a put that was not committed. Nothing of it is left."""
        self._puts.open.abort(put)

    def release_owner(self, owner: int) -> None:
        """A client is gone: its leases end, and its puts leave nothing."""
        self.leases.release_owner(owner)
        self._puts.release_owner(owner)
        self.following.release_owner(owner)
        self.rebuilding.release_owner(owner)
        self.sharing.release_owner(owner)

    # --- looking on ----------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until nothing is being moved, written or deleted."""
        while self._residency.moving or self.reading.ahead.busy or not self._writeback.idle or not self.recipes.idle:  # noqa: ASYNC110 - for onlookers; nobody should pay for an event
            await asyncio.sleep(_SETTLE_POLL_S)

    @property
    def blob_file(self) -> BlobFile:
        """The SSD tier, for those who verify it."""
        return self._files.blobs

    @property
    def readers(self) -> ThreadPoolExecutor:
        """The threads that read from SSD."""
        return self._readers
