"""What the classifier's column `state` says of a page, in bits."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.columns import runs_of
from kvstore.tiers.policies.policy import Columns, Pages

KNOWN, WAITS, ABANDONED, IN, SHADOW, OFFERED, REFUSED = 1, 2, 4, 8, 16, 32, 64
"""It was used; it is not known yet whether within the horizon again; given up; in the tier; in the rival's shadow; it left for SSD,
and it is not known yet whether it is used while SSD would hold it; it was not written there."""
_WAITING = KNOWN | WAITS | OFFERED


@dataclass(frozen=True, slots=True)
class KnownRuns:
    """Pages of one tree in consecutive slots of which the same is known: the first slot of each run, how many they are, and what it is."""

    columns: Columns
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    state: npt.NDArray[np.uint8]
    classes: npt.NDArray[np.uint8]
    last: npt.NDArray[np.float64]

    def slots(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Those of the pages of some runs, ascending."""
        starts, lengths = self.starts[chosen], self.lengths[chosen]
        ends = np.cumsum(lengths)
        found: npt.NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)
        return found


def known_runs(pages: Pages) -> KnownRuns:
    """All pages and ghosts of a tree that were used, by runs of consecutive slots."""
    last, classes = (pages.columns[name][: pages.high] for name in ("last", "class"))
    state = pages.columns["state"][: pages.high] & np.uint8(_WAITING)
    starts, lengths = runs_of(last, classes, state)
    known = (state.take(starts) & KNOWN).nonzero()[0]
    starts, lengths = starts.take(known), lengths.take(known)
    return KnownRuns(pages.columns, starts, lengths, state.take(starts), classes.take(starts), last.take(starts))


def pages_with(pages: Pages, state: int) -> Pages:
    """All pages and ghosts of a tree that have a bit of the state."""
    slots = ((pages.columns["state"][: pages.high] & state) != 0).nonzero()[0].astype(np.int32)
    return Pages(pages.columns, slots, pages.high, pages.raised)
