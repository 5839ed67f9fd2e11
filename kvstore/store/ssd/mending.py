"""Copies on SSD that were found bad while DRAM has a good one: which are to be written anew, and how that went."""

import logging
from collections.abc import Awaitable, Callable

import lmdb

from kvstore.store.space import Space
from kvstore.tiers.blobs import NO_SLOT

_log = logging.getLogger("kvstore.mending")
_MOST_TRIES = 3
"""A place on the disk that refuses so often will not be mended; the scrubber may find another way."""


class Mending:
    """Blobs to be written anew, each pinned until it was, so that its good copy stays. On the loop's thread.

    `rewrite` writes a blob's stored form, durably, and raises lmdb.Error or OSError.
    """

    def __init__(self, rewrite: Callable[[Space, int, memoryview], Awaitable[None]], view: Callable[[int], memoryview]) -> None:
        self._rewrite = rewrite
        self._view = view
        self._tries: dict[tuple[Space, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._tries)

    def add(self, space: Space, row: int) -> None:
        """The copy of a blob on SSD is bad, and DRAM has a good one."""
        if (space, row) not in self._tries:
            space.pin(row)
            self._tries[space, row] = 0

    async def mend(self) -> Exception | None:
        """Write all of them anew. Returns why the first that could not be was not; it and those after it stay to be tried again."""
        while self._tries:
            (space, row), tries = next(iter(self._tries.items()))
            try:
                await self._mend_one(space, row)
            except (lmdb.Error, OSError) as error:
                _log.error("the copy of blob %s on SSD is bad, and can't be written anew: %s", space.blobs.id_of(row).hex(), error)
                self._tries[space, row] = tries + 1
                if tries + 1 >= _MOST_TRIES:
                    self._done(space, row)
                return error
            self._done(space, row)
        return None

    async def _mend_one(self, space: Space, row: int) -> None:
        slot = int(space.blobs.slot[row])
        if slot != NO_SLOT and row not in space.spoiled and space.blobs.on_ssd[row]:
            await self._rewrite(space, row, self._view(slot)[: space.stored_bytes(row)])
            _log.warning("the copy of blob %s on SSD was bad: written anew from DRAM", space.blobs.id_of(row).hex())

    def _done(self, space: Space, row: int) -> None:
        del self._tries[space, row]
        space.unpin(row)
