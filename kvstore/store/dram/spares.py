"""DRAM segments made before somebody waits for them: the kernel zeroes memory more slowly than a disk is read.

Spares are empty segments like others: they count within the DRAM tier, and go at once when another size of blobs wants their room.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping

from kvstore.errors import KVStoreError
from kvstore.store.space import Space
from kvstore.tiers.dram import Arena
from kvstore.tiers.segments import SlotClass

_log = logging.getLogger("kvstore.mover")


class Spares:
    """Has empty segments made, one at a time, `most` bytes of them at most. `grow` makes one, and says if there is room for it."""

    def __init__(self, arena: Arena, most: int, grow: Callable[[SlotClass], Awaitable[bool]]) -> None:
        self.most = most
        self._arena = arena
        self._grow = grow
        self._wanted: dict[SlotClass, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether a segment is being made, or about to be."""
        return self._task is not None

    def took(self, slot_class: SlotClass) -> None:
        """An empty segment got its first blob: have as much ready as the class holds, so that it can double without waiting."""
        self._want(slot_class, self._arena.held_by(slot_class))

    def expect(self, nbytes: Mapping[SlotClass, int]) -> None:
        """Nothing is in DRAM yet, and so much may be soon: make room for a share of it, in proportion."""
        total = sum(nbytes.values())
        for slot_class, mine in sorted(nbytes.items(), key=lambda item: -item[1]):
            self._want(slot_class, min(mine, self.most * mine // total))

    def _want(self, slot_class: SlotClass, nbytes: int) -> None:
        if self.most and nbytes and not self._stopped:
            self._wanted[slot_class] = min(nbytes, self.most)
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="kvstore-spares")

    async def _run(self) -> None:
        try:
            while self._wanted and not self._stopped:
                slot_class = next(iter(self._wanted))
                if self._arena.empty_bytes(slot_class) >= self._wanted[slot_class] or not await self._grow(slot_class):
                    self._wanted.pop(slot_class, None)
        except KVStoreError as error:  # the machine has no memory: who needs a segment will ask for one
            self._wanted.clear()
            _log.warning("no DRAM is made ahead of need: %s", error.message)
        finally:
            self._task = None

    async def stop(self) -> None:
        """Make nothing more; returns once what is under way has ended."""
        self._stopped = True
        if self._task is not None:
            await asyncio.wait({self._task})


def bytes_on_ssd(spaces: Iterable[Space]) -> Counter[SlotClass]:
    """Bytes of the DRAM slots that all blobs on SSD would take. May run in another thread, for an estimate."""
    found: Counter[SlotClass] = Counter()
    for space in spaces:
        for stored, count in space.blobs.ssd_sizes().items():
            slot_class = Arena.slot_class(space.settings.tenant, stored)
            found[slot_class] += count * slot_class.slot_bytes
    return found
