"""What clients tell about prefixes: bring them up, keep them, give them up, delete them."""

import asyncio
import time

import numpy as np

from kvstore.errors import BadRequest, Busy, Conflict, NotFound
from kvstore.hints import NO_HINTS, Hints
from kvstore.radix.below import with_all_below
from kvstore.radix.pages import ANONYMOUS, GHOST, RECIPE
from kvstore.radix.tree import Extras
from kvstore.radix.values import Path
from kvstore.store.abandoning import abandon_line
from kvstore.store.dram.reading import Reading
from kvstore.store.matching.leases import Lease, Leases
from kvstore.store.matching.matching import each_prefix, known_path, usable_path
from kvstore.store.recipes.recipes import Recipes
from kvstore.store.removing import remove_alone
from kvstore.store.session_ends import Line
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.uses import Uses
from kvstore.tiers.blobs import NO_SLOT

_AT_ONCE = 4
_FLUSH_S = 10.0


class Prefixes:
    """See the module's text."""

    def __init__(self, reading: Reading, writeback: Writeback, pins: Leases, uses: Uses, recipes: Recipes) -> None:
        self._recipes = recipes
        self._reading = reading
        self._writeback = writeback
        self._pins = pins
        self._owners: dict[str, int] = {}
        self._uses = uses

    def _owner(self, space: Space) -> int:
        """Pins belong to their tenant, not to a client: an owner among leases that never dies, with a bound of its own."""
        return self._owners.setdefault(space.settings.tenant, len(self._owners))

    async def prefetch(self, space: Space, tokens: bytes, extras: Extras, first: int = 0, last: int = -1) -> tuple[int, int, int]:
        """Bring the pages [first, last) of the longest usable prefix into DRAM, a few blobs at a time, and count it as a use.

        Of a flat namespace that is what is there of those pages of a list. Returns pages, and blobs and stored bytes brought up. Ends
        early where there is no room, or where a blob is lost.
        """
        if space.spec.flat:
            pages, rows = self._use_alone(space, each_prefix(space, tokens, extras)[max(first, 0) : None if last < 0 else last])
        else:
            path = usable_path(space, tokens, extras)
            last = path.pages if last < 0 else min(last, path.pages)
            self._uses.use(space, path)
            pages, rows = max(last - first, 0), rows_to_load(space, path, first, last)
        blobs, nbytes = await self._bring_up(space, [row for row in rows if space.blobs.slot[row] == NO_SLOT])
        return pages, blobs, nbytes

    def _use_alone(self, space: Space, pages: list[tuple[bytes, Extras]]) -> tuple[int, list[int]]:
        """Count what is there of a list as used. Returns its pages, and the blob rows that they need, each once."""
        paths = {path.nodes[-1]: path for its in pages if (path := usable_path(space, *its)).pages}
        slots = np.array([int(space.tree.path_slots(path)[0]) for path in paths.values()], np.int32)
        self._uses.use_alone(space, slots, NO_HINTS)
        return len(slots), list(dict.fromkeys(row for path in paths.values() for row in rows_to_load(space, path, 0, 1)))

    async def _bring_up(self, space: Space, todo: list[int]) -> tuple[int, int]:
        """Bring blobs into DRAM. Returns how many, and their stored bytes."""
        done = nbytes = 0
        for row in todo:
            space.pin(row)
        try:
            for at in range(0, len(todo), _AT_ONCE):
                chunk = todo[at : at + _AT_ONCE]
                results = await asyncio.gather(*(self._reading.promote(space, row) for row in chunk), return_exceptions=True)
                for row, result in zip(chunk, results, strict=True):
                    if isinstance(result, BaseException) and not isinstance(result, Busy | NotFound):
                        raise result
                    done += result is None
                    nbytes += space.stored_bytes(row) if result is None else 0
                if any(isinstance(result, BaseException) for result in results):
                    break
        finally:
            for row in todo:
                space.unpin(row)
        return done, nbytes

    def pin(self, space: Space, tokens: bytes, extras: Extras, ttl_s: float, number: int = 0) -> Lease:
        """Keep the longest usable prefix from being evicted for `ttl_s` seconds, whoever dies.

        Of a flat namespace that is what is there of a list. With a `number` that its owner chose the pin has that one, and is made
        only once: who did not hear of it can ask again.
        """
        self._pins.check_time(ttl_s, "ttl_s")
        there = self._pins.find(self._owner(space), number)
        if not 0 <= number < 1 << 63 or (there is not None and there.space is not space):
            raise BadRequest("the number of a pin is 63 random bits, and not that of another")
        if there is not None:
            return there
        paths = [path for its in each_prefix(space, tokens, extras) if (path := usable_path(space, *its)).pages]
        if not paths:
            raise NotFound("nothing of this prefix is in the store: there is nothing to pin")
        for path in paths:
            self._uses.use(space, path)
        return self._pins.grant(self._owner(space), space, paths, time.monotonic(), ttl_s, number=number)

    def unpin(self, space: Space, pin: int) -> None:
        """End a pin of this namespace."""
        lease = self._pins.get(self._owner(space), pin)
        if lease.space is not space:
            raise self._pins.unknown(pin)
        self._pins.release(lease)

    def abandon(self, space: Space, tokens: bytes, extras: Extras, from_page: int = 0) -> int:
        """Make the end of a prefix, from a page on, the first to go; but not what other contexts go on from. Returns the pages.

        Of a flat namespace that is the end of a list.
        """
        if space.spec.flat:
            return sum(self._abandon(space, *its, 0) for its in each_prefix(space, tokens, extras)[max(from_page, 0) :])
        return self._abandon(space, tokens, extras, from_page)

    def _abandon(self, space: Space, tokens: bytes, extras: Extras, from_page: int) -> int:
        tree, path = space.tree, known_path(space, tokens, extras)
        first = path.pages
        for node in reversed(path.nodes):
            end = tree.nodes.depth[node] + (path.tail if node == path.nodes[-1] else tree.nodes.count[node])
            shared = (
                tree.nodes.children[node] > (0 if node == path.nodes[-1] else 1) or end < tree.nodes.depth[node] + tree.nodes.count[node]
            )
            if shared:
                break
            first = tree.nodes.depth[node]
        first = max(first, from_page)
        slots = tree.path_slots(path)
        if first >= len(slots):
            return 0
        tree.cool(slots[first:], first)
        self._uses.abandoned(space, slots, first)
        self._uses.cooled(space, slots[first:])
        return len(slots[first:])

    def abandon_session(self, space: Space, hints: Hints) -> int:
        """The session is over: what it used last, and nobody else, is the first to go. Returns the pages."""
        if not hints.session_hash:
            raise BadRequest("the session has no id")
        pages = 0
        for sub_agent in (True, False):
            done = abandon_line(space, Line(hints.session_hash, sub_agent), respecting=ANONYMOUS)
            if done.pages:
                self._uses.abandoned(space, done.slots, done.first)
                self._uses.cooled(space, done.cooled)
            pages += done.pages
        return pages

    async def delete(self, space: Space, tokens: bytes, extras: Extras, from_page: int = 0) -> int:
        """Delete the page `from_page` of a prefix and all below it, on every tier. Returns the pages; durable when this returns.

        Of a flat namespace that is the end of a list: all of it, or (Conflict) nothing.
        """
        if from_page < 0:
            raise BadRequest(f"from_page is {from_page}")
        if space.loading:
            raise Busy(f"namespace {space.settings.name!r} is still being loaded: nothing can be deleted yet", retry_after_ms=500)
        if space.spec.flat:
            return await self._delete_alone(space, each_prefix(space, tokens, extras), from_page)
        path = known_path(space, tokens, extras)
        key = None
        if space.text is not None:
            key = await self._recipes.key_at(space, tokens, extras, from_page)
            path = known_path(space, tokens, extras)
        removed = 0
        if from_page < path.pages:
            removed = self._remove(space, path, from_page, ghosts=False)
            await self._writeback.emptied()
        if key is not None:
            await self._recipes.delete(space, key)
        return removed

    async def _delete_alone(self, space: Space, pages: list[tuple[bytes, Extras]], first: int) -> int:
        tree = space.tree
        there = {number: path for number, its in enumerate(pages[first:], first) if (path := known_path(space, *its)).pages}
        slots: dict[int, None] = {}
        for number, path in there.items():
            slot = int(tree.path_slots(path)[0])
            if tree.pages.leases[slot]:
                raise Conflict(f"page {number} of this list is leased, pinned or being put: try again later")
            slots[slot] = None
        if slots:
            await remove_alone(space, np.array(list(slots), np.int32))
            await self._writeback.emptied()
        return len(slots)

    async def drop_to_text(self, space: Space, tokens: bytes, extras: Extras, from_page: int = 0) -> int:
        """Give up the page `from_page` of a prefix and all below it on DRAM and SSD, and keep their recipes. Returns the pages.

        Raises Conflict if the namespace has none, or a page has none, or is leased.
        """
        if space.text is None:
            raise Conflict("this namespace keeps no recipes, which is fixed when it is created: its pages could not be computed again")
        await self._recipes.flush(_FLUSH_S)
        path = known_path(space, tokens, extras)
        if not 0 <= from_page < path.pages:
            return 0
        slots = with_all_below(space.tree, space.tree.path_slots(path)[from_page : from_page + 1])
        without = int(np.count_nonzero((space.tree.pages.flags[slots] & (RECIPE | GHOST)) == 0))
        if without:
            raise Conflict(f"{without} of these pages have no recipe, and would be lost: delete them, or put them again")
        removed = self._remove(space, path, from_page, ghosts=True)
        space.stats.text_pages += removed
        await self._writeback.emptied()
        return removed

    def _remove(self, space: Space, path: Path, from_page: int, *, ghosts: bool) -> int:
        slot = int(space.tree.path_slots(path)[from_page])
        if space.tree.pages.leases[slot]:
            raise Conflict(f"page {from_page} of this prefix is leased, pinned or being put: try again later")
        return space.remove_page(slot, ghosts=ghosts)


def rows_to_load(space: Space, path: Path, first: int, last: int) -> list[int]:
    """The blob rows that a fetch of the pages [first, last) of a path needs, each once, in page order."""
    slots = space.tree.path_slots(path)
    columns = space.tree.parts_of(slots)
    starts = np.array([space.tree.rules.first_page(component, path.pages) for component in range(len(space.spec.components))])
    needed = (columns.page >= starts[columns.component]) & (columns.page >= first) & (columns.page < last)
    return list(dict.fromkeys(columns.blob[needed].tolist()))
