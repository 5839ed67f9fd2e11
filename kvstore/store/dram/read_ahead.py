"""Bringing blobs up from SSD that will probably be asked for next, while nothing is read that somebody waits for.

A client that fetches a prefix piece by piece says with each FETCH what comes after it. Nothing is promised: what can't be had now is left.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import KVStoreError
from kvstore.store.space import Space
from kvstore.store.stats import Stats
from kvstore.tiers.blobs import NO_SLOT

MOST_BLOBS = 64
"""That one request may name."""
_MOST_WAITING = 256
"""Of all clients. Who names more is not heard."""
_TOGETHER_BYTES, _TOGETHER_BLOBS = 4 << 20, 4
"""Small ones are read a few at a time; a large one by two threads anyway."""

_Name = tuple[Space, bytes]


class ReadAhead:
    """`promote` brings a pinned blob up; `idle` returns once nothing is being read into DRAM."""

    def __init__(self, promote: Callable[[Space, int], Awaitable[None]], idle: Callable[[], Awaitable[None]], stats: Stats) -> None:
        self._stats = stats
        self._promote = promote
        self._idle = idle
        self._waiting: dict[_Name, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether something is being read, or about to be."""
        return self._task is not None

    def want(self, space: Space, ids: bytes) -> None:
        """Have these blobs (16 bytes an id, in the order in which they will be asked for) read, as far as they are only on SSD."""
        for at in range(0, len(ids), DIGEST_BYTES):
            if len(self._waiting) < _MOST_WAITING and self._row(name := (space, ids[at : at + DIGEST_BYTES])) >= 0:
                self._waiting[name] = None
        if self._waiting and self._task is None and not self._stopped:
            self._task = asyncio.create_task(self._run(), name="kvstore-read-ahead")

    def _row(self, name: _Name) -> int:
        """Of a blob that is on SSD and not in DRAM; -1 for any other."""
        space, blob_id = name
        row = -1 if space.dropped else space.blobs.find(blob_id)
        return row if row >= 0 and space.blobs.slot[row] == NO_SLOT and space.blobs.on_ssd[row] else -1

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._idle()
                found = self._next()
                for space, row in found:
                    space.pin(row)  # before anything is awaited: a row that is let go may become another blob's
                try:
                    async with asyncio.TaskGroup() as group:
                        for space, row in found:
                            group.create_task(self._bring(space, row))
                finally:
                    for space, row in found:
                        space.unpin(row)
        finally:
            self._task = None

    def _next(self) -> list[tuple[Space, int]]:
        """The first of those that wait and are still to be read."""
        found: list[tuple[Space, int]] = []
        nbytes = 0
        while self._waiting and len(found) < _TOGETHER_BLOBS and nbytes < _TOGETHER_BYTES:
            name = next(iter(self._waiting))
            if (row := self._row(name)) >= 0:
                nbytes += name[0].stored_bytes(row)
                if found and nbytes > _TOGETHER_BYTES:
                    break
                found.append((name[0], row))
            del self._waiting[name]
        return found

    async def _bring(self, space: Space, row: int) -> None:
        try:
            await self._promote(space, row)
        except KVStoreError:  # no room, or it is damaged: who asks for it will hear
            self._waiting.clear()
        else:
            self._stats.read_ahead_blobs += 1

    async def stop(self) -> None:
        """Bring nothing more up; what is being read may go on."""
        self._stopped = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
