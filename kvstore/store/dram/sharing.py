"""Segments that clients on this machine have mapped, and where blobs lie in them.

A tenant's segments hold that tenant's bytes, from the first to the last, and their memory is never used again after they
were given back: whoever keeps one mapped sees nothing that is not its tenant's. What is kept so is memory beyond the tier,
though. So it is counted, for as long as the client that has it does not say that it has unmapped it, or is gone; and a tenant
whose clients hold too much of it gets no more segments until they let go.
"""

import asyncio
from dataclasses import dataclass

import numpy as np

from kvstore.errors import Busy, NotFound
from kvstore.radix.pages import Slots
from kvstore.store.dram.reading import Reading
from kvstore.store.space import Space
from kvstore.store.stats import Stats
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.dram import Arena

_AT_ONCE = 4
_LINGERING_SHARE = 8
"""Of the tier: bytes of given-back segments that one tenant's clients may keep mapped."""


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """A segment as others map it. The descriptor is the arena's: duplicate it before anything is awaited."""

    number: int
    descriptor: int
    nbytes: int
    slots: int


class Sharing:
    """See the module's text."""

    def __init__(self, arena: Arena, reading: Reading, stats: Stats) -> None:
        self._arena = arena
        self._stats = stats
        self._reading = reading
        self._given: dict[int, tuple[str, dict[int, int]]] = {}

    def segments(self, owner: int, tenant: str, numbers: list[int], dropped: list[int]) -> list[SharedSegment]:
        """Those of the segments that are there and the tenant's, for a client that has unmapped the `dropped` ones.

        Follow with `give` once they can be sent. Raises Busy if the tenant's clients have too much mapped that was given back.
        """
        given = self._given.get(owner, (tenant, {}))[1]
        for number in dropped:
            given.pop(number, None)
        if (kept := self.lingering(tenant)) > (most := self._arena.capacity // _LINGERING_SHARE):
            raise Busy(
                f"clients of this tenant keep {kept} bytes of segments mapped that were given back, more than {most}", retry_after_ms=1000
            )
        found = []
        for number in dict.fromkeys(numbers):
            segment = self._arena.shareable(tenant, number)
            if segment is not None:
                found.append(SharedSegment(number, segment.fd, len(segment.view), segment.slots))
        return found

    def give(self, owner: int, tenant: str, segments: list[SharedSegment]) -> list[int]:
        """Count segments as what a client has. Returns the numbers of those that it had not: for `take_back`, if they are not sent."""
        given = self._given.setdefault(owner, (tenant, {}))[1]
        fresh = [segment.number for segment in segments if segment.number not in given]
        given.update((segment.number, segment.nbytes) for segment in segments)
        self._stats.shared_segments += len(segments)
        return fresh

    def take_back(self, owner: int, numbers: list[int]) -> None:
        """These never got to the client."""
        if (found := self._given.get(owner)) is not None:
            for number in numbers:
                found[1].pop(number, None)

    def lingering(self, tenant: str) -> int:
        """Bytes of given-back segments that a tenant's clients may still have mapped (each counted once)."""
        kept: dict[int, int] = {}
        for whose, given in self._given.values():
            if whose == tenant:
                kept |= given
        return sum(nbytes for number, nbytes in kept.items() if self._arena.shareable(tenant, number) is None)

    def release_owner(self, owner: int) -> None:
        """A client is gone."""
        self._given.pop(owner, None)

    def places(self, space: Space, rows: Slots) -> bytes:
        """Where blobs are now, 24 bytes each (PLACE). What is leased or pinned stays there; of the rest, generations tell."""
        slots = space.blobs.slot[rows].astype(np.int64)
        if space.spoiled:
            slots[np.isin(rows, list(space.spoiled))] = NO_SLOT
        return self._arena.places(slots).tobytes()

    async def locate(self, space: Space, rows: list[int]) -> bytes:
        """As `places`, once those on SSD have been brought up, as far as there is room."""
        distinct = dict.fromkeys(rows)
        for row in distinct:
            space.pin(row)
        try:
            absent = [row for row in distinct if space.blobs.slot[row] == NO_SLOT]
            for at in range(0, len(absent), _AT_ONCE):
                chunk = absent[at : at + _AT_ONCE]
                results = await asyncio.gather(*(self._reading.promote(space, row) for row in chunk), return_exceptions=True)
                failed = [result for result in results if isinstance(result, BaseException)]
                for result in failed:
                    if not isinstance(result, Busy | NotFound):
                        raise result
                if failed:
                    break
            return self.places(space, np.array(rows, np.int32))
        finally:
            for row in distinct:
                space.unpin(row)
