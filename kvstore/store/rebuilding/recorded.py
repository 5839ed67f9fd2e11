"""What pages were before they are computed again, kept at hand until they have come, and compared with them then."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.store.rebuilding.comparing import Compared, RebuildReport, compare
from kvstore.store.recipes.source import Fresh
from kvstore.store.space import Space
from kvstore.store.stats import Stats
from kvstore.tiers.recipe import Recipe

_log = logging.getLogger("kvstore.rebuild")

_KEPT_S = 60.0
_MAX_KEPT = 1 << 15
"""Pages whose record is kept at hand to be compared; of more at a time, the others are not compared."""


@dataclass(slots=True)
class _Record:
    recipe: Recipe
    until: float


class Recorded:
    """See the module's text. `report_of` is where a namespace's figures go."""

    def __init__(self, report_of: Callable[[Space], RebuildReport], stats: Stats) -> None:
        self._report_of = report_of
        self._stats = stats
        self._kept: dict[tuple[int, bytes], _Record] = {}

    def keep(self, space: Space, recipes: list[Recipe]) -> None:
        """Keep at hand what the pages of a job were."""
        until, room = time.monotonic() + _KEPT_S, max(0, _MAX_KEPT - len(self._kept))
        self._kept.update({(space.number, one.key): _Record(replace(one, body=b""), until) for one in recipes[:room]})

    def renew(self, number: int, keys: Sequence[bytes]) -> None:
        """They are still being computed."""
        for key in keys:
            if (one := self._kept.get((number, key))) is not None:
                one.until = time.monotonic() + _KEPT_S

    def sweep(self, now: float) -> None:
        """Forget those that did not come."""
        if self._kept:
            self._kept = {name: one for name, one in self._kept.items() if one.until >= now}

    async def compare(self, fresh: Sequence[Fresh]) -> None:
        """Pages that were computed again, before what is on record of them is replaced."""
        if not self._kept:
            return
        pairs = [(one, found.recipe) for one in fresh if (found := self._kept.pop((one.space.number, one.recipe.key), None)) is not None]
        if not pairs:
            return
        results = await asyncio.to_thread(_compare_all, pairs)
        for (one, recorded), result in zip(pairs, results, strict=True):
            report = self._report_of(one.space)
            for dtype, drift in result.drift:
                report.add_drift(dtype, drift)
            if result.same is None:
                report.uncompared_pages += 1
            elif result.same:
                report.same_pages += 1
            elif one.space.settings.rebuild == "exact":
                report.new_version_pages += 1
                self._stats.rebuild_new_versions += 1
                what = f"page {recorded.depth} of a prefix (key {recorded.key.hex()[:16]}…)"
                _log.warning("namespace %s: %s is not what is on record: it is a new version", one.space.settings.name, what)


def _compare_all(pairs: Sequence[tuple[Fresh, Recipe]]) -> list[Compared]:
    return [compare(one.space.spec, recorded, one.recipe) for one, recorded in pairs]
