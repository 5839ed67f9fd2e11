"""Which pages come to which tier, and leave it, for whoever follows the store from outside. Pure, in the loop's thread.

A page is in DRAM while all its required parts are there, and on SSD while it has a durable record. What may have changed is noted
as it happens; what has changed is found when it is taken: a page that came and went in between is not spoken of.

Slots move, so pages are noted by name: the first 8 bytes of their keys, under which the tree finds them. A blob's row has the name
of a page that needs it; of those that several pages need, a set has the other names. Names may be out of date, or of two pages:
that costs a look and tells nothing wrong. After the journal is loaded, a bit of each page says that it is still to be looked at.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec, column, distinct
from kvstore.digests import KEY_BYTES, NO_EXTRA
from kvstore.radix.pages import DURABLE, GHOST, Slots
from kvstore.radix.tables import ROOT
from kvstore.store.settings import NamespaceSettings
from kvstore.store.space import Space
from kvstore.store.watchers import Watcher
from kvstore.tiers.blobs import NO_SLOT

DRAM, SSD = 1, 2
_TIERS = DRAM | SSD
_LOOK = 4
"""Of a page that was loaded and not looked at since."""
_TOLD = ColumnSpec("told", "u1")
"""In which tiers the page was said to be."""
_SCAN_SLOTS = 1 << 16
_NAMES_TO_SPARE = 16
_LEFT_PAGES = 256
"""Most pages that are told at once to have left."""
_MAX_TOKENS = 1 << 14
"""Of token ids that are told at once, about."""


@dataclass(frozen=True, slots=True)
class Came:
    """Consecutive pages, by their keys in a row, came to a tier. `parent` is the key of the page before them; empty if they are the first.

    `tokens` are their token ids (uint32), if they may be told, and `extras` the digest of each page's extra keys, empty if it has none.
    """

    tier: int
    parent: bytes
    keys: bytes
    tokens: bytes
    extras: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """Pages, by their keys in a row, left a tier."""

    tier: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class Changes:
    """What became of pages of one namespace: first some left, then some came, parents first."""

    settings: NamespaceSettings
    left: list[Left]
    came: list[Came]


class TierEvents(Watcher):
    """What has changed since it was taken last, of all namespaces. `changed` is called when there is something to take.

    With `tokens`, token ids are told of namespaces that keep recipes.
    """

    specs: Sequence[ColumnSpec] = (_TOLD,)

    def __init__(self, *, tokens: bool = False) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._tokens = tokens
        self._followed: dict[int, _Followed] = {}
        self._waiting: dict[int, _Followed] = {}
        self._dropped: deque[_Followed] = deque()

    def follow(self, space: Space) -> None:
        """Begin with a namespace, which has the column of `specs` and no pages yet."""
        followed = _Followed(space, self._wake, tokens=self._tokens and space.settings.recipes)
        space.follower = self._followed[space.number] = followed

    def dropped(self, space: Space) -> None:
        """A namespace is gone, with all its pages."""
        if space.follower is not None:
            space.follower = None
            self._waiting.pop(space.number, None)
            followed = self._followed[space.number]
            followed.dropped()
            self._dropped.append(followed)
            self.changed()

    def take(self, pages: int) -> Changes | None:
        """Changes of about so many pages, perhaps of none; None if there is nothing more to look at.

        What was dropped comes first: a namespace that takes its place has the same keys.
        """
        if self._dropped:
            followed = self._dropped[0]
            changes = followed.take_last(pages)
            if followed.over:
                del self._followed[self._dropped.popleft().space.number]
            return changes
        for number, followed in self._waiting.items():
            changes = followed.take(pages)
            if followed.idle:
                del self._waiting[number]
            return changes
        return None

    def _wake(self, followed: "_Followed") -> None:
        self._waiting[followed.space.number] = followed
        self.changed()

    # --- as a watcher --------------------------------------------------------------------------------------------------

    def written(self, space: Space, slot: int) -> None:
        """A page is on SSD now."""
        self.unwritten(space, slot)

    def unwritten(self, space: Space, slot: int) -> None:
        """A page is not on SSD any more."""
        if (followed := self._followed.get(space.number)) is not None:
            followed.note(space.tree.pages.key_hash(slot))

    def loaded(self, space: Space) -> None:
        """All pages are back from the journal."""
        if (followed := self._followed.get(space.number)) is not None:
            followed.loaded()

    def buried(self, space: Space, slots: Slots) -> None:
        """Pages were given up in all tiers."""
        if (followed := self._followed.get(space.number)) is not None:
            followed.buried(slots)


class BothWatch(Watcher):
    """Two watchers that are told the same."""

    def __init__(self, first: Watcher, second: Watcher) -> None:
        self._each = (first, second)
        self.specs: Sequence[ColumnSpec] = (*first.specs, *second.specs)

    def written(self, space: Space, slot: int) -> None:
        """A page is on SSD now."""
        for watcher in self._each:
            watcher.written(space, slot)

    def loaded(self, space: Space) -> None:
        """All pages are back from the journal."""
        for watcher in self._each:
            watcher.loaded(space)

    def unwritten(self, space: Space, slot: int) -> None:
        """A page is not on SSD any more."""
        for watcher in self._each:
            watcher.unwritten(space, slot)

    def buried(self, space: Space, slots: Slots) -> None:
        """Pages were given up in all tiers."""
        for watcher in self._each:
            watcher.buried(space, slots)

    def forgotten(self, space: Space, slots: Slots) -> None:
        """Ghosts are about to be removed for good."""
        for watcher in self._each:
            watcher.forgotten(space, slots)


class _Followed:
    """One namespace."""

    def __init__(self, space: Space, wake: "Callable[[_Followed], None]", *, tokens: bool) -> None:
        self.space = space
        self._wake = wake
        self._tokens = tokens
        self._told: npt.NDArray[np.uint8] = space.tree.pages.kept[_TOLD.name]
        self._name: npt.NDArray[np.uint64] = column(space.blobs.slots.capacity, np.uint64)
        self._more: dict[int, set[int]] = {}
        self._noted: dict[int, None] = {}
        """Names of pages to look at, as they came: parents first."""
        self._names: deque[int] = deque()
        """Those that are being looked at."""
        self._left: deque[Left] = deque()
        self._to_look = 0
        """How many pages have the bit."""
        self._at = 0
        """Where the search for them, or for what was told of a dropped namespace, is."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to look at."""
        return not (self._noted or self._names or self._left or self._to_look)

    @property
    def over(self) -> bool:
        """Whether all pages of a dropped namespace have been told to be gone."""
        return not self._left and self._at >= self.space.tree.pages.ranges.high

    # --- what happens --------------------------------------------------------------------------------------------------

    def note(self, name: int) -> None:
        """A page with this name is to be looked at."""
        self._noted[name] = None
        self._wake(self)

    def moved(self, row: int) -> None:
        """A blob came to DRAM, or left it."""
        if name := int(self._name[row]):
            self.note(name)
        for other in self._more.get(row, ()):
            self.note(other)

    def entered(self, keys: bytes, blobs: Slots) -> None:
        """Pages entered the tree, with these blob rows: (pages, parts), -1 for none. They are counted in already."""
        names = np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0]
        page, part = np.nonzero(blobs >= 0)
        self._name_rows(blobs[page, part], names[page])
        self._noted.update(dict.fromkeys(names.tolist()))
        self._wake(self)

    def loaded(self) -> None:
        """All pages that are there now are to be looked at."""
        slots = self.space.tree.live_slots()
        self._told[slots] |= _LOOK
        self._to_look = len(slots)
        self._wake(self)

    def buried(self, slots: Slots) -> None:
        """Pages have left all tiers."""
        told = self._told[slots]
        self._to_look -= int(np.count_nonzero(told & _LOOK))
        self._told[slots] = 0
        if (told & _TIERS).any():
            for left in self._gone(slots, told):
                starts = range(0, len(left.keys), _LEFT_PAGES * KEY_BYTES)
                self._left += [Left(left.tier, left.keys[at : at + _LEFT_PAGES * KEY_BYTES]) for at in starts]
            self._wake(self)

    def dropped(self) -> None:
        """The namespace is gone: from now on `take_last` goes through all its pages, and it wakes nobody."""
        self._wake = lambda _: None
        self._noted.clear()
        self._names.clear()
        self._at = 0

    def _name_rows(self, rows: Slots, names: npt.NDArray[np.uint64]) -> None:
        """Each of these blobs is needed by the page of this name."""
        shared = self.space.blobs.pages[rows] > 1
        alone = rows[~shared]
        self._name[alone] = names[~shared]
        if self._more:
            for row in alone.tolist():
                self._more.pop(row, None)
        for row, name in zip(rows[shared].tolist(), names[shared].tolist(), strict=True):
            names_of_row = self._more.setdefault(row, set())
            names_of_row.add(name)
            if len(names_of_row) > 2 * int(self.space.blobs.pages[row]) + _NAMES_TO_SPARE:
                self._more[row] = {known for known in names_of_row if any(row in self.space.rows_of(s) for s in self._slots_of(known))}

    def _slots_of(self, name: int) -> Iterator[int]:
        """The pages of this name."""
        pages = self.space.tree.pages
        for slot in pages.key_index.candidates(name):
            if pages.key_hash(slot) == name and not pages.flags[slot] & GHOST:
                yield slot

    # --- what is told --------------------------------------------------------------------------------------------------

    def take(self, pages: int) -> Changes:
        """Changes of about so many pages. Nothing comes before all that has left by now was told: it may be the same page."""
        if self._tokens:
            pages = min(pages, max(1, _MAX_TOKENS // self.space.spec.page_tokens))
        left = self._take_left(pages)
        if self._left or left:
            return Changes(self.space.settings, left, [])
        slots = self._next_slots(pages)
        now = np.where(whole_in_dram(self.space, slots), DRAM, 0).astype(np.uint8)
        now[(self.space.tree.pages.flags[slots] & DURABLE) != 0] |= SSD
        told = self._told[slots]
        self._looked_at(slots[(told & _LOOK) != 0])
        self._told[slots] = now
        came = [run for tier in (DRAM, SSD) for run in self._runs(tier, slots[(now & ~told & tier) != 0])]
        return Changes(self.space.settings, self._gone(slots, told & ~now), came)

    def take_last(self, pages: int) -> Changes:
        """That about so many pages of a dropped namespace are gone. Its tree does not change any more."""
        left = self._take_left(pages)
        if not self._left and not left:
            slots = self._next_with(_TIERS, pages)
            left = self._gone(slots, self._told[slots])
            self._told[slots] = 0
        return Changes(self.space.settings, left, [])

    def _take_left(self, pages: int) -> list[Left]:
        taken: list[Left] = []
        while self._left and pages > 0:
            taken.append(self._left.popleft())
            pages -= len(taken[-1].keys) // KEY_BYTES
        return taken

    def _gone(self, slots: Slots, tiers: npt.NDArray[np.uint8]) -> list[Left]:
        """That pages left the tiers of these masks."""
        keys = self.space.tree.pages.key
        found = [(tier, slots[(tiers & tier) != 0]) for tier in (DRAM, SSD)]
        return [Left(tier, keys[mine].tobytes()) for tier, mine in found if len(mine)]

    def _next_slots(self, pages: int) -> Slots:
        """Some of the pages to look at, parents first."""
        if not self._names:
            self._names, self._noted = deque(self._noted), {}
        found: list[int] = []
        while self._names and len(found) < pages:
            found.extend(self._slots_of(self._names.popleft()))
        if self._to_look and len(found) < pages:
            found += self._loaded_slots(pages - len(found))
        slots = distinct(np.array(found, np.int32))
        depth = np.asarray(self.space.tree.nodes.depth)[self.space.tree.pages.node[slots]]
        return slots[np.lexsort((slots, depth))]

    def _loaded_slots(self, pages: int) -> list[int]:
        """Some of the pages with the bit. They may have moved to where the search has been: it goes round until none is left."""
        if self._at >= self.space.tree.pages.ranges.high:
            self._at = 0
        return [int(slot) for slot in self._next_with(_LOOK, pages)]

    def _next_with(self, bits: int, pages: int) -> Slots:
        """Some of the pages for which any of these bits is set, going on from where the search was."""
        last = min(self._at + _SCAN_SLOTS, self.space.tree.pages.ranges.high)
        found = self._at + np.flatnonzero(self._told[self._at : last] & bits)[:pages]
        if len(found) < pages:
            self._at = last
        return found.astype(np.int32)

    def _looked_at(self, slots: Slots) -> None:
        """Pages of the journal are looked at for the first time."""
        if not len(slots):
            return
        self._to_look -= len(slots)
        pages, parts = self.space.tree.pages, self.space.tree.parts
        owner, part = parts.of(pages.part[slots])
        names = np.array([pages.key_hash(slot) for slot in slots.tolist()], np.uint64)
        self._name_rows(parts.blob[part], names[owner])

    def _runs(self, tier: int, slots: Slots) -> Iterator[Came]:
        """That pages (in order of their nodes' depth) came to a tier, each run of a node's as one."""
        if not len(slots):
            return
        tree = self.space.tree
        node = tree.pages.node[slots]
        new = np.flatnonzero((slots[1:] != slots[:-1] + 1) | (node[1:] != node[:-1])) + 1
        for first, last in pairwise([0, *new.tolist(), len(slots)]):
            yield self._run(tier, slots[first:last], int(node[first]))

    def _run(self, tier: int, slots: Slots, node: int) -> Came:
        tree, first = self.space.tree, int(slots[0])
        if first > tree.nodes.start[node]:
            parent = tree.pages.key_bytes(first - 1)
        else:
            above = tree.nodes.parent[node]
            parent = b"" if above == ROOT else tree.last_key(above)
        tokens, extras = b"", tuple[bytes, ...]()
        if self._tokens and not tree.nodes.sealed[node]:
            tokens = tree.pages.tokens[slots].tobytes()
            each = (row.tobytes() for row in tree.pages.extras[slots])
            extras = tuple(b"" if extra == NO_EXTRA else extra for extra in each)
        return Came(tier, parent, tree.pages.key[slots].tobytes(), tokens, extras)


def whole_in_dram(space: Space, slots: Slots) -> npt.NDArray[np.bool_]:
    """Which pages are in DRAM with all that makes them pages."""
    tree = space.tree
    owner, part = tree.parts.of(tree.pages.part[slots])
    required = np.left_shift(1, tree.parts.component[part].astype(np.int64)) & tree.rules.required != 0
    missing = required & (space.blobs.slot[tree.parts.blob[part]] == NO_SLOT)
    found: npt.NDArray[np.bool_] = (tree.pages.flags[slots] & GHOST) == 0
    found[owner[missing]] = False
    return found
