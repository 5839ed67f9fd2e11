"""A compact map from a 64-bit hash to slot numbers: 8 bytes an entry before load factor, no Python objects.

Open addressing with linear probing and backward-shift deletion (Knuth, TAOCP 3, 6.4, algorithm R). It stores no keys: the
caller compares what a candidate slot holds. Sharded by the low hash bits, so that growing one shard is a short pause.
"""

from collections.abc import Iterator

import numpy as np

_SHARDS = 256
_EMPTY = -1
TAG_MASK = 0xFFFFFFFF


class Shard:
    """One open-addressing table; `ids[i]` is a slot number or -1, `tags[i]` the hash bits that place it."""

    __slots__ = ("ids", "mask", "tags", "used")

    def __init__(self, size: int) -> None:
        self.ids = np.full(size, _EMPTY, dtype=np.int32).data
        self.tags = np.zeros(size, dtype=np.uint32).data
        self.mask = size - 1
        self.used = 0


class HashIndex:
    """Multimap from hash to slot numbers."""

    def __init__(self) -> None:
        self.shards = [Shard(4) for _ in range(_SHARDS)]

    def __len__(self) -> int:
        return sum(shard.used for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(8 * (shard.mask + 1) for shard in self.shards)

    def candidates(self, hash64: int) -> Iterator[int]:
        """Slots that were added under this hash (or, rarely, under one that shares its bits)."""
        shard = self.shards[hash64 & 0xFF]
        tag = (hash64 >> 8) & TAG_MASK
        ids, tags, mask = shard.ids, shard.tags, shard.mask
        at = tag & mask
        while (slot := ids[at]) >= 0:
            if tags[at] == tag:
                yield slot
            at = (at + 1) & mask

    def add(self, hash64: int, slot: int) -> None:
        """Add a slot under a hash."""
        shard = self.shards[hash64 & 0xFF]
        if (shard.used + 1) * 3 > (shard.mask + 1) * 2:
            shard = self._grow(hash64 & 0xFF)
        _place(shard, (hash64 >> 8) & TAG_MASK, slot)
        shard.used += 1

    def remove(self, hash64: int, slot: int) -> None:
        """Remove a slot added under this hash; KeyError if it is not there."""
        shard = self.shards[hash64 & 0xFF]
        ids, tags, mask = shard.ids, shard.tags, shard.mask
        at = (hash64 >> 8) & TAG_MASK & mask
        while ids[at] != slot:
            if ids[at] == _EMPTY:
                raise KeyError(slot)
            at = (at + 1) & mask
        hole = at
        while True:
            at = (at + 1) & mask
            if ids[at] == _EMPTY:
                break
            home = tags[at] & mask
            if (at - home) & mask >= (at - hole) & mask:
                ids[hole], tags[hole] = ids[at], tags[at]
                hole = at
        ids[hole] = _EMPTY
        shard.used -= 1

    def replace(self, hash64: int, old: int, new: int) -> None:
        """Put `new` where `old` stands under this hash; KeyError if it is not there."""
        shard = self.shards[hash64 & 0xFF]
        ids, mask = shard.ids, shard.mask
        at = (hash64 >> 8) & TAG_MASK & mask
        while ids[at] != old:
            if ids[at] == _EMPTY:
                raise KeyError(old)
            at = (at + 1) & mask
        ids[at] = new

    def _grow(self, which: int) -> Shard:
        old = self.shards[which]
        new = Shard(2 * (old.mask + 1))
        for slot, tag in zip(old.ids, old.tags, strict=True):
            if slot >= 0:
                _place(new, tag, slot)
        new.used = old.used
        self.shards[which] = new
        return new


def _place(shard: Shard, tag: int, slot: int) -> None:
    at = tag & shard.mask
    while shard.ids[at] >= 0:
        at = (at + 1) & shard.mask
    shard.ids[at] = slot
    shard.tags[at] = tag
