"""What an eviction policy is: which columns it keeps for each page, what it is told, and what it is asked.

A policy knows neither tree nor store. It sees pages as slots into columns: `recency` (the order of last uses, deeper pages of one
use first; it may only be read) and the columns that it declares, which stay with a page when it becomes a ghost. Each tier has a
policy of its own; one object may serve both. That no page goes before its descendants is not its business: whoever asks raises
each value to those of the descendants (`kvstore.radix.leaf_first`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec
from kvstore.hints import NO_HINTS, Hints

Slots = npt.NDArray[np.int32]
Columns = Mapping[str, npt.NDArray[Any]]
Values = npt.NDArray[np.float64] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a path of pages, `slots` from the root to its end. `now` is in seconds."""

    slots: Slots
    hits: int
    """So many of the first were in some tier."""
    known: int
    """So many of the first were known before: hits, then ghosts that come back. The rest is new."""
    now: float
    children: npt.NDArray[np.int32]
    """How many different pages follow on each, those of this path included."""
    page_tokens: int
    hints: Hints = NO_HINTS
    pages: int = 0
    """How many pages the request asked about, if not all of them are told of here: those not there yet come with its put."""
    counted: int = 0
    """So many of the first were counted before, with the read of the same request: they only say what is before the others."""
    apart: bool = False
    """Each page is a path of its own, of one page; no page is named twice. `pages` is 1 then, and none was `counted`."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Some pages of one tree."""

    columns: Columns
    slots: Slots
    """Ascending."""
    high: int
    """No page or ghost has a slot from here on: a column up to here is all that is known of the tree (free slots are 0)."""
    raised: Callable[[Slots, Any], Any]
    """The leaf-first rule for any pages of the tree (slots ascending, values): for a policy that plays through what it would have kept."""

    def of(self, name: str) -> npt.NDArray[Any]:
        """What a column says of them."""
        found: npt.NDArray[Any] = self.columns[name].take(self.slots)
        return found


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a page, what is made of it, and how it compares. Times are in seconds."""

    idle_s: float
    uses: int
    turns: int
    gap_s: float
    """About; 0 if it was used once."""
    rhythm_s: float
    """The conversation's pause, smoothed."""
    depth_pages: int
    """About."""
    children: int
    """About; of the last request's time."""
    abandoned: bool
    score: float
    """Of being used again within the horizon, 0 to 1, at its last use."""
    horizon_s: float
    chance: float
    """Of being used again before LRU would evict it, given that it has been idle so long."""
    value: float
    """Reuses a second of keeping it."""
    floor: float
    """The value under which pages went at the last eviction."""
    follows: str
    """Who decides now: `estimates` or `lru`."""
    ssd_chance: float | None = None
    """Of being used while SSD would hold it, if it left DRAM now; None if everything is written."""
    ssd_floor: float = 0.0
    """The chance under which pages were not written to SSD the last time."""


class Policy(Protocol):
    """What decides who leaves a tier. Where a tier holds pages of several trees, they compete with each other.

    Columns are passed by tree. Events come in this order: a use of a path, then what enters by it, then what must leave for it.
    """

    columns: ClassVar[tuple[ColumnSpec, ...]] = ()
    leaf_first: ClassVar[bool] = False
    """Whether its values obey the leaf-first rule by themselves, so that nobody has to raise them."""
    counts_children: ClassVar[bool] = False
    """Whether it looks at the children of a use; else they are all 1."""

    @property
    def follows_lru(self) -> bool:
        """Whether it goes by the order of last uses now."""
        return False

    def resize(self, pages: int) -> None:
        """The tier is full, and holds so many pages."""
        return

    def used(self, columns: Columns, use: Use) -> None:
        """A path is used. Pages of it that are not in the tier either enter next, or stay where they are."""
        return

    def entered(self, columns: Columns, slots: Slots, now: float) -> None:
        """Pages came into the tier, those of one path from the root on. They may be ghosts that came back."""
        return

    def left(self, columns: Columns, slots: Slots, now: float) -> None:
        """Pages left the tier because they were worth the least."""
        return

    def abandoned(self, columns: Columns, slots: Slots, now: float) -> None:
        """The client will not come back to these pages."""
        return

    def forgotten(self, columns: Columns, slots: Slots, now: float) -> None:
        """These ghosts are beyond the budget: the tree forgets them."""
        return

    def values(self, batch: Sequence[Pages], wanted: int, now: float) -> Values:
        """What keeping each page of the tier is worth, in the order of `batch`: the least goes first. About `wanted` pages are to go.

        All trees are in the batch, also those that have no page in the tier.
        """
        ...

    def peek(self, pages: Pages, now: float) -> Values | None:
        """What keeping pages is worth, as `values` says it, but without a change of anything; None if that can't be told."""
        return None

    def explain(self, pages: Pages, now: float) -> list[Explanation]:
        """What is made of each page, and of what; nothing by a policy that only goes by the order of uses."""
        return []

    def admitted_after_all(self, columns: Columns, slots: Slots) -> None:
        """Pages that were not admitted below are written all the same, as others need them."""
        return

    def left_below(self, columns: Columns, slots: Slots, now: float) -> None:
        """Pages left the tier below this one."""
        return

    def admits(self, batch: Sequence[Pages], now: float) -> npt.NDArray[np.bool_]:
        """Which pages that leave this tier are to be written to the one below."""
        return np.ones(sum(len(pages.slots) for pages in batch), np.bool_)


def gather(batch: Sequence[Pages], name: str) -> npt.NDArray[Any]:
    """What a column says of all pages of a batch."""
    return batch[0].of(name) if len(batch) == 1 else np.concatenate([pages.of(name) for pages in batch])


def scatter(batch: Sequence[Pages], name: str, values: npt.NDArray[Any]) -> None:
    """The inverse of `gather`: write a column for all pages of a batch."""
    for pages, part in parts(batch):
        pages.columns[name][pages.slots] = values[part]


def parts(batch: Sequence[Pages]) -> Iterator[tuple[Pages, slice]]:
    """Each tree's pages, with their place in the whole batch."""
    at = 0
    for pages in batch:
        yield pages, slice(at, at + len(pages.slots))
        at += len(pages.slots)
