"""Who may go: what can be evicted from DRAM and from SSD, the least valuable first, as units of a page and some of its components.

A page's required components are one unit, of the value that the policy gives to the page. Each optional component is a unit of its own, as
old as the last use of a boundary that needed it: a window part behind every boundary in use goes long before its page.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.columns import nth_least
from kvstore.errors import NoSpace
from kvstore.radix.leaf_first import least
from kvstore.radix.pages import DURABLE, RECIPE, Slots
from kvstore.store.space import WANTED, Space
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.policies import Values
from kvstore.tiers.segments import slot_bytes_for


@dataclass(frozen=True, slots=True)
class Unit:
    """Some components (a mask) of a page of a namespace, and the bytes that they take up: of DRAM slots, or as stored on SSD."""

    space: Space
    key: bytes
    components: int
    recency: int
    nbytes: int
    value: float

    @property
    def required(self) -> bool:
        """Whether it is what makes the page: without it the page goes, and all below it."""
        return bool(self.components & self.space.tree.rules.required)

    def slot_unless_used(self) -> int:
        """Where its page is now; -1 if it is gone, or was used or leased since it was chosen."""
        tree = self.space.tree
        slot = -1 if self.space.dropped else tree.pages.find_key(self.key)
        if slot < 0 or _needed(self.space, slot):
            return -1
        optional = zip(tree.rules.optional, tree.pages.part_recency, strict=True)
        columns = [tree.pages.recency] if self.required else [column for rule, column in optional if rule.bit & self.components]
        return -1 if any(int(column[slot]) > self.recency for column in columns) else slot


LOOKED_AT_ONCE = 32_768
"""So many page slots are looked at in one go where all are: some 3 ms."""


@dataclass(frozen=True, slots=True)
class Units:
    """Candidates as columns: page slot, group (0 for the required components, then the optional ones), recency, bytes and value."""

    slot: Slots
    group: npt.NDArray[np.int64]
    recency: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    value: Values

    def least(self, count: int) -> "Units":
        """The `count` least valuable, in that order; of equals the coldest first."""
        places = least(self.value, count)
        return self.chosen(places[np.lexsort((self.recency[places], self.value[places]))[:count]])

    def chosen(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Units":
        """Some of them."""
        return Units(self.slot[which], self.group[which], self.recency[which], self.nbytes[which], self.value[which])


Worth = Callable[[list[tuple[Space, Slots]], int], list[Values]]
"""What keeping pages (ascending slots by namespace) in a tier is worth, given how many are likely to go: the least goes first."""


def _valued(each: list[tuple[Space, Units]], wanted: int, worth: Worth) -> list[tuple[Space, Units]]:
    """Give units their values: to the required components that of the page.

    An optional one is worth as much, among the pages, as its own recency is recent among theirs.
    """
    if not each:
        return []
    likely = -(-wanted // min(int(units.nbytes.min()) for _, units in each))
    fresh = [np.append(True, units.slot[1:] != units.slot[:-1]) for _, units in each]
    slots = [units.slot[first] for (_, units), first in zip(each, fresh, strict=True)]
    values = worth([(space, own) for (space, _), own in zip(each, slots, strict=True)], likely)
    found = []
    for (space, units), first, own, value in zip(each, fresh, slots, values, strict=True):
        at = value[np.cumsum(first) - 1] if len(own) < len(units.slot) else value
        part = units.group > 0
        if part.any():
            rank = np.searchsorted(np.sort(space.tree.pages.recency[own]), units.recency[part])
            at = at.copy()
            at[part] = np.sort(value)[np.minimum(rank, len(own) - 1)]
        found.append((space, Units(units.slot, units.group, units.recency, units.nbytes, at)))
    return found


class InDram:
    """The unleased units of a namespace that hold bytes in DRAM. They are looked for piece by piece: others may have a turn in between.

    With `only_written`, only those of pages that are on SSD as they are.
    """

    def __init__(self, space: Space, *, only_written: bool = False) -> None:
        self.space = space
        self._only_written = only_written
        self._next, self._last = 0, space.tree.pages.ranges.high
        most = self._last * (1 + len(space.tree.rules.optional))
        self._slot, self._group = np.empty(most, np.int32), np.empty(most, np.int64)  # its memory is paid for as it is filled
        self._recency, self._nbytes = np.empty(most, np.int64), np.empty(most, np.int64)
        self._count = 0

    def look(self) -> int:
        """Look at the next pages. Returns how many slots that were, 0 at the end."""
        first, last = self._next, min(self._next + LOOKED_AT_ONCE, self._last)
        if self.space.dropped or first == last:
            return 0
        units = _in_dram(self.space, first, last, only_written=self._only_written)
        where = slice(self._count, self._count + len(units.slot))
        self._slot[where], self._group[where], self._recency[where], self._nbytes[where] = (
            units.slot,
            units.group,
            units.recency,
            units.nbytes,
        )
        self._next, self._count = last, where.stop
        return last - first

    def units(self) -> Units:
        """What was found, but for what has gone, or was leased, since."""
        found = slice(0, 0 if self.space.dropped else self._count)
        units = Units(self._slot[found], self._group[found], self._recency[found], self._nbytes[found], self._recency[found])
        there = _free_to_go(self.space, 0, self._last).take(units.slot)
        return units if there.all() else units.chosen(there)


def dram_victims(candidates: list[InDram], wanted: int, worth: Worth) -> list[Unit]:
    """The least valuable units that together hold `wanted` bytes in DRAM, the least first."""
    each = [(one.space, units) for one in candidates if len((units := one.units()).slot)]
    found = [
        unit for space, units in _valued(each, wanted, worth) for unit in _listed(space, units.least(-(-wanted // int(units.nbytes.min()))))
    ]
    found.sort(key=lambda unit: (unit.value, unit.recency))
    total = 0
    for number, unit in enumerate(found):
        if total >= wanted:
            return found[:number]
        total += unit.nbytes
    return found


def _free_to_go(space: Space, first: int, last: int) -> npt.NDArray[np.bool_]:
    """Which of the slots [first, last) hold a page that nobody needs under a lease."""
    pages = space.tree.pages
    fine = space.tree.live(first, last)
    fine &= pages.leases[first:last] == pages.held[first:last]
    return fine


def _in_dram(space: Space, first: int, last: int, *, only_written: bool) -> Units:
    tree, blobs = space.tree, space.blobs
    slots = (np.flatnonzero(_free_to_go(space, first, last)) + first).astype(np.int32)
    if only_written:
        slots = slots[~space.unwritten(slots)]
    owner, part = tree.parts.of(tree.pages.part[slots])
    rows = tree.parts.blob[part]
    resident = (blobs.slot[rows] != NO_SLOT) & (blobs.pins[rows] == 0)
    return _units(space, slots, owner[resident], part[resident], slot_bytes_for(blobs.stored_of(rows[resident])))


def _units(space: Space, slots: Slots, owner: Slots, part: Slots, nbytes: npt.NDArray[np.int64]) -> Units:
    """Sum up parts (`owner` indexes `slots`) by page and group: in the order of `slots`, those of a page in a row."""
    tree = space.tree
    if not tree.rules.optional:
        total = np.bincount(owner, nbytes, len(slots)).astype(np.int64)
        page = np.flatnonzero(total)
        slots, total = slots[page], total[page]
        last = tree.pages.recency[slots]
        return Units(slots, np.zeros(len(slots), np.int64), last, total, last)
    group_of = np.zeros(16, np.int64)
    for number, rule in enumerate(tree.rules.optional):
        group_of[rule.component] = number + 1
    sizes = np.zeros((len(slots), len(tree.rules.optional) + 1), np.int64)
    np.add.at(sizes, (owner, group_of[tree.parts.component[part]]), nbytes)
    page, group = np.nonzero(sizes)
    recency = np.stack([tree.pages.recency[slots], *(column[slots] for column in tree.pages.part_recency)], axis=1)
    return Units(slots[page], group, recency[page, group], sizes[page, group], recency[page, group])


def _listed(space: Space, units: Units) -> list[Unit]:
    masks = [space.tree.rules.required, *(rule.bit for rule in space.tree.rules.optional)]
    columns = zip(
        units.slot.tolist(), units.group.tolist(), units.recency.tolist(), units.nbytes.tolist(), units.value.tolist(), strict=True
    )
    return [Unit(space, space.tree.pages.key_bytes(slot), masks[group], *rest) for slot, group, *rest in columns]


def _needed(space: Space, slot: int) -> bool:
    """Whether a page is leased by somebody who needs its bytes."""
    pages = space.tree.pages
    return bool(pages.leases[slot] > pages.held[slot])


def free_dram(unit: Unit) -> int:
    """Free the DRAM copies of a unit's blobs that are on SSD and not in use. Returns the bytes freed."""
    space = unit.space
    slot = space.tree.pages.find_key(unit.key)
    if slot < 0 or _needed(space, slot):
        return 0
    freed = 0
    for row in space.rows_of(slot, unit.components):
        if space.blobs.on_ssd[row] and not space.blobs.pins[row]:
            freed += space.clear_slot(row)
    space.stats.evicted_dram_pages += freed > 0 and unit.required
    return freed


def discard(unit: Unit) -> bool:
    """Give a unit up in all tiers, unless its page is leased or gone. False if a put or the namespace does not let it go."""
    space = unit.space
    slot = space.tree.pages.find_key(unit.key)
    if slot < 0 or _needed(space, slot):
        return True
    if space.tree.pages.leases[slot]:
        return False
    if space.keeps_all or (unit.required and not space.tree.pages.flags[slot] & DURABLE and not space.may_discard(slot)):
        space.stats.kept_units += 1
        return False
    if unit.required and space.tree.pages.flags[slot] & DURABLE:  # only what was added to it since is not on SSD
        space.stats.dropped_parts += 1
        space.take_components(slot, space.unnamed_components(slot))
        free_dram(unit)
    elif unit.required:
        space.remove_page(slot)
    else:
        space.stats.dropped_parts += 1
        space.take_components(slot, unit.components)
    return True


def evict_ssd(spaces: Iterable[Space], wanted: int, now: float, footprint: Callable[[int], int], worth: Worth) -> int:
    """Give up the least valuable durable units of all these namespaces until `wanted` bytes on SSD will be free. Returns the bytes.

    Pages that are leased, retained or wanted stay. `footprint` says what a stored form takes up on SSD.
    """
    each = [(space, units) for space in spaces if len((units := _on_ssd(space, now)).slot)]
    if not each:
        return 0
    # Usually a few do; but pages that share their blobs free nothing until the last of them goes.
    count = sum(len(units.slot) for _, units in each)
    likely = min(64 + 4 * wanted // max(1, min(footprint(space.spec.page_bytes) for space, _ in each)), count)
    valued = _valued(each, likely * min(int(units.nbytes.min()) for _, units in each), worth)
    shared = any(space.blobs.count < space.tree.parts.slots.used for space, _ in each)
    freed = 0
    for most in (likely, count) if shared else (likely,):
        for unit in _least_of_all(valued, most):
            if freed >= wanted:
                return freed
            freed += _give_up_on_ssd(unit, footprint)
    return freed


def _on_ssd(space: Space, now: float) -> Units:
    """What is on SSD and may go."""
    tree, slots = space.tree, space.tree.live_slots()
    if space.keeps_all:
        slots = slots[:0]
    if space.guarded:
        slots = slots[(tree.pages.flags[slots] & RECIPE) != 0]
    slots = slots[(tree.pages.flags[slots] & (DURABLE | WANTED)) == DURABLE]
    slots = slots[(tree.pages.leases[slots] == 0) & (tree.pages.retain[slots] <= now)]
    owner, part = tree.parts.of(tree.pages.part[slots])
    named = tree.parts.durable[part]
    return _units(space, slots, owner[named], part[named], space.blobs.stored_of(tree.parts.blob[part[named]]))


def _least_of_all(each: list[tuple[Space, Units]], count: int) -> list[Unit]:
    """The `count` least valuable units of all namespaces, in that order; of equals the coldest first."""
    highest = nth_least(np.concatenate([units.value for _, units in each]), count - 1)
    low = [(space, units, int((units.value <= highest).sum())) for space, units in each]
    found = [unit for space, units, most in low for unit in _listed(space, units.least(min(most, count)))]
    found.sort(key=lambda unit: (unit.value, unit.recency))
    return found[:count]


NOT_DISCARDED = "may not be discarded"
OF_PUTS = "is of puts under way"


def kept_on_ssd_as(spaces: Iterable[Space], now: float) -> str:
    """Why what some namespaces have on SSD stays there, in words. Looks at every page."""
    why: dict[str, bool] = {"is leased": False, OF_PUTS: False, "is kept for the retention_s of its namespace": False, NOT_DISCARDED: False}
    for space in spaces:
        pages, slots = space.tree.pages, space.tree.live_slots()
        slots = slots[(pages.flags[slots] & DURABLE) != 0]
        if not len(slots):
            continue
        held = pages.held[slots]
        kept = space.keeps_all or (space.guarded and not (pages.flags[slots] & RECIPE).all())
        each = (pages.leases[slots] > held).any(), held.any(), (pages.retain[slots] > now).any(), kept
        why = {text: before or bool(now) for (text, before), now in zip(why.items(), each, strict=True)}
    return " or ".join(text for text, holds in why.items() if holds) or "is being written"


def ssd_is_full(own: Iterable[Space], others: Iterable[Space], now: float) -> NoSpace:
    """What a tenant with the namespaces `own` is told when nothing on SSD can go. What keeps that of others is not for it to know."""
    own, others = ([space for space in spaces if _has_durable(space)] for spaces in (own, others))
    if not own:
        return NoSpace("the SSD tier is full of what others have there, which can't go now")
    beside = ", and of what others have there nothing can go now" if others else ""
    return NoSpace(f"the SSD tier is full, and what {'you have' if others else 'is'} there {kept_on_ssd_as(own, now)}{beside}")


def _has_durable(space: Space) -> bool:
    return bool((space.tree.pages.flags[space.tree.live_slots()] & DURABLE).any())


def _give_up_on_ssd(unit: Unit, footprint: Callable[[int], int]) -> int:
    space = unit.space
    slot = space.tree.pages.find_key(unit.key)
    if slot < 0 or not space.tree.pages.flags[slot] & DURABLE:
        return 0
    if unit.required and not space.may_discard(slot):
        return 0
    blobs, outdated = space.trash_marks()
    if unit.required:
        space.forget_durable(slot)
    else:
        space.stats.dropped_parts += 1
        space.take_components(slot, unit.components)
    return space.freed_on_ssd(blobs, outdated, footprint)
