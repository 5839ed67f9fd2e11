"""The wire format: frames, messages and scatter reads, and the values they speak of. Imports nothing of the server.

A client needs no other part of the kvstore package than what is named here.
"""

from kvstore.api.wire.channel import Channel
from kvstore.api.wire.frames import (
    DATA_META,
    MAX_BULK_PAYLOAD,
    MAX_CONTROL_PAYLOAD,
    MAX_PIECES,
    PROTOCOL_VERSION,
    SLICES_META,
    STREAM_PAYLOAD,
    FrameType,
    Header,
    decode_header,
    encode,
)
from kvstore.api.wire.messages import pack, unpack, unpack_request
from kvstore.api.wire.runs import (
    Piece,
    Run,
    check_run,
    cut,
    cut_lazily,
    pack_alike,
    pack_provisional,
    pack_runs,
    unpack_provisional,
    unpack_runs,
)
from kvstore.api.wire.tls import TlsChannel, client_context
from kvstore.digests import DIGEST_BYTES, blob_id, extra_digest, slice_digest
from kvstore.drift import Drift, measure
from kvstore.errors import (
    BadDigest,
    BadRequest,
    Busy,
    Cancelled,
    Conflict,
    ConnectionLost,
    Corrupt,
    DeadlineExceeded,
    DiskFailing,
    Forbidden,
    KVStoreError,
    MissingParent,
    NoSpace,
    NotFound,
    ProtocolError,
    RebuildFailed,
    Unauthenticated,
    UnknownNamespace,
    Unsupported,
    VersionMismatch,
    error_from_code,
)
from kvstore.hints import Ended, Hints, Turn
from kvstore.kvspec import DTYPE_BYTES, Component, KVSpec, PartRange, SliceLayout, canonical_json

__all__ = [
    "DATA_META", "DIGEST_BYTES", "DTYPE_BYTES", "MAX_BULK_PAYLOAD", "MAX_CONTROL_PAYLOAD", "MAX_PIECES", "PROTOCOL_VERSION",
    "SLICES_META", "STREAM_PAYLOAD", "BadDigest", "BadRequest", "Busy", "Cancelled", "Channel", "Component", "Conflict",
    "ConnectionLost", "Corrupt", "DeadlineExceeded", "DiskFailing", "Drift", "Ended", "Forbidden", "FrameType", "Header", "Hints",
    "KVSpec", "KVStoreError", "MissingParent", "NoSpace", "NotFound", "PartRange", "Piece", "ProtocolError", "RebuildFailed",
    "Run", "SliceLayout", "TlsChannel", "Turn", "Unauthenticated", "UnknownNamespace", "Unsupported", "VersionMismatch",
    "blob_id", "canonical_json", "check_run", "client_context", "cut", "cut_lazily", "decode_header", "encode", "error_from_code",
    "extra_digest", "measure", "pack", "pack_alike", "pack_provisional", "pack_runs", "slice_digest", "unpack", "unpack_provisional",
    "unpack_request", "unpack_runs",
]  # fmt: skip
