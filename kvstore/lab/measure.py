"""What a run was worth: hit ratios by tier, seconds saved, bytes written."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.lab.bound import clairvoyant_hits, hits_apart
from kvstore.lab.cost import PrefillCost
from kvstore.lab.simulation import Outcome
from kvstore.lab.trace import Op, Trace


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one size. Ratios are of all tokens of prompts; `ssd_hit_ratio` counts pages that were on SSD only."""

    policy: str
    dram_bytes: int
    ssd_bytes: int
    dram_percent: float
    """Of the bytes of all different pages."""
    ssd_percent: float
    hit_ratio: float
    dram_hit_ratio: float | None = None
    """None for the bound, which knows one tier only, as large as both."""
    ssd_hit_ratio: float | None = None
    saved_s: float = 0.0
    """Prefill seconds that the hits saved, loads not counted."""
    all_s: float = 0.0
    """Prefill seconds of all prompts without any cache."""
    ssd_written_bytes: int | None = None
    written_per_hit_byte: float | None = None
    """Bytes written to SSD for each byte of a hit that came from there; None if none did."""
    run_s: float = 0.0
    """What the simulation took."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Measure:
    """Counts tokens of a trace. Pages of `page_bytes` by namespace."""

    def __init__(self, trace: Trace, page_bytes: list[int], cost: PrefillCost) -> None:
        self.trace = trace
        self._sizes = np.array(page_bytes, np.int64)
        self._lengths = np.diff(np.append(0, trace.ends))
        self._asks = (trace.op == Op.REQUEST) | (trace.op == Op.GET)
        self._page_tokens = trace.page_tokens()
        self._cost = cost
        used = np.unique(trace.space)
        self._alike = len({(page_bytes[space], trace.spaces[space].page_tokens) for space in used.tolist()}) <= 1
        self.looked_up = int(trace.prompt_tokens[self._asks].sum())
        """Tokens of all prompts, those of no whole page included."""
        self.all_s = float(cost.seconds(np.zeros(len(trace), np.int64), trace.prompt_tokens)[self._asks].sum())
        space_of = trace.page_space()
        self.all_bytes = int(self._sizes[space_of].sum())
        """Of all different pages."""
        self.mean_page_bytes = self.all_bytes / max(1, len(space_of))

    def pages(self, size: int) -> int:
        """How many pages of the mean size fit."""
        return int(size / self.mean_page_bytes)

    def ratio(self, hit_pages: npt.NDArray[np.int64]) -> float:
        """The token hit ratio of pages hit by request."""
        return self._share(self._tokens(hit_pages, hit_pages > 0))

    def bound(self, dram_bytes: int, ssd_bytes: int) -> Row:
        """What nobody can beat."""
        size = dram_bytes + ssd_bytes
        capacities = (size // self._sizes).tolist()
        hits = clairvoyant_hits(self.trace, self.pages(size)) if self._alike else hits_apart(self.trace, capacities)
        return Row("clairvoyant", *self._place(dram_bytes, ssd_bytes), self.ratio(hits), saved_s=self._saved(hits), all_s=self.all_s)

    def row(self, policy: str, dram_bytes: int, ssd_bytes: int, outcome: Outcome) -> Row:
        """What a policy reached."""
        tokens = self._tokens(outcome.hit_pages, outcome.hit_pages > 0)
        from_ssd = self._tokens(outcome.ssd_pages, outcome.ssd_last, outcome.hit_pages)
        served = int((outcome.ssd_pages * self._sizes[self.trace.space])[self._asks].sum())
        return Row(
            policy, *self._place(dram_bytes, ssd_bytes), self._share(tokens), self._share(tokens - from_ssd), self._share(from_ssd),
            self._saved(outcome.hit_pages), self.all_s, outcome.ssd_written_bytes,
            outcome.ssd_written_bytes / served if served else None, outcome.seconds,
        )  # fmt: skip

    def _place(self, dram_bytes: int, ssd_bytes: int) -> tuple[int, int, float, float]:
        return dram_bytes, ssd_bytes, 100 * dram_bytes / self.all_bytes, 100 * ssd_bytes / self.all_bytes

    def _tokens(
        self, pages: npt.NDArray[np.int64], last: npt.NDArray[np.bool_], depth: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Tokens of so many pages of each request; `last`: the deepest of a prefix of `depth` pages (all of `pages`) is among them."""
        whole = last & ((pages if depth is None else depth) == self._lengths)
        return pages * self._page_tokens - np.where(whole, self._page_tokens - self.trace.last_tokens, 0)

    def _share(self, tokens: npt.NDArray[np.int64]) -> float:
        return float(tokens[self._asks].sum()) / max(1, self.looked_up)

    def _saved(self, hit_pages: npt.NDArray[np.int64]) -> float:
        tokens = self._tokens(hit_pages, hit_pages > 0)
        return float(self._cost.seconds(np.zeros(len(tokens), np.int64), tokens)[self._asks].sum())
