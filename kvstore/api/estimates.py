"""What loading and computing cost, between the store's values and messages."""

from dataclasses import asdict

from kvstore.api.wire.messages import EstimateAsk, EstimateMeta, TierRunMeta
from kvstore.prefill import Prefill
from kvstore.store.matching.cut import Ask, Estimate


def prefill_of(prefill_us: float, prefill_ns_per_position: float) -> Prefill | None:
    """A prefill cost from microseconds a token, and nanoseconds more for each token before it; None if both are 0. Raises BadRequest."""
    if prefill_us == prefill_ns_per_position == 0:
        return None
    return Prefill(prefill_us / 1e6, prefill_ns_per_position / 1e9)


def in_units(prefill: Prefill | None) -> dict[str, float]:
    """The inverse of `prefill_of`, as fields of messages."""
    if prefill is None:
        return {"prefill_us": 0.0, "prefill_ns_per_position": 0.0}
    return {"prefill_us": round(prefill.base_s * 1e6, 9), "prefill_ns_per_position": round(prefill.slope_s * 1e9, 9)}


def ask_of(meta: EstimateAsk | None) -> Ask | None:
    """What a match is asked to reckon with. Raises BadRequest."""
    return None if meta is None else Ask(prefill_of(meta.prefill_us, meta.prefill_ns_per_position), meta.link_bytes_s)


def estimate_meta(estimate: Estimate | None) -> EstimateMeta | None:
    """An estimate as messages carry it."""
    if estimate is None:
        return None
    return EstimateMeta(
        runs=[TierRunMeta(**asdict(run)) for run in estimate.runs], load_s=estimate.load_s, recompute_s=estimate.recompute_s,
        pages=estimate.pages, seconds=estimate.seconds, link_bytes_s=estimate.link_bytes_s, ssd_bytes_s=estimate.ssd_bytes_s,
    )  # fmt: skip
