"""One client of the soak: mixed load on a fixed set of contexts until its standard input ends. Counts go out as JSON lines.

Every byte fetched is checked. What is tolerated is an error that says "not now" or "not any more"; the rest is counted by code.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.api.wire import Component, KVSpec, KVStoreError, PartRange
from kvstore_client import AsyncClient, fingerprint_revision
from kvstore_client.namespace import Namespace
from kvstore_workers.generator import PageGenerator

SPEC = KVSpec(64, (Component("full", 8, 2, 32),), max_slice_bytes=32 << 10)
"""Pages of 64 tokens and 128 KiB, in 4 slices."""
CONTEXT_PAGES = 16
_ROOT_PAGES = 4
_FAMILY = 8
"""So many contexts share their first pages."""
_FORKS = 8
_MODEL = fingerprint_revision("soak", "1")
_PASSING = 4
_REPORT_S = 1.0
_TIMEOUT_S = 90.0
"""A durable put may wait its 20 s for a disk that is shared, and be put again; what takes longer than this hangs."""

Tokens = npt.NDArray[np.uint32]


@dataclass(slots=True)
class Tally:
    """What a worker did since its last report."""

    operations: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    fetched_bytes: int = 0
    put_bytes: int = 0
    wrong_bytes: int = 0


def context(number: int) -> Tokens:
    """The tokens of a context."""
    rng = np.random.Generator(np.random.Philox(key=[number, 1]))
    tokens = rng.integers(0, 50_000, CONTEXT_PAGES * SPEC.page_tokens, dtype=np.uint32)
    root = np.random.Generator(np.random.Philox(key=[number // _FAMILY, 2]))
    tokens[: _ROOT_PAGES * SPEC.page_tokens] = root.integers(0, 50_000, _ROOT_PAGES * SPEC.page_tokens, dtype=np.uint32)
    return tokens


def fork(number: int, which: int) -> Tokens:
    """A context that leaves another one half way."""
    half = CONTEXT_PAGES // 2 * SPEC.page_tokens
    rng = np.random.Generator(np.random.Philox(key=[number, 3 + which]))
    return np.concatenate([context(number)[:half], rng.integers(0, 50_000, 2 * SPEC.page_tokens, dtype=np.uint32)])


async def open_soak(client: AsyncClient) -> Namespace:
    """The namespace that all workers share."""
    return await client.namespace("soak", _MODEL, SPEC, retention_s=0)


class Load:
    """The operations, and how often each is done."""

    def __init__(self, client: AsyncClient, namespace: Namespace, contexts: int, seed: int) -> None:
        self.tally = Tally()
        self._client = client
        self._namespace = namespace
        self._contexts = contexts
        self._rng = random.Random(seed)
        self._generator = PageGenerator(SPEC.page_bytes, SPEC.page_tokens)
        self._buffer = np.empty(CONTEXT_PAGES * SPEC.page_bytes // 8, np.uint64)
        self._mix: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._turn, 40), (self._fork, 10), (self._sub_range, 15), (self._leave_lease, 5), (self._look, 5),
            (self._cancelled_fetch, 8), (self._cancelled_put, 8), (self._passing_namespace, 1),
        ]  # fmt: skip

    async def fill(self, first: int, step: int) -> None:
        """Put every `step`th context from `first` on, durably, so that both tiers are full afterwards."""
        for number in range(first, self._contexts, step):
            await self._guarded("fill", self._serve(context(number), durable=True))

    async def once(self) -> None:
        """One operation, chosen at random."""
        operation = self._rng.choices([o for o, _ in self._mix], [w for _, w in self._mix])[0]
        await self._guarded(operation.__name__.strip("_"), operation())

    async def _guarded(self, name: str, work: Awaitable[None]) -> None:
        self.tally.operations[name] += 1
        try:
            await work
        except KVStoreError as error:
            self.tally.errors[error.code] += 1

    def _any(self) -> int:
        return self._rng.randrange(self._contexts)

    async def _turn(self) -> None:
        await self._serve(context(self._any()))

    async def _fork(self) -> None:
        await self._serve(fork(self._any(), self._rng.randrange(_FORKS)))

    async def _serve(self, tokens: Tokens, *, durable: bool | None = None) -> None:
        """What a worker does with a prompt: fetch what is there, put what is not."""
        seeds = self._generator.seeds(tokens)
        async with await self._namespace.match(tokens) as match:
            hit = match.pages
            if hit:
                self.tally.fetched_bytes += await self._namespace.fetch(match, self._pages(hit))
                self.tally.wrong_bytes += sum(self._generator.wrong_bytes(seeds[i], self._page(i)) for i in range(hit))
            if hit < len(seeds):
                await self._put(tokens, seeds, hit, durable=self._rng.random() < 0.3 if durable is None else durable)

    async def _put(self, tokens: Tokens, seeds: list[bytes], first: int, *, durable: bool) -> None:
        for index, seed in enumerate(seeds[first:]):
            self._generator.fill(seed, self._page(index))
        data = self._pages(len(seeds) - first)
        await self._namespace.put(tokens, data, first_page=first, durable=durable)
        self.tally.put_bytes += data.nbytes

    async def _sub_range(self) -> None:
        """Some layers and one head of some pages."""
        tokens = context(self._any())
        layer = self._rng.randrange(7)
        wanted = PartRange(0, layer, self._rng.randrange(layer + 1, 9), (head := self._rng.randrange(2)), head + 1)
        seeds = self._generator.seeds(tokens)
        async with await self._namespace.match(tokens) as match:
            if not match.pages:
                return
            first = self._rng.randrange(match.pages)
            out = np.empty((match.pages - first, SPEC.part_bytes(wanted)), np.uint8)
            self.tally.fetched_bytes += await self._namespace.fetch(match, out, pages=(first, match.pages), wanted=wanted)
            for page, found in zip(range(first, match.pages), out, strict=True):
                self._generator.fill(seeds[page], self._page(0))
                whole = self._page(0).view(np.uint8).reshape(8, 2, 2, -1)
                due = whole[wanted.layer_lo : wanted.layer_hi, :, wanted.head_lo : wanted.head_hi]
                self.tally.wrong_bytes += int((due.ravel() != found).sum())

    async def _leave_lease(self) -> None:
        await self._namespace.match(context(self._any()), lease_s=self._rng.uniform(0.5, 3))

    async def _look(self) -> None:
        await self._namespace.match(context(self._any()), lease_s=0, parts=False)

    async def _cancelled_fetch(self) -> None:
        async with await self._namespace.match(context(self._any())) as match:
            await self._cut_short(self._namespace.fetch(match, self._pages(match.pages)))

    async def _cancelled_put(self) -> None:
        tokens = fork(self._any(), self._rng.randrange(_FORKS))
        await self._cut_short(self._put(tokens, self._generator.seeds(tokens), 0, durable=self._rng.random() < 0.5))

    async def _cut_short(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.wait([task], timeout=self._rng.uniform(0, 0.02))
        task.cancel()
        for result in await asyncio.gather(task, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _passing_namespace(self) -> None:
        """A namespace of another model, with something in it, that is dropped again: perhaps while another worker uses it."""
        which = self._rng.randrange(_PASSING)
        passing = await self._client.namespace(f"passing-{which}", fingerprint_revision("passing", str(which)), SPEC, retention_s=0)
        data = np.zeros(2 * SPEC.page_bytes, np.uint8)
        await passing.put(context(which)[: 2 * SPEC.page_tokens], data, durable=True)
        await passing.drop()

    def _pages(self, count: int) -> npt.NDArray[np.uint64]:
        return self._buffer[: count * SPEC.page_bytes // 8]

    def _page(self, index: int) -> npt.NDArray[np.uint64]:
        words = SPEC.page_bytes // 8
        return self._buffer[index * words : (index + 1) * words]


async def _main(arguments: argparse.Namespace) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    async with AsyncClient(arguments.endpoint, connections=2, timeout=_TIMEOUT_S, name=f"soak {arguments.seed}") as client:
        load = Load(client, await open_soak(client), arguments.contexts, arguments.seed)
        if arguments.fill_step:
            await load.fill(arguments.fill_first, arguments.fill_step)
            print(msgspec.json.encode(load.tally).decode(), flush=True)
            load.tally = Tally()
        said = time.monotonic()
        while not ended.is_set():
            await load.once()
            if time.monotonic() - said >= _REPORT_S:
                print(msgspec.json.encode(load.tally).decode(), flush=True)
                load.tally, said = Tally(), time.monotonic()
        print(msgspec.json.encode(load.tally).decode(), flush=True)


def main() -> None:
    """Run a worker until its standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--contexts", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--fill-first", type=int, default=0)
    parser.add_argument("--fill-step", type=int, default=0, help="put every so manieth context before anything else; 0: none")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
