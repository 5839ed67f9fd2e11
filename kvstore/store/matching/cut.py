"""Load or recompute: how much of a matched prefix is worth loading. Pure.

Loading the pages up to a boundary and computing the rest takes the seconds of the one and then those of the other: they are taken not to
overlap, as a page can only be computed when all before it is there. Layer by layer it may begin earlier, so the real time is at most the
estimate. What a page costs to load depends on where it is; what it costs to compute grows with its position (`kvstore.prefill`). Late pages
are then the ones most worth loading, and they are of no use without those before them, so over pages of one tier and size it is best to
load all or none: the sum is concave in the boundary. It need not be over several tiers, and not every boundary is usable, so every usable
one is looked at; that is one pass over arrays.

Others compute the front while the tail is being loaded (S. Jin et al., "Compute Or Load KV Cache? Why Not Both?", 2024): that needs a
worker that takes pages out of order, and saves at most half.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import BadRequest
from kvstore.prefill import Prefill

Floats = npt.NDArray[np.float64]
_SLOWEST, _FASTEST = 1.0, 1e15


@dataclass(frozen=True, slots=True)
class Ask:
    """What to reckon with: a prefill cost (None for the namespace's), and the rate of the link (0 for the measured one)."""

    prefill: Prefill | None = None
    link_bytes_s: float = 0.0

    def __post_init__(self) -> None:
        if self.link_bytes_s and not _SLOWEST <= self.link_bytes_s <= _FASTEST:
            raise BadRequest(
                f"a link of {self.link_bytes_s:g} bytes a second: give {_SLOWEST:g} to {_FASTEST:g}, or 0 for the measured rate"
            )


@dataclass(frozen=True, slots=True)
class TierRun:
    """Pages in a row in one tier (`dram`, `ssd`; `mixed` at the end of very many): a page with some bytes on SSD is there.

    `recompute_s` is None if no cost is known.
    """

    tier: str
    first_page: int
    pages: int
    nbytes: int
    load_s: float
    recompute_s: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a matched prefix costs. The best is to load `pages` and to compute the rest of it, which takes `seconds` in all.

    `load_s` and `recompute_s` are for the whole of it. Without a prefill cost all is loaded, and there is nothing to compare with.
    """

    runs: tuple[TierRun, ...]
    load_s: float
    recompute_s: float | None
    pages: int
    seconds: float
    link_bytes_s: float
    ssd_bytes_s: float


def load_seconds(required: Floats, optional: Sequence[tuple[int, Floats]] = ()) -> Floats:
    """For each boundary 0 to n of n pages, how long it takes to load what going on from there needs.

    `required` are the seconds of each page's required parts. An optional component is (pages before a boundary that need it, seconds
    of each page's parts of it).
    """
    total = _sums(required)
    boundaries = np.arange(len(total))
    for pages, seconds in optional:
        sums = _sums(seconds)
        total = total + sums - sums[np.maximum(boundaries - pages, 0)]
    return total


def recompute_seconds(prefill: Prefill, pages: int, page_tokens: int) -> Floats:
    """For each boundary 0 to n, how long it takes to compute what comes after it, up to n."""
    starts = np.arange(pages + 1) * float(page_tokens)
    found: Floats = prefill.between(starts, pages * float(page_tokens))
    return found


def best_cut(load: Floats, recompute: Floats, usable: npt.NDArray[np.bool_]) -> tuple[int, float]:
    """The usable boundary up to which to load, and the seconds in all; of equals the last, as computing costs more than time."""
    total = np.where(usable, load + recompute, np.inf)
    pages = len(total) - 1 - int(total[::-1].argmin())
    return pages, float(total[pages])


def _sums(values: Floats) -> Floats:
    return np.concatenate([np.zeros(1), np.cumsum(values)])
