"""Match at scale: trees of 1,000 to a million pages, contexts of 500,000 tokens, in process and through the SDK.

The path that is matched has 31,250 pages of 16 tokens in at least 2,000 nodes, each with siblings; the rest of the tree is
other contexts that share its beginning. Memory is what the columns and indices take for each page and each part; labels
(the token ids, 64 bytes a page of 16 tokens) are shown apart.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.report import Report, arguments
from kvstore.api.wire import Component, KVSpec, PartRange
from kvstore.digests import page_key_chain
from kvstore.radix.tree import RadixTree, as_token_bytes
from kvstore.radix.values import NewPages
from kvstore.tiers.blobs import BlobTable
from kvstore_client import AsyncClient
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess

PAGE_TOKENS = 16
CONTEXT_TOKENS = 500_000
WHOLE = (PartRange(0, 0, 1, 0, 1),)
SPEC = KVSpec(PAGE_TOKENS, (Component("full", 1, 1, 2, "u8", 1),))

Tokens = npt.NDArray[np.uint32]


class Contexts:
    """Makes the contexts of a tree: a long one, branches off it at many pages, and other long ones."""

    def __init__(self, pages: int, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self._pages = pages
        self.long = self._random(min(CONTEXT_TOKENS // PAGE_TOKENS, pages // 2))

    def _random(self, pages: int) -> Tokens:
        return self._rng.integers(0, 128_000, pages * PAGE_TOKENS, dtype=np.uint32)

    def branches(self) -> list[Tokens]:
        """The long context, and three branches of two pages at each of 2,100 pages of it (fewer in small trees)."""
        pages = len(self.long) // PAGE_TOKENS
        places = sorted(self._rng.choice(np.arange(1, pages), min(2_100, pages // 12), replace=False).tolist())
        found = [self.long]
        for place in places:
            found += [np.concatenate([self.long[: place * PAGE_TOKENS], self._random(2)]) for _ in range(3)]
        return found

    def other(self) -> Tokens:
        """Another context of 500 pages that shares up to 50 pages with the long one."""
        shared = int(self._rng.integers(0, 50)) * PAGE_TOKENS
        return np.concatenate([self.long[:shared], self._random(500)])


def build(pages: int) -> tuple[RadixTree, Tokens]:
    """A tree of about `pages` pages, and its long context."""
    tree = RadixTree(bytes(32), PAGE_TOKENS, 2 * pages + 10_000)
    contexts = Contexts(pages)
    for tokens in contexts.branches():
        _insert(tree, tokens)
    while tree.page_count < pages:
        _insert(tree, contexts.other()[: (pages - tree.page_count + 50) * PAGE_TOKENS])
    return tree, contexts.long


def _insert(tree: RadixTree, tokens: Tokens) -> None:
    raw = as_token_bytes(tokens)
    first = tree.match(raw)
    count = len(tokens) // PAGE_TOKENS - first.pages
    if count <= 0:
        return
    width = tree.pages.token_bytes
    labels = (raw[i * width : (i + 1) * width] + bytes(32) for i in range(first.pages, first.pages + count))
    keys = b"".join(page_key_chain(tree.key_at(first), labels))
    tree.extend(first, raw[first.pages * width :], {}, NewPages(keys, bytes(16), np.zeros((count, 1), np.int32), WHOLE))


def in_process(report: Report, pages: int, repetitions: int) -> None:
    """Time matches of the whole long context, each with a buffer of its own."""
    started = time.perf_counter()
    tree, context = build(pages)
    built = time.perf_counter() - started
    buffers = [context.copy() for _ in range(repetitions)]
    tree.match(as_token_bytes(buffers[0]))
    hashing = memcmp = 0.0
    for repetition, buffer in enumerate(buffers):
        started = time.perf_counter()
        path = tree.match(as_token_bytes(buffer))
        report.add(f"match_{pages}_pages", repetition, (time.perf_counter() - started) * 1000, "ms")
        assert path.pages == len(context) // PAGE_TOKENS
        started = time.perf_counter()
        assert bytes(buffer) == bytes(context)
        memcmp = (time.perf_counter() - started) * 1000
        report.add(f"memcmp_{pages}_pages", repetition, memcmp, "ms")
    raw = as_token_bytes(context)
    started = time.perf_counter()
    for _ in page_key_chain(bytes(32), (raw[i : i + 64] for i in range(0, len(raw), 64))):
        pass
    hashing = (time.perf_counter() - started) * 1000
    report.add(f"hash_every_block_{pages}_pages", 0, hashing, "ms")
    memory, rows = tree.memory(), tree.pages.ranges.high
    per_page, per_part = memory["pages"] / tree.page_count, memory["parts"] / tree.page_count + _blob_bytes(tree.page_count)
    report.add(f"bytes_a_page_{pages}_pages", 0, per_page, "B")
    report.add(f"bytes_a_part_{pages}_pages", 0, per_part, "B")
    report.add(f"label_bytes_a_page_{pages}_pages", 0, memory["labels"] / tree.page_count, "B")
    print(
        f"{tree.page_count:,} pages in {tree.nodes.slots.used:,} nodes ({rows:,} slots), built in {built:.1f} s: match of "
        f"{len(context):,} tokens over {len(path.nodes):,} nodes {report.median(f'match_{pages}_pages'):.3f} ms; "
        f"{per_page:.0f} bytes a page, {per_part:.0f} a part, labels {memory['labels'] / tree.page_count:.0f}",
        flush=True,
    )


def _blob_bytes(blobs: int) -> float:
    """What a blob table takes for each blob: one blob a part, as in a real namespace."""
    table = BlobTable(2 * blobs)
    layout = SPEC.slice_layout(SPEC.whole())
    for number in range(blobs):
        table.add(number.to_bytes(8, "little") * 2, layout)
    return table.memory() / blobs


async def through_sdk(report: Report, pages: int, repetitions: int) -> None:
    """The same tree in a daemon (tiny parts), matched through the SDK over TCP."""
    contexts = Contexts(pages)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        daemon = DaemonProcess(Path(folder) / "data", "--dram", "4GiB", "--ssd", "1GiB").wait_ready()
        try:
            before = _resident(daemon.pid)
            async with AsyncClient(daemon.endpoint, timeout=120) as client:
                namespace = await client.namespace("match", "bench", SPEC)
                held = 0
                for tokens in contexts.branches():
                    held += await _put(namespace, tokens)
                while held < pages:
                    held += await _put(namespace, contexts.other())
                resident = _resident(daemon.pid) - before
                for repetition in range(-1, repetitions):
                    await _timed_matches(report, namespace, contexts.long.copy(), pages, repetition)
        finally:
            daemon.kill()
    print(
        f"through the SDK, {held:,} pages: {report.median(f'sdk_match_{pages}_pages'):.3f} ms, "
        f"{report.median(f'sdk_match_lease_parts_{pages}_pages'):.3f} ms with a lease and the part table; "
        f"the daemon grew by {resident / held:.0f} bytes a page, slots and labels included",
        flush=True,
    )


async def _timed_matches(report: Report, namespace: Namespace, tokens: Tokens, pages: int, repetition: int) -> None:
    """One repetition (the one numbered -1 is a warm-up): a look, and a match as a worker makes it."""
    for name, lease_s, parts in (("sdk_match", 0.0, False), ("sdk_match_lease_parts", 30.0, True)):
        started = time.perf_counter()
        found = await namespace.match(tokens, lease_s=lease_s, parts=parts)
        took = (time.perf_counter() - started) * 1000
        assert found.pages == len(tokens) // PAGE_TOKENS
        await found.release()
        if repetition >= 0:
            report.add(f"{name}_{pages}_pages", repetition, took, "ms")


async def _put(namespace: Namespace, tokens: Tokens) -> int:
    there = (await namespace.match(tokens, lease_s=0, parts=False)).pages
    count = len(tokens) // PAGE_TOKENS - there
    new = 0
    step = 4000
    for first in range(there, there + count, step):
        last = min(first + step, there + count)
        data = np.random.default_rng(first).integers(0, 256, (last - first) * SPEC.page_bytes, dtype=np.uint8)
        new += (await namespace.put(tokens[: last * PAGE_TOKENS], data, first_page=first)).new_pages
    return new


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(settings: argparse.Namespace) -> Report:
    """All sizes."""
    report = Report("match_scale", {"pages": settings.pages, "page_tokens": PAGE_TOKENS, "context_tokens": CONTEXT_TOKENS})
    for pages in settings.pages:
        in_process(report, pages, settings.repetitions)
        report.ratio(f"match_{pages}_pages_vs_memcmp", f"match_{pages}_pages", f"memcmp_{pages}_pages")
        hashing = report.values(f"hash_every_block_{pages}_pages")[0]
        report.ratios[f"match_{pages}_pages_vs_hashing"] = round(report.median(f"match_{pages}_pages") / hashing, 4)
    if settings.sdk:
        asyncio.run(through_sdk(report, settings.sdk, settings.repetitions))
    return report


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--pages", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--sdk", type=int, default=1_000_000, help="pages in the daemon's tree; 0 leaves the SDK out")
    parser.add_argument("--repetitions", type=int, default=15)
    settings = parser.parse_args()
    if settings.quick:
        settings.pages, settings.sdk = [100_000], 100_000
    report = run(settings)
    report.show("match of a context of 500,000 tokens (half the tree where it is smaller)")
    report.write(settings.json)
    report.draw(settings.png, "ms or bytes")


if __name__ == "__main__":
    main()
