"""Removes pages that nobody has used for the TTL of their namespace: in the background, a few at a time."""

import asyncio
import logging
from collections.abc import Callable, Iterable

import numpy as np

from kvstore.radix.pages import GHOST, RECENCY_DEPTH_BITS, Slots
from kvstore.radix.tables import ROOT
from kvstore.store.space import Space
from kvstore.store.uses import Uses

_log = logging.getLogger("kvstore.store")

_TURN_S = 1.0
_MAX_PAUSE_S = 60.0
_LOOK_SLOTS = 1 << 16
"""Slots looked at in one go: well under a millisecond."""
_AT_ONCE = 32
"""Pages removed in one go: about a millisecond."""


class Expiry:
    """Looks at each namespace that has a TTL every sixteenth of it, but at most once a second and at least once a minute.

    `poke` wakes who deletes on disk what is gone from memory.
    """

    def __init__(self, spaces: Callable[[], Iterable[Space]], uses: Uses, now: Callable[[], float], poke: Callable[[], None]) -> None:
        self._spaces = spaces
        self._uses = uses
        self._now = now
        self._poke = poke
        self._due: dict[int, float] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_TURN_S)
            now = self._now()
            spaces = [space for space in self._spaces() if space.settings.ttl_s]
            self._due = {space.number: self._due.get(space.number, now) for space in spaces}
            for space in spaces:
                if self._due[space.number] <= now and not space.loading:
                    await self.expire(space)
                    self._due[space.number] = now + min(space.settings.ttl_s / 16, _MAX_PAUSE_S)

    async def expire(self, space: Space) -> int:
        """Remove what has not been used for the TTL, but nothing leased or retained. Returns the pages."""
        tick = self._uses.tick_before(space.settings.ttl_s)
        if tick < 0:
            return 0
        limit = (tick + 1) << RECENCY_DEPTH_BITS
        removed = 0
        while more := await self._pass(space, limit):  # a page goes after all below it, which may lie anywhere
            removed += more
        if removed:
            space.stats.expired_pages += removed
            self._poke()
            _log.info("namespace %s: %d pages were not used for %d s and are removed", space.id, removed, space.settings.ttl_s)
        return removed

    async def _pass(self, space: Space, limit: int) -> int:
        pages, removed, first = space.tree.pages, 0, 0
        while first < pages.ranges.high:
            slots = _expired(space, np.arange(first, min(first + _LOOK_SLOTS, pages.ranges.high), dtype=np.int32), limit, self._now())
            slots = slots[np.argsort(pages.recency[slots])]
            for number, key in enumerate([pages.key_bytes(slot) for slot in slots.tolist()], 1):
                removed += self._remove(space, key, limit)
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            first += _LOOK_SLOTS
            await asyncio.sleep(0)
        return removed

    def _remove(self, space: Space, key: bytes, limit: int) -> int:
        """Remove a page with nothing below it, unless it is gone, or somebody has come back to it meanwhile."""
        slot = -1 if space.dropped else space.tree.pages.find_key(key)
        if slot < 0 or not _is_end(space, slot) or not len(_expired(space, np.array([slot], np.int32), limit, self._now())):
            return 0
        return space.remove_page(slot, ghosts=False)


def _is_end(space: Space, slot: int) -> bool:
    """Whether there are only ghosts below a page."""
    nodes, flags = space.tree.nodes, space.tree.pages.flags
    node = int(space.tree.pages.node[slot])
    if slot + 1 < nodes.start[node] + nodes.count[node]:
        return bool(flags[slot + 1] & GHOST)
    return all(flags[nodes.start[child]] & GHOST for child in nodes.children_of(node))


def _expired(space: Space, slots: Slots, limit: int, now: float) -> Slots:
    """Those of these slots that hold pages which were last used before a recency, and that nothing protects."""
    pages = space.tree.pages
    chosen = (pages.node[slots] > ROOT) & ((pages.flags[slots] & GHOST) == 0) & (pages.recency[slots] < limit)
    chosen &= (pages.leases[slots] == 0) & (pages.retain[slots] <= now)
    expired: Slots = slots[chosen]
    return expired
