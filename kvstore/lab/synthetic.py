"""Made traces: one whose reuse is random, of which nothing can be learned, and one of which half is never used again."""

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


def documents_and_scans(requests: int = 4_000, documents: int = 150, seed: int = 1) -> Trace:
    """Every other request is for one of some documents of 8 to 16 pages, drawn afresh; the others are read once and never again."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 17, documents)
    firsts = np.cumsum(lengths) - lengths
    builder = TraceBuilder("documents and scans", [TraceSpace(PAGE_TOKENS)])
    times, fresh = np.cumsum(rng.exponential(0.3, requests)), 1 << 32
    for number, document in enumerate(rng.integers(0, documents, requests).tolist()):
        pages = firsts[document] + np.arange(lengths[document]) if number % 2 else fresh + np.arange(20)
        fresh += 0 if number % 2 else 20
        builder.add(float(times[number]), pages.astype(np.uint64), PAGE_TOKENS, len(pages) * PAGE_TOKENS)
    return builder.build()
