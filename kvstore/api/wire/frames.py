"""Frames of the data plane: encoding and checking, without any I/O. See docs/protocol.md.

A frame is a fixed 32-byte header, a meta part (MessagePack, or a fixed struct in bulk frames), a payload, and in bulk
frames a trailer of slice digests. Every length is bounded before anything is read by it.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import ProtocolError

MAGIC = b"kV"
PROTOCOL_VERSION = 1
HEADER_BYTES = 32
MAX_META = 1 << 20
MAX_CONTROL_PAYLOAD = 16 << 20
MAX_BULK_PAYLOAD = 4 << 20
MAX_DATA_PAYLOAD = 16 << 20
"""Of DATA, if the FETCH asks for it. For ends on one machine: over a link a frame holds up what comes behind it for long."""
STREAM_PAYLOAD = 1 << 20
"""What is used piece by piece while more comes travels in smaller frames: a frame's digests are its last bytes."""
MAX_PIECES = 4096

_HEADER = struct.Struct("<2sBBIQIIQ")
_CHECKED = 24
"""The header bytes that its check covers: all but the check itself."""


class FrameType(IntEnum):
    """Requests are below 64, replies from 64 on."""

    HELLO = 1
    PING = 2
    CANCEL = 3
    CLOSE = 4
    NAMESPACE_CREATE = 8
    NAMESPACE_GET = 9
    NAMESPACE_LIST = 10
    NAMESPACE_DROP = 11
    MATCH = 16
    LEASE_RENEW = 17
    LEASE_RELEASE = 18
    FETCH = 24
    PUT = 32
    SLICES = 33
    COMMIT = 34
    ABORT = 35
    FOLLOW = 36
    OUTCOME = 37
    PREFETCH = 40
    PIN = 41
    UNPIN = 42
    ABANDON = 43
    DELETE = 44
    DROP = 45
    RECIPES = 48
    RECIPES_DELETE = 49
    REBUILD = 50
    REBUILD_CLAIM = 51
    REBUILD_RENEW = 52
    REBUILD_END = 53
    SEGMENTS = 56
    LOCATE = 57
    BUFFER = 58
    COPY = 59
    DROP_BUFFER = 60

    WELCOME = 64
    OK = 65
    ERROR = 66
    NAMESPACE = 72
    NAMESPACES = 73
    MATCHED = 80
    LEASED = 81
    DATA = 88
    FETCHED = 89
    PUT_READY = 96
    COMMITTED = 97
    FOLLOWING = 98
    PREFETCHED = 104
    PINNED = 105
    AFFECTED = 106
    RECIPE_COUNTS = 112
    REBUILT = 113
    REBUILD_JOB = 114
    SEGMENT_LIST = 120
    PLACES = 121
    BUFFERED = 122


_TYPES = {int(kind): kind for kind in FrameType}

BULK = frozenset({FrameType.SLICES, FrameType.DATA})
"""Frames whose payload is slices: its digests follow it, and the header's check leaves it out."""

_LIMITS = {FrameType.SLICES: MAX_BULK_PAYLOAD, FrameType.DATA: MAX_DATA_PAYLOAD}
"""Bytes of payload at most, where that is not MAX_CONTROL_PAYLOAD."""

SLICES_META = struct.Struct("<QIHH")
"""SLICES: put handle, page, part, first slice."""
DATA_META = struct.Struct("<Q")
"""DATA: index of the first piece in the fetch."""


class Header(NamedTuple):
    """A frame header. `pieces` counts the slices (or pieces of slices) in a bulk frame's payload, else it is 0."""

    type: FrameType
    pieces: int
    request: int
    meta_bytes: int
    payload_bytes: int
    check: int

    @property
    def bulk(self) -> bool:
        """Whether the payload is slices."""
        return self.type in BULK

    @property
    def trailer_bytes(self) -> int:
        """Bytes of digests after the payload."""
        return self.pieces * DIGEST_BYTES

    def verify(self, raw: bytes | bytearray | memoryview, meta: bytes, payload: bytes) -> None:
        """Raise ProtocolError unless header, meta and control payload are as they were sent."""
        if _check(bytes(raw[:_CHECKED]) + meta, payload) != self.check:
            raise ProtocolError(f"a {self.type.name} frame does not match its check: the bytes were changed on the way")


_HTTP_METHODS = {b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC"}
_TLS_HANDSHAKE = b"\x16\x03"


def _stranger(first: bytes) -> str:
    """What somebody speaks who does not begin a frame as kvstore does."""
    if first == b"HTTP" or first in _HTTP_METHODS:
        return "this is HTTP, not a kvstore frame: the control plane (HTTP) and the data plane have ports of their own"
    if first[:2] == _TLS_HANDSHAKE:
        return (
            "this is TLS, not a kvstore frame: the daemon speaks it on its data plane where it was given a certificate, to tls://HOST:PORT"
        )
    return f"not a kvstore frame: it begins with {first.hex()}"


def decode_header(raw: bytes | bytearray | memoryview) -> Header:
    """Read a header (32 bytes) and check every bound. Raises ProtocolError."""
    magic, version, kind, pieces, request, meta_bytes, payload_bytes, check = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise ProtocolError(_stranger(bytes(raw[:4])))
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"frame of protocol version {version}, this side speaks {PROTOCOL_VERSION}")
    frame_type = _TYPES.get(kind)
    if frame_type is None:
        raise ProtocolError(f"unknown frame type {kind}")
    bulk = frame_type in BULK
    limit = _LIMITS.get(frame_type, MAX_CONTROL_PAYLOAD)
    if meta_bytes > MAX_META or payload_bytes > limit:
        raise ProtocolError(f"a {frame_type.name} frame of {meta_bytes} + {payload_bytes} bytes: the limits are {MAX_META} + {limit}")
    if pieces > MAX_PIECES or bool(pieces) != bulk or (bulk and pieces > payload_bytes):
        raise ProtocolError(f"a {frame_type.name} frame with {pieces} pieces and {payload_bytes} bytes of payload")
    return Header(frame_type, pieces, request, meta_bytes, payload_bytes, check)


def encode(frame_type: FrameType, request: int, meta: bytes, payload: bytes | bytearray | memoryview = b"") -> list[bytes | memoryview]:
    """A control frame as buffers to send in order. Raises ProtocolError if it would be over the limits."""
    body = memoryview(payload).cast("B")
    size = len(body)
    if len(meta) > MAX_META or size > MAX_CONTROL_PAYLOAD:
        raise ProtocolError(f"a {frame_type.name} frame of {len(meta)} + {size} bytes: the limits are {MAX_META} + {MAX_CONTROL_PAYLOAD}")
    head = _HEADER.pack(MAGIC, PROTOCOL_VERSION, frame_type, 0, request, len(meta), size, 0)[:_CHECKED]
    start = head + _check(head + meta, body).to_bytes(8, "little") + meta
    return [start, body] if size else [start]


def encode_bulk(frame_type: FrameType, request: int, meta: bytes, payload_bytes: int, pieces: int) -> bytes:
    """Header and meta of a bulk frame; payload and digests are sent after it."""
    head = _HEADER.pack(MAGIC, PROTOCOL_VERSION, frame_type, pieces, request, len(meta), payload_bytes, 0)[:_CHECKED]
    return head + _check(head + meta).to_bytes(8, "little") + meta


def _check(head_and_meta: bytes, payload: bytes | memoryview = b"") -> int:
    if not payload:
        return xxh3_64_intdigest(head_and_meta)
    state = xxh3_64(head_and_meta)
    state.update(payload)
    return state.intdigest()
