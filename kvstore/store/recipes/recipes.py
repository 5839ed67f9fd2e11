"""The text tier at work: recipes of the pages that come in, written in the background; their budget, age and deletion.

A page is queued when it enters the tree, and its recipe is durable some milliseconds later, in a thread and a file of its
own: no put waits for it. What must not be lost waits for *it*: a page of a namespace with recipes carries a flag once its recipe
is durable, and is not given up before (`Space.may_discard`).
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor

import lmdb
import numpy as np

from kvstore.digests import KEY_BYTES, NO_EXTRA, page_key
from kvstore.errors import Busy, DiskFailing
from kvstore.lmdb_files import STRUCTURAL
from kvstore.radix.pages import GHOST, RECIPE
from kvstore.radix.tree import Extras, as_token_bytes
from kvstore.store.recipes.budget import RecipeBudget
from kvstore.store.recipes.source import Fresh, RecipeSource
from kvstore.store.recipes.threads import RecipeThreads
from kvstore.store.space import Space
from kvstore.store.stats import Stats
from kvstore.tiers.recipe import Recipe, encode_recipe
from kvstore.tiers.text import Holding, NewRecipe, RecipeBatch, RecipeFile

_log = logging.getLogger("kvstore.recipes")

_BATCH_PAGES = 1024
_TURN_PAGES = 128
"""Pages looked at in the loop's thread between two turns of others."""
_GATHER_S = 0.005
"""So long a batch waits for more: a sync costs the same for one recipe as for a thousand."""
_MAX_QUEUED = 1 << 18
"""Pages. What does not fit is found again by looking through the namespace."""
_RETRY_S = 1.0
_AGE_TURN_S = 30.0
LOOK_PAGES = 1 << 16
"""Pages of a prefix whose recipes are looked up for one request."""
_LOOK_STEP = 256


Told = Callable[[Sequence[Fresh]], Awaitable[None]]


class Recipes:
    """See the module's text. `run` is its task. `view` gives the bytes of a DRAM slot, `now` Unix time in seconds."""

    def __init__(
        self, file: RecipeFile, spaces: Callable[[], Iterable[Space]], view: Callable[[int], memoryview], now: Callable[[], float],
        stats: Stats, ttl_s: float, readers: Executor,
    ) -> None:  # fmt: skip
        self.file = file
        self.source = RecipeSource(view, now)
        self._stats = stats
        self._ttl_s = ttl_s
        self._threads = RecipeThreads(readers, self._on_damage)
        self._budget = RecipeBudget(file, self._threads, spaces, now, stats, self.look_through)
        self._queue: deque[tuple[Space, bytes]] = deque()
        """(namespace, keys of consecutive pages)."""
        self._queued = 0
        self._lacking: dict[int, Space] = {}
        """Namespaces to be looked through for pages without a recipe, by number."""
        self._barriers: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._failing = ""
        self._stopped = False
        self._damaged = False
        self._age_due = 0.0
        self.fresh: Told | None = None
        """Told of recipes that are about to be written."""

    # --- what comes in -------------------------------------------------------------------------------------------------

    def entered(self, space: Space, keys: bytes) -> None:
        """Consecutive pages have entered the tree, or gained parts: their recipes are to be written."""
        pages = len(keys) // KEY_BYTES
        if self._queued + pages > _MAX_QUEUED:
            self._lacking[space.number] = space
        else:
            self._queue.append((space, keys))
            self._queued += pages
        self._wake.set()

    def look_through(self, space: Space) -> None:
        """Write the recipes that pages of a namespace lack, and learn of those that are there: after loading, or an overflow."""
        self._lacking[space.number] = space
        self._wake.set()

    # --- the task ------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written."""
        return not (self._queue or self._lacking or self._threads.busy)

    async def run(self) -> None:
        """Write what comes in until cancelled."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGE_TURN_S if self._ttl_s else None):
                        await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(_GATHER_S)
                await self._turn()
        finally:
            self._stopped = True
            self._end_barriers(DiskFailing("the text tier has stopped"))

    async def _turn(self) -> None:
        try:
            async with self._threads.alone():
                await self._drain_mending()
                if self._ttl_s and time.monotonic() >= self._age_due:
                    self._age_due = time.monotonic() + _AGE_TURN_S
                    await self._budget.expire(self._ttl_s)
            if self._failing:
                _log.warning("the text tier takes recipes again")
            self._failing = ""
        except (lmdb.Error, OSError, DiskFailing) as error:
            self._stats.ssd_errors += 1
            if not self._failing:
                _log.error("recipes can't be written (%s): pages without one stay where they are", error)
            self._failing = str(error)
            self._end_barriers(DiskFailing(f"recipes can't be written: {error}", retry_after_ms=1000))
            await asyncio.sleep(_RETRY_S)
            with contextlib.suppress(lmdb.Error, OSError):
                await self._threads.write(self.file.probe)
            self._wake.set()

    async def _drain_mending(self) -> None:
        """Write all there is; a file whose structure turns out to be damaged is salvaged first, once."""
        if self._damaged:
            self._damaged = False
            await self._threads.write(self._mend)
        try:
            await self._drain()
        except STRUCTURAL:
            await self._threads.write(self._mend)
            await self._drain()

    def _on_damage(self) -> None:
        self._damaged = True
        self._wake.set()

    def _mend(self) -> None:
        _log.error("the recipes are damaged: saving what can be read of them")
        self._stats.corrupt_records += 1
        self.file.salvage()

    async def _drain(self) -> None:
        while self._queue or self._lacking:
            while self._queue:
                await self._write_some()
            if self._lacking:
                _, space = self._lacking.popitem()
                try:
                    await self._find_lacking(space)
                except BaseException:
                    self._lacking[space.number] = space
                    raise
        self._end_barriers(None)

    def _end_barriers(self, error: DiskFailing | None) -> None:
        barriers, self._barriers = self._barriers, []
        for barrier in barriers:
            if not barrier.done():
                barrier.set_exception(error) if error is not None else barrier.set_result(None)

    async def _write_some(self) -> None:
        """Write one batch. If that fails it is queued again."""
        taken: list[tuple[Space, bytes]] = []
        pages = 0
        while self._queue and pages < _BATCH_PAGES:
            taken.append(self._queue.popleft())
            pages += len(taken[-1][1]) // KEY_BYTES
        self._queued -= pages
        try:
            fresh: list[Fresh] = []
            for space, keys in taken:
                for at in range(0, len(keys), _TURN_PAGES * KEY_BYTES):
                    fresh += self.source.of_pages(space, keys[at : at + _TURN_PAGES * KEY_BYTES])
                    await asyncio.sleep(0)
            await self._write(fresh)
        except BaseException:
            self._queue.extendleft(reversed(taken))
            self._queued += pages
            raise

    async def _write(self, fresh: list[Fresh]) -> None:
        if not fresh:
            return
        if self.fresh is not None:
            await self.fresh(fresh)
        news = await self._threads.write(_encoded, fresh)
        await self._budget.make_room(sum(new.cost for new in news))
        news = [new for new, one in zip(news, fresh, strict=True) if not one.space.dropped]
        try:
            await self._threads.write(self.file.commit, RecipeBatch(put=news))
        except lmdb.MapFullError:  # the file is more fragmented than was thought: fewer fit
            self.file.capacity = self.file.usage().used * 9 // 10
            raise
        self._stats.recipes_written += len(news)
        for one in fresh:
            slot = -1 if one.space.dropped else one.space.tree.pages.find_key(one.recipe.key)
            if slot >= 0:
                one.space.tree.pages.flags[slot] |= RECIPE
            self.source.forget_given((one.space.number, one.recipe.key))

    async def _find_lacking(self, space: Space) -> None:
        """Flag the pages whose recipes are on disk, and queue the others."""
        if space.dropped or space.loading:
            return
        pages, first = space.tree.pages, 0
        while first < pages.ranges.high and not space.dropped:
            slots = np.arange(first, min(first + _BATCH_PAGES, pages.ranges.high), dtype=np.int32)
            slots = slots[(pages.node[slots] > 0) & ((pages.flags[slots] & (GHOST | RECIPE)) == 0)]
            keys = [pages.key_bytes(slot) for slot in slots.tolist()]
            there = await self._threads.read(self.file.have, space.number, space.digest, keys) if keys else []
            for key, has in zip(keys, there, strict=True):
                if not has:
                    self.entered(space, key)
                elif (slot := pages.find_key(key)) >= 0:
                    pages.flags[slot] |= RECIPE
            first += _BATCH_PAGES
            await asyncio.sleep(0)
            while self._queue:
                await self._write_some()

    # --- looking up ----------------------------------------------------------------------------------------------------

    async def flush(self, wait_s: float) -> None:
        """Wait until all that has come in has its recipe. Raises DiskFailing, or Busy if it takes longer."""
        if self._stopped:
            raise DiskFailing("the text tier has stopped")
        if self.idle:
            return
        barrier: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._barriers.append(barrier)
        self._wake.set()
        try:
            async with asyncio.timeout(wait_s):
                await barrier
        except TimeoutError:
            raise Busy(f"recipes are not durable after {wait_s:g} s", retry_after_ms=1000) from None

    async def front(self, space: Space, parent: bytes, labels: bytes, extras: Extras, first: int) -> list[bytes]:
        """The keys of the pages that follow on the page `parent`, which is before page `first`, as far as all have recipes.

        `labels` are their token bytes, `extras` their extra digests by page of the prefix. At most LOOK_PAGES.
        """
        return await self._threads.read(self._front, space, parent, labels, extras, first)

    def _front(self, space: Space, parent: bytes, labels: bytes, extras: Extras, first: int) -> list[bytes]:
        width = space.tree.pages.token_bytes
        total, found = min(len(labels) // width, LOOK_PAGES), []
        for start in range(0, total, _LOOK_STEP):
            keys = []
            for page in range(start, min(start + _LOOK_STEP, total)):
                parent = page_key(parent, labels[page * width : (page + 1) * width] + extras.get(first + page, NO_EXTRA))
                keys.append(parent)
            have = self.file.have(space.number, space.digest, keys)
            found += keys if all(have) else keys[: have.index(False)]
            if not all(have):
                break
        return found

    async def have(self, space: Space, keys: list[bytes]) -> list[bool]:
        """Which pages have a recipe that verifies."""
        return await self._threads.read(self.file.have, space.number, space.digest, keys)

    async def read(self, space: Space, keys: list[bytes]) -> list[Recipe | None]:
        """Recipes by page key."""
        return await self._threads.read(self.file.read, space.number, space.digest, keys)

    async def upwards(self, space: Space, key: bytes, limit: int) -> list[Recipe]:
        """The recipes of a page and of those before it, from it towards the root: up to the first that is lacking, at most `limit`."""
        return await self._threads.read(self.file.upwards, space.number, space.digest, key, limit)

    async def key_at(self, space: Space, tokens: bytes, extras: Extras, page: int) -> bytes | None:
        """The key of a page of a prefix, whether it is there or not; None if the prefix is shorter."""
        return await self._threads.read(_key_at, space, as_token_bytes(tokens), extras, page)

    def holding(self, space: Space) -> Holding:
        """Recipes of a namespace, and their bytes."""
        return self.file.holdings.get(space.number, Holding())

    # --- deleting ------------------------------------------------------------------------------------------------------

    async def delete(self, space: Space, key: bytes) -> int:
        """Delete the recipes of a page and of all below it, durably. Pages that are there keep theirs. Returns how many."""
        async with self._threads.alone():
            with contextlib.suppress(lmdb.Error, OSError):
                await self._drain()
            keys = await self._threads.read(self.file.below, space.number, key)
            gone = [one for one in keys if space.tree.pages.find_key(one) < 0]
            return await self._delete(space, gone)

    async def delete_all(self, space: Space) -> int:
        """Delete the recipes of all pages of a namespace that are not there, durably. Returns how many."""
        done, after = 0, None
        async with self._threads.alone():
            while True:
                keys, after = await self._threads.read(self.file.keys, space.number, after)
                done += await self._delete(space, [key for key in keys if space.tree.pages.find_key(key) < 0])
                if after is None:
                    return done

    async def _delete(self, space: Space, keys: list[bytes]) -> int:
        before = self.holding(space).recipes
        if keys:
            try:
                await self._threads.write(self.file.commit, RecipeBatch(delete=[(space.number, key) for key in keys]))
            except (lmdb.Error, OSError) as error:
                raise DiskFailing(f"the recipes can't be deleted: {error}", retry_after_ms=1000) from error
        return before - self.holding(space).recipes

    async def drop_namespace(self, space: Space) -> None:
        """Delete all recipes of a dropped namespace, durably."""
        async with self._threads.alone():
            if space.number in self.file.holdings:
                try:
                    await self._threads.write(self.file.drop_namespace, space.number)
                except (lmdb.Error, OSError) as error:
                    raise DiskFailing(f"the recipes can't be deleted: {error}", retry_after_ms=1000) from error

    async def sweep(self, known: set[int]) -> None:
        """Delete the recipes of namespaces that are no more: what a crash while one was dropped leaves."""
        async with self._threads.alone():
            try:
                await self._sweep(known)
            except STRUCTURAL:  # or no start would get past it
                await self._threads.write(self._mend)
                await self._sweep(known)

    async def _sweep(self, known: set[int]) -> None:
        for number in await self._threads.write(self.file.numbers):
            if number not in known:
                await self._threads.write(self.file.drop_namespace, number)

    async def stop(self, wait_s: float) -> bool:
        """Write what is queued, within a time, and close. False if a write does not end: its thread is left behind."""
        try:
            async with asyncio.timeout(wait_s), self._threads.alone():
                await self._drain()
                await self._threads.write(bool)
        except TimeoutError:
            self._threads.leave()
            return False
        except (lmdb.Error, OSError, DiskFailing) as error:
            _log.error("%d recipes could not be written at the end: %s", self._queued, error)
        await self._threads.end()
        await asyncio.to_thread(self.file.close)
        return True


def _key_at(space: Space, tokens: bytes, extras: Extras, page: int) -> bytes | None:
    width, key = space.tree.pages.token_bytes, space.digest
    if not 0 <= page < len(tokens) // width:
        return None
    for number in range(page + 1):
        key = page_key(key, tokens[number * width : (number + 1) * width] + extras.get(number, NO_EXTRA))
    return key


def _encoded(fresh: list[Fresh]) -> list[NewRecipe]:
    return [
        NewRecipe(one.space.number, one.recipe.key, one.recipe.parent, one.recipe.written_ms, encode_recipe(one.space.digest, one.recipe))
        for one in fresh
    ]
