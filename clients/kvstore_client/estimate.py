"""What it costs to load a matched prefix, beside computing it: what a scheduler asks."""

from dataclasses import dataclass

from kvstore.api.wire import BadRequest
from kvstore.api.wire.messages import EstimateAsk, EstimateMeta


@dataclass(frozen=True, slots=True)
class Costs:
    """What an estimate is to reckon with: microseconds to compute a token, and nanoseconds more for each token before it.

    With both 0 the namespace's cost counts, if it has one; with a link of 0 bytes a second the rate that this client's fetches reached.
    """

    prefill_us: float = 0.0
    prefill_ns_per_position: float = 0.0
    link_bytes_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prefill_us", "prefill_ns_per_position", "link_bytes_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise BadRequest(f"costs with {name} = {value!r}, which is no number")


@dataclass(frozen=True, slots=True)
class TierRun:
    """Pages in a row whose bytes are in one tier: `dram`, `ssd`, or `mixed` after very many runs.

    `recompute_s` is None if no prefill cost is known.
    """

    tier: str
    first_page: int
    pages: int
    nbytes: int
    load_s: float
    recompute_s: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the pages of a match cost, in seconds. The best is to load the first `pages` and to compute the rest: `seconds` in all.

    `load_s` and `recompute_s` are for all of them. Without a prefill cost all are to be loaded.
    """

    pages: int
    tokens: int
    seconds: float
    load_s: float
    recompute_s: float | None
    runs: tuple[TierRun, ...]
    link_bytes_s: float
    ssd_bytes_s: float


def ask_meta(costs: Costs | bool, name: str = "estimate") -> EstimateAsk | None:
    """Costs as messages carry them. Raises BadRequest for what are none."""
    if not isinstance(costs, (bool, Costs)):
        raise BadRequest(f"{name} is {costs!r}: give True, False or Costs(...)")
    if costs is False:
        return None
    given = Costs() if costs is True else costs
    return EstimateAsk(prefill_us=given.prefill_us, prefill_ns_per_position=given.prefill_ns_per_position, link_bytes_s=given.link_bytes_s)


def estimate_of(meta: EstimateMeta | None, page_tokens: int) -> Estimate | None:
    """What the daemon said."""
    if meta is None:
        return None
    runs = tuple(TierRun(r.tier, r.first_page, r.pages, r.nbytes, r.load_s, r.recompute_s) for r in meta.runs)
    return Estimate(
        meta.pages, meta.pages * page_tokens, meta.seconds, meta.load_s, meta.recompute_s, runs, meta.link_bytes_s, meta.ssd_bytes_s
    )
