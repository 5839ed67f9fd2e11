"""The eviction policies at work in the store: what they are told of uses, and what they say is the least worth keeping.

A policy keeps columns beside those of the tree's pages (see `kvstore.tiers.policies`). Here one more is kept: in which tiers the policies
take a page to be. A page is in DRAM for them from the use that brings it there until it is evicted: one on SSD from its read under a lease
on, unless it did not come up when the lease is over and somebody is to leave DRAM.

A request reads a prefix under a lease and then puts what was missing. Both are one use for a policy: a read counts for the pages that
are there, and says how many were asked for; a put counts for the pages that it brings.

Policies learn when there is time: uses are noted as they come, and told in their order once it is quiet, between requests if many wait
to be told, and before anything is decided.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec, distinct
from kvstore.digests import KEY_BYTES
from kvstore.radix.leaf_first import raised
from kvstore.radix.pages import DURABLE, GHOST, Slots
from kvstore.store.dram.untold import A_TURN, APART_AT_A_TIME, MOST, ApartUse, Cooled, Note, PathUse, Placed, Untold, pieces
from kvstore.store.space import Space
from kvstore.store.uses import Asked, Use
from kvstore.tiers.policies import Columns, Explanation, Pages, Policy, Values, parts
from kvstore.tiers.policies import Use as PolicyUse
from kvstore.tiers.policies.kept import columns_of, specs_of

DRAM, SSD = 1, 2
_SEEN = 4
"""Of a page or ghost whose use a policy was told of."""
_PLACE = ColumnSpec("place", "u1")
_MAX_AWAITED = 4096
_MAX_AWAITED_PAGES = 1 << 18
"""Most reads, and pages in them, of which it is remembered that they are to be fetched; of more, the first have come."""
_PAGES_AWAITED, _AWAITED_AT_A_TIME, _LOOK_PAGES = 4096, 128, 2048
_HURRY_S = 0.1
"""How long others may have their turns while somebody waits for policies to be told."""
_QUIET_S = 0.02
"""How long nothing must have come for it to be quiet."""


class Replacement:
    """`dram` and `ssd` may be one policy. An observer of uses. `run` is its task."""

    def __init__(self, dram: Policy, ssd: Policy, now: Callable[[], float]) -> None:
        self._now = now
        self.policies = {DRAM: dram, SSD: ssd}
        self._asks_uses = any(policy.columns for policy in self.policies.values())
        """Whether a policy looks at anything but the order of uses."""
        self._counts_children = any(policy.counts_children for policy in self.policies.values())
        self.specs: Sequence[ColumnSpec] = (_PLACE, *specs_of(self.policies))
        self._notes = Untold()
        self._awaited: deque[tuple[Space, bytes]] = deque()
        """Pages, by their keys in a row, that were on SSD only when they were read."""
        self._awaited_pages = 0
        self._wake = asyncio.Event()

    # --- what happens --------------------------------------------------------------------------------------------------

    def used(self, space: Space, use: Use, asked: Asked | None) -> None:
        """Pages were read, or put (`asked` is None)."""
        slots = use.slots
        if not len(slots) or not self._asks_uses:
            return
        if space.spec.flat:
            self._count_apart(space, slots, use)
            return
        self._count(space, slots, None if asked is None else asked.pages, use)

    def abandoned(self, space: Space, slots: Slots, first: int) -> None:
        """What comes of it is told by `cooled`."""

    def cooled(self, space: Space, slots: Slots) -> None:
        """Nobody is expected to come back to these pages."""
        if self._asks_uses and len(slots):
            now = self._now()
            for at in pieces(len(slots)):
                piece = slots[at : at + APART_AT_A_TIME]
                self._note(Cooled(space, Placed.of(space, piece), now), len(piece))

    def _count(self, space: Space, slots: Slots, asked: int | None, use: Use) -> None:
        """Note a use of a path, by a request for so many pages; None: by a put, which counts for those that it brings."""
        place, count = self._place(space), len(slots)
        before = place[slots]
        known, hits = _front(before & _SEEN), _front(before & (DRAM | SSD))
        place[slots] = before | (DRAM | _SEEN)
        keys = space.tree.pages.key
        missing = (before & DRAM) == 0
        ends = keys[slots[_ends(count)]].tobytes()
        counted, pages = (hits, count) if asked is None else (0, asked)
        self._note(PathUse(space, ends, counted, known, min(hits, known), missing, pages, use.hints, use.now), count)
        if use.hits and missing[: use.hits].any():
            self._await(space, keys[slots[: use.hits][missing[: use.hits]]].tobytes())

    def _count_apart(self, space: Space, slots: Slots, use: Use) -> None:
        """Note a use of pages that each stand alone. One that is named twice was used once."""
        if len(distinct(slots)) < len(slots):
            slots = slots[np.sort(np.unique(slots, return_index=True)[1])]
        column = self._place(space)
        for at in pieces(len(slots)):
            mine = slots[at : at + APART_AT_A_TIME]
            mine = mine[np.argsort((column[mine] & _SEEN) == 0, kind="stable")]
            before = column[mine]
            seen, missing = (before & _SEEN) != 0, (before & DRAM) == 0
            column[mine] = before | (DRAM | _SEEN)
            hits = int(np.count_nonzero(seen & ((before & (DRAM | SSD)) != 0)))
            placed = Placed.of(space, mine)
            self._note(ApartUse(space, placed, int(np.count_nonzero(seen)), hits, missing, use.hints, use.now), len(mine))
            if use.hits and missing.any():
                self._await(space, placed.keys[missing].tobytes())

    def _note(self, note: Note, pages: int) -> None:
        self._notes.add(note, pages)
        while self._notes.too_many:
            self._teach_next()
        self._wake.set()

    def _await(self, space: Space, keys: bytes) -> None:
        step = _PAGES_AWAITED * KEY_BYTES
        self._awaited.extend((space, keys[at : at + step]) for at in range(0, len(keys), step))
        self._awaited_pages += len(keys) // KEY_BYTES
        while (len(self._awaited) > _MAX_AWAITED or self._awaited_pages > _MAX_AWAITED_PAGES) and len(self._awaited) > 1:
            self._awaited_pages -= len(self._awaited.popleft()[1]) // KEY_BYTES

    async def give_up_waiting(self) -> None:
        """Tell the policy of DRAM which pages were read and did not come: those still on SSD only that nobody has a lease on.

        Looks at some of them, those that were read first.
        """
        looked_at = 0
        for _ in range(min(len(self._awaited), _AWAITED_AT_A_TIME)):
            if not self._awaited:
                return
            space, keys = self._awaited.popleft()
            self._awaited_pages -= len(keys) // KEY_BYTES
            slots = _found(space, keys)
            leased = space.tree.pages.leases[slots] > 0
            if leased.any():
                self._await(space, space.tree.pages.key[slots[leased]].tobytes())
            self.left(DRAM, space, slots[~leased & ~space.in_dram(slots)])
            looked_at += len(slots)
            if looked_at > _LOOK_PAGES:  # somebody waits for room: no more turns for the others than they need
                looked_at = 0
                await asyncio.sleep(0)

    # --- telling the policies ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tell the policies of uses whenever it has been quiet for a moment, or many wait to be told."""
        while True:
            await self._wake.wait()
            noted = self._notes.noted
            if not self._notes.many:
                await asyncio.sleep(_QUIET_S)
            if self._notes.many or noted == self._notes.noted:
                self._wake.clear()
                await self.catch_up(math.inf)

    async def catch_up(self, within_s: float = _HURRY_S) -> None:
        """Tell the policies of all uses noted up to now, giving way to others in between. What is left after `within_s` is told in one go.

        What is noted meanwhile is left: who waits would wait for ever where requests never pause.
        """
        last, clock = self._notes.noted, asyncio.get_running_loop().time
        deadline = clock() + within_s
        while self._notes.told < last:
            most = A_TURN if clock() < deadline else MOST
            weight = 0
            while self._notes.told < last and weight < most:
                weight += self._teach_next()
            await asyncio.sleep(0)

    async def ready(self, tier: int) -> None:
        """To be awaited before `values` is asked about a tier, so that it has little left to tell."""
        if self.policies[tier].columns:
            await self.catch_up()

    def _flush(self) -> None:
        """Tell of all in one go. The bounds keep that to some tens of milliseconds; who can awaits `catch_up` before."""
        while self._notes:
            self._teach_next()

    def _teach_next(self) -> int:
        """Tell of the oldest note. Returns its weight."""
        note, weight = self._notes.take()
        if isinstance(note, PathUse):
            self._teach(note)
        elif isinstance(note, ApartUse):
            self._teach_apart(note)
        else:
            found = note.live()
            for tier, policy in self._each():
                policy.abandoned(self._columns(note.space, tier), found, note.now)
        return weight

    def _teach(self, note: PathUse) -> None:
        space, slots = note.space, self._still_there(note)
        count = len(slots)
        if not count:
            return
        known = min(note.known, count)
        use = PolicyUse(
            slots, min(note.hits, known), known, note.now, self._children(space, slots), space.spec.page_tokens, note.hints, note.asked,
            min(note.counted, count),
        )  # fmt: skip
        for tier, policy in self._each():
            policy.used(self._columns(space, tier), use)
        came = note.missing[:count] & ((self._place(space)[slots] & DRAM) != 0)
        self.policies[DRAM].entered(self._columns(space, DRAM), slots[came], note.now)

    def _teach_apart(self, note: ApartUse) -> None:
        space, slots, place = note.space, note.pages.now(note.space), self._place(note.space)
        there, known = slots >= 0, np.arange(len(slots)) < note.known
        gone = there & ((space.tree.pages.flags[slots] & GHOST) != 0)
        place[slots[gone & ~known]] &= ~np.uint8(_SEEN)  # nobody was told of them
        there &= ~gone
        slots, count = slots[there], int(np.count_nonzero(there & known))
        if not len(slots):
            return
        children = np.full(len(slots), 0 if self._counts_children else 1, np.int32)
        use = PolicyUse(slots, min(note.hits, count), count, note.now, children, space.spec.page_tokens, note.hints, 1, apart=True)
        for tier, policy in self._each():
            policy.used(self._columns(space, tier), use)
        came = slots[note.missing[there] & ((place[slots] & DRAM) != 0)]
        self.policies[DRAM].entered(self._columns(space, DRAM), came[::-1], note.now)  # the first of a path is the last in line

    def _still_there(self, note: PathUse) -> Slots:
        """What is left of a path: all before the first page that is a ghost by now, or, if its end is forgotten, about as much."""
        space, tree = note.space, note.space.tree
        for at in range(0, 0 if space.dropped else len(note.keys), KEY_BYTES):
            slot = tree.pages.find_any(note.keys[at : at + KEY_BYTES])
            if slot < 0:
                continue
            slots = tree.path_slots(tree.path_to(slot))
            if not tree.pages.flags[slot] & GHOST:
                return slots
            ghosts = slots[_front((tree.pages.flags[slots] & GHOST) == 0) :]
            new = ghosts[max(note.known - (len(slots) - len(ghosts)), 0) :]
            self._place(space)[new] &= ~np.uint8(_SEEN)  # and nobody was told of them
            return slots[: len(slots) - len(ghosts)]
        return np.empty(0, np.int32)

    def _children(self, space: Space, slots: Slots) -> npt.NDArray[np.int32]:
        if not self._counts_children:
            return np.ones(len(slots), np.int32)
        return space.tree.children_on(space.tree.path_to(int(slots[-1])))

    def written(self, space: Space, slot: int) -> None:
        """A page is on SSD now."""
        place = self._place(space)
        if not place[slot] & SSD:
            place[slot] |= SSD
            self.policies[SSD].entered(self._columns(space, SSD), np.array([slot], np.int32), self._now())

    def loaded(self, space: Space) -> None:
        """All pages are back from the journal: what is durable is on SSD, and nothing is known of its uses."""
        pages = space.tree.pages
        slots = space.tree.live_slots()
        slots = slots[((pages.flags[slots] & DURABLE) != 0) & ((self._place(space)[slots] & SSD) == 0)]
        self._place(space)[slots] |= SSD
        self.policies[SSD].entered(self._columns(space, SSD), slots, self._now())

    def unwritten(self, space: Space, slot: int) -> None:
        """A page is not on SSD any more."""
        slots = np.array([slot], np.int32)
        if self._place(space)[slot] & SSD:
            self.policies[DRAM].left_below(self._columns(space, DRAM), slots, self._now())
        self.left(SSD, space, slots)

    def buried(self, space: Space, slots: Slots) -> None:
        """Pages were given up in all tiers, and are ghosts now."""
        for tier in self.policies:
            self.left(tier, space, slots)

    def left(self, tier: int, space: Space, slots: Slots) -> None:
        """Pages left a tier."""
        place = self._place(space)
        gone = slots[(place[slots] & tier) != 0]
        place[gone] &= ~np.uint8(tier)
        if len(gone):
            self.policies[tier].left(self._columns(space, tier), gone, self._now())

    def forgotten(self, space: Space, slots: Slots) -> None:
        """Ghosts are about to be removed for good."""
        for tier, policy in self._each():
            policy.forgotten(self._columns(space, tier), slots, self._now())

    # --- what is decided -----------------------------------------------------------------------------------------------

    def resize(self, tier: int, spaces: Iterable[Space]) -> None:
        """The tier is full of what these namespaces, all there are, have in it."""
        self.policies[tier].resize(sum(int(np.count_nonzero(self._place(s)[: s.tree.pages.ranges.high] & tier)) for s in spaces))

    def values(self, tier: int, candidates: Sequence[tuple[Space, Slots]], wanted: int, *, whole: bool = True) -> list[Values]:
        """What keeping pages (ascending slots of each namespace) in a tier is worth, by namespace: the least goes first.

        No page is worth less than one below it. Without `whole` these are not all pages that could go: then nothing is learned from them.
        """
        policy, now = self.policies[tier], self._now()
        if policy.columns:
            self._flush()
        batch = [self._pages(space, slots, tier) for space, slots in candidates]
        if not whole and (peeked := [policy.peek(pages, now) for pages in batch]) and all(values is not None for values in peeked):
            return [pages.raised(pages.slots, values) for pages, values in zip(batch, peeked, strict=True)]
        values = policy.values(batch, wanted, now)
        found = [values[part] for _, part in parts(batch)]
        return found if policy.leaf_first else [pages.raised(pages.slots, own) for pages, own in zip(batch, found, strict=True)]

    def admits(self, space: Space, slots: Slots, promised: Callable[[], Iterable[bytes]]) -> npt.NDArray[np.bool_]:
        """Which pages that leave DRAM (ascending slots) are worth writing to SSD: with one, all above it.

        So are those, by their keys, that somebody waits for to be written.
        """
        wanted = self.policies[DRAM].admits([self._pages(space, slots, DRAM)], self._now())
        if wanted.all():
            return wanted
        keys = [space.tree.pages.find_key(key) for key in promised()]
        needed = wanted | np.isin(slots, keys) | (space.tree.pages.retain[slots] > self._now())
        admitted: npt.NDArray[np.bool_] = raised(space.tree, slots, needed)
        self.policies[DRAM].admitted_after_all(self._columns(space, DRAM), slots[admitted & ~wanted])
        return admitted

    def check(self, space: Space) -> None:
        """Raise AssertionError unless the policies know which pages are on SSD, and take no ghost to be anywhere."""
        tree, place = space.tree, self._place(space)
        live = tree.live_slots()
        assert (((place[live] & SSD) != 0) == ((tree.pages.flags[live] & DURABLE) != 0)).all(), (
            "the policies take the wrong pages to be on SSD"
        )
        assert not (place[tree.ghost_slots()] & (DRAM | SSD)).any(), "the policies take a ghost to be in a tier"

    def rank(self, space: Space, slots: Slots) -> dict[int, int] | None:
        """The place of each page in DRAM (ascending slots) among them all, 0 for who goes first; None if the policy can't tell."""
        self._flush()
        pages = self._pages(space, slots, DRAM)
        values = self.policies[DRAM].peek(pages, self._now())
        if values is None:
            return None
        order = np.lexsort((space.tree.pages.recency[slots], raised(space.tree, slots, values)))
        return dict(zip(slots[order].tolist(), range(len(slots)), strict=True))

    def explain(self, space: Space, slots: Slots) -> list[Explanation]:
        """What the policy of DRAM makes of pages, in their order; nothing if it only goes by the order of uses."""
        self._flush()
        ascending = np.argsort(slots, kind="stable")
        found = self.policies[DRAM].explain(self._pages(space, slots[ascending], DRAM), self._now())
        return [found[at] for at in np.argsort(ascending).tolist()] if found else []

    # --- columns -------------------------------------------------------------------------------------------------------

    def _each(self) -> list[tuple[int, Policy]]:
        """Each policy once."""
        return list(self.policies.items())[: 1 if self.policies[DRAM] is self.policies[SSD] else 2]

    def _pages(self, space: Space, slots: Slots, tier: int) -> Pages:
        return Pages(self._columns(space, tier), slots, space.tree.pages.ranges.high, partial(raised, space.tree))

    def _columns(self, space: Space, tier: int) -> Columns:
        found = space.seen_by_policies.get(tier)
        if found is None:
            found = space.seen_by_policies[tier] = columns_of(space.tree.pages.kept, space.tree.pages.recency, self.policies, tier)
        return found

    @staticmethod
    def _place(space: Space) -> npt.NDArray[np.uint8]:
        return space.tree.pages.kept[_PLACE.name]


@lru_cache(maxsize=1024)
def _ends(pages: int) -> npt.NDArray[np.int64]:
    """The last page, and pages before it at doubling distances up to the first."""
    return np.unique(np.maximum(pages - (1 << np.arange(pages.bit_length() + 1)), 0))[::-1].copy()


def _found(space: Space, keys: bytes) -> Slots:
    """The pages that are there of those with these keys in a row."""
    each = () if space.dropped else (space.tree.pages.find_key(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES))
    return np.array([slot for slot in each if slot >= 0], np.int32)


def _front(bits: npt.NDArray[np.integer[Any]] | npt.NDArray[np.bool_]) -> int:
    """How many (of one byte) are set before the first that is not."""
    first = bits.tobytes().find(0)
    return len(bits) if first < 0 else first
