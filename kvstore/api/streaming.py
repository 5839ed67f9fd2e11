"""The bulk side of the data plane: slices coming in for a put, and pieces going out for a fetch."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn, Protocol

from kvstore.api.sessions import Session
from kvstore.api.wire import (
    DATA_META,
    MAX_BULK_PAYLOAD,
    MAX_DATA_PAYLOAD,
    SLICES_META,
    Alike,
    Channel,
    FrameType,
    Header,
    Piece,
    Run,
    SliceLayout,
    check_run,
    cut_lazily,
    encode,
    pack,
    unpack_alike,
    unpack_provisional,
    unpack_request,
    whole_slices,
)
from kvstore.api.wire.messages import Fetched, FetchRequest, Message
from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.errors import BadRequest, Corrupt, KVStoreError, ProtocolError
from kvstore.store import Held, Put, Space, Store

_AHEAD = 4
"""Blobs of a fetch that are brought up from SSD while earlier ones are sent."""
BEGIN_WAIT_S = 0.05
"""How long a connection waits with slices in hand for the room of a put that is sent at once: long enough to make a segment, and short
enough for the requests that come behind them."""
_FRAME_PIECES = 1024
"""Pieces of a DATA frame at most: some milliseconds of work."""
_BREATH = 16 << 20
_PIECE_WORK = 32 << 10
_PROVISIONAL = -1
"""In place of a blob row: the bytes belong to a put under way."""


Then = Callable[[list[bytes]], Sequence[bytes | memoryview]]


class Peer(Protocol):
    """The connection that bulk comes in by and goes out by."""

    store: Store
    session: Session
    channel: Channel

    async def reply(self, request: int, frame_type: FrameType, message: Message, payload: bytes = b"") -> None:
        """Send one control frame."""

    def interruptible(self, request: int) -> AbstractContextManager[None]:
        """While a fetch waits for something that is not its own frame, it can be stopped at once."""

    async def send_pieces(
        self, request: int, meta: bytes, pieces: Sequence[memoryview], promised: Sequence[bytes | None], then: Then | None = None
    ) -> list[bytes]:
        """Send one DATA frame, and what `then`, told the digests computed on the way, has to go behind it. Returns the digests."""


async def receive_slices(connection: Peer, header: Header, meta: bytes) -> KVStoreError | None:
    """Read a SLICES frame straight into its put's slots. A put that can't take them is told at its commit, too.

    The payload is read in any case, so that the connection goes on. Returns the error to report.
    """
    if len(meta) != SLICES_META.size:
        raise ProtocolError(f"a SLICES meta of {len(meta)} bytes, not {SLICES_META.size}")
    handle, page, part, first_slice = SLICES_META.unpack(meta)
    put = None
    try:
        put = connection.store.get_put(connection.session.owner, handle)
        if put.at_once:
            if not put.ready or put.error is not None:
                await connection.store.put_begun(put, BEGIN_WAIT_S)
            if not put.wants(page, part):
                await connection.channel.skip(header.payload_bytes + header.trailer_bytes)
                return None
        try:
            view, sizes = put.locate(page, part, first_slice, header.payload_bytes, header.pieces)
        except BadRequest:
            if not put.has(page, part, first_slice, header.pieces):
                raise
            await connection.channel.skip(header.payload_bytes)
            put.check_again(page, part, first_slice, await connection.channel.read(header.trailer_bytes))
            return None
    except KVStoreError as error:
        if put is not None:
            put.fail(error)
        await connection.channel.skip(header.payload_bytes + header.trailer_bytes)
        return error
    try:
        digests, claimed = await connection.channel.read_pieces(header, [(view, sizes)])
    except BaseException:
        put.release_writer(page, part, first_slice, len(sizes))
        raise
    try:
        put.received(page, part, first_slice, digests, claimed)
    except KVStoreError as error:
        put.fail(error)
        return error
    return None


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
    nbytes = sum(alike.nbytes for alike in runs)
    return Asked(space, payload[:ids_end], runs, nbytes, message.provisional, message.frame_bytes, message.priority)


async def stream_fetch(connection: Peer, request: int, asked: Asked) -> None:
    """Answer a FETCH: all pieces of all runs in order, as DATA frames, then FETCHED."""
    store, space, runs, tenant = connection.store, asked.space, asked.runs, asked.tenant
    store.quotas.start_fetch(tenant, asked.nbytes)
    sender, link = _Sender(connection, request, space, asked.frame_bytes), connection.session.link.meter
    link.begin()
    held_up = True
    try:
        if asked.provisional:
            await _send_arriving(connection, sender, asked.names, runs)
        else:
            await _send_stored(connection, sender, space, asked.ids, runs)
        held_up = asked.provisional or sender.held_up
    finally:
        link.end(sender.payload_bytes, spoiled=held_up)
        sender.release()
        store.quotas.end(tenant, asked.nbytes)
    store.stats.fetches += 1
    store.stats.fetch_bytes += sender.payload_bytes
    if not sender.answered:
        await connection.reply(request, FrameType.FETCHED, sender.fetched())


async def _send_stored(connection: Peer, sender: "_Sender", space: Space, ids: bytes, runs: list[Alike]) -> None:
    store = connection.store
    rows = store.find_blobs(space, ids).tolist()
    layouts = space.blobs.layouts_of(rows)
    for alike in runs:
        for layout in {id(layouts[blob]): layouts[blob] for blob in alike.blobs}.values():
            check_run(alike.run, layout)
    for row in rows:
        space.pin(row)  # before anything is awaited: a row that is let go may become another blob's
    resident = {row: view for row, view in zip(rows, store.residents(space, rows), strict=True) if view is not None}
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
        await sender.flush(last=True)
    finally:
        try:
            await ahead.close()
        finally:
            sender.release()
            for row in rows:
                space.unpin(row)


async def _send_arriving(connection: Peer, sender: "_Sender", names: list[bytes], alike: list[Alike]) -> None:
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


async def _send_as_it_arrives(
    connection: Peer, sender: "_Sender", sources: list[tuple[Put, int, int, SliceLayout]], runs: list[Run]
) -> None:
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
            held = self._store.hold_resident(self._space, row)
            self._turns.append(turn := asyncio.Event())
            self._started.append(held or asyncio.create_task(self._store.hold(self._space, row, turn, early=True)))
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


class _Sender:
    """Gathers pieces into DATA frames. Every slice is verified on the way: whole ones as they are sent, others before."""

    def __init__(self, connection: Peer, request: int, space: Space, frame_bytes: int) -> None:
        self.request = request
        self._frame_bytes = min(frame_bytes or MAX_BULK_PAYLOAD, MAX_DATA_PAYLOAD)
        self.pieces_sent = 0
        self.payload_bytes = 0
        self.answered = False
        """Whether FETCHED went out with the last frame."""
        self.held_up = False
        """Whether something had to be read from SSD before it could be sent."""
        self._connection = connection
        self._space = space
        self._pieces: list[memoryview] = []
        self._promised: list[bytes | None] = []
        self._owners: list[int] = []
        self._bytes = 0
        self._held: list[Held] = []
        self._named: set[int] = set()
        """Rows whose digest table was found to be the one that their id names, in the bytes that this fetch holds."""
        self._verified: tuple[int, int] | None = None
        self._cut: tuple[Run, SliceLayout, list[tuple[int, int, int]]] | None = None
        """The run that was last added whole, and the slices of it."""
        self._work = 0
        """Since others had a turn: bytes hashed, and pieces as so many bytes."""

    @property
    def waiting(self) -> bool:
        """Whether there are pieces to flush."""
        return bool(self._pieces)

    async def send_held(self, run: Run, held: Held) -> None:
        """Send a run of a blob that is held, and let go of it once its pieces are sent. It may still be on its way from SSD."""
        self._held.append(held)
        self._named.discard(held.row)
        await self.send_run(run, held.row, held.view, held)

    def add_whole(self, run: Run, row: int, stored: memoryview, layout: SliceLayout) -> bool:
        """Gather a run of whole slices of a blob that stays in place for the fetch, if the frame has room for all of it; else do nothing.

        Most runs are so, and alike: this is `send_run` without what has been looked at already.
        """
        if self._bytes + run.length > self._frame_bytes or self._work > _BREATH:
            return False
        cut = self._cut
        if cut is None or cut[0] is not run or cut[1] is not layout:
            cut = self._cut = run, layout, whole_slices(run, layout)
        slices, count = cut[2], len(cut[2])
        if not count or len(self._pieces) + count > _FRAME_PIECES:
            return False
        if row not in self._named:
            self._check_name(row, stored, layout)
        self._verified = None
        for number, start, end in slices:
            table = layout.payload_bytes + DIGEST_BYTES * number
            self._pieces.append(stored[start:end])
            self._promised.append(bytes(stored[table : table + DIGEST_BYTES]))
            self._owners.append(row)
        self._bytes += run.length
        self._work += _PIECE_WORK * count
        return True

    def _check_name(self, row: int, stored: memoryview, layout: SliceLayout) -> None:
        """See that the digest table is the one that the blob's id names."""
        if blob_id(stored[layout.payload_bytes :]) != self._space.blobs.id_of(row):
            self._corrupt(row, stored)
        self._named.add(row)

    async def send_run(self, run: Run, row: int, stored: memoryview, held: Held | None = None) -> None:
        """Send a run of a blob. Its stored form stays in place for the fetch, or is `held`, the last that was taken over."""
        layout = self._space.blobs.layout_of(row)
        if row not in self._named:
            self._check_name(row, stored, layout)
        self._verified = None
        for piece in cut_lazily(run, layout):
            if held is not None and not held.has(piece.slice):
                await self._wait_for(held, piece.slice)
            if self.full(piece):
                await self.flush(keep_last=True)
            self.add(piece, layout, stored, row)
            if self._work > _BREATH:  # many small pieces are much work for few bytes, and no write that waits
                self._work = 0
                await asyncio.sleep(0)

    async def _wait_for(self, held: Held, number: int) -> None:
        """Wait for a slice that is being read; what came before it is sent meanwhile."""
        self.held_up = True
        await self.flush(keep_last=True)
        with self._connection.interruptible(self.request):
            await held.wait_for(number)

    def full(self, piece: Piece) -> bool:
        """Whether a piece has no place in the frame any more."""
        most = min(self._frame_bytes, MAX_BULK_PAYLOAD) if self._held else self._frame_bytes  # what comes from SSD is not saved up
        return (bool(self._pieces) and self._bytes + piece.size > most) or len(self._pieces) >= _FRAME_PIECES

    def add(self, piece: Piece, layout: SliceLayout, stored: memoryview, row: int = _PROVISIONAL) -> None:
        """Gather a piece of the stored form of a blob, or of a part of a put under way."""
        table = layout.payload_bytes + piece.slice * DIGEST_BYTES
        promise = bytes(stored[table : table + DIGEST_BYTES])
        if not piece.whole and self._verified != (row, piece.slice):
            whole = stored[layout.offsets[piece.slice] : layout.offsets[piece.slice + 1]]
            if slice_digest(whole) != promise:
                self._corrupt(row, whole)
            self._verified = (row, piece.slice) if row != _PROVISIONAL else None
            self._work += len(whole)
        self._work += _PIECE_WORK
        self._pieces.append(stored[piece.offset : piece.offset + piece.size])
        self._promised.append(promise if piece.whole else None)
        self._owners.append(row)
        self._bytes += piece.size

    async def flush(self, *, keep_last: bool = False, last: bool = False) -> None:
        """Send what is gathered, and let go of the blobs that were taken over, except the last if it is still being sent.

        Nothing comes behind what is the `last` but FETCHED, which goes with it.
        """
        if self._pieces:
            meta = DATA_META.pack(self.pieces_sent)
            self.pieces_sent += len(self._pieces)
            self.payload_bytes += self._bytes
            digests = await self._connection.send_pieces(self.request, meta, self._pieces, self._promised, self._answer if last else None)
            if digests != self._promised:
                for digest, promise, row, piece in zip(digests, self._promised, self._owners, self._pieces, strict=True):
                    if promise is not None and digest != promise:
                        self._corrupt(row, piece)
            self._pieces, self._promised, self._owners, self._bytes = [], [], [], 0
        kept = [self._held.pop()] if keep_last and self._held else []
        self.release()
        self._held = kept

    def fetched(self) -> Fetched:
        """What the client is told at the end."""
        return Fetched(pieces=self.pieces_sent, payload_bytes=self.payload_bytes)

    def _answer(self, digests: list[bytes]) -> Sequence[bytes | memoryview]:
        """What goes behind the last frame: nothing if it does not verify."""
        self.answered = all(promise is None or promise == digest for promise, digest in zip(self._promised, digests, strict=True))
        return encode(FrameType.FETCHED, self.request, pack(self.fetched())) if self.answered else ()

    def release(self) -> None:
        """Let go of all blobs."""
        for held in self._held:
            held.release()
        self._held.clear()

    def _corrupt(self, row: int, seen: memoryview) -> NoReturn:
        if row == _PROVISIONAL:
            raise Corrupt("a slice of a put under way did not verify in DRAM")
        corrupt(self._connection.store, self._space, row, seen)


def corrupt(store: Store, space: Space, row: int, seen: memoryview) -> NoReturn:
    """Drop a copy in DRAM that did not verify, in the memory `seen`, and say so. Raises Corrupt."""
    name = space.blobs.id_of(row).hex()
    store.discard_bad_copy(space, row, seen)
    raise Corrupt(f"blob {name} did not verify in DRAM; that copy was dropped")
