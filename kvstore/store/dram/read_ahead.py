"""Bringing blobs up from SSD that will probably be asked for next, while nothing is read that somebody waits for.

A client that fetches a prefix piece by piece says with each FETCH what comes after it. Nothing is promised: what can't be had now is left.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import KVStoreError, NotFound
from kvstore.store.dram.in_turn import InTurn
from kvstore.store.space import Space
from kvstore.store.stats import Stats
from kvstore.tiers.blobs import NO_SLOT

MOST_BLOBS = 64
"""That one request may name."""
MOST_BYTES = 32 << 20
"""Of one request: what passes this is not read. It would be for later than for the next request, and its client may be gone by then."""
MOST_WAITING = 256
"""Blobs, of all clients."""
_TOGETHER_BYTES, _TOGETHER_BLOBS = 4 << 20, 4
"""Small ones are read a few at a time; a large one by two threads anyway."""

_Name = tuple[Space, bytes]


class ReadAhead:
    """`promote` brings a pinned blob up; `idle` returns once nothing is being read from SSD. Tenants are heard in turn."""

    def __init__(self, promote: Callable[[Space, int], Awaitable[None]], idle: Callable[[], Awaitable[None]], stats: Stats) -> None:
        self._stats = stats
        self._promote = promote
        self._idle = idle
        self._waiting: InTurn[_Name] = InTurn()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether something is being read, or about to be."""
        return self._task is not None and not self._task.done()

    def want(self, space: Space, ids: bytes) -> None:
        """Have these blobs (16 bytes an id, in the order in which they will be asked for) read, as far as they are only on SSD."""
        if self._stopped:
            return
        nbytes = 0
        for at in range(0, len(ids), DIGEST_BYTES):
            if (row := self._row(name := (space, ids[at : at + DIGEST_BYTES]))) < 0:
                continue
            if nbytes >= MOST_BYTES or not self._waiting.add(space.settings.tenant, name, MOST_WAITING):
                break
            nbytes += space.stored_bytes(row)
        if self._waiting and not self.busy:
            self._task = asyncio.create_task(self._run(), name="kvstore-read-ahead")

    def _row(self, name: _Name) -> int:
        """Of a blob that is on SSD and not in DRAM; -1 for any other."""
        space, blob_id = name
        row = -1 if space.dropped else space.blobs.find(blob_id)
        return row if row >= 0 and space.blobs.slot[row] == NO_SLOT and space.blobs.on_ssd[row] else -1

    async def _run(self) -> None:
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

    def _next(self) -> list[tuple[Space, int]]:
        """The first of those that wait and are still to be read."""
        found: list[tuple[Space, int]] = []
        nbytes = 0
        while self._waiting and len(found) < _TOGETHER_BLOBS and nbytes < _TOGETHER_BYTES:
            _, name = self._waiting.first()
            if (row := self._row(name)) >= 0:
                nbytes += name[0].stored_bytes(row)
                if found and nbytes > _TOGETHER_BYTES:
                    break
                found.append((name[0], row))
            self._waiting.take()
        return found

    async def _bring(self, space: Space, row: int) -> None:
        try:
            await self._promote(space, row)
        except NotFound:
            pass  # it is damaged: who asks for it will hear
        except KVStoreError:  # its tenant has no room
            self._waiting.forget(space.settings.tenant)
        else:
            self._stats.read_ahead_blobs += 1

    async def stop(self) -> None:
        """Bring nothing more up; what is being read may go on."""
        self._stopped = True
        self._waiting.clear()
        if self._task is not None and self.busy:
            self._task.cancel()
            await asyncio.wait({self._task})
