"""Small fetches of what is in DRAM: answered where they are read, without a task, by one DATA frame and FETCHED in one system call.

A task, its bookkeeping and a second system call are nothing beside a MiB, and most of the time of some KiB.
"""

from collections.abc import Callable
from typing import Protocol

from kvstore.api.sessions import Session
from kvstore.api.streaming import Asked, corrupt
from kvstore.api.wire import DATA_META, FrameType, check_run, cut, encode, pack
from kvstore.api.wire.frames import encode_bulk
from kvstore.api.wire.messages import Fetched
from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.store import Store

SMALL_BYTES = 512 << 10
SMALL_RUNS = 256
SMALL_PIECES = 1024
SMALL_HASHED = 4 << 20
"""Bytes of slices to be verified for it: a byte of a slice takes all of the slice."""

Buffers = list[bytes | memoryview]


class Peer(Protocol):
    """The connection that it goes out by."""

    store: Store
    session: Session

    async def send_at_once(self, gather: Callable[[], Buffers | None]) -> bool:
        """Send what `gather` returns, which is called when it can be sent; False if that is nothing."""


async def fetch_small(connection: Peer, request: int, asked: Asked) -> bool:
    """Answer a FETCH, if it is small and all of it is in DRAM. Raises as `stream_fetch`; then nothing was sent."""
    if asked.provisional or asked.nbytes > min(SMALL_BYTES, asked.frame_bytes or SMALL_BYTES):
        return False
    if sum(len(alike.blobs) for alike in asked.runs) > SMALL_RUNS or sum(alike.segments for alike in asked.runs) > SMALL_PIECES:
        return False
    store = connection.store
    store.quotas.start_fetch(asked.tenant, asked.nbytes)
    try:
        sent = await connection.send_at_once(lambda: _gather(store, request, asked))
    finally:
        store.quotas.end(asked.tenant, asked.nbytes)
    if sent:
        store.stats.fetches += 1
        store.stats.fetch_bytes += asked.nbytes
    return sent


def _gather(store: Store, request: int, asked: Asked) -> Buffers | None:
    """The whole answer, verified; None if something is not in DRAM, or it does not fit into a frame.

    Holds only until the loop goes on: nothing is pinned.
    """
    space, names = asked.space, asked.names
    rows = store.find_blobs(space, names)
    stored = store.residents(space, rows)
    layouts = space.blobs.layouts_of(rows)
    tables = [b""] * len(rows)
    pieces: list[memoryview] = []
    trailer: list[bytes] = []
    hashed = 0
    for alike in asked.runs:
        layout = None
        for blob in alike.blobs:
            view = stored[blob]
            if view is None:
                return None
            if layouts[blob] is not layout:
                layout = layouts[blob]
                check_run(alike.run, layout)
                cuts, offsets = cut(alike.run, layout), layout.offsets
            if not (table := tables[blob]):
                table = tables[blob] = bytes(view[offsets[-1] :])
                if blob_id(table) != names[blob]:
                    corrupt(store, space, rows[blob])
            verified = -1
            for offset, size, number, whole in cuts:
                promise = table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                if number != verified:
                    at, end = offsets[number], offsets[number + 1]
                    if slice_digest(view[at:end]) != promise:
                        corrupt(store, space, rows[blob])
                    verified = number
                    hashed += end - at
                if hashed > SMALL_HASHED or len(pieces) == SMALL_PIECES:
                    return None
                part = view[offset : offset + size]
                pieces.append(part)
                trailer.append(promise if whole else slice_digest(part))
    fetched = Fetched(pieces=len(pieces), payload_bytes=asked.nbytes)
    return [
        encode_bulk(FrameType.DATA, request, DATA_META.pack(0), asked.nbytes, len(pieces)),
        *pieces,
        b"".join([*trailer, *map(bytes, encode(FrameType.FETCHED, request, pack(fetched)))]),
    ]
