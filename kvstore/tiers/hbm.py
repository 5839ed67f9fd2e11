"""The HBM tier: sets of pages that enter an accelerator's memory shortly before use and leave promptly.

It lives in a worker, over one pool an accelerator (`DevicePool`; the stub is `HostPool`). A **page set** is what one batch
reads: a region in each pool, filled by a callable that receives straight into them, shard by shard. It comes with a deadline,
is used, and is released at the end of the batch; the next set may move while one is used (double buffering). A set that
nobody uses, and to which nothing comes any more, leaves after its grace time. Times are those of the clock given: by default
the running event loop's.

Imports nothing of the server.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.errors import BadRequest, Busy, Cancelled, DeadlineExceeded, KVStoreError, NoSpace, NotFound
from kvstore.tiers import Usage
from kvstore.tiers.device import Clock, DeviceConfig, DevicePool, Handle, HostPool, Link, Passage

__all__ = ["Account", "Arrived", "DeviceConfig", "DevicePool", "Fill", "Hbm", "HostPool", "PageSet", "State"]

Arrived = Callable[[int, int], None]
"""Told (device, group) once all bytes of a layer group are in a device's memory."""
Fill = Callable[[list[memoryview], Arrived], Awaitable[object]]
"""Receives a set's bytes into the memory of each device. Once it has returned, raised or been cancelled, it writes no more."""


class State(Enum):
    """What a page set is about. `GONE` is the end, whatever led there."""

    HELD = "held"
    """Not begun: it is not needed yet, or there is no room."""
    MOVING = "moving"
    READY = "ready"
    GONE = "gone"


@dataclass(slots=True)
class Account:
    """Byte-seconds by what bytes were doing: `used` by a batch, `idle` (there, and used by none), `moving` (room taken, not there yet).

    `arrived_bytes` have come over the links, `dropped_sets` left unused after their grace time, `late_sets` missed their deadline.
    """

    used: float = 0.0
    idle: float = 0.0
    moving: float = 0.0
    arrived_bytes: int = 0
    dropped_sets: int = 0
    late_sets: int = 0


class PageSet:
    """A set of pages in the memory of the accelerators of a worker. Made by `Hbm.prefetch`."""

    def __init__(self, tier: "Hbm", sizes: tuple[int, ...], room: tuple[int, ...], groups: int) -> None:
        self.sizes = sizes
        """Bytes that are brought in, by device."""
        self.room = room
        """Bytes after them, for what the batch computes."""
        self.groups = groups
        self.state = State.HELD
        self.error: KVStoreError | None = None
        self.regions: list[int] = []
        self.passages: list[Passage] = []
        self.uses = 0
        self.arrived_bytes = 0
        self.held_back = False
        self.task: asyncio.Task[None] | None = None
        self.idle_timer: Handle | None = None
        self.deadline_timer: Handle | None = None
        self.counted = (0, 0, 0)
        """What it last weighed in the account: bytes used, idle, moving."""
        self._tier = tier
        self._missing = [len(sizes)] * groups
        self._there = [asyncio.Event() for _ in range(groups)]
        self._placed = asyncio.Event()
        self._seen: set[tuple[int, int]] = set()

    def views(self) -> list[memoryview]:
        """The memory of the set, one stretch a device. Raises why it is gone, or NotFound before it has any."""
        if self.error is not None or self.state in (State.HELD, State.GONE):
            raise self.error or NotFound(f"the page set has no memory: it is {self.state.value}")
        return [pool.view(region) for pool, region in zip(self._tier.pools, self.regions, strict=True)]

    async def placed(self) -> None:
        """Wait until the set has its memory. Raises why it will not."""
        if self.error is None:
            await self._placed.wait()
        if self.error is not None:
            raise self.error

    async def arrived(self, group: int | None = None) -> None:
        """Wait until a layer group (or all) is there on every device. Raises why it will not be: late, lost, or dropped."""
        for event in self._there if group is None else (self._there[group],):
            if self.error is None:
                await event.wait()
            if self.error is not None:
                raise self.error

    @contextlib.asynccontextmanager
    async def use(self, *, keep: bool = False) -> AsyncIterator[list[memoryview]]:
        """A batch uses the set, which may still be moving. It is released at the end, unless `keep`: then it has its grace time."""
        views = self.views()
        self.uses += 1
        self._tier.changed(self)
        try:
            yield views
        finally:
            self.uses -= 1
            self._tier.changed(self)
            if not self.uses and (not keep or self.error is not None):
                await self.release()

    async def release(self) -> None:
        """Let go of the memory: a fill under way is ended first, and who still uses it has it to the end. Harmless if it is gone."""
        await asyncio.shield(self._tier.end(self, Cancelled("the page set was released")))

    def there(self, device: int, group: int) -> None:
        """A group is there on a device: its bytes, and the link's time."""
        if (device, group) in self._seen or self.state is State.GONE:
            return
        self._seen.add((device, group))
        pieces = _pieces(self.sizes[device], self.groups)
        self.arrived_bytes += pieces[group]
        self._missing[group] -= 1
        if not self._missing[group]:
            self._there[group].set()
        self._tier.changed(self, pieces[group])

    def place(self, regions: list[int]) -> None:
        """It has memory: a region in each pool."""
        self.regions, self.state = regions, State.MOVING
        self._placed.set()

    def fail(self, error: KVStoreError) -> None:
        """Whoever waits is told."""
        self.error = self.error or error
        self._placed.set()
        for event in self._there:
            event.set()


class Hbm:
    """The sets of one worker over its accelerators' pools. At most `max_sets` at a time; what can't be had at once waits in order.

    `grace_s` is how long a set stays that nobody uses and to which nothing comes. `lead_s` is added to what a transfer should
    take, when one is held back until it is needed.
    """

    def __init__(
        self, pools: Sequence[DevicePool], *, grace_s: float = 1.0, lead_s: float = 0.02, max_sets: int = 256, clock: Clock | None = None
    ) -> None:
        if not pools or grace_s < 0 or lead_s < 0 or max_sets < 1:
            raise BadRequest("HBM needs at least one pool and one set, and times of 0 or more")
        self.pools = list(pools)
        self.grace_s = grace_s
        self.lead_s = lead_s
        self._max_sets = max_sets
        self._clock: Clock = clock or asyncio.get_running_loop()
        self._links = [Link(pool.config, self._clock) for pool in pools]
        self._sets: set[PageSet] = set()
        self._queue: deque[PageSet] = deque()
        self._room = asyncio.Event()
        self._account = Account()
        self._now = (0, 0, 0)
        self._since = self._clock.time()

    # --- what it holds -------------------------------------------------------------------------------------------------

    def usage(self) -> list[Usage]:
        """Capacity and bytes taken of each device."""
        return [pool.usage() for pool in self.pools]

    def account(self) -> Account:
        """Byte-seconds up to now."""
        self._settle()
        return self._account

    @property
    def holding(self) -> tuple[int, int, int]:
        """Bytes that are used, idle and moving just now."""
        return self._now

    def seconds(self, sizes: Sequence[int]) -> float:
        """How long a set of so many bytes a device takes to arrive over idle links."""
        return max((link.seconds(size) for link, size in zip(self._links, sizes, strict=True)), default=0.0)

    def _settle(self) -> None:
        now = self._clock.time()
        passed, self._since = now - self._since, now
        used, idle, moving = self._now
        self._account.used += used * passed
        self._account.idle += idle * passed
        self._account.moving += moving * passed

    def changed(self, page_set: PageSet, arrived_bytes: int = 0) -> None:
        """A set is used otherwise than before, or has got bytes: the account goes on with the new weights."""
        self._settle()
        self._account.arrived_bytes += arrived_bytes
        there, missing, room = page_set.arrived_bytes, sum(page_set.sizes) - page_set.arrived_bytes, sum(page_set.room)
        weights = (0, 0, 0)
        if page_set.regions:
            weights = (there + room, 0, missing) if page_set.uses else (0, there, missing + room)
        used, idle, moving = (now - old + new for now, old, new in zip(self._now, page_set.counted, weights, strict=True))
        self._now, page_set.counted = (used, idle, moving), weights
        if page_set.idle_timer is not None and (arrived_bytes or not weights[1]):
            page_set.idle_timer.cancel()
            page_set.idle_timer = None
        if weights[1] and page_set.idle_timer is None:
            page_set.idle_timer = self._clock.call_at(self._clock.time() + self.grace_s, self._drop_idle, page_set)

    def _drop_idle(self, page_set: PageSet) -> None:
        page_set.idle_timer = None
        if page_set.uses or page_set.state is State.GONE:
            return
        self._account.dropped_sets += 1
        self._stop(page_set, NotFound(f"nobody used the page set, and nothing came to it, for {self.grace_s:g} s: it left HBM"))

    # --- a set's life --------------------------------------------------------------------------------------------------

    def prefetch(
        self, sizes: Sequence[int], fill: Fill, *, groups: int = 1, room: Sequence[int] | None = None, deadline: float | None = None,
        needed_at: float | None = None,
    ) -> PageSet:  # fmt: skip
        """Bring a set in: so many bytes for each device, in layer groups of equal size. Returns at once; see `PageSet.arrived`.

        `room` are bytes for each device that the batch needs after them, for what it computes. The set has to be there by the
        `deadline`; with `needed_at` it starts no earlier than it must to be there at that time (both of the clock). Raises
        DeadlineExceeded if it can't be there by the deadline, NoSpace if it is larger than a device, Busy if there are too many
        sets. A set that turns out late is ended, and says so to whoever waits for it.
        """
        room = tuple(room or (0,) * len(sizes))
        if len(sizes) != len(self.pools) or len(room) != len(sizes) or groups < 1:
            raise BadRequest(f"{len(sizes)} sizes and {len(room)} rooms for {len(self.pools)} devices, {groups} groups")
        if any(0 < size < groups or size < 0 or extra < 0 or not size + extra for size, extra in zip(sizes, room, strict=True)):
            raise BadRequest(f"sizes of {list(sizes)} and {list(room)} bytes: give a byte a group at least")
        for size, pool in zip(map(sum, zip(sizes, room, strict=True)), self.pools, strict=True):
            if size > pool.usage().capacity:
                raise NoSpace(f"a page set of {size} bytes on a device of {pool.usage().capacity}: it can't be there in one piece")
        if len(self._sets) >= self._max_sets:
            raise Busy(f"{self._max_sets} page sets in HBM or on their way", retry_after_ms=10)
        waiting = [s.sizes for s in self._sets if s.state is State.HELD and not s.held_back]
        due = max(link.arrival(sum(before)) for link, *before in zip(self._links, sizes, *waiting, strict=True))
        if deadline is not None and due > deadline:
            self._account.late_sets += 1
            raise DeadlineExceeded(f"the page set could be in HBM {due - deadline:.3f} s after its deadline at the earliest")
        page_set = PageSet(self, tuple(sizes), room, groups)
        self._sets.add(page_set)
        start = needed_at - self.seconds(sizes) - self.lead_s if needed_at is not None else None
        page_set.held_back = start is not None
        if deadline is not None:
            page_set.deadline_timer = self._clock.call_at(deadline, self._too_late, page_set)
        page_set.task = asyncio.create_task(self._bring(page_set, fill, start), name="kvstore-hbm")
        page_set.task.add_done_callback(lambda _: self._brought(page_set))
        return page_set

    async def _bring(self, page_set: PageSet, fill: Fill, start: float | None) -> None:
        try:
            if start is not None:
                await self._sleep_until(start)
            await self._get_room(page_set)
            await self._move(page_set, fill)
            page_set.state = State.READY
        except KVStoreError as error:
            page_set.fail(error)
        except OSError as error:
            page_set.fail(NotFound(f"a transfer into HBM failed: {error}"))
        except asyncio.CancelledError:
            page_set.fail(Cancelled("the transfer into HBM was cancelled"))  # unless whoever ended it has said why
        except BaseException:
            page_set.fail(KVStoreError("a transfer into HBM failed in a way that is a bug; the log has it"))
            raise

    def _brought(self, page_set: PageSet) -> None:
        """Its task is over; it may have been cancelled before it began, so this is no part of it."""
        page_set.task = None
        if page_set.deadline_timer is not None:
            page_set.deadline_timer.cancel()
        if page_set.state is not State.READY or page_set.error is not None:
            page_set.fail(Cancelled("the transfer into HBM was cancelled"))
            self._free(page_set)

    def _too_late(self, page_set: PageSet) -> None:
        if page_set.state in (State.HELD, State.MOVING):
            self._account.late_sets += 1
            self._stop(page_set, DeadlineExceeded("the page set was not in HBM at its deadline"))

    async def _sleep_until(self, when: float) -> None:
        if when <= self._clock.time():
            return
        over = asyncio.Event()
        timer = self._clock.call_at(when, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    async def _get_room(self, page_set: PageSet) -> None:
        """Regions on all devices at once, in the order in which sets asked."""
        self._queue.append(page_set)
        try:
            while self._queue[0] is not page_set or not self._allocate(page_set):
                self._room.clear()
                await self._room.wait()
        finally:
            self._queue.remove(page_set)
            self._room.set()

    def _allocate(self, page_set: PageSet) -> bool:
        regions: list[int] = []
        for pool, size, extra in zip(self.pools, page_set.sizes, page_set.room, strict=True):
            region = pool.allocate(size + extra)
            if region is None:
                for held, taken in zip(self.pools, regions, strict=False):
                    held.free(taken)
                return False
            regions.append(region)
        page_set.place(regions)
        self.changed(page_set)
        return True

    async def _move(self, page_set: PageSet, fill: Fill) -> None:
        """Fill it. A group counts once its bytes are there and the link's time has passed, whichever is later."""
        page_set.passages = [
            link.pass_through(_pieces(size, page_set.groups)) for link, size in zip(self._links, page_set.sizes, strict=True)
        ]
        timers: list[Handle] = []
        filled = {(device, group) for device, size in enumerate(page_set.sizes) if not size for group in range(page_set.groups)}
        for device, group in filled:
            page_set.there(device, group)

        def arrived(device: int, group: int) -> None:
            filled.add((device, group))
            when = page_set.passages[device].arrivals[group]
            if when <= self._clock.time():
                page_set.there(device, group)
            else:
                timers.append(self._clock.call_at(when, page_set.there, device, group))

        try:
            await fill(page_set.views(), arrived)
            if len(filled) != len(page_set.sizes) * page_set.groups:
                raise NotFound("a transfer into HBM ended before all its layer groups were there")
            await page_set.arrived()
        finally:
            for timer in timers:
                timer.cancel()
            for link, passage in zip(self._links, page_set.passages, strict=True):
                link.give_back(passage)

    def _stop(self, page_set: PageSet, error: KVStoreError) -> None:
        """End a set: at once if nothing moves any more, else as soon as the fill has stopped."""
        page_set.fail(error)
        if page_set.task is not None:
            page_set.task.cancel()
        else:
            self._free(page_set)

    def _free(self, page_set: PageSet) -> None:
        if page_set.uses:
            return  # a batch has views of it: the end of the use comes here again
        page_set.state = State.GONE
        regions, page_set.regions = page_set.regions, []
        for pool, region in zip(self.pools, regions, strict=False):
            pool.free(region)
        self._sets.discard(page_set)
        self.changed(page_set)
        self._room.set()

    async def end(self, page_set: PageSet, error: KVStoreError) -> None:
        """End a set and wait until nothing of it is left."""
        if page_set.state is State.GONE:
            return
        task = page_set.task
        self._stop(page_set, error)
        if task is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        """End all sets; those that are still used go at the end of their use."""
        await asyncio.gather(*(self.end(page_set, Cancelled("HBM was closed")) for page_set in list(self._sets)))


def _pieces(size: int, groups: int) -> list[int]:
    """A size cut into groups, the last one with the remainder."""
    each = size // groups
    return [each] * (groups - 1) + [size - each * (groups - 1)]
