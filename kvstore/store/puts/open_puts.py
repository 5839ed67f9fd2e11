"""Which puts are under way, by their handles and by whose they are."""

import asyncio
import time
from collections.abc import Iterator

from kvstore.errors import NotFound
from kvstore.store.puts.put import Put
from kvstore.store.space import Space
from kvstore.store.stats import Stats


class OpenPuts:
    """The puts that have begun and not ended, those that still wait for room included."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._open: dict[int, Put] = {}
        self._own_names: dict[tuple[int, int], Put] = {}
        """Of those by an owner: the puts that are open under a name of its own. A name may come again, a handle never does."""
        self._opened = asyncio.Event()

    def __iter__(self) -> Iterator[Put]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def of_space(self, space: Space) -> list[Put]:
        """The puts to a namespace."""
        return [put for put in self._open.values() if put.space is space]

    def of_tenant(self, tenant: str) -> int:
        """How many puts a tenant has under way."""
        return sum(put.space.settings.tenant == tenant for put in self._open.values())

    def of_put_id(self, space: Space, put_id: bytes) -> list[Put]:
        """The puts of one computation."""
        return [put for put in self._open.values() if put.space is space and put.request.put_id == put_id]

    def has_name(self, owner: int, name: int) -> bool:
        """Whether a put of an owner is open under this name of its own."""
        return (owner, name) in self._own_names

    def add(self, put: Put) -> None:
        """A put begins."""
        self._open[put.handle] = put
        if put.own_name:
            self._own_names[put.owner, put.own_name] = put

    def get(self, owner: int, handle: int) -> Put:
        """An owner's own put under way, by its handle or the owner's name for it; NotFound otherwise."""
        put = self._own_names.get((owner, handle)) or self._open.get(handle)
        if put is None or put.owner != owner:
            raise NotFound(f"put {handle} does not exist: it was committed, aborted, or timed out")
        put.last_used = time.monotonic()
        return put

    async def opened(self) -> None:
        """Wait until another put has begun."""
        await self._opened.wait()

    def tell_opened(self) -> None:
        """One has its room, or none will come: whoever waits for it looks again."""
        self._opened.set()
        self._opened = asyncio.Event()

    def abort(self, put: Put) -> None:
        """End a put that was not committed. Nothing of it is left."""
        self._stats.puts_aborted += self.take_out(put)
        put.close()

    def take_out(self, put: Put) -> bool:
        """Whether it was under way; it is no more."""
        if put.own_name:
            self._own_names.pop((put.owner, put.own_name), None)
        return self._open.pop(put.handle, None) is not None
