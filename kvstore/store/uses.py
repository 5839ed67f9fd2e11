"""The one place where a use of pages is recorded: their recency, what it says of the session, and who else is to know."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from kvstore.hints import Hints, Turn
from kvstore.radix.pages import ANONYMOUS, BRANCHED, Slots
from kvstore.radix.tree import Extras
from kvstore.radix.values import Path
from kvstore.store.abandoning import abandon_line, common_pages, is_compaction, last_slots
from kvstore.store.clock import elapsed
from kvstore.store.session_ends import Line
from kvstore.store.space import Space
from kvstore.store.stats import Stats

_MARKS, _MARKS_AN_AGE = 8192, 256
"""Even ten years then take some five thousand notes."""
Defer = Callable[[Callable[[], None]], None]
"""Told of what can be done once the answer is out, but before anything else happens to the tree."""


@dataclass(frozen=True, slots=True)
class Use:
    """One use of the pages in `slots`, from the root on. `hits` of them were there before; the rest was put just now.

    Of a put that waited for others it is not known how much was there: its `hits` are 0.

    `now` is in seconds of the store's clock.
    """

    slots: Slots
    hits: int
    hints: Hints
    now: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request was about: so many tokens, of which the store knows the pages in `known`.

    `labels` and `extras` are those after `base_pages` pages.
    """

    tokens: int
    pages: int
    known: Slots
    base_pages: int
    labels: bytes
    extras: Extras


class Observer(Protocol):
    """Who is told of uses, in the loop's thread."""

    def used(self, space: Space, use: Use, asked: Asked | None) -> None:
        """Pages were used: those that are there of what was asked for, or (None) those that were put."""

    def abandoned(self, space: Space, slots: Slots, first: int) -> None:
        """A client said that of this path the pages from `first` on are not wanted any more."""

    def cooled(self, space: Space, slots: Slots) -> None:
        """Pages became the first to go: abandoned, or left behind by a compaction."""


class Uses:
    """Records uses. `observers` are told of each after it was recorded."""

    def __init__(self, now: Callable[[], float], stats: Stats, passed: Callable[[], float] = elapsed) -> None:
        self._now = now
        self._passed = passed
        self._stats = stats
        self._tick = 0
        self._marks = [(passed(), 0)]
        """Times and ticks: all uses up to a tick were at its time, or before."""
        self.observers: list[Observer] = []

    def use(self, space: Space, path: Path, hints: Hints | None = None, *, hits: int | None = None) -> None:
        """A path, which ends at a usable boundary, was used; `hits` of its pages were there before, all of them if None.

        Without `hints` (None) it is told about, not used: that says nothing of who will come back to it.
        """
        self.use_slots(space, space.tree.path_slots(path), hints, hits=hits)

    def use_slots(
        self, space: Space, slots: Slots, hints: Hints | None = None, *, hits: int | None = None, asked: Asked | None = None
    ) -> None:
        """As `use`, of a path whose slots are known. `asked` is what for; None if pages were put."""
        self._tick += 1
        space.tree.touch(slots, self._tick)
        if hints is None:
            return
        if not space.spec.flat:
            self._note_session(space, slots, hints, slots if asked is None else asked.known, len(slots) if asked is None else asked.pages)
        use = Use(slots, len(slots) if hits is None else min(hits, len(slots)), hints, self._now())
        self._tell(space, use, asked)

    def use_alone(self, space: Space, slots: Slots, hints: Hints, *, put: bool = False) -> None:
        """Pages were used that each stand alone, as those of a flat namespace do; those that were `put` just now were not there before."""
        if not len(slots):
            return
        space.tree.touch_alone(slots, self._tick + 1)
        self._tick += len(slots)
        self._tell(space, Use(slots, 0 if put else len(slots), hints, self._now()), None)

    def _tell(self, space: Space, use: Use, asked: Asked | None) -> None:
        for observer in self.observers:
            observer.used(space, use, asked)

    def abandoned(self, space: Space, slots: Slots, first: int) -> None:
        """A client gave up the pages of a path from `first` on."""
        for observer in self.observers:
            observer.abandoned(space, slots, first)

    def cooled(self, space: Space, slots: Slots) -> None:
        """Pages became the first to go."""
        for observer in self.observers:
            observer.cooled(space, slots)

    # --- sessions ------------------------------------------------------------------------------------------------------

    def _note_session(self, space: Space, slots: Slots, hints: Hints, known: Slots, asked: int) -> None:
        """Remember where the session is now, and give up what it has left behind by a compaction.

        It asked for so many pages, of which the store knows some and could give `slots`.
        """
        sub_agent = hints.turn is Turn.SUB_AGENT
        if sub_agent or not hints.session_hash:
            space.tree.pages.flags[slots] |= BRANCHED if sub_agent else ANONYMOUS
        if not hints.session_hash:
            return
        line = Line(hints.session_hash, sub_agent)
        last = last_slots(space, line)
        common = common_pages(last, known)
        front = common_pages(last, slots) == len(slots)
        if not sub_agent and is_compaction(len(last), common, asked):  # of sub-agents there may be several at a time
            self._stats.compactions += 1
            done = abandon_line(space, line, common)
            self._stats.abandoned_pages += done.pages
            self.cooled(space, done.cooled)
            front = False
        if len(slots) and (sub_agent or not front):
            space.ends.put(line, space.tree.pages.key_bytes(int(slots[-1])))
        else:  # a look at the front of where it was: a put in several commits, or a turn taken back
            space.ends.heard(line)

    # --- time ----------------------------------------------------------------------------------------------------------

    def note_time(self) -> None:
        """To be called about once a second: uses between two calls can't be told apart by their time.

        The older the notes are, the fewer are kept: they are a 256th of their age apart, or closer.
        """
        if self._tick > self._marks[-1][1]:
            self._marks.append((self._passed(), self._tick))
        if len(self._marks) > _MARKS:
            self._marks = self._thinned()

    def _thinned(self) -> list[tuple[float, int]]:
        now, kept = self._passed(), [self._marks[0]]
        for mark, after in zip(self._marks[1:], [*self._marks[2:], (inf, 0)], strict=True):
            if after[0] - kept[-1][0] > (now - mark[0]) / _MARKS_AN_AGE:
                kept.append(mark)
        return kept

    def tick_before(self, age_s: float) -> int:
        """A tick of which it is known that it and all before it are `age_s` seconds ago or longer; -1 if there is none.

        That is time that has passed, whatever the store's clock was set to meanwhile.
        """
        at = bisect_right(self._marks, self._passed() - age_s, key=lambda mark: mark[0]) - 1
        return self._marks[at][1] if at >= 0 else -1
