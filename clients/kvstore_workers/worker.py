"""One simulated worker node: takes requests from standard input, one JSON a line, and reports on each on standard output.

For each it matches the prompt, fetches the hit and checks every byte, "computes" the rest for a modelled time, and puts the
new pages.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import KVSpec, NotFound
from kvstore_client import AsyncClient
from kvstore_client.namespace import Namespace
from kvstore_workers.generator import PageGenerator, prompt_tokens
from kvstore_workers.trace import Request


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times are in seconds, -1 where there was nothing to do."""

    number: int
    hit_tokens: int = 0
    input_tokens: int = 0
    fetched_bytes: int = 0
    put_bytes: int = 0
    wrong_bytes: int = 0
    lost: int = 0
    """1 if a matched page was gone when it was fetched: then all of it was recomputed."""
    match_s: float = -1.0
    fetch_s: float = -1.0
    put_s: float = -1.0


@contextmanager
def _timed(outcome: Outcome, name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    setattr(outcome, name, time.perf_counter() - started)


class Worker:
    """A worker of one model: `compute_us` is the modelled prefill time a token, in microseconds."""

    def __init__(self, namespace: Namespace, compute_us: float) -> None:
        self._namespace = namespace
        self._spec: KVSpec = namespace.spec
        self._compute_us = compute_us
        self._generator = PageGenerator(self._spec.page_bytes, self._spec.page_tokens)
        self._buffer = np.empty(0, np.uint64)

    async def run(self, request: Request) -> Outcome:
        """Serve one request."""
        outcome = Outcome(request.number, input_tokens=request.input_tokens)
        tokens = prompt_tokens(request)
        seeds = self._generator.seeds(tokens)
        with _timed(outcome, "match_s"):
            match = await self._namespace.match(tokens)
        async with match:
            hit = match.pages
            if hit:
                try:
                    with _timed(outcome, "fetch_s"):
                        outcome.fetched_bytes = await self._namespace.fetch(match, self._pages(hit))
                    outcome.wrong_bytes = sum(self._generator.wrong_bytes(seeds[i], self._page(i)) for i in range(hit))
                except NotFound:
                    outcome.lost, hit = 1, 0
            outcome.hit_tokens = hit * self._spec.page_tokens
            await asyncio.sleep((request.input_tokens - outcome.hit_tokens) * self._compute_us / 1e6)
            if hit < len(seeds):
                await self._put(outcome, tokens, seeds, hit)
        return outcome

    async def _put(self, outcome: Outcome, tokens: npt.NDArray[np.uint32], seeds: list[bytes], first: int) -> None:
        new = len(seeds) - first
        data = self._pages(new)
        for index in range(new):
            self._generator.fill(seeds[first + index], self._page(index))
        with _timed(outcome, "put_s"):
            await self._namespace.put(tokens[: len(seeds) * self._spec.page_tokens], data, first_page=first, timeout=120)
        outcome.put_bytes = new * self._spec.page_bytes

    def _pages(self, count: int) -> npt.NDArray[np.uint64]:
        words = count * self._spec.page_bytes // 8
        if len(self._buffer) < words:
            self._buffer = np.empty(words, np.uint64)
        return self._buffer[:words]

    def _page(self, index: int) -> npt.NDArray[np.uint64]:
        words = self._spec.page_bytes // 8
        return self._buffer[index * words : (index + 1) * words]


async def _main(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncClient(arguments.endpoint, connections=arguments.connections, name=arguments.name) as client:
        worker = Worker(await client.namespace(arguments.namespace), arguments.compute_us)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            data = json.loads(line)
            request = Request(**{**data, "blocks": tuple(data["blocks"])})
            print(json.dumps(asdict(await worker.run(request))), flush=True)


def main() -> None:
    """Run a worker until its standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--name", default="worker")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--compute-us", type=float, default=0.0)
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
