"""What came out when pages were computed again, beside what is on record: the same bytes, others, and how far apart. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.drift import Drift, measure
from kvstore.kvspec import DTYPE_BYTES, KVSpec
from kvstore.tiers.recipe import Recipe, RecipePart


@dataclass(slots=True)
class RebuildReport:
    """What rebuilds of a namespace came to, since start. `drift` is by dtype, over samples of pages that were gone and over whole
    pages that were computed again while they were there.
    """

    rebuilt_pages: int = 0
    same_pages: int = 0
    new_version_pages: int = 0
    uncompared_pages: int = 0
    checked_pages: int = 0
    checks_that_differed: int = 0
    failed_attempts: int = 0
    failed_jobs: int = 0
    seconds_a_page: float = 0.0
    drift: dict[str, Drift] = field(default_factory=dict)

    def took(self, pages: int, seconds: float) -> None:
        """A job of so many pages took so long; the rate is averaged over the last few."""
        rate = seconds / max(pages, 1)
        self.seconds_a_page = rate if not self.seconds_a_page else 0.75 * self.seconds_a_page + 0.25 * rate

    def add_drift(self, dtype: str, drift: Drift) -> None:
        """Take in a measurement."""
        self.drift.setdefault(dtype, Drift()).add(drift)


@dataclass(frozen=True, slots=True)
class Compared:
    """One page: `same` is None where nothing can be said, as it came in other parts than it was recorded in."""

    same: bool | None
    drift: tuple[tuple[str, Drift], ...]


def compare(spec: KVSpec, recorded: Recipe, fresh: Recipe) -> Compared:
    """Hold a page that was computed again against its record. Optional components count where both have them."""
    old = {part.range: part for part in recorded.parts}
    pairs = [(old[part.range], part) for part in fresh.parts if part.range in old]
    required = {part.range for part in recorded.parts if spec.components[part.range.component].kind == "full"}
    if not required <= {part.range for _, part in pairs}:
        return Compared(None, ())
    same = all(before.blob == after.blob for before, after in pairs)
    return Compared(same, tuple(_drift(spec, pairs)))


def _drift(spec: KVSpec, pairs: Iterable[tuple[RecipePart, RecipePart]]) -> Iterable[tuple[str, Drift]]:
    for before, after in pairs:
        dtype = spec.components[before.range.component].dtype
        if before.sample and len(before.sample) == len(after.sample):
            yield dtype, measure(dtype, before.sample, after.sample)


def sane(dtype: str, drift: Drift) -> bool:
    """Whether figures that somebody else measured can be true."""
    counts = 0 <= drift.not_finite <= drift.differing <= drift.elements <= 1 << 48
    return dtype in DTYPE_BYTES and counts and 0 <= drift.max_abs < float("inf") and 0 <= drift.sum_abs < float("inf")
