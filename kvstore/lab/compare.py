"""Runs of several policies over one trace, at one size or at many, and what that says of the size to buy."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.errors import BadRequest
from kvstore.lab.bound import unlimited_hits
from kvstore.lab.cost import PrefillCost
from kvstore.lab.measure import Measure, Row
from kvstore.lab.simulation import LabConfig, Simulation
from kvstore.lab.trace import Trace
from kvstore.tiers.policies.make import SSD_LOSS, make_policies

SWEEP_PERCENT = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Capacities of a sweep, in percent of the bytes of all different pages."""

MAX_PAGE_BYTES = 1 << 36

Progress = Callable[[str, int], None]
"""Told of a run's name and how many of its requests are done."""


def _quiet(_name: str, _done: int) -> None:
    return


@dataclass(slots=True)
class Comparison:
    """One trace with its page sizes. `hints` off takes what clients said of their requests out of it."""

    trace: Trace
    bytes_per_token: float = 0.0
    cost: PrefillCost = field(default_factory=PrefillCost)
    batch: float = 0.01
    max_ghosts: int = 200_000
    hints: bool = True
    ssd_loss: float | None = SSD_LOSS
    """As for `make_policies`."""
    measure: Measure = field(init=False)
    _page_bytes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.bytes_per_token < 1e12 or not 0 <= self.batch <= 1 or self.max_ghosts < 0:
            raise BadRequest(f"{self.bytes_per_token} bytes a token, batches of {self.batch}, {self.max_ghosts} ghosts: out of range")
        if not self.hints:
            self.trace = replace(self.trace, hints=[None] * len(self.trace))
        self._page_bytes = [round(space.page_tokens * (self.bytes_per_token or space.bytes_per_token or 1)) for space in self.trace.spaces]
        if max(self._page_bytes) > MAX_PAGE_BYTES:
            raise BadRequest(f"pages of {max(self._page_bytes)} bytes: {MAX_PAGE_BYTES} are the most")
        if min(self._page_bytes) <= 0:
            raise BadRequest(f"pages of {min(self._page_bytes)} bytes: {self.bytes_per_token} bytes a token are too few")
        self.measure = Measure(self.trace, self._page_bytes, self.cost)

    @property
    def knows_bytes(self) -> bool:
        """Whether sizes in bytes mean anything."""
        return bool(self.bytes_per_token) or all(space.bytes_per_token for space in self.trace.spaces)

    def percent(self, share: float) -> int:
        """Bytes: so many percent of those of all different pages."""
        return int(self.measure.all_bytes * share / 100)

    def unlimited(self) -> float:
        """The token hit ratio with room for everything."""
        return self.measure.ratio(unlimited_hits(self.trace))

    def run(self, policy: str, dram_bytes: int, ssd_bytes: int = 0, progress: Progress = _quiet) -> Row:
        """One policy at one size; `clairvoyant` is the bound."""
        if policy == "clairvoyant":
            return self.measure.bound(dram_bytes, ssd_bytes)
        dram, ssd = make_policies(policy, self.measure.pages(dram_bytes), self.measure.pages(ssd_bytes), self.ssd_loss)
        started = time.perf_counter()
        simulation = Simulation(self.trace, self._page_bytes, LabConfig(dram_bytes, ssd_bytes, self.batch, self.max_ghosts), dram, ssd)
        outcome = simulation.run(lambda done: progress(policy, done))
        outcome.seconds = time.perf_counter() - started
        return self.measure.row(policy, dram_bytes, ssd_bytes, outcome)

    def sweep(
        self, policies: Sequence[str], ssd_bytes: int, progress: Progress = _quiet, shares: Sequence[float] = SWEEP_PERCENT
    ) -> list[Row]:
        """All policies at DRAM sizes of `shares` percent."""
        return [self.run(policy, self.percent(share), ssd_bytes, progress) for share in shares for policy in policies]


def size_for(rows: Iterable[Row], policy: str, ratio: float) -> int | None:
    """The DRAM bytes at which a policy reaches a hit ratio, between the sizes tried by the logarithm; None if it does at none."""
    before: Row | None = None
    for row in sorted((row for row in rows if row.policy == policy), key=lambda row: row.dram_bytes):
        reached = row.hit_ratio if row.dram_hit_ratio is None else row.dram_hit_ratio
        if reached >= ratio:
            if before is None or before.dram_bytes <= 0:
                return row.dram_bytes
            lower = before.hit_ratio if before.dram_hit_ratio is None else before.dram_hit_ratio
            part = (ratio - lower) / (reached - lower)
            return int(math.exp(math.log(before.dram_bytes) + part * math.log(row.dram_bytes / before.dram_bytes)))
        before = row
    return None
