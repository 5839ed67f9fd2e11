"""A recipe: what it takes to compute a page again, and what came out the last time. Values and their encoding; pure."""

import struct
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_128_digest

from kvstore.digests import DIGEST_BYTES, KEY_BYTES
from kvstore.kvspec import PartRange

_VERSION = 1
_HEAD = struct.Struct("<BBHI32s16s32sQI")
_PART = struct.Struct("<BxHHHH16sIH")
MIN_RECORD = _HEAD.size + DIGEST_BYTES
"""Bytes of the shortest recipe."""
MAX_BODY = 4096
"""Bytes of text, or of a reference, that a client may give for a page."""


class RecipeKind(IntEnum):
    """What the body of a recipe is."""

    TOKENS = 0
    TEXT = 1
    REFERENCE = 2


@dataclass(frozen=True, slots=True)
class RecipePart:
    """One part of the page as it was: geometry, blob id (its content hash), payload size, and a few of its elements as raw bytes."""

    range: PartRange
    blob: bytes
    size: int
    sample: bytes = b""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to compute the page `key`, which is page `depth` of its prefix. `body` are token ids (uint32), text, or a client's reference.

    `version` is the put id of the computation that `parts` came from. `written_ms` is Unix time.
    """

    key: bytes
    parent: bytes
    depth: int
    kind: RecipeKind
    body: bytes
    extra: bytes
    version: bytes
    written_ms: int
    parts: tuple[RecipePart, ...]


def encode_recipe(namespace_digest: bytes, recipe: Recipe) -> bytes:
    """The bytes of a recipe on disk, its digest over all of it (and its namespace and key) last."""
    head = _HEAD.pack(
        _VERSION, recipe.kind, len(recipe.parts), recipe.depth, recipe.parent, recipe.version, recipe.extra, recipe.written_ms,
        len(recipe.body),
    )  # fmt: skip
    parts = b"".join(
        _PART.pack(p.range.component, p.range.layer_lo, p.range.layer_hi, p.range.head_lo, p.range.head_hi, p.blob, p.size, len(p.sample))
        + p.sample
        for p in recipe.parts
    )
    body = head + recipe.body + parts
    return body + xxh3_128_digest(namespace_digest + recipe.key + body)


def verifies(namespace_digest: bytes, key: bytes, value: bytes) -> bool:
    """Whether these are the bytes that were written for this key."""
    return (
        len(key) == KEY_BYTES
        and len(value) >= MIN_RECORD
        and value[0] == _VERSION
        and xxh3_128_digest(namespace_digest + key + value[:-DIGEST_BYTES]) == value[-DIGEST_BYTES:]
    )


def decode_recipe(namespace_digest: bytes, key: bytes, value: bytes) -> Recipe | None:
    """The inverse of `encode_recipe`; None if the bytes do not verify."""
    if not verifies(namespace_digest, key, value):
        return None
    _, kind, count, depth, parent, version, extra, written_ms, body_bytes = _HEAD.unpack_from(value)
    at = _HEAD.size + body_bytes
    body, parts = value[_HEAD.size : at], []
    for _ in range(count):
        *where, blob, size, sample_bytes = _PART.unpack_from(value, at)
        at += _PART.size
        parts.append(RecipePart(PartRange(*where), blob, size, value[at : at + sample_bytes]))
        at += sample_bytes
    return Recipe(key, parent, depth, RecipeKind(kind), body, extra, version, written_ms, tuple(parts))


def parent_of(value: bytes) -> bytes:
    """The parent's key, of bytes that may be damaged."""
    return value[8 : 8 + KEY_BYTES]
