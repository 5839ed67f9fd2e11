"""One put of pages that lie in the caller's buffer: cut into commits, each sent by the fastest way there is.

Streams of layers are in streams.py.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.api.wire import DIGEST_BYTES, MAX_BULK_PAYLOAD, Busy, FrameType, KVSpec, PartRange
from kvstore.api.wire.put_messages import Committed, PutStart
from kvstore_client.connection import Connection
from kvstore_client.linked import LINK_STRIPE
from kvstore_client.near_put import NEAR_AT_ONCE_BYTES, near_connection, near_frame_bytes, put_near, put_near_at_once
from kvstore_client.plan import INTERACTIVE_BYTES
from kvstore_client.pool import Pool
from kvstore_client.put_layout import PutLayout
from kvstore_client.transfer import ALONE_AT_ONCE_BYTES, AT_ONCE_BYTES, Progress, begin_put, give_up_put, put_at_once, send_striped
from kvstore_client.waiting import Patience
from kvstore_client.whole import Closing, Whole

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient

_STORED_STEP = 256
"""The daemon keeps parts, with their digests, in slots whose sizes are multiples of this, of 4 KiB if they are large: for those
there is room in what it says that a put may have."""
PUT_PAGES = 4096
PUT_BYTES = 64 << 20
"""A put is sent in commits of about so many bytes, the front of the prefix first."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """Pages that are new in the store, that had a version already, and that still lack what other shards of the put id bring.

    Of a flat namespace `existing` says which pages [first, last) of the call had one. `gained_pages` of the existing ones got windows or
    states that they lacked; a daemon older than this says 0.
    """

    new_pages: int
    existing_pages: int
    pending_pages: int = 0
    existing: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    gained_pages: int = field(default=0, compare=False)


def in_all(done: Iterable[PutResult | Committed]) -> PutResult:
    """What several commits, or puts, came to."""
    counts = [(one.new_pages, one.existing_pages, one.pending_pages, one.gained_pages) for one in done]
    new, existing, pending, gained = (sum(column) for column in zip((0, 0, 0, 0), *counts, strict=True))
    return PutResult(new, existing, pending, gained_pages=gained)


def commit_bytes(pool: Pool, spec: KVSpec, parts: tuple[PartRange, ...], most: int) -> int:
    """Payload bytes of a commit of these parts: `most`, or what the daemon's DRAM has room for."""
    found = most
    for part in parts if pool.put_bytes else ():
        layout = spec.slice_layout(part)
        stored = -(-(layout.payload_bytes + DIGEST_BYTES * layout.count) // _STORED_STEP) * _STORED_STEP
        found = min(found, pool.put_bytes * layout.payload_bytes // stored)
    return found


async def put_once(
    client: "AsyncClient", message: PutStart, payload: bytes | memoryview, data: memoryview, layout: PutLayout, whole: Whole,
    progress: Progress | None = None, *, alone: bool = True,
) -> Committed:  # fmt: skip
    """One commit, of all of the layout if it is `alone`.

    A put that is cut off is put again: whoever commits a page first wins, so that is harmless.
    """
    at_once = alone and layout.total - layout.first_page <= PUT_PAGES

    async def attempt() -> Committed:
        with client.pool.bulk(layout.nbytes > INTERACTIVE_BYTES):
            return await once_there_is_room()

    async def once_there_is_room() -> Committed:
        nonlocal at_once
        with Patience() as patience:
            while True:
                near = await near_connection(client, layout.nbytes)
                most = NEAR_AT_ONCE_BYTES if near is not None else AT_ONCE_BYTES if client.pool.spread > 1 else ALONE_AT_ONCE_BYTES
                if near is None and client.pool.several:
                    most = LINK_STRIPE  # more is faster over all of them
                message.handle = secrets.randbits(62) + 1 if at_once and layout.nbytes <= most else 0
                try:
                    return await _attempt(client, near, message, payload, data, layout, whole, progress)
                except Busy as busy:
                    at_once = False  # next time it is only sent when there is room
                    await patience.wait(busy)

    return await client.pool.retry(attempt)


async def _attempt(
    client: "AsyncClient", near: Connection | None, message: PutStart, payload: bytes | memoryview, data: memoryview, layout: PutLayout,
    whole: Whole, progress: Progress | None,
) -> Committed:  # fmt: skip
    pool, parts = client.pool, [PartRange(*p) for p in message.parts]
    if message.handle:
        handle = message.handle
        connection = near or await pool.first()
        wanted = [(part, *span) for part, span in enumerate(message.spans or [(layout.first_page, layout.total)] * len(parts))]
    else:
        connection = await pool.first()
        ready = await begin_put(pool, connection, message, payload)
        handle, wanted = ready.handle, ready.wanted
    closing = Closing(handle, whole)
    try:
        if message.handle and near is not None:
            frames = layout.frames(wanted, parts, near_frame_bytes(client, data))
            return await put_near_at_once(client, near, message, payload, frames, data, closing, progress)
        frames = layout.frames(wanted, parts, LINK_STRIPE if near is None and pool.several else MAX_BULK_PAYLOAD)
        if message.handle:
            return await put_at_once(connection, message, payload, frames, data, closing, progress)
        if near is not None:
            done = await put_near(client, near, closing, frames, data, message.ack == "durable", progress)
            if done is not None:
                return done
        await send_striped(pool, handle, frames, data, progress)
        if pool.several:
            connection = await pool.first()  # the daemon has all slices, and the link that PUT went over may be gone
        committed, _ = await connection.call(FrameType.COMMIT, closing.commit(), Committed)
    except BaseException as error:  # whatever it was: the put must not stay open, with its slots
        await give_up_put(pool, handle, error, connection)
        raise
    return committed
