"""Bulk over several links: stripes and slices go to whichever is free, and a link that slows or dies loses them to the others.

`Dealer` says which job goes where. Here the connections are opened, the jobs are run, and what a lost link had is moved. A stripe that
is fetched twice goes into the caller's buffer the first time and into one of its own the second; if the second is there first, verified,
the first is stopped for good before its bytes are copied over: two never write in one place. A frame of slices is never on two links at
once: the daemon ends the connection of the one that fell behind before another sends it.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvstore.api.wire import DIGEST_BYTES, ConnectionLost, Corrupt, KVStoreError
from kvstore_client.connection import Connection
from kvstore_client.dealing import Ask, Dealer, Rate
from kvstore_client.plan import FetchPlan
from kvstore_client.pool import Pool
from kvstore_client.put_layout import SliceFrame
from kvstore_client.stripes import PackedStripe, Stripe

LINK_STRIPE = 1 << 20
"""What a link is asked for, or sends, at a time: a few hundredths of a second on a slow one."""
_PATIENCE_S = 0.1
_TICK_S = 0.05
"""How often it is looked whether a lane has fallen behind."""

J = TypeVar("J", Stripe, SliceFrame)


class _Run(ABC, Generic[J]):
    """Jobs under way. `undone` are those left, by identity; it shrinks, also if the run fails."""

    twice = False

    def __init__(self, pool: Pool, undone: dict[int, J], slots: Sequence[int]) -> None:
        self._pool = pool
        self._slots = list(slots)
        self._undone: dict[int, J] = undone
        self._dealer: Dealer[J] = Dealer(undone.values(), lambda job: job.nbytes, least_window=2 * LINK_STRIPE)
        self._connections: dict[int, Connection] = {}
        self._opening: set[int] = set()
        self._gone = {slot: asyncio.Event() for slot in slots}
        self._work: dict[Ask[J], asyncio.Task[None]] = {}
        self._losing: dict[int, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()
        self._error: KVStoreError = ConnectionLost("no link to the daemon works")
        self._failed = False

    async def run(self) -> None:
        """Do all jobs. Raises ConnectionLost if no link works; once it returns or raises, nobody touches the caller's buffer."""
        self._opening = {slot for slot in self._slots if not self._pool.link(slot).resting} or set(self._slots)
        lanes = [asyncio.create_task(self._hold(slot), name="kvstore-link") for slot in self._slots]
        try:
            while self._undone:
                self._woken.clear()
                now = time.monotonic()
                for ask in self._dealer.deal(now, twice=self.twice):
                    self._start(ask)
                if not self.twice:
                    for slot in self._dealer.behind(now):
                        self._lose(slot, "its link has fallen behind the others")
                if self._failed or not (self._opening or self._connections or self._losing):
                    raise self._error
                try:
                    async with asyncio.timeout(_TICK_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass
        finally:
            await self._stop(lanes)

    async def _stop(self, lanes: list[asyncio.Task[None]]) -> None:
        for ask, task in self._work.items():
            if ask.second:
                self._pool.adopt(task)  # it writes in its own buffer: nobody needs to wait until its connection is quiet
        ours: list[asyncio.Task[None]] = [*lanes, *self._losing.values(), *(task for ask, task in self._work.items() if not ask.second)]
        for task in (*ours, *self._work.values()):
            _end(task)
        cancelled: asyncio.CancelledError | None = None
        while waiting := [task for task in ours if not task.done()]:
            try:
                await asyncio.wait(waiting)
            except asyncio.CancelledError as error:  # they end soon: until then they may touch the caller's buffer
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # --- lanes ---------------------------------------------------------------------------------------------------------

    async def _hold(self, slot: int) -> None:
        """Keep a connection in a slot, for as long as the run lasts."""
        link, failed = self._pool.link(slot), False
        while True:
            if link.resting and slot not in self._opening:
                await asyncio.sleep(link.rests_s)
            elif failed:
                await asyncio.sleep(_TICK_S)
            try:
                connection = await self._pool.connection(slot)
            except KVStoreError as error:
                self._error, self._failed = error, self._failed or not isinstance(error, ConnectionLost)
                self._opening.discard(slot)
                self._woken.set()
                failed = True
                continue
            failed = False
            self._opening.discard(slot)
            self._connections[slot] = connection
            self._gone[slot].clear()
            self._dealer.up(slot, link.rates.setdefault(slot, Rate()))
            self._woken.set()
            await self._gone[slot].wait()

    def _lose(self, slot: int, why: str, *, works: bool = False) -> None:
        """Give a lane up: what it had goes to the others. If its link `works`, another connection is made at once."""
        connection = self._connections.pop(slot, None)
        if connection is not None:
            self._losing[slot] = asyncio.create_task(self._let_go(slot, connection, why, works), name="kvstore-link-lost")

    async def _let_go(self, slot: int, connection: Connection, why: str, works: bool) -> None:
        try:
            mine = {task for ask, task in self._work.items() if ask.lane == slot}
            connection.give_up(why)
            for task in mine:
                _end(task)
            if mine:
                await asyncio.wait(mine)
            link = self._pool.link(slot)
            link.losses += 1
            if not works:
                link.failed()
                link.rates.pop(slot, None)
            await self._end(slot, connection, why)
            link.given_up += len(self._dealer.down(slot))
        finally:
            self._losing.pop(slot, None)
            self._gone[slot].set()
            self._woken.set()

    @abstractmethod
    async def _end(self, slot: int, connection: Connection, why: str) -> None:
        """Have the daemon end the connection, as far as that matters before others take over."""

    # --- jobs ----------------------------------------------------------------------------------------------------------

    def _start(self, ask: Ask[J]) -> None:
        connection = self._connections.get(ask.lane)
        if connection is None:
            return  # it is being given up, and then this comes again
        task = asyncio.create_task(self._guarded(ask, connection), name="kvstore-stripe")
        self._work[ask] = task
        task.add_done_callback(lambda _: self._work.pop(ask, None))

    @abstractmethod
    async def _do(self, ask: Ask[J], connection: Connection) -> None:
        """Do a job over a connection."""

    async def _guarded(self, ask: Ask[J], connection: Connection) -> None:
        try:
            await self._do(ask, connection)
        except ConnectionLost as lost:
            self._lose(ask.lane, lost.message)
        except KVStoreError as error:
            if id(ask.job) in self._undone:
                self._error, self._failed = error, True
        finally:
            self._woken.set()

    def _finished(self, ask: Ask[J]) -> None:
        """A job is done, and this lane brought it."""
        for other in self._dealer.done(ask.job):
            self._pool.link(other.lane).given_up += other is not ask
        self._undone.pop(id(ask.job), None)
        self._pool.link(ask.lane).stripes += 1


def _end(task: "asyncio.Task[None]") -> None:
    """Cancel a task, once: a fetch that is being cancelled waits until its buffer is left alone, and is not to be hurried."""
    if not task.cancelling():
        task.cancel()


class _Fetch(_Run[Stripe]):
    twice = True

    def __init__(
        self, pool: Pool, undone: dict[int, Stripe], slots: Sequence[int], namespace: str, plan: FetchPlan, target: memoryview
    ) -> None:
        super().__init__(pool, undone, slots)
        self._namespace = namespace
        self._plan = plan
        self._target = target

    async def _end(self, slot: int, connection: Connection, why: str) -> None:
        self._pool.adopt(asyncio.create_task(_disown(self._pool, slot, connection, why)))

    async def _do(self, ask: Ask[Stripe], connection: Connection) -> None:
        stripe, link = ask.job, self._pool.link(ask.lane)

        def arrived(part: Stripe, first: int, digests: list[bytes], claimed: bytes) -> None:
            nbytes = sum(stretch.nbytes for stretch in part.stretches(first, len(digests)))
            link.fetched_bytes += nbytes
            self._dealer.arrived(ask.lane, nbytes, time.monotonic())
            (copy or self._plan).arrived(part, first, digests, claimed)

        copy = _Copy(stripe) if ask.second else None
        if copy is None:
            await connection.fetch(self._namespace, stripe, self._target, self._plan, arrived, quiet_s=self._patience(ask.lane))
        else:
            await connection.fetch(self._namespace, copy.stripe, copy.buffer, self._plan, arrived)
            for other, task in list(self._work.items()):
                if other is not ask and other.job is stripe and not other.second:
                    if self._dealer.stalled(other.lane, time.monotonic()):
                        self._lose(other.lane, "its link has stalled")  # and it is dialled again
                    _end(task)
                    await asyncio.wait([task])
                    if (cut := self._connections.get(other.lane)) is not None and cut.lost is not None:
                        self._lose(other.lane, cut.lost.message, works=True)
            if id(stripe) not in self._undone:
                return  # it came in the same moment
            copy.into(self._target)
            self._plan.arrived(stripe, 0, copy.digests, copy.claimed)
        if id(stripe) in self._undone:
            self._finished(ask)
        self._withdraw(ask)

    def _patience(self, lane: int) -> float:
        """How long a frame that is just arriving may take to be whole, once its stripe has come from elsewhere."""
        gap = self._pool.link(lane).rates[lane].gap
        return min(2 * gap, _PATIENCE_S) if gap else _PATIENCE_S

    def _withdraw(self, done: Ask[Stripe]) -> None:
        """Whoever else has this stripe need not bring it any more."""
        for ask, task in list(self._work.items()):
            if ask is not done and ask.job is done.job:
                _end(task)


class _Copy:
    """A stripe that is fetched again: the same, into a buffer of its own."""

    def __init__(self, stripe: Stripe) -> None:
        self._original = stripe
        self.stripe = PackedStripe(stripe)
        self.buffer = memoryview(bytearray(stripe.nbytes))
        self.digests: list[bytes] = []
        self.claimed = b""

    def arrived(self, stripe: Stripe, first: int, digests: list[bytes], claimed: bytes) -> None:
        """Pieces came. Raises Corrupt if they are not what the daemon sent."""
        if claimed != b"".join(digests):
            raise Corrupt(f"{len(digests)} pieces from number {first} on of a stripe that was asked for again do not verify")
        assert len(claimed) == DIGEST_BYTES * len(digests)
        self.digests += digests
        self.claimed += claimed

    def into(self, target: memoryview) -> None:
        """Copy it where it belongs."""
        self._original.into(target, self.buffer)


async def _disown(pool: Pool, slot: int, connection: Connection, why: str) -> None:
    await pool.disown(slot, connection, why)


class _Send(_Run[SliceFrame]):
    def __init__(
        self, pool: Pool, undone: dict[int, SliceFrame], handle: int, data: memoryview, sent: Callable[[SliceFrame], None]
    ) -> None:
        super().__init__(pool, undone, range(pool.size))
        self._handle = handle
        self._data = data
        self._sent = sent

    async def _end(self, slot: int, connection: Connection, why: str) -> None:
        if not await self._pool.disown(slot, connection, why):
            self._error, self._failed = ConnectionLost(f"what went over {self._pool.link(slot).endpoint} is not known: {why}"), True

    async def _do(self, ask: Ask[SliceFrame], connection: Connection) -> None:
        frame, link = ask.job, self._pool.link(ask.lane)
        slices = [self._data[at : at + size] for at, size in frame.slices]
        await connection.deliver(self._handle, frame.page, frame.part, frame.first_slice, slices)
        self._dealer.arrived(ask.lane, frame.nbytes, time.monotonic())
        link.put_bytes += frame.nbytes
        self._finished(ask)
        self._sent(frame)


async def fetch_linked(pool: Pool, namespace: str, plan: FetchPlan, target: memoryview) -> None:
    """Fetch all stripes of a plan over the links of a pool."""
    undone = {id(stripe): stripe for stripe in plan.stripes}
    ready = await pool.ready_express() if plan.priority == "interactive" else []
    slots = ready if ready and min(ready) >= pool.size else range(pool.size)

    async def attempt() -> None:
        await _Fetch(pool, undone, slots, namespace, plan, target).run()

    await pool.retry(attempt)


async def send_linked(
    pool: Pool, handle: int, frames: Sequence[SliceFrame], data: memoryview, progress: Callable[[int, int], None] | None = None
) -> None:
    """Send the slices of a put over the links of a pool; the daemon has them all when this returns. Raises ConnectionLost: put it again."""
    total, sent = sum(frame.nbytes for frame in frames), 0

    def told(frame: SliceFrame) -> None:
        nonlocal sent
        sent += frame.nbytes
        if progress is not None:
            progress(sent, total)

    await _Send(pool, {id(frame): frame for frame in frames}, handle, data, told).run()
