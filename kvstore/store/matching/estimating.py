"""What it costs to load a matched prefix from where it is, beside computing it."""

import numpy as np
import numpy.typing as npt

from kvstore.prefill import Prefill
from kvstore.radix.pages import Slots
from kvstore.store.matching.cut import Ask, Estimate, Floats, TierRun, best_cut, load_seconds, recompute_seconds
from kvstore.store.matching.rates import Rates
from kvstore.store.space import Space
from kvstore.tiers.blobs import NO_SLOT

Flags = npt.NDArray[np.bool_]
MAX_RUNS = 256
"""Of one estimate: more would take long to make and to send, and tell a scheduler nothing."""


def estimate(space: Space, slots: Slots, ask: Ask, rates: Rates, link_bytes_s: float) -> Estimate:
    """Of the path in `slots`, which ends at a usable boundary. `link_bytes_s` is the measured rate of who asks.

    Bytes from DRAM come as fast as the link takes them; those on SSD are read and sent at the same time, so that the slower of both counts.
    """
    tree, pages = space.tree, len(slots)
    link, ssd = ask.link_bytes_s or link_bytes_s, rates.ssd.bytes_s
    owner, part = tree.parts.of(tree.pages.part[slots])
    rows, component = tree.parts.blob[part], tree.parts.component[part]
    on_ssd = space.blobs.slot[rows] == NO_SLOT
    nbytes = space.blobs.stored_of(rows)
    seconds = nbytes / np.where(on_ssd, min(link, ssd), link)

    def by_page(mine: Flags, weight: Floats = seconds) -> Floats:
        found: Floats = np.bincount(owner[mine], weight[mine], pages).astype(np.float64)
        return found

    needed = owner >= np.array([tree.rules.first_page(c, pages) for c in range(len(space.spec.components))])[component]
    required = ~np.isin(component, [rule.component for rule in tree.rules.optional])
    load = load_seconds(by_page(required), [(rule.pages, by_page(component == rule.component)) for rule in tree.rules.optional])
    prefill = ask.prefill or space.settings.prefill
    recompute = None if prefill is None else recompute_seconds(prefill, pages, space.spec.page_tokens)
    slow = np.zeros(pages, np.bool_)
    slow[owner[needed & on_ssd]] = True
    runs = _runs(slow, by_page(needed, nbytes.astype(np.float64)), by_page(needed), prefill, space.spec.page_tokens)
    whole = float(load[-1])
    if recompute is None:
        return Estimate(runs, whole, None, pages, whole, link, ssd)
    usable = tree.rules.usable(tree.pages.components[slots])
    cut, total = best_cut(load, recompute, usable)
    return Estimate(runs, whole, float(recompute[0]), cut, total, link, ssd)


def _runs(slow: Flags, nbytes: Floats, seconds: Floats, prefill: Prefill | None, page_tokens: int) -> tuple[TierRun, ...]:
    """Pages in a row that are in one tier; where they alternate too often, the rest is one run."""
    if not len(slow):
        return ()
    firsts = np.flatnonzero(np.append(True, slow[1:] != slow[:-1]))
    mixed = len(firsts) > MAX_RUNS
    firsts = firsts[:MAX_RUNS]
    columns = zip(firsts.tolist(), np.add.reduceat(nbytes, firsts).tolist(), np.add.reduceat(seconds, firsts).tolist(), strict=True)
    ends = [*firsts[1:].tolist(), len(slow)]
    found = []
    for (first, size, load), last in zip(columns, ends, strict=True):
        recompute = None if prefill is None else float(prefill.between(first * page_tokens, last * page_tokens))
        tier = "mixed" if mixed and last == len(slow) else "ssd" if slow[first] else "dram"
        found.append(TierRun(tier, first, last - first, int(size), load, recompute))
    return tuple(found)
