"""Small fetches of what is in DRAM: answered where they are read, without a task, by one DATA frame and FETCHED in one system call.

A task, its bookkeeping and a second system call are nothing beside a MiB, and most of the time of some KiB.
"""

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Protocol

from kvstore.api.sending import corrupt
from kvstore.api.sessions import Session
from kvstore.api.streaming import Asked
from kvstore.api.wire import DATA_META, FrameType, Run, SliceLayout, check_run, cut, encode, pack, whole_slices
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
        if asked.ahead:
            store.reading.ahead.want(asked.space, asked.ahead)
    return sent


def _gather(store: Store, request: int, asked: Asked) -> Buffers | None:
    """The whole answer, verified; None if something is not in DRAM, or it does not fit into a frame.

    Holds only until the loop goes on: nothing is pinned.
    """
    if (answer := _gather_blobs(store, request, asked)) is not None:
        return answer
    space, names, rows = asked.space, asked.names, store.reading.find_many(asked.space, asked.ids).tolist()
    stored = [view for view in store.reading.residents(space, rows) if view is not None]
    if len(stored) < len(rows):
        return None
    layouts = space.blobs.layouts_of(rows)
    tables = [bytes(view[layout.offsets[-1] :]) for view, layout in zip(stored, layouts, strict=True)]
    if (named := [blob_id(table) for table in tables]) != names:
        other = _first_other(named, names)
        corrupt(store, space, rows[other], stored[other])
    pieces: list[memoryview] = []
    trailer: list[bytes] = []
    hashed = 0
    for run, all_blobs in asked.runs:
        for _, alike in groupby(all_blobs, lambda blob: id(layouts[blob])):
            blobs = list(alike)
            layout = layouts[blobs[0]]
            check_run(run, layout)
            if slices := whole_slices(run, layout):
                parts = [view[start:end] for view in [stored[blob] for blob in blobs] for _, start, end in slices]
                low, high = DIGEST_BYTES * slices[0][0], DIGEST_BYTES * (slices[-1][0] + 1)
                promised = [tables[blob][low:high] for blob in blobs]
                digests = [slice_digest(part) for part in parts]
                if (found := b"".join(digests)) != b"".join(promised):
                    each = len(slices)
                    found_of = [b"".join(digests[at : at + each]) for at in range(0, len(digests), each)]
                    other = blobs[_first_other(found_of, promised)]
                    corrupt(store, space, rows[other], stored[other])
                pieces += parts
                trailer.append(found)
            else:
                for blob in blobs:
                    try:
                        hashed += _add(stored[blob], tables[blob], run, layout, pieces, trailer)
                    except _Wrong:
                        corrupt(store, space, rows[blob], stored[blob])
                    if hashed > SMALL_HASHED or len(pieces) > SMALL_PIECES:
                        return None
            if len(pieces) > SMALL_PIECES:
                return None
    return _answer(request, asked.nbytes, pieces, trailer)


def _gather_blobs(store: Store, request: int, asked: Asked) -> Buffers | None:
    """As `_gather`, of whole blobs that are alike, each once and in order: what is done piece by piece is done by one call for all.

    None if it is something else that is asked for, or something does not verify, which `_gather` will find, too.
    """
    run, blobs = asked.runs[0]
    count = len(asked.ids) // DIGEST_BYTES
    if len(asked.runs) > 1 or run.offset or run.segments != 1 or len(blobs) != count:
        return None
    if blobs != range(count) and list(blobs) != list(range(count)):
        return None
    there = _one(store, asked) if count == 1 else _several(store, asked)
    if there is None:
        return None
    layout, pieces, tables = there
    if run.length != layout.payload_bytes or count * layout.count > SMALL_PIECES:
        return None
    width = DIGEST_BYTES * layout.count
    if layout.count > 1:
        bounds = list(pairwise(layout.offsets))
        pieces = [view[start:end] for view in pieces for start, end in bounds]
    if b"".join(map(slice_digest, pieces)) != tables:
        return None
    if b"".join([blob_id(tables[at : at + width]) for at in range(0, len(tables), width)]) != asked.ids:
        return None
    return _answer(request, asked.nbytes, pieces, [tables])


_There = tuple[SliceLayout, list[memoryview], bytes]
"""The layout of blobs in DRAM, their payloads, and their digest tables, one after the other."""


def _one(store: Store, asked: Asked) -> _There | None:
    row = store.reading.find(asked.space, asked.ids)
    if (view := store.reading.resident(asked.space, row)) is None:
        return None
    layout = asked.space.blobs.layout_of(row)
    end = layout.payload_bytes
    return layout, [view[:end]], bytes(view[end:])


def _several(store: Store, asked: Asked) -> _There | None:
    rows = store.reading.find_many(asked.space, asked.ids)
    layout = asked.space.blobs.common_layout(rows)
    there = store.reading.fronts(asked.space, rows, layout) if layout is not None else None
    return (layout, *there) if layout is not None and there is not None else None


def _answer(request: int, nbytes: int, pieces: list[memoryview], trailer: list[bytes]) -> Buffers:
    fetched = Fetched(pieces=len(pieces), payload_bytes=nbytes)
    return [
        encode_bulk(FrameType.DATA, request, DATA_META.pack(0), nbytes, len(pieces)),
        *pieces,
        b"".join([*trailer, *map(bytes, encode(FrameType.FETCHED, request, pack(fetched)))]),
    ]


class _Wrong(Exception):
    """A slice does not verify."""


def _add(view: memoryview, table: bytes, run: Run, layout: SliceLayout, pieces: list[memoryview], trailer: list[bytes]) -> int:
    """Add the pieces of a run, whose slices are verified first. Returns the bytes hashed for that, or once they are too many."""
    offsets, hashed, verified = layout.offsets, 0, -1
    for offset, size, number, whole in cut(run, layout):
        promise = table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if number != verified:
            if slice_digest(view[offsets[number] : offsets[number + 1]]) != promise:
                raise _Wrong
            verified = number
            hashed += offsets[number + 1] - offsets[number]
        part = view[offset : offset + size]
        pieces.append(part)
        trailer.append(promise if whole else slice_digest(part))
        if hashed > SMALL_HASHED or len(pieces) > SMALL_PIECES:
            break
    return hashed


def _first_other(found: list[bytes], promised: list[bytes]) -> int:
    """Where two lists begin to differ."""
    return next(index for index, (one, other) in enumerate(zip(found, promised, strict=True)) if one != other)
