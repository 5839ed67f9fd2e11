"""The façade: match, put, fetch, leases and namespaces. No sockets in it.

The tree decides what exists, the tiers hold the bytes, and this joins them. All methods run on one event loop; what can
block is in two bounded executors.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import lmdb
import numpy as np

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import Busy, Conflict, DiskFailing, MissingParent, NoSpace, NotFound, UnknownNamespace
from kvstore.hints import NO_HINTS, Hints
from kvstore.lmdb_files import DATA_FILE, mark_damaged
from kvstore.radix.journal import Journal
from kvstore.radix.tree import Extras
from kvstore.radix.values import Path
from kvstore.store.backlog import Backlog
from kvstore.store.clock import Clock
from kvstore.store.cut import Ask
from kvstore.store.datadir import DataDir
from kvstore.store.expiry import Expiry
from kvstore.store.following import Following
from kvstore.store.gaps import find_gap, rebuildable_keys
from kvstore.store.leases import MAX_PIN_S, Lease, Leases
from kvstore.store.matching import Defer, Match, Matching
from kvstore.store.pending import Pending
from kvstore.store.prefixes import Prefixes
from kvstore.store.puts import Put, PutRequest, PutResult
from kvstore.store.putting import Puts
from kvstore.store.quotas import Quotas, SsdBudget
from kvstore.store.rates import Rates
from kvstore.store.reading import Held, Reading
from kvstore.store.rebuilding import Rebuilding
from kvstore.store.recipes import Recipes
from kvstore.store.recovery import LoadProgress, Recovery
from kvstore.store.replacement import DRAM, SSD, Replacement
from kvstore.store.residency import Residency
from kvstore.store.scrub import Scrubber
from kvstore.store.session_ends import SessionEnds
from kvstore.store.settings import NamespaceSettings
from kvstore.store.sharing import Sharing
from kvstore.store.space import Space
from kvstore.store.spaces import Spaces
from kvstore.store.spares import bytes_on_ssd
from kvstore.store.ssd_state import SsdState
from kvstore.store.stats import Stats
from kvstore.store.store_config import StoreConfig
from kvstore.store.tier_events import BothWatch, TierEvents
from kvstore.store.trash import Trash
from kvstore.store.upkeep import Orphans, flush, give_back
from kvstore.store.uses import Uses
from kvstore.store.vacate import Vacator
from kvstore.store.waits import finish_despite_cancel
from kvstore.store.why import Why, why
from kvstore.store.writeback import Writeback
from kvstore.tiers import Usage
from kvstore.tiers.dram import Arena, SegmentUsage
from kvstore.tiers.policies.make import make_policies
from kvstore.tiers.ssd import BlobFile
from kvstore.tiers.text import RecipeFile
from kvstore.tiers.vacating import MoveBudget

_log = logging.getLogger("kvstore.store")

_SWEEP_S = 0.5
_PAGE = 1 << 20
"""Bytes of a page, as long as none is known: policies learn how many pages a tier holds when it is full."""
_SETTINGS = ("name", "recipes", "retention_s", "ttl_s", "rebuild", "lossy")
"""Of a namespace, besides what its identity is made of."""
_DEATHS = 2
"""LMDB itself can end the process at a damaged page; but one kill in the middle of loading is no damage."""
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
        """Whether a write did not end when the store was closed; then a thread is left that only the end of the process ends."""
        self.leases = Leases(config.lease_bytes or (config.dram_bytes + config.ssd_bytes) // 2)
        self.pins = Leases(config.pin_bytes or (config.dram_bytes + config.ssd_bytes) // 2, MAX_PIN_S)
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
        self._next_number = 1
        self._arena = Arena(config.dram_bytes, config.segment_bytes)
        self._writer = ThreadPoolExecutor(1, "kvstore-writer")
        self._readers = ThreadPoolExecutor(config.reader_threads, "kvstore-reader")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def id(self) -> bytes:
        """16 bytes that stay the same as long as the data directory is there."""
        return self._dir.id

    # --- life ----------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "Store":
        loop = asyncio.get_running_loop()
        self._dir = await loop.run_in_executor(self._writer, DataDir, self.config.data_dir)
        try:
            await loop.run_in_executor(self._writer, self._open_files)
            self._wire_up()
            spaces, self._next_number = await self._recovery.find(self._new_space)
            for space in spaces:
                self._spaces.add(space)
            await self.recipes.sweep({space.number for space in spaces})
        except BaseException:
            self._dir.end_loading()  # it says why it can't start: that is not the death that the note is about
            self._dir.close()
            self._writer.shutdown(wait=False)
            self._readers.shutdown(wait=False)
            raise
        self._writeback_task = asyncio.create_task(self._writeback.run(), name="kvstore-writeback")
        load = asyncio.create_task(self._load(), name="kvstore-load")
        self._tasks = [
            load,
            asyncio.create_task(self._residency.run(), name="kvstore-mover"),
            asyncio.create_task(self._sweep_leases(), name="kvstore-leases"),
            asyncio.create_task(self._sweep_orphans(load), name="kvstore-sweep"),
            asyncio.create_task(self._scrub(load), name="kvstore-scrub"),
            asyncio.create_task(self._expiry.run(), name="kvstore-expiry"),
            asyncio.create_task(self.replacement.run(), name="kvstore-replacement"),
            asyncio.create_task(self.recipes.run(), name="kvstore-recipes"),
        ]
        for task in (self._writeback_task, *self._tasks):
            task.add_done_callback(self._note_death)
        if not self.config.serve_while_loading:
            try:
                await asyncio.shield(load)
            except BaseException:
                await self.__aexit__()
                raise
        return self

    def _note_death(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the background task %s died", task.get_name(), exc_info=error)
            self.died.set()

    def _open_files(self) -> None:
        if (journal := self._dir.journal / DATA_FILE).exists():  # until its records say it better
            self._clock.not_before(journal.stat().st_mtime)
        if self._dir.begin_loading() >= _DEATHS:
            _log.error("the last %d starts died while they read the journal: it is salvaged", _DEATHS)
            for path in (self._dir.journal, self._dir.recipes):
                if path.exists():
                    mark_damaged(path)
        self._journal = Journal(self._dir.journal, self.config.journal_bytes)
        self._blob_file = BlobFile(self._dir.blobs, self.config.ssd_bytes, self.config.extent_bytes)
        self._recipe_file = RecipeFile(self._dir.recipes, self.config.recipe_bytes)
        usage = self._blob_file.usage()
        if usage.used > usage.capacity:
            _log.warning(
                "the SSD tier holds %d bytes, more than its new capacity of %d: it shrinks as new pages are written",
                usage.used,
                usage.capacity,
            )

    def _wire_up(self) -> None:
        config = self.config
        budget = MoveBudget(config.move_share, config.dram_bytes // 20, config.dram_bytes // 8)
        self._residency = Residency(
            self._arena, self._blob_file, lambda: self._spaces, self.stats, config.watermarks, config.put_wait_s,
            Vacator(self._arena, self._readers, lambda: self._spaces, self.stats, budget), self.quotas, self.replacement,
            config.ahead_bytes,
        )  # fmt: skip
        self._writeback = Writeback(
            self._blob_file, self._journal, self._writer, self._trash, self.stats,
            lambda wanted, tenant: self._residency.make_ssd_room(wanted, self._clock.now(), tenant), self._arena.view, config.batch_bytes,
            self._clock.now, lambda make_room: SsdBudget(self.quotas, self._ssd_used_by, make_room),
            config.durable_wait_s, lambda: self.replacement.ready(SSD),
        )  # fmt: skip
        self._residency.writeback = self._writeback
        self._reading = Reading(
            self._arena, self._blob_file, self._readers, self.stats, self._residency.allocate, config.put_wait_s,
            self._writeback, self.rates.reads,
        )  # fmt: skip
        self._puts = Puts(
            self._arena,
            self._residency,
            self._writeback,
            self.stats,
            self.uses,
            config.put_idle_s,
            self._blob_file.footprint,
            config.ssd_bytes,
            self.quotas,
        )
        self.scrubber = Scrubber(
            self._blob_file, self._writeback, self._readers, lambda: self._spaces, self._arena.view,
            self._reading.discard_bad_copy, self.stats, config.scrub_bytes_s,
        )  # fmt: skip
        self._orphans = Orphans(self._blob_file, self._writeback, self._readers, self._writer, lambda: self._spaces, self._trash)
        self._recovery = Recovery(self._journal, self._writeback, self._readers, self._writer, self.stats, self._clock.not_before)
        self.recipes = Recipes(
            self._recipe_file, lambda: self._spaces, self._arena.view, self._clock.now, self.stats, config.recipe_ttl_s, self._readers
        )
        self.rebuilding = Rebuilding(self.recipes, self.stats)
        self.prefixes = Prefixes(self._reading, self._writeback, self.pins, self.uses, self.recipes)
        self._expiry = Expiry(lambda: self._spaces, self.uses, self._clock.now, self._writeback.poke)
        self.following = Following(self._puts, config.put_idle_s)
        self.sharing = Sharing(self._arena, self._reading, self.stats)

    async def _load(self) -> None:
        await self._recovery.run()
        if self.config.ahead_bytes:
            self._residency.spares.expect(await asyncio.to_thread(bytes_on_ssd, list(self._spaces)))
        for space in self._spaces:
            if space.text is not None:
                self.recipes.look_through(space)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._dir.end_loading)
        self.loaded.set()

    async def __aexit__(self, *_: object) -> None:
        self.rebuilding.close()
        self._puts.close()
        self.following.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await flush(self._spaces, self._writeback, self.config.shutdown_s)
        text_is_closed = await self.recipes.stop(self.config.shutdown_s)
        if await self._writeback.stop(self._writeback_task, self.config.shutdown_s):
            await asyncio.to_thread(self._close_files)
        else:
            _log.critical("a write to SSD does not end: it is left behind, unfinished")
            self.stuck = True
        self.stuck |= not text_is_closed
        self._arena.close()
        self._dir.close()

    def _close_files(self) -> None:
        self._dir.end_loading()
        self._writer.shutdown()
        self._readers.shutdown()
        self._journal.close()
        self._blob_file.close()

    async def _sweep_leases(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for kind in (self.leases, self.pins):
                for lease in kind.expired(now):
                    kind.release(lease)
            self._puts.sweep(now)
            self.following.sweep(now)
            self.rebuilding.sweep(now)
            self.uses.note_time()

    async def _scrub(self, load: "asyncio.Task[None]") -> None:
        await asyncio.wait([load])
        if self.loaded.is_set():
            await self.scrubber.run()

    async def _sweep_orphans(self, load: "asyncio.Task[None]") -> None:
        """Delete blobs on SSD that no page names: what a crash between a blob and its record leaves."""
        await asyncio.wait([load])
        if not self.loaded.is_set():
            return  # loading died: what it did not get to must not be taken for what nobody names
        try:
            await self._orphans.sweep()
        except lmdb.Error as error:
            self._blob_file.mark_damaged()
            _log.error("the blob file is damaged (%s): what can be read of it will be saved at the next start", error)

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
        tree = space.tree
        self.leases.cut(space, slot)
        self.pins.cut(space, slot)
        for put in [p for p in self._puts.of_space(space) if p.anchor is not None]:
            if slot in tree.path_slots(tree.path_to(tree.pages.find_key(put.anchor or b""))):
                put.fail(MissingParent("a page before the put was lost: its bytes did not verify"))
                self.abort_put(put)

    async def create_namespace(self, settings: NamespaceSettings) -> Space:
        """The namespace of these settings, made if it is not there. Durable when this returns.

        Raises Conflict if the name is taken by a namespace of another identity or with other settings. A prefill cost can be given later,
        or another one: it says nothing of what is stored.
        """
        space = self._spaces.by_id(settings.tenant, settings.digest[:16].hex())
        if space is not None:
            if replace(space.settings, prefill=settings.prefill) != settings:
                there = space.settings
                others = [name for name in _SETTINGS if getattr(there, name) != getattr(settings, name)]
                raise Conflict(
                    f"this model fingerprint and KV spec have a namespace, {there.name!r} ({space.id}); other there: {', '.join(others)}"
                )
            if settings.prefill and settings.prefill != space.settings.prefill:
                await self._put_record(space, settings)
            return space
        other = self._spaces.by_name(settings.tenant, settings.name)
        if other is not None:
            raise Conflict(f"the name {settings.name!r} is taken by {other.id}, which has another model fingerprint or KV spec")
        space = self._new_space(self._next_number, settings)
        self._next_number += 1
        self._spaces.add(space)
        try:
            await self._put_record(space, settings)
        except BaseException:
            self._spaces.remove(space)  # unless it has been dropped, and created anew, meanwhile
            if self.tier_events is not None:
                self.tier_events.dropped(space)
            raise
        return space

    async def _put_record(self, space: Space, settings: NamespaceSettings) -> None:
        """Give a namespace its settings, durably. Raises NoSpace or DiskFailing."""
        space.settings = settings
        try:
            async with self._writeback.lock:
                if not space.dropped:
                    await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.put_namespace, space.record())
        except (lmdb.Error, OSError) as error:
            raise self._writeback.failed(error) from error

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
        raise UnknownNamespace(f"no namespace {name_or_id!r}; create it first")

    async def drop_namespace(self, space: Space) -> None:
        """Forget a namespace and everything in it; its space on both tiers is free when this returns.

        Its records go in the background even if the caller is cancelled. Raises DiskFailing if the disk refuses.
        """
        space.dropped = True
        self._spaces.remove(space)
        if self.tier_events is not None:
            self.tier_events.dropped(space)
        for kind in (self.leases, self.pins):
            for lease in kind.of_space(space):
                kind.release(lease)
        self._puts.end_space(space)
        self.rebuilding.end_space(space)
        self._trash.namespaces.append(space.number)
        self._writeback.poke()
        await finish_despite_cancel(asyncio.ensure_future(give_back(space)))
        await self._residency.announce_room()
        try:
            await self._writeback.emptied()
            await self.recipes.drop_namespace(space)
        except (NoSpace, DiskFailing) as error:
            what = f"namespace {space.settings.name!r} is dropped, but its records are deleted only once the disk is well"
            raise DiskFailing(f"{what} (until then a restart brings it back): {error.message}", retry_after_ms=1000) from error

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

    def find_blob(self, space: Space, blob_id: bytes) -> int:
        """The row of a blob; NotFound if the namespace has no such blob."""
        row = space.blobs.find(blob_id) if len(blob_id) == DIGEST_BYTES else -1
        if row < 0 and space.loading:
            raise Busy(f"namespace {space.settings.name!r} is still being read from the journal", retry_after_ms=100)
        if row < 0:
            self.stats.fetch_misses += 1
            raise NotFound(f"blob {blob_id.hex()} is not in this namespace: it was evicted, or never there")
        return row

    def find_blobs(self, space: Space, blob_ids: Sequence[bytes]) -> list[int]:
        """As `find_blob`, of several blobs; ids of 16 bytes."""
        rows = space.blobs.find_many(blob_ids)
        if -1 in rows:
            self.find_blob(space, blob_ids[rows.index(-1)])
        return rows

    def residents(self, space: Space, rows: Sequence[int]) -> list[memoryview | None]:
        """As `resident`, of several blobs."""
        return self._reading.residents(space, rows)

    def resident(self, space: Space, row: int) -> memoryview | None:
        """The stored form of a blob in DRAM, which stays in place while the caller has it pinned; None if it is not there."""
        return self._reading.resident(space, row)

    def hold_resident(self, space: Space, row: int) -> Held | None:
        """Pin a blob that is in DRAM; None if it is not."""
        return self._reading.hold_resident(space, row)

    async def hold(self, space: Space, row: int, turn: asyncio.Event | None = None, *, early: bool = False) -> Held:
        """Pin a blob in memory, wherever it is now (see Reading.hold)."""
        return await self._reading.hold(space, row, turn, early=early)

    def discard_bad_copy(self, space: Space, row: int) -> None:
        """A slice did not verify while it was served."""
        self._reading.discard_bad_copy(space, row)

    def renew_lease(self, owner: int, lease_id: int, ttl_s: float) -> Lease:
        """Let a lease end `ttl_s` seconds from now."""
        return self.leases.renew(owner, lease_id, time.monotonic(), ttl_s)

    def release_lease(self, owner: int, lease_id: int) -> None:
        """End a lease."""
        self.leases.release(self.leases.get(owner, lease_id))

    # --- writing -------------------------------------------------------------------------------------------------------

    async def begin_put(self, owner: int, space: Space, request: PutRequest, base: int = 0, handle: int = 0) -> Put:
        """Start a put, after the boundary of a lease of this owner if a `base` is given (see Puts.begin)."""
        return await self._puts.begin(owner, space, request, self._matching.base_path(owner, space, base), handle)

    def get_put(self, owner: int, handle: int) -> Put:
        """An owner's own put under way; NotFound otherwise."""
        return self._puts.get(owner, handle)

    async def put_begun(self, put: Put, wait_s: float) -> None:
        """Wait a little until a put can take what is sent (see Puts.begun)."""
        await self._puts.begun(put, wait_s)

    async def commit_put(self, put: Put, wait_s: float = 0.0) -> PutResult:
        """Make a put's pages visible (see Puts.commit)."""
        return await self._puts.commit(put, wait_s)

    def abort_put(self, put: Put) -> None:
        """End a put that was not committed. Nothing of it is left."""
        self._puts.abort(put)

    def release_owner(self, owner: int) -> None:
        """A client is gone: its leases end, and its puts leave nothing."""
        self.leases.release_owner(owner)
        self._puts.release_owner(owner)
        self.following.release_owner(owner)
        self.rebuilding.release_owner(owner)
        self.sharing.release_owner(owner)

    # --- looking on ----------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Usage]:
        """Usage by tier."""
        return {"dram": self._arena.usage(), "ssd": self._blob_file.usage(), "text": self._recipe_file.usage()}

    @property
    def loading(self) -> LoadProgress | None:
        """How far loading is; None once everything is back."""
        return self._recovery.progress

    @property
    def dram_segments(self) -> SegmentUsage:
        """How many DRAM segments there are, and their bytes."""
        return self._arena.segments()

    def usage_of(self, tenant: str) -> dict[str, Usage]:
        """A tenant's own usage by tier, out of its quota, or of the tier if it has none."""
        quota = self.quotas.of(tenant)
        return {
            "dram": Usage(quota.dram or self._arena.capacity, self._arena.used_by(tenant)),
            "ssd": Usage(quota.ssd or self._blob_file.capacity, self._ssd_used_by(tenant)),
        }

    def _ssd_used_by(self, tenant: str) -> int:
        return sum(space.ssd_bytes(self._blob_file.extent_bytes) for space in self._spaces.of(tenant))

    def puts_open_of(self, tenant: str) -> int:
        """A tenant's puts under way."""
        return self._puts.of_tenant(tenant)

    async def settle(self) -> None:
        """Wait until nothing is being moved, written or deleted."""
        while self._residency.moving or not self._writeback.idle or not self.recipes.idle:  # noqa: ASYNC110 - for onlookers; nobody should pay for an event
            await asyncio.sleep(_SETTLE_POLL_S)

    @property
    def puts_open(self) -> int:
        """Puts under way."""
        return len(self._puts)

    def pending_of(self, space: Space) -> list[Pending]:
        """What waits for other shards in a namespace."""
        return [pending for assembly in self._puts.assemblies.of_space(space) for pending in assembly.pending]

    @property
    def pending_pages(self) -> int:
        """Pages of which other shards are still to come."""
        return self._puts.assemblies.pages

    @property
    def pinned_blobs(self) -> int:
        """Blobs that transfers and group commits hold in place now."""
        return sum(int(np.count_nonzero(s.blobs.pins[: s.blobs.slots.high])) for s in self._spaces)

    @property
    def backlog(self) -> Backlog:
        """What waits to be written to SSD."""
        return self._writeback.backlog

    @property
    def blob_file(self) -> BlobFile:
        """The SSD tier, for those who verify it."""
        return self._blob_file

    @property
    def readers(self) -> ThreadPoolExecutor:
        """The threads that read from SSD."""
        return self._readers

    @property
    def follows_lru(self) -> bool:
        """Whether what leaves DRAM goes by recency now: the policy is `lru`, or the classifier trusts it more than itself."""
        return self.replacement.policies[DRAM].follows_lru

    @property
    def ssd_state(self) -> SsdState:
        """How the disk under the SSD tier is doing."""
        return self._writeback.state
