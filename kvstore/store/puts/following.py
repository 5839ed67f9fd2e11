"""Reading what a put has received before it is committed: who follows which put, and until when.

Provisional until the commit: a follower asks for the outcome at the end, and throws away what it read if there was none.
"""

import asyncio
import time
from dataclasses import dataclass

from kvstore.errors import Busy, NotFound
from kvstore.store.puts.open_puts import OpenPuts
from kvstore.store.puts.put import Put
from kvstore.store.space import Space

MAX_FOLLOWED = 4096
"""Of one client."""


@dataclass(slots=True)
class _Follow:
    put: Put
    last_used: float


class Following:
    """Who follows which put. A follow keeps what has arrived in DRAM, so it ends: with its outcome, its owner, or by time."""

    def __init__(self, puts: OpenPuts, idle_s: float) -> None:
        self._puts = puts
        self._idle_s = idle_s
        self._by_owner: dict[int, dict[int, _Follow]] = {}

    def __len__(self) -> int:
        return sum(len(mine) for mine in self._by_owner.values())

    async def follow(self, owner: int, space: Space, put_id: bytes, beyond: int, wait_s: float) -> list[Put]:
        """The puts under way of a computation, all followed from now on. Waits up to `wait_s` until there are more than `beyond`."""
        try:
            async with asyncio.timeout(wait_s):
                while len(self._now(owner, space, put_id)) <= beyond and not space.dropped:
                    await self._puts.opened()
        except TimeoutError:
            pass  # the caller sees how many there are
        found = self._now(owner, space, put_id)
        mine = self._by_owner.setdefault(owner, {})
        if len(mine) + len(found) > MAX_FOLLOWED:
            raise Busy(f"this client follows {len(mine)} puts: ask for their outcome", retry_after_ms=1000)
        for put in found:
            if put.handle not in mine:
                put.follow()
                mine[put.handle] = _Follow(put, time.monotonic())
        return found

    def _now(self, owner: int, space: Space, put_id: bytes) -> list[Put]:
        """The puts of a computation that have begun, and those that have ended since this owner began to follow them."""
        known = [f.put for f in self._by_owner.get(owner, {}).values() if f.put.space is space and f.put.request.put_id == put_id]
        return known + [put for put in self._puts.of_put_id(space, put_id) if put.ready and put not in known]

    def get(self, owner: int, handle: int) -> Put:
        """A put that an owner follows; NotFound otherwise."""
        follow = self._by_owner.get(owner, {}).get(handle)
        if follow is None:
            raise NotFound(f"put {handle} is not followed by this client (any more)")
        follow.last_used = time.monotonic()
        return follow.put

    async def outcome(self, owner: int, handle: int, wait_s: float) -> None:
        """Wait until a followed put is committed, and end the follow; without a wait it ends in any case.

        Raises NotFound if the put ended otherwise, or did not end in time.
        """
        put = self.get(owner, handle)
        try:
            async with asyncio.timeout(wait_s):
                while not put.closed:
                    await put.progress()
        except TimeoutError:
            if not wait_s:  # whoever does not wait wants to leave
                self._end(owner, handle)
            raise NotFound(f"put {handle} was not committed within {wait_s:g} s: what was read of it is still provisional") from None
        self._end(owner, handle)
        if not put.committed:
            raise NotFound(f"put {handle} was not committed, its producer died or gave up: what was read of it is void")

    def _end(self, owner: int, handle: int) -> None:
        mine = self._by_owner.get(owner, {})
        follow = mine.pop(handle, None)
        if follow is not None:
            follow.put.unfollow()
        if not mine:
            self._by_owner.pop(owner, None)

    def release_owner(self, owner: int) -> None:
        """A client is gone."""
        for handle in list(self._by_owner.get(owner, {})):
            self._end(owner, handle)

    def sweep(self, now: float) -> None:
        """End follows that nobody has used for a while after their put ended."""
        for owner, mine in list(self._by_owner.items()):
            for handle, follow in list(mine.items()):
                if (follow.put.closed or follow.put.space.dropped) and follow.last_used + self._idle_s < now:
                    self._end(owner, handle)

    def close(self) -> None:
        """The daemon stops."""
        for owner in list(self._by_owner):
            self.release_owner(owner)
