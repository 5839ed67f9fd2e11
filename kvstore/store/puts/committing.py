"""How puts end well: what they received becomes pages, they wait for other shards, and what was asked for becomes durable."""

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.errors import Busy, DiskFailing, NoSpace, NotFound
from kvstore.radix.pages import Slots
from kvstore.store.dram.copies import Copies
from kvstore.store.puts.assembly import ADVANCED_AT_ONCE, Assemblies, Assembly, Bringing
from kvstore.store.puts.open_puts import OpenPuts
from kvstore.store.puts.pages import Had, done_pages, runs_of, slots_of
from kvstore.store.puts.plain import is_plain
from kvstore.store.puts.put import Put
from kvstore.store.puts.request import Ack, PutResult
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.stats import Stats
from kvstore.store.uses import Defer, Uses

_log = logging.getLogger("kvstore.store")

_LATEST = (1 << 32) - 1
"""The last date that a record can hold."""


class Commits:
    """See the module's text. `idle_s`: seconds without another shard after which pages that wait for it are given up."""

    def __init__(
        self, open_puts: OpenPuts, assemblies: Assemblies, writeback: Writeback, stats: Stats, uses: Uses, copies: Copies, idle_s: float
    ) -> None:  # fmt: skip
        self._open = open_puts
        self._assemblies = assemblies
        self._writeback = writeback
        self._stats = stats
        self._uses = uses
        self._copies = copies
        self._idle_s = idle_s
        self._went_on = asyncio.Event()

    async def commit(self, put: Put, wait_s: float = 0.0) -> PutResult:
        """Make the put's pages visible, as far as other shards do not lack; wait for those up to `wait_s`.

        A put that asks for it is acknowledged when its pages are durable. If NoSpace comes from that step, they can be read
        but are not promised to stay, but for the error's `done_pages`.
        """
        try:
            return await self._commit_and_wait(put, wait_s)
        except (Busy, NoSpace, DiskFailing) as error:
            self._stats.count_refusal(error)
            raise error if put.space.spec.flat else error.after(done_pages(put)) from error

    def commit_now(self, put: Put, defer: Defer) -> PutResult | None:
        """As `commit`, for a put that can't but succeed at once, as most can't; None, with nothing done, for others.

        `defer` takes over the commit itself, to be done once the answer is out, but before anybody else has a turn.
        """
        if put.request.ack is Ack.DURABLE or not is_plain(put, self._assemblies) or put.in_dram_already():
            return None
        defer(partial(self._enter, put))
        return PutResult(put.total_pages - put.first_page, 0)

    def _enter(self, put: Put) -> None:
        """Commit a plain put. Its client has been told, so what must not happen here is a miss to all."""
        space, pages = put.space, put.total_pages - put.first_page
        try:
            before = space.tree.page_count
            self._assemblies.bring_whole(space, put.request.put_id, put.hand_over())
            if (new := space.tree.page_count - before) != pages:
                _log.error("a put of %d new pages was acknowledged, and %d were new", pages, new)
            went_on = self._assemblies.advance_others(space)
            self.wake_waiters()
            self._use_prefixes(put, pages, 0, went_on)
            self._end(put, new, 0)
            for assembly, key in went_on:
                if assembly.durable:
                    self._promise_later(space, key)
        except Exception:  # noqa: BLE001 - the answer is out
            _log.exception("a put of %d pages was acknowledged, but could not be taken in: they are not there", pages)
            self._open.abort(put)

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
            had = Had.now(put)
            entered, waiting = self._take_in(put, had.existed)
            steps = self._assemblies.advance_each(put.space, put.request.put_id, waiting)
            went_on = next(steps, [])
            if len(waiting) > ADVANCED_AT_ONCE:
                self._check_all_here(put, slots_of(put) >= 0)
                put.close(committed=True)  # nothing of it is the put's any more
                self._open.take_out(put)
                try:
                    for more in steps:
                        went_on += more
                        await asyncio.sleep(0)
                except asyncio.CancelledError as error:
                    cancelled = error  # each page that is whole has to be in the tree, and durable if it was to be
                    went_on += [gained for more in steps for gained in more]
            if entered or went_on:
                self.wake_waiters()
            slots = slots_of(put)
            self._check_all_here(put, slots >= 0)
        except BaseException:
            self._open.abort(put)
            raise
        result = self._committed(put, slots, had, went_on)
        if cancelled is not None:
            raise cancelled
        return result

    def _committed(self, put: Put, slots: Slots, had: Had, went_on: list[tuple[Assembly, bytes]]) -> PutResult:
        """A put's pages are where they belong: note the uses, and what is to become durable without anybody who waits for it."""
        space, existed = put.space, had.existed
        if space.spec.flat:
            self._uses.use_alone(space, slots[existed & (slots >= 0)], put.request.hints)
            self._uses.use_alone(space, slots[~existed & (slots >= 0)], put.request.hints, put=True)
        else:
            self._use_prefixes(put, int(np.count_nonzero(slots >= 0)), int(np.count_nonzero(existed)), went_on)
        there, before = int(np.count_nonzero((slots >= 0) | existed)), int(np.count_nonzero(existed))
        self._end(put, there - before, before)
        durable, whole = put.request.ack is Ack.DURABLE, there == len(slots)
        for assembly, key in went_on:
            if assembly.durable and not (durable and assembly.put_id == put.request.put_id and whole):
                self._promise_later(space, key)
        if durable and not whole and space.spec.flat:  # nobody waits for those that are here
            for page in np.flatnonzero(slots >= 0).tolist():
                self._promise_later(space, put.key(page))
        existing = runs_of(existed) if space.spec.flat else ()
        return PutResult(there - before, before, len(slots) - there, existing, had.gained(put, slots))

    def _end(self, put: Put, new: int, existing: int) -> None:
        """A put is committed, of so many pages that are new and that existed."""
        put.close(committed=True)
        self._open.take_out(put)
        self._stats.puts += 1
        self._stats.put_pages += new
        self._stats.put_exists_pages += existing
        self._stats.put_bytes += put.payload_bytes

    def _use_prefixes(self, put: Put, there: int, existed: int, went_on: list[tuple[Assembly, bytes]]) -> None:
        """Record the use of the pages that a put has now, of which some existed, and of what went on with it."""
        space = put.space
        used = {key: (assembly.hints, 0) for assembly, key in went_on}
        if there:
            used[put.key(put.first_page + there - 1)] = (put.request.hints, put.first_page + existed)
        for key, (hints, hits) in used.items():
            if (slot := space.tree.pages.find_key(key)) >= 0:
                self._uses.use(space, space.tree.path_to(slot), hints, hits=hits)

    def _check_all_here(self, put: Put, there: npt.NDArray[np.bool_]) -> None:
        """What was not wanted of this put, because an earlier try had brought it, is still here. Raises Busy if it has gone meanwhile."""
        if there.all():
            return
        here = self._assemblies.present(put.space, put.request.put_id, put.first_page, put.keys, put.request.ranges)
        if not (here | ~put.in_spans())[~there].all():
            raise Busy("what an earlier try of this put had brought is gone: put it again", retry_after_ms=10)

    def _take_in(self, put: Put, existed: npt.NDArray[np.bool_]) -> tuple[bool, list[bytes]]:
        """Take over what a put received: into the tree, or to wait for what is missing. `existed` says which pages are in the tree already.

        Returns whether any of it went straight into the tree, and what is to be advanced (see Assemblies.advance_each).
        """
        space, put_id, pending = put.space, put.request.put_id, put.hand_over()
        bring = Bringing(put.owner, time.monotonic() + self._idle_s, put.request.ack is Ack.DURABLE, put.request.hints)
        if space.spec.flat:
            return self._assemblies.take_alone(space, put_id, pending, existed, bring)
        if not existed.any() and self._assemblies.take_whole(space, put_id, pending):
            return True, []
        self._assemblies.deposit(space, put_id, pending, bring)
        return False, [b""]

    def wake_waiters(self) -> None:
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
