"""All puts under way: how they begin, commit, wait for other shards, and end."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import BadRequest, Busy, KVStoreError, NoSpace, NotFound, UnknownNamespace
from kvstore.radix.components import Masks
from kvstore.radix.pages import Slots
from kvstore.radix.values import EMPTY_PATH, Path
from kvstore.store.dram.copies import Copies
from kvstore.store.dram.residency import Residency
from kvstore.store.puts.assembly import ADVANCED_AT_ONCE, MAX_PENDING_PAGES, Assemblies, Assembly, Bringing
from kvstore.store.puts.pages import check_apart, check_pages, check_parent, masks_of, name_alone, name_pages, runs_of, slots_of
from kvstore.store.puts.pending import whole_components
from kvstore.store.puts.plain import is_plain
from kvstore.store.puts.put import Put
from kvstore.store.puts.request import Ack, PutRequest, PutResult, check_parts
from kvstore.store.quotas import Quotas
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.stats import Stats
from kvstore.store.uses import Defer, Uses
from kvstore.tiers.dram import Arena

_log = logging.getLogger("kvstore.store")

MAX_OPEN_PUTS = 1024
"""Each holds the tokens of its pages, so their number is bounded."""
_LATEST = (1 << 32) - 1
"""The last date that a record can hold."""


class Puts:
    """See the module's text. `idle_s`: seconds without a slice, or without another shard, after which a put is given up."""

    def __init__(
        self, arena: Arena, residency: Residency, writeback: Writeback, stats: Stats, uses: Uses, idle_s: float,
        footprint: Callable[[int], int], ssd_bytes: int, quotas: Quotas, copies: Copies,
    ) -> None:  # fmt: skip
        self.assemblies = Assemblies()
        self._arena = arena
        self._residency = residency
        self._writeback = writeback
        self._stats = stats
        self._uses = uses
        self._idle_s = idle_s
        self._footprint = footprint
        self._ssd_bytes = ssd_bytes
        self._quotas = quotas
        self._copies = copies
        self._open: dict[int, Put] = {}
        self._own_names: dict[tuple[int, int], Put] = {}
        """Of those by an owner: the puts that are open under a name of its own. A name may come again, a handle never does."""
        self._went_on = asyncio.Event()
        self._opened = asyncio.Event()
        self._many = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def of_space(self, space: Space) -> list[Put]:
        """The puts to a namespace."""
        return [put for put in self._open.values() if put.space is space]

    def of_tenant(self, tenant: str) -> int:
        """How many puts a tenant has under way."""
        return sum(put.space.settings.tenant == tenant for put in self._open.values())

    def of_put_id(self, space: Space, put_id: bytes) -> list[Put]:
        """The puts of one computation."""
        return [put for put in self._open.values() if put.space is space and put.request.put_id == put_id]

    # --- beginning -----------------------------------------------------------------------------------------------------

    async def begin(self, owner: int, space: Space, request: PutRequest, base: Path = EMPTY_PATH, handle: int = 0) -> Put:
        """Start a put: check it, find out which of its parts are missing, and take DRAM slots for them.

        An owner that names it (`handle`) sends at once, whatever is wanted. Raises MissingParent, Busy or NoSpace; then nothing is held.
        """
        if len(self._open) >= MAX_OPEN_PUTS:
            self._stats.puts_busy += 1
            raise Busy("too many puts are under way", retry_after_ms=100)
        if space.loading:
            self._stats.puts_busy += 1
            raise Busy(f"namespace {space.settings.name!r} is still being loaded: it can be read, and written to soon", retry_after_ms=500)
        if len(request.tokens) % space.tree.pages.token_bytes:
            raise BadRequest(f"a put covers whole pages of {space.spec.label_words} tokens, not {len(request.tokens) / 4:g} tokens")
        check_parts(space.spec, request, base.pages + len(request.tokens) // space.tree.pages.token_bytes)
        if (owner, handle) in self._own_names or not 0 <= handle < 1 << 63:
            raise BadRequest("the handle of a put is 63 random bits, and not that of another")
        put = Put(secrets.randbits(63), owner, space, request, self._arena, base.pages)
        put.own_name = handle
        self._check(put)
        path = base if space.spec.flat else self._hold_prefix(put, base)
        self._open[put.handle] = put
        if put.at_once:
            self._own_names[owner, handle] = put
        try:
            if space.spec.flat:
                _hold_alone(put)
            else:
                await name_pages(put, path, space.tree.path_slots(path))
                check_parent(put, path, self.of_put_id(space, request.put_id), self.assemblies)
            wanted = self._wanted(put, masks_of(put))
            self._count_in_flight(put, self._check_size(put, wanted))
            put.want(wanted)
            sizes = put.stored_sizes
            for page, part in put.wanted_cells():
                put.add_slot(page, part, await self._residency.allocate(space, sizes[part]))
            if space.dropped:
                raise UnknownNamespace(f"namespace {space.settings.name!r} was dropped")
        except BaseException as error:
            self._count_refusal(error)
            if isinstance(error, KVStoreError):
                put.fail(error)  # what was sent behind it is told that, too
            self.abort(put)
            raise
        put.ready = True
        put.begun.set()
        self._opened.set()
        self._opened = asyncio.Event()
        return put

    def _count_refusal(self, error: BaseException) -> None:
        self._stats.puts_busy += isinstance(error, Busy)
        self._stats.puts_no_space += isinstance(error, NoSpace)

    def _check(self, put: Put) -> None:
        request, space = put.request, put.space
        pages = put.total_pages - request.first_page
        if len(request.put_id) != DIGEST_BYTES:
            raise BadRequest(f"the put id is {len(request.put_id)} bytes, not {DIGEST_BYTES}")
        check_pages(put)
        if space.spec.flat:
            name_alone(put)
        check_apart(put, self.of_put_id(space, request.put_id), self.assemblies)
        alone = whole_components(space.spec, request.ranges) & space.tree.rules.required == space.tree.rules.required
        if not alone and self.assemblies.pages + pages > MAX_PENDING_PAGES:
            raise Busy("too many pages wait for other shards", retry_after_ms=1000)

    @staticmethod
    def _hold_prefix(put: Put, base: Path) -> Path:
        """Pin those pages of a put's prefix that are there, labels known from here on. Returns their path."""
        tree, request = put.space.tree, put.request
        path = tree.match(request.tokens, request.extras, base)
        path = tree.open_path(path, request.tokens, request.extras, base.pages)
        put.hold([tree.hold(path)] if path.pages else [], min(path.pages, put.total_pages))
        return path

    def _wanted(self, put: Put, existing: Masks) -> npt.NDArray[np.bool_]:
        """Which parts are to be sent: those that no page has, and that did not come with an earlier try of this shard."""
        ranges, required = put.request.ranges, put.space.tree.rules.required
        wanted = put.in_spans()
        if (exists := existing != 0).any():
            bits = np.array([1 << r.component for r in ranges], np.uint16)
            has = (existing[:, np.newaxis] & bits) != 0
            wanted &= ~exists[:, np.newaxis] | (~has & ((bits & required) == 0))
        if self.assemblies.adopt(put.space, put.request.put_id, put.keys, put.owner):
            wanted &= ~self.assemblies.present(put.space, put.request.put_id, put.first_page, put.keys, ranges)
        return wanted

    def _count_in_flight(self, put: Put, nbytes: int) -> None:
        """From now until it ends, what the put takes in DRAM is in flight. Raises Busy or NoSpace by the tenant's quota."""
        if put.closed:
            raise put.why_ended
        tenant = put.space.settings.tenant
        self._quotas.start_put(tenant, nbytes)
        put.at_end.append(lambda: self._quotas.end(tenant, nbytes))

    def _check_size(self, put: Put, wanted: npt.NDArray[np.bool_]) -> int:
        """A put that can never fit is refused at once. Returns the bytes it takes in DRAM."""
        cells = wanted.sum(axis=0).tolist()
        needed: int = sum(n * Arena.slot_class("", size).slot_bytes for n, size in zip(cells, put.stored_sizes, strict=True))
        if needed > self._arena.capacity:
            raise NoSpace(
                f"a put of {needed} bytes does not fit into a DRAM tier of {self._arena.capacity}: "
                "put fewer pages at once, or give the daemon a larger --dram"
            )
        on_disk = sum(n * self._footprint(size) for n, size in zip(cells, put.stored_sizes, strict=True))
        if put.request.ack is Ack.DURABLE and on_disk > self._ssd_bytes:
            raise NoSpace(f"a durable put of {on_disk} bytes does not fit into an SSD tier of {self._ssd_bytes}")
        return needed

    # --- ending --------------------------------------------------------------------------------------------------------

    def get(self, owner: int, handle: int) -> Put:
        """An owner's own put under way, by its handle or the owner's name for it; NotFound otherwise."""
        put = self._own_names.get((owner, handle)) or self._open.get(handle)
        if put is None or put.owner != owner:
            raise NotFound(f"put {handle} does not exist: it was committed, aborted, or timed out")
        put.last_used = time.monotonic()
        return put

    @staticmethod
    async def begun(put: Put, wait_s: float) -> None:
        """Wait until a put that is sent at once can take what is sent. Raises Busy, or why it has ended or will."""
        if put.error is not None:
            raise put.error
        if not put.ready:
            try:
                async with asyncio.timeout(wait_s):
                    await put.begun.wait()
            except TimeoutError:
                raise Busy("there is no room for the put yet", retry_after_ms=50) from None
        if put.error is not None or put.closed:  # meanwhile
            raise put.why_ended

    async def commit(self, put: Put, wait_s: float = 0.0) -> PutResult:
        """Make the put's pages visible, as far as other shards do not lack; wait for those up to `wait_s`.

        A put that asks for it is acknowledged when its pages are durable. If NoSpace comes from that step, they can be read
        but are not promised to stay.
        """
        try:
            return await self._commit_and_wait(put, wait_s)
        except (Busy, NoSpace) as error:
            self._count_refusal(error)
            raise

    def commit_now(self, put: Put, defer: Defer) -> PutResult | None:
        """As `commit`, for a put that can't but succeed at once, as most can't; None, with nothing done, for others.

        `defer` takes over the commit itself, to be done once the answer is out, but before anybody else has a turn.
        """
        if put.request.ack is Ack.DURABLE or not is_plain(put, self.assemblies) or put.in_dram_already():
            return None
        defer(partial(self._enter, put))
        return PutResult(put.total_pages - put.first_page, 0)

    def _enter(self, put: Put) -> None:
        """Commit a plain put. Its client has been told, so what must not happen here is a miss to all."""
        pages = put.total_pages - put.first_page
        try:
            existed = slots_of(put) >= 0
            _, waiting = self._take_in(put, existed)
            went_on = next(self.assemblies.advance_each(put.space, put.request.put_id, waiting), [])
            self._wake_waiters()
            done = self._committed(put, slots_of(put), existed, went_on)
        except Exception:  # noqa: BLE001 - the answer is out
            _log.exception("a put of %d pages was acknowledged, but could not be taken in: they are not there", pages)
            self.abort(put)
        else:
            if done.new_pages != pages:
                _log.error("a put of %d new pages was acknowledged, and %d were new", pages, done.new_pages)

    async def _commit_and_wait(self, put: Put, wait_s: float) -> PutResult:
        await put.name_blobs()
        if there := put.in_dram_already():  # it is shared, if it is what it was
            put.bad_copies = await self._copies.bad_ones(put.space, there)
        result = await self._commit(put)
        space = put.space
        if result.pending_pages and wait_s > 0:
            await self._whole(put, wait_s)
            pending = int(np.count_nonzero(slots_of(put) < 0))
            result = replace(result, new_pages=result.new_pages + result.pending_pages - pending, pending_pages=pending)
        if put.request.ack is Ack.DURABLE and not result.pending_pages:
            await self._promise(space, put.last_keys())
        return result

    async def _commit(self, put: Put) -> PutResult:
        """All in one step, but for many pages of a flat namespace that other shards have brought a part of."""
        cancelled: asyncio.CancelledError | None = None
        try:
            put.check_complete()
            existed = slots_of(put) >= 0
            entered, waiting = self._take_in(put, existed)
            steps = self.assemblies.advance_each(put.space, put.request.put_id, waiting)
            went_on = next(steps, [])
            if len(waiting) > ADVANCED_AT_ONCE:
                self._check_all_here(put, slots_of(put) >= 0)
                put.close(committed=True)  # nothing of it is the put's any more
                self._take_out(put)
                try:
                    for more in steps:
                        went_on += more
                        await asyncio.sleep(0)
                except asyncio.CancelledError as error:
                    cancelled = error  # each page that is whole has to be in the tree, and durable if it was to be
                    went_on += [gained for more in steps for gained in more]
            if entered or went_on:
                self._wake_waiters()
            slots = slots_of(put)
            self._check_all_here(put, slots >= 0)
        except BaseException:
            self.abort(put)
            raise
        result = self._committed(put, slots, existed, went_on)
        if cancelled is not None:
            raise cancelled
        return result

    def _committed(
        self, put: Put, slots: Slots, existed: npt.NDArray[np.bool_], went_on: list[tuple[Assembly, bytes]]
    ) -> PutResult:  # fmt: skip
        """A put's pages are where they belong: note the uses, and what is to become durable without anybody who waits for it."""
        space, stats = put.space, self._stats
        if space.spec.flat:
            self._uses.use_alone(space, slots[existed & (slots >= 0)], put.request.hints)
            self._uses.use_alone(space, slots[~existed & (slots >= 0)], put.request.hints, put=True)
        else:
            self._use_prefixes(put, slots, existed, went_on)
        put.close(committed=True)
        self._take_out(put)
        there, before = int(np.count_nonzero((slots >= 0) | existed)), int(np.count_nonzero(existed))
        stats.puts += 1
        stats.put_pages += there - before
        stats.put_exists_pages += before
        stats.put_bytes += put.payload_bytes
        durable, whole = put.request.ack is Ack.DURABLE, there == len(slots)
        for assembly, key in went_on:
            if assembly.durable and not (durable and assembly.put_id == put.request.put_id and whole):
                self._promise_later(space, key)
        if durable and not whole and space.spec.flat:  # nobody waits for those that are here
            for page in np.flatnonzero(slots >= 0).tolist():
                self._promise_later(space, put.key(page))
        return PutResult(there - before, before, len(slots) - there, runs_of(existed) if space.spec.flat else ())

    def _use_prefixes(self, put: Put, slots: Slots, existed: npt.NDArray[np.bool_], went_on: list[tuple[Assembly, bytes]]) -> None:
        """Record the use of what a put has as its pages now, and of what went on with it."""
        space = put.space
        used = {key: (assembly.hints, 0) for assembly, key in went_on}
        if there := int(np.count_nonzero(slots >= 0)):
            used[put.key(put.first_page + there - 1)] = (put.request.hints, put.first_page + int(np.count_nonzero(existed)))
        for key, (hints, hits) in used.items():
            if (slot := space.tree.pages.find_key(key)) >= 0:
                self._uses.use(space, space.tree.path_to(slot), hints, hits=hits)

    def _check_all_here(self, put: Put, there: npt.NDArray[np.bool_]) -> None:
        """What was not wanted of this put, because an earlier try had brought it, is still here. Raises Busy if it has gone meanwhile."""
        if there.all():
            return
        here = self.assemblies.present(put.space, put.request.put_id, put.first_page, put.keys, put.request.ranges)
        if not (here | ~put.in_spans())[~there].all():
            raise Busy("what an earlier try of this put had brought is gone: put it again", retry_after_ms=10)

    def _take_in(self, put: Put, existed: npt.NDArray[np.bool_]) -> tuple[bool, list[bytes]]:
        """Take over what a put received: into the tree, or to wait for what is missing. `existed` says which pages are in the tree already.

        Returns whether any of it went straight into the tree, and what is to be advanced (see Assemblies.advance_each).
        """
        space, put_id, pending = put.space, put.request.put_id, put.hand_over()
        bring = Bringing(put.owner, time.monotonic() + self._idle_s, put.request.ack is Ack.DURABLE, put.request.hints)
        if space.spec.flat:
            return self.assemblies.take_alone(space, put_id, pending, existed, bring)
        if not existed.any() and self.assemblies.take_whole(space, put_id, pending):
            return True, []
        self.assemblies.deposit(space, put_id, pending, bring)
        return False, [b""]

    def _wake_waiters(self) -> None:
        """Whoever waits for pages to be whole looks again."""
        self._went_on.set()
        self._went_on = asyncio.Event()

    async def _whole(self, put: Put, wait_s: float) -> None:
        """Wait until all pages of a put are in the tree, or the time is over."""
        try:
            async with asyncio.timeout(wait_s):
                while (slots_of(put) < 0).any() and not put.space.dropped:
                    await self._went_on.wait()
        except TimeoutError:
            pass  # the result says what is still pending

    def _retain(self, space: Space, key: bytes) -> bool:
        slot = space.tree.pages.find_key(key)
        if slot < 0:
            return False
        if space.settings.retention_s:  # whole seconds, rounded so that it is never short of what was promised
            slots = space.tree.path_slots(space.tree.path_to(slot))
            retain = space.tree.pages.retain
            retain[slots] = np.maximum(retain[slots], min(int(self._writeback.now()) + 2 + space.settings.retention_s, _LATEST))
        return True

    async def _promise(self, space: Space, keys: list[bytes]) -> None:
        """Make pages durable and retained, with all before them."""
        retained = [self._retain(space, key) for key in keys]
        if not all(retained) or await self._writeback.make_durable(space, keys, rewrite=True) < len(keys):
            raise NotFound("the pages were removed before they became durable: put them again")

    def _promise_later(self, space: Space, key: bytes) -> None:
        """What an earlier shard asked for becomes true in the background: it is not there to wait."""
        if self._retain(space, key):
            self._writeback.queue(space, key, rewrite=True)

    def abort(self, put: Put) -> None:
        """End a put that was not committed. Nothing of it is left."""
        self._stats.puts_aborted += self._take_out(put)
        put.close()

    def _take_out(self, put: Put) -> bool:
        """Whether it was under way; it is no more."""
        if put.at_once:
            self._own_names.pop((put.owner, put.own_name), None)
        return self._open.pop(put.handle, None) is not None

    def sweep(self, now: float) -> None:
        """Give up puts that receive nothing any more, and pages whose other shards do not come."""
        for put in list(self._open.values()):
            if put.last_used + self._idle_s < now:
                self.abort(put)
        self.assemblies.expire(now)
        self._released()

    def release_owner(self, owner: int) -> None:
        """A client is gone: its puts leave nothing."""
        for put in [p for p in self._open.values() if p.owner == owner]:
            self.abort(put)
        self.assemblies.release_owner(owner)
        self._released()

    def _released(self) -> None:
        """Shards were given up; if there are many, the rest goes in turns of the loop."""
        self._writeback.poke()
        if self.assemblies.some_left:
            self._many.set()

    async def give_up_shards(self) -> None:
        """A background task: of many shards that are to be given up, some at a time."""
        while True:
            await self._many.wait()
            self._many.clear()
            while self.assemblies.some_left:
                await asyncio.sleep(0)
                self.assemblies.release_some()
                self._writeback.poke()

    def end_space(self, space: Space) -> None:
        """A namespace is dropped."""
        for put in self.of_space(space):
            put.fail(UnknownNamespace(f"namespace {space.settings.name!r} was dropped"))
            self.abort(put)
        self.assemblies.end_space(space)
        self._released()
        self._wake_waiters()
        self._opened.set()
        self._opened = asyncio.Event()

    def close(self) -> None:
        """The daemon stops: everything under way ends."""
        for put in list(self._open.values()):
            self.abort(put)
        self.assemblies.drop_all()

    # --- looking on ----------------------------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Wait until another put has begun."""
        await self._opened.wait()


def _hold_alone(put: Put) -> None:
    """Pin those pages of a put to a flat namespace that are there."""
    tree, slots = put.space.tree, slots_of(put)
    there = slots >= 0
    for slot in slots[there].tolist():
        tree.hold(tree.path_to(slot))
    put.hold([put.key(page) for page in np.flatnonzero(there).tolist()], len(slots) if there.all() else int(there.argmin()))
