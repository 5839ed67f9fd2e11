"""Chunks of vLLM's offloading, moved between rows of the primary tier's buffer and the store. Nothing of vLLM is needed for it."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client import Component, KVSpec, KVStoreError, Namespace, NotFound
from kvstore_connectors.hashed_pages import scattered
from kvstore_connectors.hashed_puts import Outcome, batches, put_pages
from kvstore_connectors.vllm_link import StoreLink, Unavailable

log = logging.getLogger("vllm.kvstore_connectors")

_KEY_BYTES = 36
"""SHA-256 of a block and all before it, and the number of its cache group. Shorter hashes could collide: they are refused."""
_AT_ONCE = 8
"""Puts, or fetches of a chunk, of a job that are under way at a time."""
_LARGEST = (1 << 16) - 1


def chunk_spec(nbytes: int) -> KVSpec:
    """A flat namespace for chunks of so many bytes, whatever is in them. Raises ValueError if no KV spec has pages of that size."""
    width = next(d for d in range(min(_LARGEST, nbytes), 0, -1) if nbytes % d == 0)
    if nbytes // width > _LARGEST:
        raise ValueError(f"kvstore: chunks of {nbytes} bytes can't be pages")
    component = Component("full", layers=1, kv_heads=1, head_dim=width, dtype="u8", planes=1)
    return KVSpec(page_tokens=nbytes // width, components=(component,), hash_bytes=32, flat=True)


def digest(key: bytes) -> bytes:
    """The label of a chunk: its key, which holds a SHA-256 and a group number, in 32 bytes."""
    if len(key) < _KEY_BYTES:
        raise ValueError("kvstore: block hashes are too short to be trusted: set prefix_caching_hash_algo to sha256 or sha256_cbor")
    return sha256(b"vllm chunk\n" + key).digest()


class Chunks:
    """The chunks of one buffer, a row each. `store` and `load` are for the link's loop, and raise nothing that the store says."""

    def __init__(self, link: StoreLink, rows: "npt.NDArray[Any]") -> None:
        if not rows[0].flags.c_contiguous:
            raise ValueError("kvstore: the rows of this buffer do not lie in one piece each")
        self.link = link
        self.rows = rows
        self._row_bytes = rows[0].nbytes

    def forget(self) -> None:
        """Give the buffer back."""
        self.rows = np.zeros((0, 0), np.int8)

    async def store(self, keys: Sequence[bytes], rows: Sequence[int]) -> set[int]:
        """Put chunks, many at a time; those that are there already are not sent. Returns the places of those that are there then."""
        runs = batches(len(keys), self._row_bytes)
        return await self._all(self._put(range(len(keys))[run], keys[run], rows[run]) for run in runs)

    async def load(self, keys: Sequence[bytes], rows: Sequence[int]) -> set[int]:
        """Fetch chunks straight into their rows, verified. Returns the places of those that came."""
        return await self._all(self._get(place, key, row) for place, (key, row) in enumerate(zip(keys, rows, strict=True)))

    async def _all(self, moves: Iterable[Coroutine[Any, Any, set[int]]]) -> set[int]:
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(move: Coroutine[Any, Any, set[int]]) -> set[int]:
            async with room:
                try:
                    return await move
                except (KVStoreError, Unavailable) as error:
                    log.debug("kvstore: chunks were not moved: %r", error)
                except Exception:
                    log.exception("kvstore: chunks were not moved")
            return set()

        return set[int]().union(*await asyncio.gather(*map(one, moves)))

    async def _put(self, places: range, keys: Sequence[bytes], rows: Sequence[int]) -> set[int]:
        labels = [digest(key) for key in keys]
        data = scattered([[self.rows[row].ctypes.data] for row in rows], self._row_bytes)
        s = self.link.settings

        def put(namespace: Namespace) -> Awaitable[Outcome]:
            return put_pages(namespace, labels, data, durable=s.durable, timeout=s.save_timeout_s)

        done = await self.link.call(put, patient=True)
        if done.error is not None:
            self.link.full(done.error)
        return {place for place, new in zip(places, done.new, strict=True) if new is not None}

    async def _get(self, place: int, key: bytes, row: int) -> set[int]:
        s, label = self.link.settings, digest(key)

        async def get(namespace: Namespace) -> None:
            async with await namespace.match(label, lease_s=s.lease_s, timeout=s.call_timeout_s) as match:
                if not match.pages:
                    raise NotFound("the chunk is not in the store any more")
                await namespace.fetch(match, self.rows[row], timeout=s.call_timeout_s)

        await self.link.call(get, patient=True)
        return {place}
