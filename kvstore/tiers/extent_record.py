"""The index of the SSD tier: a record a blob, which says where in the file of extents it lies. Pure.

A record verifies itself: the number of the commit that wrote it, then first block and count of each extent, then xxh3_128 of the key and
all of that. Of two records that name the same block the one of the later commit is right, as blocks are given out again only after
whoever had them is durably gone.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from kvstore.digests import DIGEST_BYTES
from kvstore.tiers.free_space import Extent

_KEY = struct.Struct(">I16s")
_COMMIT = struct.Struct("<Q")
_EXTENT = struct.Struct("<QI")
KEY_BYTES = _KEY.size
ONE_EXTENT = np.dtype([("commit", "<u8"), ("first", "<u8"), ("blocks", "<u4"), ("digest", f"V{DIGEST_BYTES}")])
"""Nearly all records: of blobs that lie in one extent."""


class Record(NamedTuple):
    """The number of the commit that wrote it, and where the blob lies."""

    commit: int
    extents: tuple[Extent, ...]


def blob_key(number: int, blob: bytes) -> bytes:
    """The key of a blob: namespace number, then blob id."""
    return _KEY.pack(number, blob)


def blob_of(key: bytes) -> bytes:
    """The blob id in a key."""
    return key[4:]


def encode_record(key: bytes, commit: int, extents: Sequence[Extent]) -> bytes:
    """The record of a blob that lies in these extents, in this order."""
    body = _COMMIT.pack(commit) + b"".join(_EXTENT.pack(*extent) for extent in extents)
    return body + xxh3_128_digest(key + body)


def decode_record(key: bytes, value: bytes) -> Record | None:
    """The record behind a key; None if it does not verify."""
    body = value[:-DIGEST_BYTES]
    extents, rest = divmod(len(body) - _COMMIT.size, _EXTENT.size)
    if extents < 1 or rest or xxh3_128_digest(key + body) != value[-DIGEST_BYTES:]:
        return None
    (commit,) = _COMMIT.unpack_from(body)
    return Record(commit, tuple(Extent(*one) for one in _EXTENT.iter_unpack(body[_COMMIT.size :])))


def begins_of(value: bytes) -> list[int]:
    """The first blocks that a record of one extent names, also if it does not verify."""
    return [int(np.frombuffer(value, ONE_EXTENT)["first"][0])] if len(value) == ONE_EXTENT.itemsize else []
