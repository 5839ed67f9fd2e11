"""Bulk over the connections of a pool: stripes come in and slices go out as connections become free."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvstore.api.wire import MAX_BULK_PAYLOAD, SLICES_META, BadRequest, Busy, ConnectionLost, DeadlineExceeded, FrameType, NotFound
from kvstore.api.wire.messages import Empty
from kvstore.api.wire.put_messages import Committed, PutHandle, PutReady, PutStart
from kvstore_client.answers import refused
from kvstore_client.connection import Connection
from kvstore_client.direct import current
from kvstore_client.linked import fetch_linked, send_linked
from kvstore_client.plan import FetchPlan
from kvstore_client.pool import Pool
from kvstore_client.put_layout import SliceFrame, Wanted
from kvstore_client.stripes import Stripe
from kvstore_client.whole import Closing

_DEPTH = 2
"""Stripes that a connection has in flight, so that it never waits for the next request to travel."""

AT_ONCE_BYTES = 4 << 20
"""Puts up to here are sent without asking what is wanted, on one connection."""
ALONE_AT_ONCE_BYTES = 64 << 20
"""As `AT_ONCE_BYTES`, for a client that has only one connection. What is not wanted travels in vain only until the daemon says so."""
_ABORT_S = 1.0
_BREATH_BYTES = 4 << 20
"""So much is sent before others on the loop get a turn: a millisecond or two."""
_GROUP_BYTES = 12 << 20
"""On the daemon's machine, where nothing is waited for, so much of a put is sent as if it were one frame: some two milliseconds."""

Progress = Callable[[int, int], None]
"""Told of payload bytes so far, and in all."""


async def fetch_striped(pool: Pool, namespace: str, plan: FetchPlan, target: memoryview) -> None:
    """Fetch all stripes of a plan. What a broken connection had goes to the others, and is asked for again after a restart."""
    if (line := current()) is not None:
        for stripe in plan.stripes:
            await line.fetch(namespace, stripe, target, plan)
        return
    alone = pool.at_hand() if len(plan.stripes) == 1 else None
    if plan.priority == "bulk":
        with pool.bulk():
            await _fetch_striped(pool, namespace, plan, target, alone)
    else:
        await _fetch_striped(pool, namespace, plan, target, alone)


async def _fetch_striped(pool: Pool, namespace: str, plan: FetchPlan, target: memoryview, alone: Connection | None) -> None:
    """As `fetch_striped`; all of it over one connection, if it is to go `alone` and that one does not break."""
    if alone is not None:
        with suppress(ConnectionLost):
            await alone.fetch(namespace, plan.stripes[0], target, plan)
            return
    if pool.several and not plan.provisional:  # those of a put under way wait for somebody else: it does not tell which link is slow
        await fetch_linked(pool, namespace, plan, target)
        return
    stripes: deque[Stripe] = deque(plan.stripes)

    async def work(slot: int) -> None:
        while stripes:
            stripe = stripes.popleft()
            try:
                connection = await pool.connection(slot)
                await connection.fetch(namespace, stripe, target, plan)
            except BaseException:  # also a worker that is stopped because another's connection broke: its stripe comes again
                stripes.appendleft(stripe)
                raise

    async def attempt() -> None:
        slots = await pool.ready_express() if plan.priority == "interactive" else pool.usable()
        workers = min(len(slots) * _DEPTH, len(stripes))
        if workers <= 1:
            await work(pool.least_busy(slots))
            return
        await together([work(slots[n % len(slots)]) for n in range(workers)])

    await pool.retry(attempt)


async def send_striped(pool: Pool, handle: int, frames: Sequence[SliceFrame], data: memoryview, progress: Progress | None = None) -> None:
    """Send the slices of a put. Once this returns, or raises, the buffer is not read any more."""
    if pool.several:
        await send_linked(pool, handle, frames, data, progress)
        return
    pending = iter(frames)
    total, sent, breath = sum(frame.nbytes for frame in frames), 0, 0

    async def work(slot: int) -> None:
        nonlocal sent, breath
        connection = await pool.connection(slot)
        for frame in pending:
            slices = [data[at : at + size] for at, size in frame.slices]
            await connection.send_slices(handle, frame.page, frame.part, frame.first_slice, slices)
            sent += frame.nbytes
            if sent - breath >= _BREATH_BYTES:  # a socket that always takes more must not starve the others on this loop
                breath = sent
                await asyncio.sleep(0)
            if progress is not None:
                progress(sent, total)

    workers = min(pool.spread, -(-total // MAX_BULK_PAYLOAD))
    if workers <= 1:
        await work(0)
    else:
        await together([work(n) for n in range(workers)])


async def put_at_once(
    connection: Connection, start: PutStart, payload: bytes | memoryview, frames: Sequence[SliceFrame], data: memoryview, closing: Closing,
    progress: Progress | None = None,
) -> Committed:  # fmt: skip
    """Put without asking what is wanted: one journey to the daemon and back, on one connection. What it says on the way is listened to."""
    total, sent, breath = sum(frame.nbytes for frame in frames), 0, 0
    committed: Committed | None = None
    async with connection.unanswered(FrameType.PUT, start, payload) as put:
        wanted: Wanted | None = None
        for group in _groups(frames, 0 if progress is not None or not connection.local else _GROUP_BYTES):
            if wanted is None and (ready := put.said(PutReady)) is not None:
                wanted = Wanted(ready.wanted)
            if parts := [_slices(start.handle, frame, data) for frame in group if wanted is None or wanted.has(frame)]:
                send = partial(connection.send_frames, parts, put.number)
                if group[-1] is frames[-1]:
                    committed = await connection.call_behind(send, FrameType.COMMIT, closing.commit(), Committed)
                else:
                    await send()
            sent += sum(frame.nbytes for frame in group)
            if sent - breath >= _BREATH_BYTES and sent < total:  # others on this loop, and the task that hears what the daemon says
                breath = sent
                await asyncio.sleep(0)
            if progress is not None:
                progress(sent, total)
        if committed is None:
            committed, _ = await connection.call(FrameType.COMMIT, closing.commit(), Committed)
    return committed


def _groups(frames: Sequence[SliceFrame], nbytes: int) -> Iterator[Sequence[SliceFrame]]:
    """Frames up to `_BREATH_BYTES`, after which the daemon may have been heard, then up to `nbytes` at a time; 0: frame by frame."""
    first, size, most = 0, 0, min(nbytes, _BREATH_BYTES)
    for at, frame in enumerate(frames):
        if at > first and size + frame.nbytes > most:
            yield frames[first:at]
            first, size, most = at, 0, nbytes
        size += frame.nbytes
    yield frames[first:]


def _slices(handle: int, frame: SliceFrame, data: memoryview) -> tuple[bytes, list[memoryview]]:
    """A frame as it is sent: its meta, and its slices."""
    return SLICES_META.pack(handle, frame.page, frame.part, frame.first_slice), [data[at : at + size] for at, size in frame.slices]


async def begin_put(pool: Pool, connection: Connection, start: PutStart, payload: bytes | memoryview) -> PutReady:
    """Ask what is wanted of a put, under a name that is chosen here: one whose answer is not heard is given up."""
    start.name = secrets.randbits(62) + 1
    try:
        ready, _ = await connection.call(FrameType.PUT, start, PutReady, payload)
    except BaseException as error:
        if not refused(error):
            await give_up_put(pool, start.name, error, connection)
        raise
    return ready


async def abort_put(pool: Pool, handle: int, carrier: Connection | None = None) -> None:
    """Tell the daemon that a put will not be committed, if it can be reached.

    `carrier` is the connection that its PUT went over: on another one, unless that is ended before, this could get there before the PUT.
    """
    try:
        async with asyncio.timeout(_ABORT_S):
            while not await _aborted(pool, PutHandle(handle=handle), carrier):
                pass
    except (BadRequest, Busy, ConnectionLost, NotFound, TimeoutError):  # BadRequest: the client was closed
        pass  # then the daemon ends it with the session, or by its own time limit


async def _aborted(pool: Pool, message: PutHandle, carrier: Connection | None) -> bool:
    """Tell of the end of a put once; False if the connection that was to be had for that broke."""
    by = carrier if carrier is not None and carrier.lost is None else await pool.first()
    try:
        if carrier is not None and by is not carrier:
            await pool.end_there(carrier, by)
        await by.call(FrameType.ABORT, message, Empty)
    except ConnectionLost:
        return False
    return True


async def give_up_put(pool: Pool, handle: int, why: BaseException | None, carrier: Connection | None = None) -> None:
    """As `abort_put`, to its end. Whose time is over, or who was cancelled, does not wait for it: the pool does when it is closed."""
    task = asyncio.create_task(abort_put(pool, handle, carrier), name="kvstore-client-abort")
    pool.adopt(task)
    if not isinstance(why, asyncio.CancelledError | DeadlineExceeded):
        await asyncio.shield(task)


async def together(jobs: "Sequence[Coroutine[Any, Any, None]]") -> None:
    """Run jobs concurrently; the first failure cancels the rest and is raised alone. All of them have ended when this returns.

    Not a TaskGroup: that cancels the task that waits for it when a job fails, and in Python 3.11 leaves it counted as being cancelled;
    a deadline around it would then end in CancelledError. A cancellation goes before a failure: a deadline must not be lost in one.
    """
    tasks = [asyncio.create_task(job) for job in jobs]
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as error:
        cancelled = error
    for task in tasks:
        task.cancel()
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    failures = [failure for task in tasks if not task.cancelled() and (failure := task.exception()) is not None]
    if cancelled is not None:
        raise cancelled
    if failures:
        raise failures[0]
    if any(task.cancelled() for task in tasks):
        raise asyncio.CancelledError
