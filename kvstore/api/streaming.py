"""What a fetch asks for, and how it is answered: stored blobs brought up in time, or parts of puts under way as they arrive."""

import asyncio
from collections import deque
from typing import NamedTuple, Protocol

from kvstore.api.sending import Outlet, Sender
from kvstore.api.sessions import Session
from kvstore.api.wire import (
    Alike,
    FrameType,
    Run,
    SliceLayout,
    check_run,
    cut_lazily,
    unpack_alike,
    unpack_provisional,
    unpack_request,
)
from kvstore.api.wire.messages import FetchRequest, Message
from kvstore.digests import DIGEST_BYTES
from kvstore.errors import BadRequest
from kvstore.store import Held, Put, Space
from kvstore.store.dram.read_ahead import MOST_BLOBS

_AHEAD = 4
"""Blobs of a fetch that are brought up from SSD while earlier ones are sent."""


class Peer(Outlet, Protocol):
    """The connection that asks."""

    session: Session

    async def reply(self, request: int, frame_type: FrameType, message: Message, payload: bytes = b"") -> None:
        """Send one control frame."""


class Asked(NamedTuple):
    """A FETCH, checked as far as that takes no look at the blobs."""

    space: Space
    ids: bytes
    """Of its blobs, 16 bytes each."""
    runs: list[Alike]
    nbytes: int
    provisional: bool
    frame_bytes: int
    priority: str = ""
    ahead: bytes = b""
    """Ids of blobs that will probably be asked for next."""

    @property
    def names(self) -> list[bytes]:
        """The ids, one by one."""
        return [self.ids[i : i + DIGEST_BYTES] for i in range(0, len(self.ids), DIGEST_BYTES)]

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.space.settings.tenant


def read_fetch(connection: Peer, meta: bytes, payload: bytes) -> Asked:
    """What a FETCH asks for. Raises BadRequest, UnknownNamespace."""
    message = unpack_request(FetchRequest, meta)
    space = connection.store.space(connection.session.tenant, message.namespace)
    ids_end = message.blobs * DIGEST_BYTES
    if not message.blobs > 0 or ids_end > len(payload):
        raise BadRequest(f"a fetch of {message.blobs} blobs with a payload of {len(payload)} bytes")
    runs = unpack_alike(memoryview(payload)[ids_end:])
    if not runs:
        raise BadRequest("a fetch of no pieces: it says which by its runs")
    if (last := max(max(alike.blobs) for alike in runs)) >= message.blobs:
        raise BadRequest(f"a run names blob {last} of {message.blobs}")
    if len(message.ahead) % DIGEST_BYTES or len(message.ahead) > MOST_BLOBS * DIGEST_BYTES:
        raise BadRequest(f"{len(message.ahead)} bytes of ids to be read ahead: at most {MOST_BLOBS} of {DIGEST_BYTES} each")
    nbytes = sum(alike.nbytes for alike in runs)
    return Asked(space, payload[:ids_end], runs, nbytes, message.provisional, message.frame_bytes, message.priority, message.ahead)


async def stream_fetch(connection: Peer, request: int, asked: Asked) -> None:
    """Answer a FETCH: all pieces of all runs in order, as DATA frames, then FETCHED."""
    store, space, runs, tenant = connection.store, asked.space, asked.runs, asked.tenant
    store.quotas.start_fetch(tenant, asked.nbytes)
    sender, link = Sender(connection, request, space, asked.frame_bytes), connection.session.link.meter
    link.begin()
    held_up = True
    try:
        if asked.provisional:
            await _send_arriving(connection, sender, asked.names, runs)
        else:
            await _send_stored(connection, sender, asked)
        held_up = asked.provisional or sender.held_up
    finally:
        link.end(sender.payload_bytes, spoiled=held_up)
        sender.release()
        store.quotas.end(tenant, asked.nbytes)
    store.stats.fetches += 1
    store.stats.fetch_bytes += sender.payload_bytes
    if not sender.answered:
        await connection.reply(request, FrameType.FETCHED, sender.fetched())


async def _send_stored(connection: Peer, sender: Sender, asked: Asked) -> None:
    store, space, runs = connection.store, asked.space, asked.runs
    rows = store.reading.find_many(space, asked.ids).tolist()
    layouts = space.blobs.layouts_of(rows)
    for alike in runs:
        for layout in {id(layouts[blob]): layouts[blob] for blob in alike.blobs}.values():
            check_run(alike.run, layout)
    for row in rows:
        space.pin(row)  # before anything is awaited: a row that is let go may become another blob's
    resident = {row: view for row, view in zip(rows, store.reading.residents(space, rows), strict=True) if view is not None}
    ahead = _ReadAhead(connection, space, [row for alike in runs for blob in alike.blobs if (row := rows[blob]) not in resident])
    try:
        for run, blobs in runs:
            for blob in blobs:
                row = rows[blob]
                stored = resident.get(row)
                if stored is None:
                    ahead.start()
                    if ahead.must_wait:
                        sender.held_up = True
                        await sender.flush()  # nothing is held while waiting, or fetches that read around DRAM could wait for each other
                    await sender.send_held(run, await ahead.next(sender.request))
                elif not sender.add_whole(run, row, stored, layouts[blob]):
                    await sender.send_run(run, row, stored)
        if asked.ahead:  # the disk is free from here on, while the last of this is sent
            store.reading.ahead.want(space, asked.ahead)
        await sender.flush(last=True)
    finally:
        try:
            await ahead.close()
        finally:
            sender.release()
            for row in rows:
                space.unpin(row)


async def _send_arriving(connection: Peer, sender: Sender, names: list[bytes], alike: list[Alike]) -> None:
    """Parts of followed puts, each slice as soon as it is there."""
    following, owner = connection.store.following, connection.session.owner
    sources = []
    for name in names:
        handle, page, part = unpack_provisional(name)
        put = following.get(owner, handle)
        sources.append((put, page, part, put.layout_of(page, part)))
    runs = [run for some in alike for run in some.each()]
    for run in runs:
        check_run(run, sources[run.blob][3])
    puts = {put.handle: put for put, _, _, _ in sources}.values()
    for put in puts:
        put.follow()  # for the fetch itself: its session may ask for the outcome meanwhile
    try:
        await _send_as_it_arrives(connection, sender, sources, runs)
    finally:
        for put in puts:
            put.unfollow()


async def _send_as_it_arrives(connection: Peer, sender: Sender, sources: list[tuple[Put, int, int, SliceLayout]], runs: list[Run]) -> None:
    for run in runs:
        put, page, part, layout = sources[run.blob]
        for piece in cut_lazily(run, layout):
            while (stored := put.arrived(page, part, piece.slice, piece.slice + 1)) is None:
                if sender.waiting:
                    await sender.flush()
                else:
                    with connection.interruptible(sender.request):
                        await put.progress()
            if sender.full(piece):
                await sender.flush()
            sender.add(piece, layout, stored)
    await sender.flush(last=True)


class _ReadAhead:
    """Holds the blobs of a fetch in order, bringing the next few up from SSD while earlier ones are sent."""

    def __init__(self, connection: Peer, space: Space, rows: list[int]) -> None:
        self._connection = connection
        self._store = connection.store
        self._space = space
        self._rows = iter(rows)
        self._started: deque[Held | asyncio.Task[Held]] = deque()
        self._turns: deque[asyncio.Event] = deque()

    def start(self) -> None:
        """Begin to bring up the next few."""
        while len(self._started) < _AHEAD and (row := next(self._rows, None)) is not None:
            held = self._store.reading.hold_resident(self._space, row)
            self._turns.append(turn := asyncio.Event())
            self._started.append(held or asyncio.create_task(self._store.reading.hold(self._space, row, turn, early=True)))
        if self._turns:
            self._turns[0].set()

    @property
    def must_wait(self) -> bool:
        """Whether the next blob is not in memory yet."""
        first = self._started[0]
        return isinstance(first, asyncio.Task) and not first.done()

    async def next(self, request: int) -> Held:
        """The next blob, held for the caller. Call `start` before."""
        first = self._started[0]
        if isinstance(first, Held):
            held = first
        else:
            with self._connection.interruptible(request):
                held = await first
        self._started.popleft()
        self._turns.popleft()
        return held

    async def close(self) -> None:
        """Let go of what was started and not used, even if this is cancelled while it waits for it."""
        if not self._started:
            return
        started, self._started = self._started, deque()
        for item in started:
            if isinstance(item, Held):
                item.release()
            else:
                item.cancel()
                item.add_done_callback(_release_result)
        await asyncio.gather(*(item for item in started if isinstance(item, asyncio.Task)), return_exceptions=True)


def _release_result(task: asyncio.Task[Held]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()
