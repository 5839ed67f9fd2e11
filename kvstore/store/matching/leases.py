"""Leases: pins on (node, boundary) with an end time. An owner's death ends its leases.

What one owner holds is bounded in number and in payload bytes (a page that two of its leases share counts twice). Many that end
together are nobody's at once; what they pinned is let go in turns of the loop.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvstore.errors import Busy, NotFound
from kvstore.lease_times import MAX_LEASE_S, MAX_PIN_S, check_seconds
from kvstore.radix.pages import Slots
from kvstore.radix.values import Path
from kvstore.store.space import Space

MAX_LEASES = 10_000
"""Of one client."""
_AT_ONCE = 128
"""Pages or paths that are let go in one turn of the loop: about a millisecond."""
_PAGES_AS_ONE = 1024
_NODES_AS_ONE = 16
"""What it takes to let go of a long path, in such steps."""


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

    `word` and `ended` are what its owners call one, and the end of one; `setting` is what bounds its bytes.
    """

    def __init__(
        self, max_bytes: int, max_s: float = MAX_LEASE_S, *, word: str = "lease", ended: str = "released", setting: str = "max_leased"
    ) -> None:
        self._word = word
        self._setting = setting
        self._ended = ended
        self._max_bytes = max_bytes
        self._max_s = max_s
        self._bytes: dict[int, int] = {}
        self._of: dict[int, dict[int, Lease]] = {}
        """By owner, and then by number: an owner that gives a number learns nothing of those of others."""
        self._left: deque[Lease] = deque()
        """Nobody's any more; what is left of their boundaries is still pinned."""
        self._some_ended = asyncio.Event()

    @classmethod
    def of_pins(cls, max_bytes: int) -> "Leases":
        """All pins."""
        return cls(max_bytes, MAX_PIN_S, word="pin", ended="unpinned", setting="max_pinned")

    def __len__(self) -> int:
        return sum(len(mine) for mine in self._of.values())

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
                f"{self._word}s on {held} bytes are held already, each counted by itself, and {wanted} more would be over the "
                f"{self._max_bytes} of `{self._setting}`: some must be {self._ended} first",
                retry_after_ms=1000,
            )
        if len(self._of.get(owner, ())) >= MAX_LEASES:
            raise Busy(f"{MAX_LEASES} {self._word}s are held already: some must be {self._ended} first", retry_after_ms=1000)
        lease = Lease(number or secrets.randbits(63), owner, space, [space.tree.pin(path, slots) for path in paths], pages, now + ttl_s)
        self._of.setdefault(owner, {})[lease.id] = lease
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
        return self._of.get(owner, {}).get(lease_id)

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
        check_seconds(name, ttl_s, self._max_s)

    def release(self, lease: Lease) -> None:
        """End a lease."""
        self._forget(lease)
        if not lease.space.dropped:
            for boundary in lease.boundaries:
                lease.space.tree.unpin(boundary)

    def _forget(self, lease: Lease) -> None:
        """A lease is its owner's no more."""
        self._bytes[lease.owner] -= lease.nbytes
        mine = self._of[lease.owner]
        del mine[lease.id]
        if not mine:
            del self._of[lease.owner], self._bytes[lease.owner]

    def release_owner(self, owner: int) -> None:
        """End all leases of an owner; what they pin stays some turns of the loop longer, if it is much."""
        self._bytes.pop(owner, None)
        self._end(self._of.pop(owner, {}).values())

    def expire(self, now: float) -> None:
        """End the leases whose time is over, as `release_owner` does."""
        over = [lease for mine in self._of.values() for lease in mine.values() if lease.expires <= now]
        for lease in over:
            self._forget(lease)
        self._end(over)

    def _end(self, leases: Iterable[Lease]) -> None:
        self._left.extend(leases)
        self._let_some_go()
        if self._left:
            self._some_ended.set()

    async def let_go(self) -> None:
        """A background task: of what many ended leases pinned, let some go at a time."""
        while True:
            await self._some_ended.wait()
            self._some_ended.clear()
            while self._left:
                await asyncio.sleep(0)
                self._let_some_go()

    def _let_some_go(self) -> None:
        left = _AT_ONCE
        while self._left and left > 0:
            lease = self._left[0]
            if lease.boundaries and not lease.space.dropped:
                path = lease.space.tree.unpin(lease.boundaries.pop())
                left -= 1 + path.pages // _PAGES_AS_ONE + len(path.nodes) // _NODES_AS_ONE
            else:
                self._left.popleft()

    def cut(self, space: Space, slot: int) -> None:
        """The page in a slot is lost: no lease holds it, nor, but for a flat namespace, what comes after it, and none is left empty."""
        tree, key = space.tree, space.tree.pages.key_bytes(slot)
        self._let_go_of(space, slot, key)
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

    def of_tenant(self, tenant: str) -> int:
        """How many leases a tenant has."""
        return sum(lease.space.settings.tenant == tenant for mine in self._of.values() for lease in mine.values())

    def each(self) -> list[Lease]:
        """All of them, as they are now."""
        return [lease for mine in self._of.values() for lease in mine.values()]

    def of_space(self, space: Space) -> list[Lease]:
        """All leases on a namespace."""
        return [lease for mine in self._of.values() for lease in mine.values() if lease.space is space]

    def ended_of_space(self, space: Space) -> list[Lease]:
        """Those on a namespace that have ended, and still pin something."""
        return [lease for lease in self._left if lease.space is space]

    def _let_go_of(self, space: Space, slot: int, key: bytes) -> None:
        """Nothing that ended leases on a namespace still pin has the page in a slot, which is lost."""
        tree = space.tree

        def on_it(boundary: bytes) -> bool:
            return bool((tree.path_slots(tree.path_to(tree.pages.find_key(boundary))) == slot).any())

        for lease in self.ended_of_space(space):
            gone = [key] * lease.boundaries.count(key) if space.spec.flat else [one for one in lease.boundaries if on_it(one)]
            for boundary in gone:
                tree.unpin(boundary)
                lease.boundaries.remove(boundary)
