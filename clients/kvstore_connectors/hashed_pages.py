"""Pages of engines that give hashes: a KV spec for bytes that only the engine understands, and its memory as places. Pure.

An engine's page is so many rows of one size, each contiguous in its memory. For the store a row is a layer of bytes; what they mean
(dtype, shape, axis order) is the engine's affair, and goes into the fingerprint of the namespace.
"""

import ctypes
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256

import numpy as np

from kvstore_client import BadRequest, Component, KVSpec, Scattered

LABEL_BYTES = 32
_MOST = (1 << 16) - 1
_LEAST_SPAN = 20
"""Of the windows into memory, as a power of two."""


def rows_component(kind: str, rows: int, row_bytes: int, page_tokens: int, window: int = 0) -> Component:
    """A component of opaque rows: `full` and `window` ones of `page_tokens` tokens, a `state` once. Raises BadRequest for odd sizes."""
    tokens = 1 if kind == "state" else page_tokens
    if row_bytes <= 0 or row_bytes % tokens:
        raise BadRequest(f"rows of {row_bytes} bytes are not whole for {tokens} tokens")
    heads, width = _two_factors(row_bytes // tokens)
    if kind == "window":
        return Component("window", rows, heads, width, dtype="u8", planes=1, window=window)
    return Component("state" if kind == "state" else "full", rows, heads, width, dtype="u8", planes=1)


def page_tokens_for(row_bytes: int, tokens: int) -> int:
    """The tokens of a page as the spec can say them: so many if the row divides by them, else 1 (they only count tokens matched)."""
    return tokens if tokens and row_bytes % tokens == 0 else 1


def _two_factors(number: int) -> tuple[int, int]:
    """Two factors that a spec can hold, the second as large as can be."""
    for second in range(min(number, _MOST), 0, -1):
        if number % second == 0:
            if number // second > _MOST:
                break
            return number // second, second
    raise BadRequest(f"{number} bytes a token have no two factors under {_MOST}: the store can't describe such a page")


def namespace_name(engine: str, model: str, kind: str, fingerprint: str, spec: KVSpec) -> str:
    """The name of a namespace: readable, and as different as fingerprint and spec are."""
    identity = sha256(json.dumps([fingerprint, spec.to_dict()], sort_keys=True).encode()).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[-60:].strip("-") or "model"
    return f"{engine}.{readable}.{kind}.{identity[:24]}"


def label(*fields: bytes) -> bytes:
    """A page's label: a digest of what names it, each field with its length, so that no two lists of fields are the same."""
    digest = blake2b(digest_size=LABEL_BYTES, person=b"kvstore.label")
    for field in fields:
        digest.update(len(field).to_bytes(4, "little"))
        digest.update(field)
    return digest.digest()


def settings_digest(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings that the bytes depend on, as a fingerprint takes them."""
    return {name: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for name, value in settings.items()}


@lru_cache(maxsize=64)
def _window_type(power: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * (1 << power)  # made once a size: the types are never given back


def scattered(addresses: Sequence[Sequence[int]], row_bytes: int) -> Scattered:
    """Pages in this process's memory, by the addresses of their rows. The caller keeps that memory alive, and its rows valid."""
    low = min(min(page) for page in addresses)
    high = max(max(page) for page in addresses) + row_bytes
    window = _window_type(max((high - low - 1).bit_length(), _LEAST_SPAN)).from_address(low)
    memory = np.frombuffer(memoryview(window), np.uint8)[: high - low].data
    return Scattered(memory, [[address - low for address in page] for page in addresses])


def labels(names: Iterable[bytes]) -> bytes:
    """Labels as a match takes them."""
    return b"".join(names)
