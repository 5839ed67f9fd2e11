"""What a worker node has: accelerators with their HBM, an engine that computes one fill at a time, and a decode batch."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import NotFound
from kvstore.tiers.hbm import Arrived, DeviceConfig, Fill, Hbm, HostPool, PageSet
from kvstore_client import Follower, Match, Namespace
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.cost import DecodeBatch
from kvstore_workers.factory.messages import Prompt, Stats
from kvstore_workers.factory.model import GROUP_LAYERS, GROUPS, Bytes, Shards
from kvstore_workers.factory.settings import Settings
from kvstore_workers.generator import prompt_tokens
from kvstore_workers.trace import Request

T = TypeVar("T")


def now() -> float:
    """The clock of all processes of a factory, and of their event loops."""
    return time.monotonic()


@dataclass(slots=True)
class Meter:
    """What a node has done. Bytes by path and tier, seconds by kind."""

    moved: Counter[str] = field(default_factory=Counter)
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((k.value for k in Kind), 0.0))
    alive_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((k.value for k in Kind), 0.0))
    wrong_bytes: int = 0
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pages:
    """A prompt's whole pages: its tokens up to their end, and a seed for the bytes of each."""

    tokens: npt.NDArray[np.uint32]
    seeds: list[bytes]


class Node:
    """The parts of a worker that its stages share."""

    def __init__(self, namespace: Namespace, outgoing: Namespace, settings: Settings, kind: Kind, path: str) -> None:
        self.namespace = namespace
        self.outgoing = outgoing
        """The same over other connections: what is computed leaves by its own link, and does not wait behind what comes in."""
        self.settings = settings
        self.kind = kind
        self.path = path
        self.cost = settings.cost()
        self.shards = Shards(namespace.spec, settings.accelerators)
        device = DeviceConfig(settings.hbm_bytes, settings.hbm_bandwidth, settings.hbm_latency_s)
        self.hbm = Hbm([HostPool(device) for _ in range(settings.accelerators)], grace_s=settings.grace_s)
        self.engine = asyncio.Lock()
        self.engine_free_at = 0.0
        """When the fills that it has will be done, by prediction."""
        self.batch = DecodeBatch(self.cost, now())
        self.meter = Meter()
        self._ends: dict[int, asyncio.Future[float]] = {}
        self._batch_changed = asyncio.Event()
        self._since = now()

    # --- computing -----------------------------------------------------------------------------------------------------

    async def compute(self, seconds: float) -> None:
        """The accelerators work on a fill; an aggregated worker's batch stands still meanwhile."""
        started = now()
        if len(self.batch):
            self.batch.pause(started + seconds, started)
            self._batch_changed.set()
        await asyncio.sleep(seconds)
        self.meter.busy_s[self.kind.value] += seconds

    async def first_pass(self, page_set: PageSet, context_tokens: int) -> None:
        """A sequence's first token: the pass goes through the layer groups as they arrive."""
        seconds = self.cost.decode_step_s(1, context_tokens)
        for group in range(GROUPS):
            await page_set.arrived(group)
            await asyncio.sleep(seconds / GROUPS)
        self.meter.busy_s[self.kind.value] += seconds

    async def decode(self, turn: int, context_tokens: int, output_tokens: int) -> float:
        """Be in the decode batch until so many tokens are made. Returns when they were."""
        self.batch.add(turn, context_tokens, output_tokens, now())
        end: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._ends[turn] = end
        self._batch_changed.set()
        try:
            return await end
        finally:
            del self._ends[turn]
            self.batch.remove(turn, now())
            self._batch_changed.set()

    async def run_batch(self) -> None:
        """Make the batch's tokens in time, for ever."""
        while True:
            self._batch_changed.clear()
            due = self.batch.next_end()
            try:
                async with asyncio.timeout(None if due is None else max(due - now(), 0.0)):
                    await self._batch_changed.wait()
            except TimeoutError:
                pass  # somebody is done
            moment = now()
            for turn in self.batch.ended(moment):
                if not self._ends[turn].done():
                    self._ends[turn].set_result(moment)

    def become(self, kind: Kind) -> None:
        """Another kind from now on."""
        self._count_alive()
        self.kind = kind

    def _count_alive(self) -> None:
        moment = now()
        self.meter.alive_s[self.kind.value] += moment - self._since
        self._since = moment

    def stats(self, name: str) -> Stats:
        """What it has done so far."""
        self._count_alive()
        decoding = self.kind if self.kind is Kind.AGGREGATED else Kind.DECODE
        busy, account = dict(self.meter.busy_s), self.hbm.account()
        busy[decoding.value] += self.batch.busy_s
        return Stats(
            name, self.kind.value, busy, dict(self.meter.alive_s), account.used, account.idle, account.moving, self.hbm.holding,
            account.dropped_sets, account.late_sets, dict(self.meter.moved) | {"hbm": account.arrived_bytes}, self.meter.wrong_bytes,
            self.meter.verified_bytes, self.batch.tokens,
        )  # fmt: skip

    # --- pages ---------------------------------------------------------------------------------------------------------

    async def pages(self, prompt: Prompt) -> Pages:
        """The whole pages of a prompt."""
        request = Request(prompt.turn, 0, prompt.input_tokens, tuple(prompt.blocks), prompt.tail_block)

        def make() -> Pages:
            tokens = prompt_tokens(request)
            seeds = self.shards.seeds(tokens)
            return Pages(tokens[: len(seeds) * self.shards.spec.page_tokens], seeds)

        return await asyncio.to_thread(make)

    def bring(self, match: Match | None, hit: int, new: int, needed_at: float | None) -> PageSet:
        """Bring the first `hit` pages of a match into HBM, each accelerator's shard straight to its memory, with room for new ones."""

        async def fill(views: list[memoryview], arrived: Arrived) -> None:
            if match is not None and hit:
                async with asyncio.TaskGroup() as group:
                    for device, view in enumerate(views):
                        group.create_task(self.fetch(match, hit, device, view[: hit * self.shards.page_bytes], arrived))
                self._count_fetched(match, hit)

        return self._prefetch(fill, hit, new, needed_at)

    def bring_followed(self, match: Match, hit: int, follower: Follower, new: int, needed_at: float) -> PageSet:
        """Bring the first `hit` pages from the store, and those after them from a put under way. Waits until that is committed."""
        cut = hit * self.shards.page_bytes

        async def fill(views: list[memoryview], arrived: Arrived) -> None:
            async with asyncio.TaskGroup() as group:
                for device, view in enumerate(views):
                    if hit:
                        group.create_task(self.fetch(match, hit, device, view[:cut], lambda *_: None))
                    group.create_task(follower.fetch(view[cut:], wanted=self.shards.parts[device], group_layers=GROUP_LAYERS))
            await follower.committed()
            self._count_fetched(match, hit)
            self.meter.moved[f"follow_{self.path}"] += new * self.shards.spec.page_bytes
            for device in range(len(views)):
                for number in range(GROUPS):
                    arrived(device, number)

        return self._prefetch(fill, hit + new, 0, needed_at)

    def _prefetch(self, fill: Fill, moved: int, new: int, needed_at: float | None) -> PageSet:
        devices, size = len(self.shards.parts), self.shards.page_bytes
        return self.hbm.prefetch(
            [moved * size] * devices, _one_error(fill), room=[new * size] * devices, groups=GROUPS, needed_at=needed_at
        )

    async def fetch(self, match: Match, pages: int, device: int, view: memoryview, arrived: Arrived) -> None:
        """One accelerator's shard of the first pages of a match, in layer order."""
        await self.namespace.fetch(
            match, view, pages=(0, pages), wanted=self.shards.parts[device], group_layers=GROUP_LAYERS,
            on_group=lambda low, _: arrived(device, low // GROUP_LAYERS), timeout=self.settings.deadline_s,
        )  # fmt: skip

    def _count_fetched(self, match: Match, pages: int) -> None:
        nbytes = pages * self.shards.spec.page_bytes
        dram = nbytes * min(max(match.dram_pages, 0), match.pages) // max(match.pages, 1)
        self.meter.moved[f"fetch_{self.path}_dram"] += dram
        self.meter.moved[f"fetch_{self.path}_ssd"] += nbytes - dram

    async def verify(self, seeds: list[bytes], views: list[memoryview]) -> None:
        """Check every byte of pages in HBM."""
        if seeds:
            shards: list[Bytes] = [np.frombuffer(view, np.uint8)[: len(seeds) * self.shards.page_bytes] for view in views]
            self.meter.wrong_bytes += await in_thread(self.shards.wrong_bytes, seeds, shards)
            self.meter.verified_bytes += len(seeds) * self.shards.spec.page_bytes


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that reads or writes HBM in a thread. Cancelled, it still waits for the end: the memory must not go before."""
    future = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(future)
    finally:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue  # once more; the first one is raised in the end


def _one_error(fill: Fill) -> Fill:
    """A fill whose shards fail together fails as one of them does."""

    async def run(views: list[memoryview], arrived: Arrived) -> None:
        try:
            await fill(views, arrived)
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None

    return run


def first_of(error: BaseException) -> BaseException:
    """The first error of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def missing(turn: int, have: int, want: int) -> NotFound:
    """Pages that should be in the store are not."""
    return NotFound(f"turn {turn}: the store has {have} of its {want} pages")
