"""What the daemon answers to a client on its machine: descriptors of segments, places, and copies out of the client's buffers."""

import os
from functools import partial

from kvstore.api.auth import Access
from kvstore.api.copying import Job
from kvstore.api.receiving import BEGIN_WAIT_S
from kvstore.api.replies import Context, Reply
from kvstore.api.requests import Quick, Slow
from kvstore.api.same_host import SameHostPeer
from kvstore.api.wire.frames import FrameType
from kvstore.api.wire.messages import Empty, Message
from kvstore.api.wire.same_host import (
    COPY_BYTES,
    MAX_COPIES,
    MAX_LOCATED,
    MAX_SEGMENTS,
    Buffer,
    Buffered,
    CopiedPart,
    Copy,
    Locate,
    Places,
    SegmentList,
    SegmentMeta,
    SegmentsRequest,
    unpack_copies,
)
from kvstore.digests import DIGEST_BYTES
from kvstore.errors import BadRequest, Busy, Forbidden, KVStoreError
from kvstore.store import Put
from kvstore.store.waits import finish_despite_cancel

Named = tuple[CopiedPart, int, bytes | None]
"""Slices that a COPY names, how many they are, and their digests; None if those are said later."""


def _peer(context: Context) -> SameHostPeer:
    if context.same_host is None:
        raise Forbidden("shared memory is for clients of the daemon's user, over its Unix socket, where it is switched on")
    return context.same_host


def _segments(context: Context, message: SegmentsRequest, payload: bytes) -> Reply:
    _peer(context)
    if len(message.numbers) > MAX_SEGMENTS:
        raise BadRequest(f"{len(message.numbers)} segments asked for at once: the limit is {MAX_SEGMENTS}")
    session, sharing = context.session, context.store.sharing
    found = sharing.segments(session.owner, session.tenant, message.numbers, message.dropped)
    mine: list[int] = []
    try:
        mine.extend(os.dup(segment.descriptor) for segment in found)
    except OSError as error:
        for descriptor in mine:
            os.close(descriptor)
        raise Busy(f"no descriptors are left: {error.strerror}", retry_after_ms=1000) from None
    items = [SegmentMeta(number=s.number, nbytes=s.nbytes, slots=s.slots) for s in found]
    unsent = partial(sharing.take_back, session.owner, sharing.give(session.owner, session.tenant, found))
    return Reply(FrameType.SEGMENT_LIST, SegmentList(items=items), descriptors=tuple(mine), unsent=unsent)


async def _locate(context: Context, message: Locate, payload: bytes) -> Reply:
    _peer(context)
    if message.blobs > MAX_LOCATED:
        raise BadRequest(f"the places of {message.blobs} blobs asked for at once: the limit is {MAX_LOCATED}")
    if not message.blobs > 0 or len(payload) != message.blobs * DIGEST_BYTES:
        raise BadRequest(f"the places of {message.blobs} blobs, asked for with {len(payload)} bytes of ids")
    store, space = context.store, context.store.space(context.session.tenant, message.namespace)
    rows = [store.reading.find(space, payload[i : i + DIGEST_BYTES]) for i in range(0, len(payload), DIGEST_BYTES)]
    return Reply(FrameType.PLACES, Places(blobs=message.blobs), await store.sharing.locate(space, rows))


def _buffer(context: Context, message: Buffer, payload: bytes) -> Reply:
    return Reply(FrameType.BUFFERED, Buffered(buffer=_peer(context).add_buffer(message.nbytes)))


def _drop_buffer(context: Context, message: Buffered, payload: bytes) -> Reply:
    _peer(context).drop_buffer(message.buffer)
    return Reply(FrameType.OK, Empty())


async def _copy(context: Context, message: Copy, payload: bytes) -> Reply | None:
    peer = _peer(context)
    put = context.store.get_put(context.session.owner, message.handle)
    try:
        named = _named(message, payload)
        for part, count, digests in named:
            if digests is None:
                put.expect(part.page, part.part, part.first_slice, count)  # before anything is waited for: a COMMIT may be next
        if put.at_once:
            await context.store.put_begun(put, BEGIN_WAIT_S)
            named = [each for each in named if put.wants(each[0].page, each[0].part)]
        copied = await _copy_into(put, peer, message.buffer, named)
    except KVStoreError as error:
        put.fail(error)  # its commit says so, too
        raise
    context.store.stats.copied_put_bytes += copied
    return None if message.quiet else Reply(FrameType.OK, Empty())


def _named(message: Copy, payload: bytes) -> list[Named]:
    counts, at = message.slices, len(message.slices) * COPY_BYTES
    late = len(payload) == at
    if not 0 < len(counts) <= MAX_COPIES or min(counts) < 1 or not (late or len(payload) == at + sum(counts) * DIGEST_BYTES):
        raise BadRequest(f"a copy of {len(counts)} parts with a payload of {len(payload)} bytes")
    named: list[Named] = []
    for part, count in zip(unpack_copies(payload[:at]), counts, strict=True):
        named.append((part, count, None if late else payload[at : at + count * DIGEST_BYTES]))
        at += count * DIGEST_BYTES
    return named


async def _copy_into(put: Put, peer: SameHostPeer, number: int, parts: list[Named]) -> int:
    """Returns the bytes."""
    buffer = peer.buffer(number)
    located = 0
    jobs: list[Job] = []
    received = 0
    try:
        for part, count, _ in parts:
            offsets = put.layout_of(part.page, part.part).offsets
            if part.first_slice + count >= len(offsets):
                raise BadRequest(f"slices {part.first_slice} to {part.first_slice + count} of page {part.page}, part {part.part}")
            nbytes = offsets[part.first_slice + count] - offsets[part.first_slice]
            view, sizes = put.locate(part.page, part.part, part.first_slice, nbytes, count)
            located += 1
            jobs.append((view, sizes, part.offset))
        found = await finish_despite_cancel(buffer.copy(peer.host.copiers, jobs))
        for (part, _, claimed), digests in zip(parts, found, strict=True):
            received += 1
            put.received(part.page, part.part, part.first_slice, digests, claimed)
        return sum(len(view) for view, _, _ in jobs)
    finally:
        for part, count, _ in parts[received:located]:
            put.release_writer(part.page, part.part, part.first_slice, count)


QUICK: dict[FrameType, tuple[type[Message], Quick]] = {
    FrameType.SEGMENTS: (SegmentsRequest, _segments),
    FrameType.BUFFER: (Buffer, _buffer),
    FrameType.DROP_BUFFER: (Buffered, _drop_buffer),
}
SLOW: dict[FrameType, tuple[type[Message], Slow]] = {FrameType.LOCATE: (Locate, _locate), FrameType.COPY: (Copy, _copy)}
ACCESS: dict[FrameType, Access] = {
    FrameType.SEGMENTS: Access.READ,
    FrameType.LOCATE: Access.READ,
    FrameType.BUFFER: Access.WRITE,
    FrameType.COPY: Access.WRITE,
    FrameType.DROP_BUFFER: Access.WRITE,
}
