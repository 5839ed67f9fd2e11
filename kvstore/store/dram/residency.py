"""Room in DRAM: allocation, and the mover that demotes ahead of need. What is in it is read in `reading.py`."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Iterable
from functools import partial

import numpy as np

from kvstore.columns import distinct
from kvstore.errors import Busy, DiskFailing, KVStoreError, NoSpace
from kvstore.radix.pages import Slots
from kvstore.store.dram.eviction import (
    LOOKED_AT_ONCE,
    NOT_DISCARDED,
    OF_PUTS,
    InDram,
    Unit,
    discard,
    dram_victims,
    evict_ssd,
    free_dram,
    kept_on_ssd_as,
    ssd_is_full,
)
from kvstore.store.dram.replacement import DRAM, SSD, Replacement
from kvstore.store.dram.spares import Spares
from kvstore.store.dram.vacate import Vacator
from kvstore.store.quotas import Quotas, SsdBudget, named, room_to_make
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.stats import Stats
from kvstore.tiers.dram import Arena
from kvstore.tiers.policies import Values
from kvstore.tiers.segments import Room, SlotClass, make_segment
from kvstore.tiers.ssd import BlobFile
from kvstore.tiers.watermarks import Watermarks

_log = logging.getLogger("kvstore.mover")
_ROOM_POLL_S = 0.05
_UNITS_AT_A_TIME = 256
"""Evicted before others get a turn."""
_IDLE_S = 20.0
"""A segment that has been empty for this long to twice as long is given back."""


class Residency:
    """The DRAM tier at work. `run` is the mover's task."""

    def __init__(
        self, arena: Arena, blob_file: BlobFile, spaces: Callable[[], Iterable[Space]],
        stats: Stats, watermarks: Watermarks, wait_s: float, vacator: Vacator, quotas: Quotas, replacement: Replacement,
        ahead: int = 0,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._blob_file = blob_file
        self._spaces = spaces
        self._stats = stats
        self._watermarks = watermarks
        self._wait_s = wait_s
        self._vacator = vacator
        self._quotas = quotas
        self._replacement = replacement
        self.spares = Spares(arena, ahead, self._grow_ahead)
        self._own_room: dict[str, asyncio.Task[None]] = {}
        self._demand = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Condition()
        self._growing: dict[SlotClass, asyncio.Task[None]] = {}
        self._moving = False
        self._refused: dict[int, set[str]] = {}
        """Namespaces that did not let something go that can't be written, and why, in words."""
        self._held_up: dict[str | None, str] = {}
        """Why the last pass of the mover freed nothing, if that is for good: that over all, or (by tenant) one over what is its own."""
        self._why_refused: dict[str, str] = {}
        """By tenant, what SSD said last to what had to be written there; that may be about its quota, which is told to nobody else."""
        self.writeback: Writeback

    # --- allocation ----------------------------------------------------------------------------------------------------

    async def allocate(self, space: Space, nbytes: int, wait_s: float | None = None) -> int:
        """A DRAM slot for `nbytes`. Waits a bounded time for the mover to make room, then raises Busy.

        Raises NoSpace if the tier could never hold it.
        """
        slot_class = Arena.slot_class(space.settings.tenant, nbytes)
        if slot_class.slot_bytes > self._arena.capacity:
            raise NoSpace(f"{nbytes} bytes do not fit into a DRAM tier of {self._arena.capacity}")
        self._vacator.asked(slot_class.slot_bytes)
        opened = self._arena.opened
        slot = self._take(slot_class)
        if slot is None:
            await asyncio.sleep(0)  # who was begun without a task has one from here on
            slot = await self._wait_for_slot(slot_class, self._wait_s if wait_s is None else wait_s)
        if self._arena.opened != opened:
            self.spares.took(slot_class)
        if self._watermarks.above_high(self._arena.usage()):
            self._wake.set()
        else:
            self._vacator.keep_headroom()
        return slot

    def _take(self, slot_class: SlotClass) -> int | None:
        return None if self._over_quota(slot_class) else self._arena.allocate(slot_class)

    def _over_quota(self, slot_class: SlotClass) -> int:
        """Bytes that the tenant must give up before it may have another slot."""
        tenant = slot_class.tenant
        return room_to_make(self._quotas.of(tenant).dram, self._arena.used_by(tenant), slot_class.slot_bytes)

    async def _wait_for_slot(self, slot_class: SlotClass, wait_s: float) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        demand = 0
        try:
            while True:
                if (slot := self._take(slot_class)) is not None:
                    return slot
                over = self._over_quota(slot_class)
                if not over and await self._find_room(slot_class, max(0.0, deadline - loop.time()), evicting=demand > 0):
                    continue
                if loop.time() >= deadline:
                    raise self._no_slot(slot_class, bool(over), wait_s)
                wanted = 0 if over else slot_class.slot_bytes  # who is over its quota makes nobody else's pages go
                self._demand += wanted - demand
                demand = wanted
                if over:
                    self._make_own_room(slot_class.tenant, over)
                else:
                    self._wake.set()
                await self._room_or_pause()
        finally:
            self._demand -= demand

    def _no_slot(self, slot_class: SlotClass, over: bool, wait_s: float) -> Busy | NoSpace:
        """What is told to who has waited for a slot in vain; of others' pages nothing."""
        tenant, why = slot_class.tenant, f"no DRAM free for {slot_class.slot_bytes} bytes"
        if over and (limit := self._quotas.of(tenant).dram) is not None:
            why += f": {named(tenant, 'dram', limit)} is full"
        if held_up := self._held_up.get(tenant if over else None):
            return NoSpace(f"{why}: {held_up}")
        return Busy(why, retry_after_ms=max(50, int(1000 * wait_s)))

    async def _room_or_pause(self) -> None:
        """Wait for word of room, in steps: it also comes from leases that end and puts that are given up, which announce nothing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ROOM_POLL_S), self._room:
                await self._room.wait()

    def _make_own_room(self, tenant: str, wanted: int) -> None:
        """A tenant over its quota gives up its own coldest pages, never another's. In the background; one at a time."""
        if tenant not in self._own_room:
            task = asyncio.create_task(self._reclaim_own(tenant, wanted), name=f"kvstore-quota {tenant}")
            self._own_room[tenant] = task
            task.add_done_callback(lambda _: self._own_room.pop(tenant, None))

    async def _reclaim_own(self, tenant: str, wanted: int) -> None:
        try:
            await self.reclaim(wanted, tenant)
            await self.announce_room()
        except KVStoreError as error:
            _log.warning("no room made within the quota of tenant %s: %s", tenant, error.message)

    async def _find_room(self, slot_class: SlotClass, wait_s: float, *, evicting: bool) -> bool:
        """Get room for more slots without evicting anything. Returns whether it is worth to try for a slot again.

        Above the high mark blobs are moved only if evicting did not help: the mover is about to free more than a slot.
        """
        if await self._grow(slot_class, whole=True):
            return True
        full = self._watermarks.above_high(self._arena.usage())
        if wait_s and (evicting or not full) and await self._vacator.make_room(slot_class.slot_bytes, wait_s):
            return True
        return await self._grow(slot_class)

    async def _grow(self, slot_class: SlotClass, *, whole: bool = False) -> bool:
        """Add a segment, if there is room for one. Callers that want the same kind share one."""
        task = self._growing.get(slot_class)
        if task is None:
            room = self._arena.reserve_segment(slot_class, whole=whole)
            if room is None:
                return False
            task = self._growing[slot_class] = asyncio.create_task(self._add_segment(room))
        await asyncio.shield(task)
        return True

    async def _grow_ahead(self, slot_class: SlotClass) -> bool:
        """Add a segment that nobody waits for yet, if there is room that nobody has."""
        task = self._growing.get(slot_class)
        if task is None:
            room = self._arena.reserve_spare(slot_class, self.spares.most)
            if room is None:
                return False
            task = self._growing[slot_class] = asyncio.create_task(self._add_segment(room))
        await asyncio.shield(task)
        return True

    async def _add_segment(self, room: Room) -> None:
        try:
            segment = await asyncio.to_thread(make_segment, room)  # not behind reads that wait for a disk
        except OSError as error:
            self._arena.cancel_segment(room)
            raise NoSpace(f"the machine has no memory for a segment of {room.nbytes} bytes: {error}") from error
        else:
            self._arena.add_segment(room, segment)
        finally:
            # Here and not in a callback: who finds the task done, and its slots gone, must not wait for it once more, for ever.
            self._growing.pop(room.slot_class, None)

    async def announce_room(self) -> None:
        """Slots were freed: let those who wait try again."""
        async with self._room:
            self._room.notify_all()

    @property
    def moving(self) -> bool:
        """Whether the mover is at work, or about to be."""
        return self._moving or self._wake.is_set() or self._vacator.busy or self.spares.busy

    # --- the mover -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Demote and free the coldest pages whenever usage passes the high mark, down to the low one."""
        try:
            while True:
                try:
                    async with asyncio.timeout(_IDLE_S):
                        await self._wake.wait()
                except TimeoutError:
                    await self._vacator.give_back(self._arena.retire_idle(self.spares.most))
                    continue
                await self._run_once()
        finally:
            await self._vacator.stop()
            await self.spares.stop()

    async def _run_once(self) -> None:
        self._wake.clear()
        self._moving = True
        while (wanted := self._watermarks.excess(self._arena.usage(), self._demand)) > 0:
            freed = await self.reclaim(wanted)
            await self.announce_room()
            await asyncio.sleep(0.001)  # those who wait take their slots before anything more is evicted
            if freed <= 0:
                break
        self._moving = False
        self._vacator.keep_headroom()

    async def reclaim(self, wanted: int, tenant: str | None = None) -> int:
        """Free about so many bytes of DRAM (of a tenant's own, if given), of the pages that are worth the least. Returns the bytes.

        What may not be discarded, and can't be written, is passed over.
        """
        refusing: dict[int, set[str]] = {}
        while (freed := await self._reclaim_once(wanted, tenant, refusing)) <= 0 and self._refused.keys() - refusing:
            refusing |= self._refused
        state = self.writeback.state
        if freed > 0 or not refusing:
            self._held_up.pop(tenant, None)
        else:
            why = state.error().message if not state.ok else self._why_refused.get(tenant or "", "SSD has no room for it")
            self._held_up[tenant] = f"what is there {' or '.join(sorted(set().union(*refusing.values()), reverse=True))}, and {why}"
        return freed

    async def _reclaim_once(self, wanted: int, tenant: str | None, refusing: Container[int]) -> int:
        freed, pending = 0, []
        self._refused = {}
        await self._replacement.give_up_waiting()
        candidates = await self._candidates(self._of(tenant), refusing)
        await self._replacement.catch_up()
        if tenant is None:
            self._replacement.resize(DRAM, self._of(None))
        victims = dram_victims(candidates, wanted, partial(self._worth_in_dram, whole=tenant is None))
        for number, unit in enumerate(victims, 1):
            if not number % _UNITS_AT_A_TIME:
                await asyncio.sleep(0)
            if (slot := unit.slot_unless_used()) < 0:
                continue
            if unit.space.is_durable(slot):
                freed += self._free(unit, slot)
            else:
                pending.append(unit)
        before = self._arena.usage().used
        pending = self._discard_unwanted(pending)
        freed += before - self._arena.usage().used
        for first in range(0, len(pending), 64):
            freed += await self._demote(pending[first : first + 64])
            await self.announce_room()
        self.writeback.poke()  # what was discarded is to be deleted
        return freed

    async def _candidates(self, spaces: list[Space], refusing: Container[int]) -> list[InDram]:
        """What may go from DRAM, giving way to others in between: of namespaces (by number) that are `refusing`, and of all while the disk
        fails, only what is on SSD.
        """
        only_written = not self.writeback.state.ok
        found = [InDram(space, only_written=only_written or space.number in refusing) for space in spaces]
        looked_at = 0
        for one in found:
            while slots := one.look():
                looked_at += slots
                if looked_at >= LOOKED_AT_ONCE:
                    looked_at = 0
                    await asyncio.sleep(0)
        return found

    def _free(self, unit: Unit, slot: int) -> int:
        """Free what a unit has in DRAM, of a page that is on SSD. Returns the bytes."""
        freed = free_dram(unit)
        if freed and unit.required:
            self._replacement.left(DRAM, unit.space, np.array([slot], np.int32))
        return freed

    def _discard_unwanted(self, units: list[Unit]) -> list[Unit]:
        """Give up the units that are not worth writing to SSD. Returns the others."""
        by_space: dict[int, list[Unit]] = {}
        for unit in units:
            if unit.slot_unless_used() >= 0:  # others had a turn since it was looked at
                by_space.setdefault(unit.space.number, []).append(unit)
        kept: list[Unit] = []
        for mine in by_space.values():
            space = mine[0].space
            slots = np.array([space.tree.pages.find_key(unit.key) for unit in mine], np.int32)
            asked = distinct(slots[slots >= 0])
            promised = partial(self.writeback.promised, space)
            admitted = np.isin(slots, asked[self._replacement.admits(space, asked, promised)])
            for unit, wanted in zip(mine, admitted.tolist(), strict=True):
                if wanted or not unit.required or not discard(unit):
                    kept.append(unit)
                else:
                    self._stats.refused_pages += 1
        return kept

    def _worth_in_dram(self, candidates: list[tuple[Space, Slots]], wanted: int, *, whole: bool) -> list[Values]:
        return self._replacement.values(DRAM, candidates, wanted, whole=whole)

    def _worth_on_ssd(self, candidates: list[tuple[Space, Slots]], wanted: int) -> list[Values]:
        return self._replacement.values(SSD, candidates, wanted)

    async def _demote(self, units: list[Unit]) -> int:
        before = self._arena.usage().used
        by_space: dict[int, tuple[Space, list[bytes]]] = {}
        for unit in units:
            by_space.setdefault(unit.space.number, (unit.space, []))[1].append(unit.key)
        stay: set[int] = set()
        refused: dict[int, str] = {}
        for space, keys in by_space.values():
            try:
                await self.writeback.make_durable(space, keys)
            except NoSpace as error:
                if self.writeback.state.ok:
                    refused[space.number] = self._why_refused[space.settings.tenant] = error.message
                else:
                    stay.add(space.number)  # the disk may have room again soon
            except (Busy, DiskFailing):
                stay.add(space.number)
        discarded = 0
        for unit in units:
            if (slot := unit.slot_unless_used()) < 0:
                continue
            if unit.space.is_durable(slot):
                self._free(unit, slot)
            elif unit.space.number not in stay and discard(unit):
                discarded += 1
            elif unit.space.number not in stay and (unit.space.text is None or unit.space.text.idle):
                why = OF_PUTS if unit.space.tree.pages.leases[slot] else NOT_DISCARDED
                self._refused.setdefault(unit.space.number, set()).add(why)
        if discarded:
            _log.warning("%d pages were discarded, as SSD does not take them: %s", discarded, "; ".join(dict.fromkeys(refused.values())))
        return before - self._arena.usage().used

    def _of(self, tenant: str | None) -> list[Space]:
        """The namespaces of a tenant, or of all."""
        return [space for space in self._spaces() if tenant is None or space.settings.tenant == tenant]

    def ssd_budget(self, make_room: Callable[[int, str], int]) -> SsdBudget:
        """The tenants' SSD quotas, for one group commit."""

        def used(tenant: str) -> int:
            return sum(space.ssd_bytes() for space in self._of(tenant))

        return SsdBudget(self._quotas, used, make_room, lambda tenant: kept_on_ssd_as(self._of(tenant), self.writeback.now()))

    def make_ssd_room(self, wanted: int, now: float, tenant: str | None = None) -> int:
        """Give up the coldest unprotected pages on SSD (of a tenant, if given). Returns the bytes that the next commit will free."""
        spaces = [space for space in self._of(tenant) if not space.loading]
        return evict_ssd(spaces, wanted, now, self._blob_file.footprint, self._worth_on_ssd)

    def ssd_is_full(self, tenant: str) -> NoSpace:
        """What a tenant is told when no room could be made on SSD."""
        others = [space for space in self._spaces() if space.settings.tenant != tenant]
        return ssd_is_full(self._of(tenant), others, self.writeback.now())
