"""Restart at scale: a journal of a million pages, and how soon after a start it is served from.

The journal is made as a daemon makes it, but at once: contexts that share roots and branch off one another, runs of one page up
to thousands. Then a real daemon is started on it and asked, over and over, for contexts of all depths: seconds until the first
match that finds pages, until the last page is back, and the longest that a ping had to wait meanwhile.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from bench.report import Report, arguments
from kvstore.digests import NO_EXTRA, page_key
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.radix.journal import Journal, JournalBatch, NamespaceRecord, PageRecord, PartRecord, encode_page
from kvstore.radix.load_plan import plan_load
from kvstore.radix.loading import TreeLoad
from kvstore.radix.tree import RadixTree
from kvstore.store import NamespaceSettings
from kvstore.store.datadir import DataDir
from kvstore_client import AsyncClient, ConnectionLost
from kvstore_workers.daemon_process import DaemonProcess

PAGE_TOKENS = 16
SPEC = KVSpec(PAGE_TOKENS, (Component("full", 4, 1, 64),))
PARTS = {1: (PartRange(0, 0, 4, 0, 1),), 2: (PartRange(0, 0, 2, 0, 1), PartRange(0, 2, 4, 0, 1))}
_COMMIT_PAGES = 20_000


class Maker:
    """Writes page records of contexts into a journal. With `mixed`, every eighth page has two parts, as in hybrid models."""

    def __init__(self, journal: Journal, settings: NamespaceSettings, *, mixed: bool) -> None:
        self._journal = journal
        self._digest = settings.digest
        self._recipes = settings.recipes
        self._mixed = mixed
        self._rng = np.random.default_rng(7)
        self._batch = JournalBatch()
        self.pages = 0
        self.contexts: list[list[tuple[bytes, bytes]]] = []
        """(page key, token bytes) of each page of some contexts."""

    def fill(self, pages: int) -> None:
        """Roots of up to 200 pages, contexts of up to 3,000 on them, and branches off those."""
        roots = [self._grow([], int(n)) for n in self._rng.integers(1, 200, 32)]
        while self.pages < pages:
            base = roots[int(self._rng.integers(len(roots)))]
            if self.contexts and self._rng.random() < 0.6:
                other = self.contexts[int(self._rng.integers(len(self.contexts)))]
                base = other[: int(self._rng.integers(1, len(other) + 1))]
            length = int(np.exp(self._rng.uniform(0, np.log(3000))))
            grown = self._grow(base, min(length, pages - self.pages))
            if len(self.contexts) < 2000:
                self.contexts.append(grown)
            else:
                self.contexts[int(self._rng.integers(2000))] = grown
        self._flush()

    def _grow(self, base: list[tuple[bytes, bytes]], count: int) -> list[tuple[bytes, bytes]]:
        context = list(base)
        tokens = self._rng.integers(0, 128_000, (count, PAGE_TOKENS), dtype=np.uint32)
        blobs = self._rng.bytes(32 * count)
        for index in range(count):
            parent = context[-1][0] if context else self._digest
            label = tokens[index].tobytes()
            key = page_key(parent, label + NO_EXTRA)
            ranges = PARTS[2 if self._mixed and len(context) % 8 == 7 else 1]
            parts = tuple(PartRecord(r, blobs[32 * index + 16 * i :][:16], SPEC.part_bytes(r)) for i, r in enumerate(ranges))
            record = PageRecord(
                key, parent, len(context), b"v" * 16, b"v" * 16 if context else bytes(16), 1, 0, parts,
                label + NO_EXTRA if self._recipes else None,
            )  # fmt: skip
            self._batch.put_pages.append((1, key, encode_page(self._digest, record)))
            context.append((key, label))
        self.pages += count
        if len(self._batch.put_pages) >= _COMMIT_PAGES:
            self._flush()
        return context

    def _flush(self) -> None:
        self._journal.commit(self._batch)
        self._batch = JournalBatch()


def make(folder: Path, settings: NamespaceSettings, pages: int, *, mixed: bool) -> Maker:
    """A data directory whose journal holds about `pages` pages; their blobs are not there, which nobody notices at a match."""
    directory = DataDir(folder)
    journal = Journal(directory.journal, 16 << 30)
    journal.put_namespace(NamespaceRecord(1, settings.digest, settings.to_dict()))
    maker = Maker(journal, settings, mixed=mixed)
    maker.fill(pages)
    journal.close()
    directory.close()
    return maker


def phases(report: Report, folder: Path, settings: NamespaceSettings, name: str, pages: int) -> None:
    """In process, in CPU time: reading and verifying the records, planning, and inserting, with the longest step."""
    journal = Journal(folder / "journal", 16 << 30)
    started = time.process_time()
    groups, bad = journal.load(1, settings.digest, PAGE_TOKENS * 4 + 32)
    report.add(f"{name}_read", 0, time.process_time() - started, "s CPU")
    assert not bad
    started = time.process_time()
    plan = plan_load(groups, settings.digest, 2 * pages, 4 * pages)
    report.add(f"{name}_plan", 0, time.process_time() - started, "s CPU")
    tree = RadixTree(settings.digest, PAGE_TOKENS, 2 * pages)
    load, steps = TreeLoad(tree, plan, np.zeros(len(plan.parts), np.int32)), []
    started, before = time.process_time(), time.perf_counter()
    while load.step():
        steps.append(time.perf_counter() - before)
        before = time.perf_counter()
    report.add(f"{name}_insert", 0, time.process_time() - started, "s CPU")
    report.add(f"{name}_median_step", 0, 1000 * float(np.median(steps)), "ms")
    report.add(f"{name}_longest_step", 0, 1000 * max(steps), "ms")
    assert tree.page_count == plan.pages
    print(f"{name}: {tree.page_count:,} pages in {tree.nodes.slots.used:,} nodes", flush=True)
    journal.close()


async def restart(report: Report, folder: Path, maker: Maker, name: str, repetition: int) -> None:
    """Start a daemon on the journal, and watch it come back."""
    started = time.perf_counter()
    daemon = DaemonProcess(folder, "--dram", "256MiB", "--ssd", "1GiB", environment={"KVSTORE_SCRUB_RATE": "0"})
    try:
        await asyncio.to_thread(daemon.wait_listening)
        report.add(f"{name}_listening", repetition, time.perf_counter() - started, "s")
        probes = [np.frombuffer(b"".join(label for _, label in c), np.uint32) for c in maker.contexts[:64]]
        async with AsyncClient(daemon.endpoint, timeout=60) as client:
            space = await client.namespace("restart", "bench", SPEC, recipes=name == "labels")
            slowest, found_first = 0.0, False
            while True:
                for probe in probes[:1]:
                    sent = time.perf_counter()
                    found = await space.match(probe, lease_s=0, parts=False)
                    slowest = max(slowest, time.perf_counter() - sent)
                    if found.pages and not found_first:
                        found_first = True
                        report.add(f"{name}_first_match", repetition, time.perf_counter() - started, "s")
                state = await asyncio.to_thread(_ready, daemon.http)
                if state["status"] == "ready":
                    break
                await asyncio.sleep(0.02)
            report.add(f"{name}_all_pages", repetition, time.perf_counter() - started, "s")
            report.add(f"{name}_slowest_match", repetition, 1000 * slowest, "ms")
            for probe in probes:
                assert (await space.match(probe, lease_s=0, parts=False)).pages == len(probe) // PAGE_TOKENS
        report.add(f"{name}_resident", repetition, _resident(daemon.pid) / (1 << 20), "MiB")
    finally:
        daemon.kill()


def _ready(http: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{http}/readyz", timeout=30) as answer:
        state: dict[str, str] = json.load(answer)
    return state


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(settings: argparse.Namespace) -> Report:
    """All shapes of journals."""
    report = Report("restart", {"pages": settings.pages, "page_tokens": PAGE_TOKENS})
    for name, recipes, mixed in (("plain", False, False), ("labels", True, False), ("mixed", False, True)):
        if name not in settings.shapes:
            continue
        namespace = NamespaceSettings("default", "restart", "bench", SPEC, recipes=recipes)
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
            maker = make(Path(folder) / "data", namespace, settings.pages, mixed=mixed)
            phases(report, Path(folder) / "data", namespace, name, settings.pages)
            for repetition in range(settings.repetitions):
                try:
                    asyncio.run(restart(report, Path(folder) / "data", maker, name, repetition))
                except ConnectionLost as error:
                    raise SystemExit(f"the daemon did not come up: {error.message}") from error
    return report


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=["plain", "labels", "mixed"], help="plain, labels (recipes on), mixed (parts vary)")
    settings = parser.parse_args()
    if settings.quick:
        settings.pages, settings.repetitions, settings.shapes = 100_000, 1, ["plain"]
    report = run(settings)
    report.show(f"restart on a journal of {settings.pages:,} pages")
    report.write(settings.json)
    report.draw(settings.png, "s, ms or MiB")


if __name__ == "__main__":
    main()
