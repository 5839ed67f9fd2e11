"""The stored form of a blob: its slices and behind them their digests. How a large one is read piece by piece, and verified. Pure."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.errors import Corrupt
from kvstore.kvspec import SliceLayout

_PIECE_BYTES = 2 << 20
"""Of a blob, read and verified before they are given out: enough for the disk, little enough to be sent meanwhile."""
_END_BYTES = 1 << 20
"""Of a blob's payload, read with its digest table: a read of that alone waits behind the others, and keeps a thread from its share."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of a stored form, which hold the slices [first, last)."""

    start: int
    end: int
    first: int
    last: int


def pieces_to_read(layout: SliceLayout, nbytes: int) -> list[Piece]:
    """How a stored form of `nbytes` is read: a small one at once; else its end, with the digest table, then the rest by two MiB or so."""
    if nbytes <= _PIECE_BYTES:
        return [Piece(0, nbytes, 0, layout.count)]
    offsets = layout.offsets
    end = min(layout.count - 1, bisect_left(offsets, layout.payload_bytes - _END_BYTES))
    pieces, first = [Piece(offsets[end], nbytes, end, layout.count)], 0
    while first < end:
        last = min(end, max(first + 1, bisect_right(offsets, offsets[first] + _PIECE_BYTES) - 1))
        pieces.append(Piece(offsets[first], offsets[last], first, last))
        first = last
    return pieces


def verify_stored(blob: bytes, layout: SliceLayout, stored: memoryview) -> None:
    """Raise Corrupt unless a stored form is that of the blob: its table gives the id, its slices give the table."""
    verify_table(blob, layout, stored)
    verify_slices(blob, layout, stored, 0, layout.count)


def _table(layout: SliceLayout, stored: memoryview) -> memoryview:
    return stored[layout.payload_bytes : layout.payload_bytes + DIGEST_BYTES * layout.count]


def verify_table(blob: bytes, layout: SliceLayout, stored: memoryview) -> None:
    """Raise Corrupt unless the digest table in a stored form is the one that gives the blob's id."""
    if blob_id(_table(layout, stored)) != blob:
        raise Corrupt(f"blob {blob.hex()}: its digest table does not verify")


def verify_slices(blob: bytes, layout: SliceLayout, stored: memoryview, first: int, last: int) -> None:
    """Raise Corrupt unless the slices [first, last) of a stored form are those that its table names."""
    table, offsets = _table(layout, stored), layout.offsets
    for index in range(first, last):
        if slice_digest(stored[offsets[index] : offsets[index + 1]]) != table[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            raise Corrupt(f"blob {blob.hex()}: slice {index} does not verify")
