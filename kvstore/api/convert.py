"""Between the store's values and the wire's messages."""

import numpy as np
import numpy.typing as npt

from kvstore.api.estimates import in_units
from kvstore.api.wire.messages import HintsMeta, NamespaceInfo, PartRangeList, PartRunMeta
from kvstore.digests import KEY_BYTES
from kvstore.errors import BadRequest
from kvstore.hints import NO_HINTS, Ended, Hints, Turn
from kvstore.kvspec import PartRange
from kvstore.radix.tree import Extras
from kvstore.store import NamespaceSettings, PartTable, Space


def namespace_info(space: Space) -> NamespaceInfo:
    """What a namespace is, and what it holds."""
    settings = space.settings
    return NamespaceInfo(
        id=space.id, name=settings.name, fingerprint=settings.fingerprint, spec=space.spec.to_dict(), recipes=settings.recipes,
        retention_s=settings.retention_s, pages=space.tree.page_count, blobs=space.blobs.count, dram_bytes=space.resident_bytes,
        ttl_s=settings.ttl_s, rebuild=settings.rebuild, lossy=settings.lossy, **in_units(settings.prefill),
    )  # fmt: skip


def check_recipe_settings(settings: NamespaceSettings) -> NamespaceSettings:
    """Settings to create a namespace with. Raises BadRequest where they say something about recipes that it is not to have."""
    if not settings.recipes and (settings.lossy or settings.rebuild == "tolerant"):
        what = "lossy" if settings.lossy else "rebuild = tolerant"
        raise BadRequest(f"{what} is about pages that can be computed again: it goes with recipes (--recipes, recipes = true)")
    return settings


def split_tokens(payload: bytes, extra_pages: list[int]) -> tuple[bytes, Extras]:
    """Tokens and extra digests from a payload that holds both."""
    tail = len(extra_pages) * KEY_BYTES
    if tail > len(payload):
        raise BadRequest(f"{len(extra_pages)} pages with extra keys need {tail} bytes of payload, there are {len(payload)}")
    if not extra_pages:
        return payload, {}
    start = len(payload) - tail
    if min(extra_pages) < 0 or len(set(extra_pages)) != len(extra_pages):
        raise BadRequest("extra_pages are distinct page indices from 0 on")
    return payload[:start], {page: payload[start + i * KEY_BYTES : start + (i + 1) * KEY_BYTES] for i, page in enumerate(extra_pages)}


def hints_of(meta: HintsMeta | None) -> Hints:
    """Hints as the store takes them. Raises BadRequest."""
    if meta is None:
        return NO_HINTS
    try:
        turn, ended = Turn(meta.turn) if meta.turn else None, Ended(meta.ended) if meta.ended else None
    except ValueError as error:
        raise BadRequest(f"a hint is wrong: {error}") from None
    return Hints(meta.session, turn, ended, meta.ttl_ms / 1000)


def boundary_runs(boundaries: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Rising numbers as half-open runs."""
    if not len(boundaries):
        return []
    breaks = np.flatnonzero(np.diff(boundaries) != 1)
    firsts, lasts = boundaries[np.concatenate([[0], breaks + 1])], boundaries[np.concatenate([breaks, [-1]])] + 1
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def part_ranges(parts: PartRangeList) -> tuple[PartRange, ...]:
    """Part ranges as the store takes them."""
    return tuple(PartRange(*part) for part in parts)


def part_list(ranges: tuple[PartRange, ...]) -> PartRangeList:
    """Part ranges as messages carry them."""
    return [(r.component, r.layer_lo, r.layer_hi, r.head_lo, r.head_hi) for r in ranges]


def part_runs(table: PartTable) -> list[PartRunMeta]:
    """A part table's runs as messages."""
    return [PartRunMeta(first_page=run.first_page, pages=run.pages, parts=part_list(run.ranges)) for run in table.runs]
