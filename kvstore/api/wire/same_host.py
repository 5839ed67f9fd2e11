"""What clients and daemon on one machine say about shared memory: messages, places, and which machine it is. See docs/same-host.md."""

import struct
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kvstore.api.wire.messages import Message
from kvstore.errors import ProtocolError

MAX_SEGMENTS = 32
"""Segments asked for at a time: each is a descriptor."""
MAX_COPIES = 4096
"""Parts named by one COPY."""
MAX_LOCATED = 4096
"""Blobs asked for by one LOCATE."""
RETIRED = 1
"""State word of a segment that was given back: unmap it."""

_PLACE = struct.Struct("<IIQQ")
PLACE_BYTES = _PLACE.size
_NOWHERE = 0xFFFF_FFFF
_COPY = struct.Struct("<IHHQ")
COPY_BYTES = _COPY.size
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Place(NamedTuple):
    """Where the stored form of a blob lies in shared memory: as long as the slot has this generation, these are its bytes."""

    segment: int
    slot: int
    offset: int
    generation: int


def unpack_places(data: bytes | memoryview) -> list[Place | None]:
    """Places from bytes, 24 each; None for what is not in DRAM. Raises ProtocolError for a torn list."""
    if len(data) % PLACE_BYTES:
        raise ProtocolError(f"{len(data)} bytes of places: they are {PLACE_BYTES} bytes each")
    return [None if place[0] == _NOWHERE else Place(*place) for place in _PLACE.iter_unpack(data)]


class CopiedPart(NamedTuple):
    """Consecutive slices of a part of a put, from `first_slice` on, which lie at `offset` of a buffer."""

    page: int
    part: int
    first_slice: int
    offset: int


def pack_copies(parts: list[CopiedPart]) -> bytes:
    """Copied parts as bytes, 16 each."""
    return b"".join(_COPY.pack(*part) for part in parts)


def unpack_copies(data: bytes | memoryview) -> list[CopiedPart]:
    """Copied parts from bytes."""
    return [CopiedPart(*part) for part in _COPY.iter_unpack(data)]


class SegmentsRequest(Message):
    """Ask for the descriptors of segments, by number. `dropped` are those that this client has unmapped since it asked last."""

    numbers: list[int]
    dropped: list[int]


class SegmentMeta(Message):
    """A segment: its number, the bytes to map, and how many slots it has."""

    number: int
    nbytes: int
    slots: int


class SegmentList(Message):
    """The segments whose descriptors come with the frame, in order. Those that are not there (any more) are left out."""

    items: list[SegmentMeta]


class Locate(Message):
    """Where blobs are in shared memory; those on SSD are brought up first. Payload: `blobs` ids of 16 bytes, at most MAX_LOCATED."""

    namespace: str
    blobs: int


class Places(Message):
    """Payload: the place of each blob, 24 bytes each."""

    blobs: int


class Buffer(Message):
    """Let the daemon read this client's memory, whose descriptor comes with the frame, until DROP_BUFFER or the connection's end."""

    nbytes: int


class Buffered(Message):
    """A buffer's number on this connection. In a request: give it up."""

    buffer: int


class Copy(Message):
    """Take slices of a put from a buffer. Payload: copied parts of 16 bytes, then `slices[i]` digests for each, or no digests at all.

    Those are in the payload of COMMIT then: of all slices that came without, by page, part and slice. A `quiet` one is answered
    only by an error: that the rest went well, COMMITTED says.
    """

    handle: int
    buffer: int
    slices: list[int]
    quiet: bool = False


@lru_cache(maxsize=1)
def host_id() -> str:
    """Names this machine since it was booted; empty where there is no way to tell. Not the boot id itself, which is nobody's business."""
    try:
        boot = _BOOT_ID.read_bytes()
    except OSError:
        return ""
    return blake2b(boot, digest_size=16, person=b"kvstore.host").hexdigest()
