"""Churn in the DRAM arena: four part sizes come and go at random, at 92% live, and nothing may be evicted.

Four namespaces, each with pages of one part of 48, 100, 260 or 520 KiB, share the arena of a store in process. Every put is a
real one of one page, with its digests; before it, random pages are removed until the new one fits under the live share. Which
size comes next follows shares that wander at random, so the sizes' parts of the arena grow and shrink for good. One page in a
hundred is leased at any time. The mover's eviction is switched off: a put either gets a place or is refused.

The same churn runs without moving (`move_share` 0), which shows what is refused then. Waste is the share of the segments in
use (empty ones are anybody's room) that holds nothing live. At the end everything that is live is verified, and the arena is
filled until a put is refused.
"""

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.report import Report, arguments
from kvstore.api.wire import Component, KVSpec, PartRange
from kvstore.digests import slice_digest
from kvstore.errors import Busy
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store, StoreConfig
from kvstore.store.matching.leases import Lease
from kvstore.tiers.watermarks import Watermarks

SIZES_KIB = (48, 100, 260, 520)
LIVE, LEASED = 0.92, 0.01
PAGE_TOKENS = 1
PART = PartRange(0, 0, 8, 0, 1)
OWNER = 1
_SAMPLE_EVERY = 500
_LEASE_PUTS = 50


def spec(kib: int) -> KVSpec:
    """Pages of one part of `kib` KiB."""
    return KVSpec(PAGE_TOKENS, (Component("full", 8, 1, kib << 6, "u8"),))


@dataclass(slots=True)
class Page:
    """A page that is live: what finds it again."""

    space: Space
    token: int
    stored: int
    lease: Lease | None = None


class Mix:
    """Shares of the sizes that wander: each put moves their logarithms by a random step."""

    def __init__(self, seed: int, step: float) -> None:
        self._random = np.random.default_rng(seed)
        self._step = step
        self._logs = np.zeros(len(SIZES_KIB))

    def next(self) -> int:
        """The number of the next size. A size's share is of the bytes put, not of the puts."""
        self._logs += self._random.normal(0, self._step, len(SIZES_KIB))
        self._logs -= self._logs.mean()
        np.clip(self._logs, -2.5, 2.5, out=self._logs)
        weights = np.exp(self._logs) / np.array(SIZES_KIB)
        return int(self._random.choice(len(SIZES_KIB), p=weights / weights.sum()))


@dataclass(slots=True)
class Outcome:
    """What a run gave. Waste is a share of the segments' bytes."""

    puts: int = 0
    put_bytes: int = 0
    refused: int = 0
    moved_bytes: int = 0
    waste_most: float = 0.0
    waste: list[float] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    shares: list[list[float]] = field(default_factory=list)
    filled: float = 0.0
    seconds: float = 0.0


class Churn:
    """One run in one store."""

    def __init__(self, store: Store, settings: argparse.Namespace) -> None:
        self.store = store
        self.outcome = Outcome()
        self._settings = settings
        self._mix = Mix(settings.seed, settings.drift)
        self._random = random.Random(settings.seed)
        self._pages: list[Page] = []
        self._leased: list[Page] = []
        self._live = 0
        self._resident = 0
        self._next_token = 0
        self._spaces: list[Space] = []
        self._payload = np.random.default_rng(settings.seed).bytes((max(SIZES_KIB) << 10) + (1 << 20))

    async def run(self) -> Outcome:
        """Fill, churn, verify, and fill to the brim."""
        for kib in SIZES_KIB:
            settings = NamespaceSettings("default", f"size-{kib}", "model", spec(kib))
            self._spaces.append(await self.store.create_namespace(settings))
        while self._live < LIVE * self.store.config.dram_bytes - (max(SIZES_KIB) << 11):
            await self._put(self._mix.next())
        before, moved = self.outcome, self.store.stats.moved_stored_bytes
        assert self._settings.no_moving or not before.refused
        self.outcome = Outcome()
        started = time.perf_counter()
        remaining = self._settings.puts
        workers = [asyncio.create_task(self._work(remaining // self._settings.workers)) for _ in range(self._settings.workers)]
        await asyncio.gather(*workers)
        self.outcome.seconds = time.perf_counter() - started
        self.outcome.moved_bytes = self.store.stats.moved_stored_bytes - moved
        assert self.store.stats.evicted_dram_pages == 0
        await self._verify()
        await self._fill()
        return self.outcome

    async def _work(self, puts: int) -> None:
        for _ in range(puts):
            number = self._mix.next()
            new = self._stored(number)
            while self._live + new > LIVE * self.store.config.dram_bytes:
                self._remove()
            self._turn_leases()
            await self._put(number)
            self.outcome.waste_most = max(self.outcome.waste_most, self._waste())
            if self.outcome.puts % _SAMPLE_EVERY == 0:
                self._sample()

    def _stored(self, number: int) -> int:
        layout = self._spaces[number].spec.slice_layout(PART)
        return layout.payload_bytes + 16 * layout.count

    def _remove(self) -> None:
        while True:
            at = self._random.randrange(len(self._pages))
            page = self._pages[at]
            if page.lease is None:
                break
        self._pages[at] = self._pages[-1]
        self._pages.pop()
        tree = page.space.tree
        page.space.remove_page(int(tree.path_slots(tree.match(np.uint32(page.token).tobytes()))[0]))
        self._live -= page.stored
        self._resident -= page.stored

    def _turn_leases(self) -> None:
        """Lease a page now and then, and let go of the longest leased: one in a hundred is."""
        if self.outcome.puts % _LEASE_PUTS and len(self._leased) >= LEASED * len(self._pages):
            return
        page = self._random.choice(self._pages)
        if page.lease is None:
            page.lease = self.store.match(page.space, np.uint32(page.token).tobytes(), {}, owner=OWNER, lease_s=3600).lease
            assert page.lease is not None
            self._leased.append(page)
        while len(self._leased) > LEASED * len(self._pages):
            oldest = self._leased.pop(0)
            assert oldest.lease is not None
            self.store.release_lease(OWNER, oldest.lease.id)
            oldest.lease = None

    async def _put(self, number: int) -> bool:
        space, stored = self._spaces[number], self._stored(number)
        self._next_token += 1
        token = self._next_token
        self._live += stored
        self.outcome.puts += 1
        try:
            put = await self.store.begin_put(
                OWNER, space, PutRequest(token.to_bytes(16, "little"), np.uint32(token).tobytes(), {}, 0, (PART,), Ack.MEMORY)
            )
        except Busy:
            self._live -= stored
            self.outcome.refused += 1
            return False
        await asyncio.sleep(0)  # where a client's bytes would arrive
        first = self._random.randrange(1 << 20)
        for index, size in enumerate(space.spec.slice_layout(PART).sizes):
            view, _ = put.locate(0, 0, index, size, 1)
            view[:] = self._payload[first : first + size]
            digest = slice_digest(view)
            put.received(0, 0, index, [digest], digest)
        await self.store.commit_put(put)
        self._pages.append(Page(space, token, stored))
        self._resident += stored
        self.outcome.put_bytes += stored
        return True

    def _waste(self) -> float:
        return 1 - self._resident / self.store.figures.dram_segments.held

    def _sample(self) -> None:
        self.outcome.waste.append(self._waste())
        self.outcome.segments.append(self.store.figures.dram_segments.count)
        sizes = np.zeros(len(SIZES_KIB))
        for page in self._pages:
            sizes[self._spaces.index(page.space)] += page.stored
        self.outcome.shares.append((sizes / sizes.sum()).tolist())

    async def _verify(self) -> None:
        for page in self._pages:
            space = page.space
            row = space.rows_of(int(space.tree.path_slots(space.tree.match(np.uint32(page.token).tobytes()))[0]))[0]
            held = await self.store.reading.hold(space, row)
            layout = space.blobs.layout_of(row)
            for index in range(layout.count):
                table = layout.payload_bytes + 16 * index
                piece = held.view[layout.offsets[index] : layout.offsets[index + 1]]
                assert slice_digest(piece) == held.view[table : table + 16], "wrong bytes"
            held.release()

    async def _fill(self) -> None:
        """Put until the first refusal: what can't be used then is lost to the sizes' being apart."""
        puts, refused = self.outcome.puts, self.outcome.refused
        while await self._put(self._mix.next()):
            pass
        self.outcome.puts, self.outcome.refused = puts, refused
        self.outcome.filled = self._live / self.store.config.dram_bytes


async def churn(settings: argparse.Namespace) -> Outcome:
    """One run in a store of its own."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        config = StoreConfig(
            data_dir=Path(folder) / "data", dram_bytes=settings.dram << 20, ssd_bytes=1 << 20, max_pages=200_000,
            watermarks=Watermarks(1.0, 0.99, on_demand=False), put_wait_s=0.0 if settings.no_moving else 1.0, shutdown_s=0.0,
            move_share=0.0 if settings.no_moving else settings.move_share, journal_bytes=64 << 20,
        )  # fmt: skip
        async with Store(config) as store:
            return await Churn(store, settings).run()


def record(report: Report, name: str, outcome: Outcome) -> None:
    """The figures of a run."""
    shares = np.array(outcome.shares)
    report.add(f"{name}_refused", 0, outcome.refused, f"of {outcome.puts} puts")
    report.add(f"{name}_moved_vs_put", 0, outcome.moved_bytes / outcome.put_bytes, "bytes a byte")
    for number, waste in enumerate(outcome.waste):
        report.add(f"{name}_waste", number, waste, "of the segments")
    for number, segments in enumerate(outcome.segments):
        report.add(f"{name}_segments", number, segments, "")
    report.add(f"{name}_waste_most", 0, outcome.waste_most, "of the segments")
    report.add(f"{name}_filled_until_refused", 0, outcome.filled, "of the arena")
    report.add(f"{name}_seconds", 0, outcome.seconds, "s")
    for size, column in zip(SIZES_KIB, shares.T, strict=True):
        for number, share in enumerate(column):
            report.add(f"{name}_share_of_{size}_KiB", number, float(share), "of what is live")


def run(settings: argparse.Namespace) -> Report:
    """With moving, then without."""
    report = Report("arena_churn", {k: v for k, v in vars(settings).items() if k not in ("json", "png")})
    for name in ("moving", "not_moving"):
        settings.no_moving = name == "not_moving"
        outcome = asyncio.run(churn(settings))
        record(report, name, outcome)
        print(
            f"{name}: {outcome.refused} of {outcome.puts} puts refused, waste at most {outcome.waste_most:.4f}, "
            f"moved {outcome.moved_bytes / outcome.put_bytes:.3f} of the bytes put, {outcome.seconds:.0f} s",
            flush=True,
        )
    report.ratios["moved_vs_put"] = round(report.median("moving_moved_vs_put"), 4)
    report.ratios["waste_most"] = round(report.median("moving_waste_most"), 4)
    return report


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--dram", type=int, default=512, help="MiB of the arena")
    parser.add_argument("--puts", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=4, help="puts under way at once")
    parser.add_argument("--drift", type=float, default=0.016, help="how far a put moves the logarithm of each size's share")
    parser.add_argument("--move-share", type=float, default=0.5, help="bytes moved for each byte put, at most")
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()
    if settings.quick:
        settings.dram, settings.puts = 256, 6_000
    report = run(settings)
    report.show("churn of four part sizes, 92% live, 1% leased, nothing evicted")
    report.write(settings.json)
    report.draw(settings.png, "see the units in the JSON")


if __name__ == "__main__":
    main()
