"""Which recipes go: the oldest when there is no room, and those written too long ago; first of pages that are gone."""

from collections.abc import Callable, Iterable

import numpy as np

from kvstore.radix.pages import RECIPE
from kvstore.store.recipes.threads import RecipeThreads
from kvstore.store.space import Space
from kvstore.store.stats import Stats
from kvstore.tiers.text import Aged, RecipeFile

_AGED = 512
_ROUNDS = 4
"""So often recipes of pages that are there are passed over, before the oldest go all the same."""


class RecipeBudget:
    """See the module's text. `now` is Unix time in seconds; `look_through` is told of namespaces
    whose pages may have lost their flag in vain.
    """

    def __init__(
        self, file: RecipeFile, threads: RecipeThreads, spaces: Callable[[], Iterable[Space]], now: Callable[[], float], stats: Stats,
        look_through: Callable[[Space], None],
    ) -> None:  # fmt: skip
        self._file = file
        self._threads = threads
        self._spaces = spaces
        self._now = now
        self._stats = stats
        self._look_through = look_through

    async def make_room(self, nbytes: int) -> None:
        """Let the oldest recipes go until there is room; those of pages that are gone first."""
        for number in range(1 << 16):
            usage = self._file.usage()
            if usage.used + nbytes <= usage.capacity:
                return
            aged = await self._threads.write(self._file.oldest, _AGED)
            if not aged:
                return
            live, dead = self._apart(aged)
            if not dead and number < _ROUNDS:
                await self._threads.write(self._file.restamp, live, int(self._now() * 1000))
                continue
            await self._threads.write(self._file.forget, dead) if dead else await self._forget_live(live)
            self._stats.recipes_evicted += len(dead or live)

    async def expire(self, ttl_s: float) -> None:
        """Let recipes go that were written too long ago, but not of pages that are there: theirs count as written anew."""
        while aged := await self._threads.write(self._file.oldest, _AGED, int((self._now() - ttl_s) * 1000)):
            live, dead = self._apart(aged)
            if live:
                await self._threads.write(self._file.restamp, live, int(self._now() * 1000))
            if dead:
                await self._threads.write(self._file.forget, dead)
                self._stats.recipes_expired += len(dead)

    def _apart(self, aged: list[Aged]) -> tuple[list[Aged], list[Aged]]:
        """Recipes of pages that are there, and of those that are not."""
        spaces = {space.number: space for space in self._spaces()}
        live: list[Aged] = []
        dead: list[Aged] = []
        for one in aged:
            space = spaces.get(one.number)
            there = space is not None and (space.loading or space.tree.pages.find_key(one.key) >= 0)
            (live if there else dead).append(one)
        return live, dead

    async def _forget_live(self, gone: list[Aged]) -> None:
        """Let recipes of pages that are there go. No page may be given up from the first moment on: their flags go before."""
        spaces = {space.number: space for space in self._spaces()}
        for one in gone:
            space = spaces.get(one.number)
            if space is not None and (slot := space.tree.pages.find_key(one.key)) >= 0:
                space.tree.pages.flags[slot] &= ~np.uint8(RECIPE)
        try:
            await self._threads.write(self._file.forget, gone)
        except BaseException:
            for number in {one.number for one in gone} & spaces.keys():
                self._look_through(spaces[number])  # they may still be there
            raise
