"""Values of the SDK as messages carry them, and back."""

from kvstore.api.wire import Hints, PartRange
from kvstore.api.wire.messages import HintsMeta, PartRunMeta
from kvstore_client.times import milliseconds


def part_runs(metas: list[PartRunMeta]) -> list[tuple[int, int, tuple[PartRange, ...]]]:
    """Runs of pages that have the same parts: (first page, pages, their ranges)."""
    return [(run.first_page, run.pages, tuple(PartRange(*part) for part in run.parts)) for run in metas]


def hints_meta(hints: Hints | None) -> HintsMeta | None:
    """Hints as messages carry them."""
    if hints is None:
        return None
    return HintsMeta(session=hints.session_id, turn=hints.turn or "", ended=hints.ended or "", ttl_ms=milliseconds("ttl_s", hints.ttl_s))


def part_list(ranges: list[PartRange]) -> list[tuple[int, int, int, int, int]]:
    """Part ranges as messages carry them."""
    return [(r.component, r.layer_lo, r.layer_hi, r.head_lo, r.head_hi) for r in ranges]
