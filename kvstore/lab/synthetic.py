"""A trace whose reuse is random: nothing that a policy may learn of the past says anything of the future."""

import numpy as np

from kvstore.lab.trace import Trace, TraceBuilder, TraceSpace

PAGE_TOKENS = 512


def random_reuse(requests: int = 12_000, documents: int = 2_000, seed: int = 1) -> Trace:
    """Requests a second for documents of 4 to 28 pages, each drawn afresh with equal chances; they share a first page."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 29, documents)
    firsts = np.cumsum(lengths) - lengths + 1
    builder = TraceBuilder("random reuse", [TraceSpace(PAGE_TOKENS)])
    times = np.cumsum(rng.exponential(0.3, requests))
    for time, document in zip(times.tolist(), rng.integers(0, documents, requests).tolist(), strict=True):
        pages = np.append(0, firsts[document] + np.arange(lengths[document])).astype(np.uint64)
        builder.add(time, pages, PAGE_TOKENS, len(pages) * PAGE_TOKENS)
    return builder.build()
