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
    FrameType,
    Header,
    decode_header,
    encode,
)
from kvstore.api.wire.messages import pack, unpack
from kvstore.api.wire.runs import Piece, Run, check_run, cut, pack_runs, unpack_runs

__all__ = [
    "DATA_META", "MAX_BULK_PAYLOAD", "MAX_CONTROL_PAYLOAD", "MAX_PIECES", "PROTOCOL_VERSION", "SLICES_META",
    "Channel", "FrameType", "Header", "Piece", "Run", "check_run", "cut", "decode_header", "encode", "pack", "pack_runs",
    "unpack", "unpack_runs",
]  # fmt: skip
