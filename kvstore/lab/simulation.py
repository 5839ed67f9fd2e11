"""Replaying a trace against the real tree and policies, on the trace's own clock.

A request looks its prompt up: a hit is the longest prefix whose pages are each in DRAM or on SSD. Then all its pages are used, the deepest
first, and are in DRAM: those on SSD are promoted (the copy on SSD stays), those that were lost or new are computed. What leaves DRAM is
written to SSD, if that policy admits it and no copy is there; what leaves both becomes a ghost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES
from kvstore.hints import NO_HINTS
from kvstore.lab.tiers import DRAM, PLACE, SSD, LabSpace, Tier
from kvstore.lab.trace import Op, Trace
from kvstore.radix.below import with_all_below
from kvstore.radix.leaf_first import raised
from kvstore.radix.pages import Slots
from kvstore.radix.tree import RadixTree
from kvstore.radix.values import NewPages, Path
from kvstore.tiers.policies import Policy, Use
from kvstore.tiers.policies.kept import columns_of, specs_of

_WORD = 4
_VERSION = bytes(16)
_PROGRESS_STEP = 256


@dataclass(frozen=True, slots=True)
class LabConfig:
    """Sizes in bytes. `batch` is the share of a tier that leaves at once, `max_ghosts` as in the daemon's configuration."""

    dram_bytes: int
    ssd_bytes: int = 0
    batch: float = 0.01
    max_ghosts: int = 200_000


@dataclass(slots=True)
class Outcome:
    """What happened: by request the pages hit in DRAM and on SSD (of a hit, some may be in one and some in the other), and totals."""

    hit_pages: npt.NDArray[np.int64]
    ssd_pages: npt.NDArray[np.int64]
    ssd_last: npt.NDArray[np.bool_]
    """Whether the last page of the hit was on SSD only."""
    ssd_written_bytes: int = 0
    seconds: float = 0.0
    ghosts: int = 0


@dataclass(slots=True)
class Simulation:
    """One run of one policy. `dram` and `ssd` may be one object."""

    trace: Trace
    page_bytes: list[int]
    config: LabConfig
    dram: Policy
    ssd: Policy
    spaces: list[LabSpace] = field(init=False)
    outcome: Outcome = field(init=False)
    _tiers: dict[int, Tier] = field(init=False)
    _policies: dict[int, Policy] = field(init=False)
    _count_children: bool = field(init=False)
    _tick: int = 0

    def __post_init__(self) -> None:
        self._policies = {DRAM: self.dram, SSD: self.ssd}
        self._count_children = self.dram.counts_children or self.ssd.counts_children
        specs = [PLACE, *specs_of(self._policies)]
        counts = np.bincount(self.trace.page_space(), minlength=len(self.trace.spaces)).tolist()
        self.spaces = []
        for number, (count, size) in enumerate(zip(counts, self.page_bytes, strict=True)):
            tree = RadixTree(number.to_bytes(KEY_BYTES, "big"), 1, count + 1, kept=specs)
            tree.pages.key_index.reserve(count)
            space = LabSpace(tree, size)
            space.columns = {tier: columns_of(tree.pages.kept, tree.pages.recency, self._policies, tier) for tier in self._policies}
            self.spaces.append(space)
        self._tiers = {
            DRAM: Tier(DRAM, self.config.dram_bytes, self.dram, self.spaces, self.config.batch),
            SSD: Tier(SSD, self.config.ssd_bytes, self.ssd, self.spaces, self.config.batch),
        }
        count = len(self.trace)
        self.outcome = Outcome(np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.bool_))

    def run(self, progress: Callable[[int], None] = lambda _: None) -> Outcome:
        """Replay all requests; `progress` is told now and then how many are done."""
        trace = self.trace
        labels = trace.pages.tobytes()
        requests = zip(
            trace.starts.tolist(), trace.ends.tolist(), trace.times.tolist(), trace.space.tolist(), trace.op.tolist(), strict=True
        )
        for number, (start, end, now, space, op) in enumerate(requests):
            tokens = labels[start * _WORD : end * _WORD]
            if op == Op.ABANDON:
                self._abandon(self.spaces[space], tokens, int(trace.first[number]), now)
            elif tokens:
                self._request(number, self.spaces[space], tokens, op, now)
            if not number % _PROGRESS_STEP:
                progress(number)
        self.outcome.ghosts = sum(space.tree.ghost_count for space in self.spaces)
        progress(len(trace))
        return self.outcome

    def used(self, tier: int) -> int:
        """Bytes that a tier counts as used."""
        return self._tiers[tier].used

    def _request(self, number: int, space: LabSpace, tokens: bytes, op: int, now: float) -> None:
        tree = space.tree
        known = tree.match_with_ghosts(tokens)
        slots = tree.path_slots(known)
        place = space.place.take(slots)
        hits = _front(place)
        if op != Op.PUT:
            self.outcome.hit_pages[number] = hits
            if hits and self.config.ssd_bytes:
                on_ssd = (place[:hits] & DRAM) == 0
                self.outcome.ssd_pages[number] = int(on_ssd.sum())
                self.outcome.ssd_last[number] = bool(on_ssd[-1])
        path = known
        if op == Op.GET:
            path, slots, place = tree.shorten(known, hits), slots[:hits], place[:hits]
        elif hits * _WORD < len(tokens):
            path = self._bring(tree, tree.shorten(known, hits), known, tokens)
            slots = tree.path_slots(path)
            place = space.place.take(slots)
        self._use(number, space, path, slots, place, min(hits, path.pages), known.pages, now)

    def _bring(self, tree: RadixTree, there: Path, known: Path, tokens: bytes) -> Path:
        """Put the pages after those that are `there` into the tree, which knows some of them. Returns the whole path."""
        hits = there.pages
        count = len(tokens) // _WORD - hits
        keys = np.zeros((count, KEY_BYTES), np.uint8)
        keys[:, :_WORD] = np.frombuffer(tokens, np.uint8, offset=hits * _WORD).reshape(count, _WORD)
        tree.extend(there, tokens[hits * _WORD :], {}, NewPages(keys.tobytes(), _VERSION, np.empty((count, 0), np.int32), ()), known)
        return tree.path_to(tree.pages.find_key(keys[-1].tobytes()))

    def _use(
        self, number: int, space: LabSpace, path: Path, slots: Slots, place: npt.NDArray[np.uint8], hits: int, known: int, now: float
    ) -> None:
        if not len(slots):
            return
        self._tick += 1
        space.tree.touch(slots, self._tick)
        size = self.trace.spaces[int(self.trace.space[number])].page_tokens
        children = space.tree.children_on(path) if self._count_children else np.ones(len(slots), np.int32)
        use = Use(slots, hits, min(known, len(slots)), now, children, size, self.trace.hints[number] or NO_HINTS)
        self.dram.used(space.columns[DRAM], use)
        if self.ssd is not self.dram and self.config.ssd_bytes:
            self.ssd.used(space.columns[SSD], use)
        missing = slots[(place & DRAM) == 0]
        if len(missing):
            self._tiers[DRAM].enter(space, missing, now)
            self._tiers[DRAM].shrink(now, lambda where, gone: self._demote(where, gone, now))
            self._forget_ghosts(now)

    def _demote(self, space: LabSpace, slots: Slots, now: float) -> None:
        """Pages left DRAM: write them to SSD, or give them up."""
        lost = slots[(space.place[slots] & SSD) == 0]
        if self.config.ssd_bytes and len(lost):
            written = self._written(space, np.sort(lost), now)
            self._tiers[SSD].enter(space, written, now)
            self.outcome.ssd_written_bytes += len(written) * space.page_bytes
            self._tiers[SSD].shrink(now, lambda where, gone: self._left_ssd(where, gone, now))
        self._give_up(space, lost)

    def _written(self, space: LabSpace, lost: Slots, now: float) -> Slots:
        """What is written when pages leave DRAM: those of them that the policy admits, and as in the daemon all above them."""
        admitted = self.dram.admits([self._tiers[DRAM].pages(space, lost)], now)
        place = space.place[: space.tree.pages.ranges.high]
        there = np.sort(np.append(np.flatnonzero((place & (DRAM | SSD)) == DRAM), lost)).astype(np.int32)
        wanted = np.zeros(len(there), np.bool_)
        wanted[np.searchsorted(there, lost)] = admitted
        wanted = raised(space.tree, there, wanted)
        if not admitted.all():
            self.dram.admitted_after_all(space.columns[DRAM], lost[~admitted & wanted[np.searchsorted(there, lost)]])
        found: Slots = there[wanted]
        return found

    def _left_ssd(self, space: LabSpace, slots: Slots, now: float) -> None:
        self.dram.left_below(space.columns[DRAM], slots, now)
        self._give_up(space, slots)

    def _give_up(self, space: LabSpace, slots: Slots) -> None:
        """Pages that are in no tier any more become ghosts."""
        gone = slots[space.place[slots] == 0]
        if len(gone):
            space.tree.bury_many(gone)

    def _forget_ghosts(self, now: float) -> None:
        """Keep to the budget. This moves pages to other slots."""
        for space in self.spaces:
            surplus = space.tree.ghost_count - self.config.max_ghosts
            if surplus <= 0:
                continue
            surplus += self.config.max_ghosts // 16
            going = with_all_below(space.tree, space.tree.coldest(space.tree.ghost_slots(), surplus))
            for tier, policy in self._each_policy():
                policy.forgotten(space.columns[tier], going, now)
            space.tree.forget_ghosts(surplus)

    def _each_policy(self) -> list[tuple[int, Policy]]:
        """Each policy once."""
        return list(self._policies.items())[: 1 if self.dram is self.ssd else 2]

    def _abandon(self, space: LabSpace, tokens: bytes, first: int, now: float) -> None:
        slots = space.tree.path_slots(space.tree.match(tokens), first)
        for tier, policy in self._each_policy() if len(slots) else ():
            policy.abandoned(space.columns[tier], slots, now)


def _front(place: npt.NDArray[np.uint8]) -> int:
    """How many pages of a path are in some tier before the first that is in none."""
    first = place.tobytes().find(0)
    return len(place) if first < 0 else first
