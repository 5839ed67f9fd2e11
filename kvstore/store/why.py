"""Why pages are where they are: for each, in which tiers it is, who holds it, what the policy makes of it, and what comes of that."""

from dataclasses import dataclass

import numpy as np

from kvstore.columns import distinct
from kvstore.radix.components import Lack
from kvstore.radix.pages import DURABLE, GHOST, Slots
from kvstore.radix.tree import Extras
from kvstore.store.dram.replacement import Replacement
from kvstore.store.matching.matching import known_path
from kvstore.store.space import Space
from kvstore.store.tier_events import whole_in_dram
from kvstore.tiers.policies import Explanation

MAX_PAGES = 1024
_SAMPLE = 1 << 14
"""A namespace of more pages is looked at by a sample: its places are estimates then, and the time does not grow with it."""


@dataclass(frozen=True, slots=True)
class PageWhy:
    """One page of a prefix. `rank` is its place among the namespace's pages that can leave DRAM, 0 for who goes first.

    A page that is `gone` is in no tier; what is told of it is what the store still remembers.
    """

    page: int
    in_dram: bool
    on_ssd: bool
    leased: bool
    gone: bool
    rank: int | None
    decision: str
    explanation: Explanation | None


@dataclass(frozen=True, slots=True)
class Why:
    """`pages` are those of the prefix that are there, after which so many are `gone`; `candidates` how many of the namespace's pages
    could leave DRAM now. `usable_pages` are matched, as the end of all of them `lacks` components.
    `estimated` says that candidates and ranks come from a sample.
    """

    policy: str
    pages: int
    gone: int
    candidates: int
    estimated: bool
    found: list[PageWhy]
    usable_pages: int
    lacks: tuple[Lack, ...]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Pages that can leave DRAM (ascending slots), each of which stands for `weight` of them."""

    slots: Slots
    weight: float

    @property
    def count(self) -> int:
        return round(len(self.slots) * self.weight)


def why(replacement: Replacement, policy: str, space: Space, tokens: bytes, extras: Extras, first: int, last: int) -> Why:
    """Explain the pages [first, last) of a prefix, at most MAX_PAGES of them. Is no use of them, and changes nothing."""
    tree = space.tree
    there = known_path(space, tokens, extras).pages
    slots = tree.path_slots(tree.match_with_ghosts(tokens, extras))
    asked = slots[first : len(slots) if last < 0 else last][:MAX_PAGES]
    resident = whole_in_dram(space, asked)
    candidates = _candidates(space, asked)
    places = replacement.rank(space, candidates.slots) or {}
    explained: list[Explanation | None] = [*replacement.explain(space, asked)] or [None] * len(asked)
    found = []
    for at, (slot, explanation) in enumerate(zip(asked.tolist(), explained, strict=True)):
        flags, leased = int(tree.pages.flags[slot]), bool(tree.pages.leases[slot])
        rank = round(places[slot] * candidates.weight) if slot in places else None
        gone, in_dram = bool(flags & GHOST), bool(resident[at])
        decision = _decision(policy, gone, in_dram, leased, _place(rank, candidates), explanation)
        if in_dram and not leased and not flags & DURABLE and explanation is not None:
            decision += _after_dram(explanation)
        found.append(PageWhy(first + at, in_dram, bool(flags & DURABLE), leased, gone, rank, decision, explanation))
    masks = tree.pages.components[slots[:there]]
    usable, lacks = tree.rules.longest(masks), tree.rules.lacks(masks)
    return Why(policy, there, len(slots) - there, candidates.count, candidates.weight > 1, found, usable, lacks)


def _candidates(space: Space, asked: Slots) -> _Candidates:
    """Those that can leave DRAM, or a sample of them with all that were asked about."""
    tree, weight = space.tree, 1.0
    if tree.pages.ranges.high <= 2 * _SAMPLE:
        slots = tree.live_slots()
    else:
        drawn = np.random.default_rng().integers(0, tree.pages.ranges.high, _SAMPLE).astype(np.int32)
        slots = distinct(np.concatenate([drawn, asked]))
        slots = slots[(tree.pages.node[slots] > 0) & ((tree.pages.flags[slots] & GHOST) == 0)]
        weight = max(1.0, tree.page_count / max(len(slots), 1))
    return _Candidates(slots[whole_in_dram(space, slots) & (tree.pages.leases[slots] == 0)], weight)


def _place(rank: int | None, candidates: _Candidates) -> str:
    """A rank in words."""
    if rank is None:
        return ""
    if rank == 0:
        return "the next to go"
    return f"{'about ' if candidates.weight > 1 else ''}{rank} of {candidates.count} pages go before it"


def _decision(policy: str, gone: bool, in_dram: bool, leased: bool, place: str, explanation: Explanation | None) -> str:
    """In words."""
    if gone:
        return "gone from every tier: it is to be computed and put again"
    if leased:
        return "stays where it is: leased, pinned or being built on"
    if not in_dram:
        return "on SSD only: it comes up when it is fetched"
    if not place:
        return f"in DRAM for as long as {policy} keeps it"
    if explanation is None:
        return f"kept by recency: {place}"
    if explanation.abandoned:
        return f"abandoned: {place}"
    if explanation.follows == "lru":
        return f"kept by recency, which does better than the estimates now: {place}"
    return f"{explanation.chance:.0%} chance of use in time: {place}"


def _after_dram(explanation: Explanation) -> str:
    """What becomes of a page that is in DRAM only when it has to leave."""
    chance, floor = explanation.ssd_chance, explanation.ssd_floor
    if chance is None or not floor:
        return "; then it is written to SSD"
    if chance < floor:
        return f"; then it is not worth writing to SSD, as its chance to be used there is {chance:.1%}, under {floor:.1%}"
    return f"; then it is written to SSD, for a chance of {chance:.1%} that it is used there"
