"""Leases: pins on (node, boundary) with an end time. An owner's death ends its leases.

What one owner holds is bounded in number and in payload bytes (a page that two of its leases share counts twice).
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.errors import BadRequest, Busy, NotFound
from kvstore.radix.pages import Slots
from kvstore.radix.values import Path
from kvstore.store.space import Space

MAX_LEASE_S = 3600.0
MAX_PIN_S = 30 * 86_400.0
MAX_LEASES = 10_000
"""Of one client."""


@dataclass(slots=True)
class Lease:
    """One lease; `boundaries` are the page keys of the last pages that it pins (one, but for a flat namespace).

    `expires` is in seconds of the store's clock.
    """

    id: int
    owner: int
    space: Space
    boundaries: list[bytes]
    pages: int
    expires: float
    shortened: bool = False
    """Whether a page was lost, with all after it: its owner still takes it for longer, so nothing can be built on it."""

    @property
    def nbytes(self) -> int:
        """Payload bytes of the pages it pins."""
        return self.pages * self.space.spec.page_bytes


class Leases:
    """All leases of one kind. `max_bytes` bounds what one owner holds, `max_s` how long a lease lasts from its last renewal.

    `word` and `ended` are what its owners call one, and the end of one.
    """

    def __init__(self, max_bytes: int, max_s: float = MAX_LEASE_S, *, word: str = "lease", ended: str = "released") -> None:
        self._word = word
        self._ended = ended
        self._max_bytes = max_bytes
        self._max_s = max_s
        self._bytes: dict[int, int] = {}
        self._by_id: dict[tuple[int, int], Lease] = {}
        """By owner and number: an owner that gives a number learns nothing of those of others."""
        self._by_owner: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def grant(
        self, owner: int, space: Space, paths: list[Path], now: float, ttl_s: float, slots: Slots | None = None, number: int = 0
    ) -> Lease:
        """Lease paths for `ttl_s` seconds; `slots` are those of a single path, if they are known, and `number` is its own, if it is given.

        Raises Busy if the owner holds too much already.
        """
        self.check_time(ttl_s)
        pages = sum(path.pages for path in paths)
        held, wanted = self._bytes.get(owner, 0), pages * space.spec.page_bytes
        if held + wanted > self._max_bytes:
            raise Busy(
                f"{self._word}s on {held} bytes are held already, and {wanted} more would be over the limit of {self._max_bytes}: "
                f"some must be {self._ended} first",
                retry_after_ms=1000,
            )
        if len(self._by_owner.get(owner, ())) >= MAX_LEASES:
            raise Busy(f"{MAX_LEASES} {self._word}s are held already: some must be {self._ended} first", retry_after_ms=1000)
        lease = Lease(number or secrets.randbits(63), owner, space, [space.tree.pin(path, slots) for path in paths], pages, now + ttl_s)
        self._by_id[owner, lease.id] = lease
        self._by_owner.setdefault(owner, set()).add(lease.id)
        self._bytes[owner] = held + wanted
        return lease

    def get(self, owner: int, lease_id: int) -> Lease:
        """An owner's own lease; NotFound otherwise."""
        lease = self.find(owner, lease_id)
        if lease is None:
            raise self.unknown(lease_id)
        return lease

    def find(self, owner: int, lease_id: int) -> Lease | None:
        """An owner's own lease, if it has it."""
        return self._by_id.get((owner, lease_id))

    def unknown(self, lease_id: int) -> NotFound:
        """What is said of one that is not there."""
        return NotFound(f"{self._word} {lease_id} does not exist: it was {self._ended}, or it expired")

    def renew(self, owner: int, lease_id: int, now: float, ttl_s: float) -> Lease:
        """Let a lease end `ttl_s` seconds from now."""
        self.check_time(ttl_s)
        lease = self.get(owner, lease_id)
        lease.expires = now + ttl_s
        return lease

    def check_time(self, ttl_s: float, name: str = "lease_s") -> None:
        """Raise BadRequest, naming the argument, unless a lease may last so long."""
        if not 0 < ttl_s <= self._max_s:
            raise BadRequest(f"{name} is {ttl_s:g}: it is more than 0 and up to {self._max_s:.0f} (seconds)")

    def release(self, lease: Lease) -> None:
        """End a lease."""
        self._bytes[lease.owner] -= lease.nbytes
        del self._by_id[lease.owner, lease.id]
        owned = self._by_owner[lease.owner]
        owned.discard(lease.id)
        if not owned:
            del self._by_owner[lease.owner], self._bytes[lease.owner]
        if not lease.space.dropped:
            for boundary in lease.boundaries:
                lease.space.tree.unpin(boundary)

    def cut(self, space: Space, slot: int) -> None:
        """The page in a slot is lost: no lease holds it, nor, but for a flat namespace, what comes after it, and none is left empty."""
        tree, key = space.tree, space.tree.pages.key_bytes(slot)
        for lease in self.of_space(space):
            if space.spec.flat:
                if gone := lease.boundaries.count(key):
                    self._shorten(lease, [key] * gone, [boundary for boundary in lease.boundaries if boundary != key], lease.pages - gone)
                continue
            slots = tree.path_slots(tree.path_to(tree.pages.find_key(lease.boundaries[0])))
            hit = np.flatnonzero(slots == slot)
            if len(hit):
                left = [tree.pin(tree.path_to(int(slots[hit[0] - 1])))] if hit[0] else []
                self._shorten(lease, lease.boundaries, left, int(hit[0]))

    def _shorten(self, lease: Lease, gone: list[bytes], kept: list[bytes], pages: int) -> None:
        """Let a lease hold so many pages, by the boundaries that are kept, and no more by those that are gone."""
        for boundary in gone:
            lease.space.tree.unpin(boundary)
        self._bytes[lease.owner] -= (lease.pages - pages) * lease.space.spec.page_bytes
        lease.boundaries, lease.pages, lease.shortened = kept, pages, True
        if not kept:
            self.release(lease)

    def release_owner(self, owner: int) -> int:
        """End all leases of an owner. Returns how many there were."""
        owned = [self._by_id[owner, i] for i in self._by_owner.get(owner, ())]
        for lease in owned:
            self.release(lease)
        return len(owned)

    def expired(self, now: float) -> Iterator[Lease]:
        """The leases whose time is over (a list made at call time)."""
        return iter([lease for lease in self._by_id.values() if lease.expires <= now])

    def of_tenant(self, tenant: str) -> int:
        """How many leases a tenant has."""
        return sum(lease.space.settings.tenant == tenant for lease in self._by_id.values())

    def of_space(self, space: Space) -> list[Lease]:
        """All leases on a namespace."""
        return [lease for lease in self._by_id.values() if lease.space is space]
