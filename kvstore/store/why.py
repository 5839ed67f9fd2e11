"""Why pages are where they are: for each, in which tiers it is, who holds it, what the policy makes of it, and what comes of that."""

from dataclasses import dataclass

import numpy as np

from kvstore.radix.pages import DURABLE
from kvstore.radix.tree import Extras
from kvstore.store.matching import known_path
from kvstore.store.replacement import Replacement
from kvstore.store.space import Space
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.policies import Explanation

MAX_PAGES = 1024


@dataclass(frozen=True, slots=True)
class PageWhy:
    """One page of a prefix. `rank` is its place among the namespace's pages that can leave DRAM, 0 for who goes first."""

    page: int
    in_dram: bool
    on_ssd: bool
    leased: bool
    rank: int | None
    decision: str
    explanation: Explanation | None


@dataclass(frozen=True, slots=True)
class Why:
    """`pages` are those of the prefix that are there, `candidates` how many of the namespace's pages could leave DRAM now."""

    policy: str
    pages: int
    candidates: int
    found: list[PageWhy]


def why(replacement: Replacement, policy: str, space: Space, tokens: bytes, extras: Extras, first: int, last: int) -> Why:
    """Explain the pages [first, last) of a prefix, at most MAX_PAGES of them. Is no use of them, and changes nothing."""
    tree, blobs = space.tree, space.blobs
    path = known_path(space, tokens, extras)
    slots = tree.path_slots(path)
    asked = slots[first : path.pages if last < 0 else last][:MAX_PAGES]
    live = tree.live_slots()
    owner, part = tree.parts.of(tree.pages.part[live])
    missing = np.bincount(owner, blobs.slot[tree.parts.blob[part]] == NO_SLOT, len(live)) > 0
    candidates = live[~missing & (tree.pages.leases[live] == 0)]
    rank = replacement.rank(space, candidates) or {}
    resident = set(live[~missing].tolist())
    explained: list[Explanation | None] = [*replacement.explain(space, asked)] or [None] * len(asked)
    found = []
    for page, (slot, explanation) in enumerate(zip(asked.tolist(), explained, strict=True), first):
        in_dram, leased = slot in resident, bool(tree.pages.leases[slot])
        on_ssd = bool(tree.pages.flags[slot] & DURABLE)
        decision = _decision(policy, in_dram, leased, rank.get(slot), len(candidates), explanation)
        found.append(PageWhy(page, in_dram, on_ssd, leased, rank.get(slot), decision, explanation))
    return Why(policy, path.pages, len(candidates), found)


def _decision(policy: str, in_dram: bool, leased: bool, rank: int | None, candidates: int, explanation: Explanation | None) -> str:
    """In words."""
    if leased:
        return "stays: it is leased, pinned or being built on"
    if not in_dram:
        return "is on SSD only: it comes up when it is fetched"
    if rank is None:
        return f"in DRAM for as long as {policy} keeps it"
    place = f"{rank} of {candidates} pages go before it"
    if explanation is None:
        return f"kept by recency: {place}"
    if explanation.abandoned:
        return f"is among the first to go, as it was abandoned: {place}"
    if explanation.follows == "lru":
        return f"kept by recency, which does better than the estimates now: {place}"
    return f"kept for the {explanation.chance:.0%} chance that it is used again in time: {place}"
