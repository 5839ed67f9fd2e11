"""A trace through a real daemon, over real sockets, with the trace's clock: it hits what the policy lab says it would."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import Component, KVSpec
from kvstore.config import load_config
from kvstore.daemon import serve
from kvstore.lab.compare import Comparison
from kvstore.lab.readers import ReadOptions, read_trace
from kvstore.lab.trace import Trace, TraceSpace
from kvstore.store import Clock
from kvstore_client import AsyncClient, ConnectionLost

FILE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
REQUESTS = 300
SPEC = KVSpec(1, (Component("full", 4, 1, 64),))
SLOT, BLOCK = 1280, 4096
"""What a page takes up in DRAM and on SSD."""
HIGH, LOW = 0.99, 0.97


class TraceClock(Clock):
    """Stands at the time of the request that is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def now(self) -> float:
        return self.time


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The first requests of a recorded hour of chat, one token a page."""
    if not FILE.exists():
        pytest.skip(f"the trace {FILE.name} is not there")
    whole = read_trace(FILE, ReadOptions())
    end = int(whole.ends[REQUESTS - 1])
    cut = slice(0, REQUESTS)
    ones = np.ones(REQUESTS, np.int64)
    _, pages = np.unique(whole.pages[:end], return_inverse=True)
    lengths = np.diff(np.append(0, whole.ends[cut]))
    return replace(
        whole, spaces=(TraceSpace(1, SLOT),), pages=pages.astype(np.uint32), ends=whole.ends[cut], times=whole.times[cut], last_tokens=ones,
        prompt_tokens=lengths, space=whole.space[cut], op=whole.op[cut], first=whole.first[cut], hints=whole.hints[:REQUESTS],
    )  # fmt: skip


@contextlib.asynccontextmanager
async def daemon_with(clock: Clock, data_dir: Path, dram: int, ssd: int, policy: str, admission: str) -> AsyncIterator[AsyncClient]:
    """A daemon in this process, which can so be given a clock; a client of it over its socket."""
    flags = {"data_dir": data_dir, "port": 0, "http_port": 0, "dram": dram, "ssd": ssd, "policy": policy}
    flags |= {"ssd_admission": admission}
    config = load_config({**flags, "high_watermark": HIGH, "low_watermark": LOW, "shutdown_timeout": 5.0}, environment={})
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(config, stop, clock))
        try:
            async with contextlib.AsyncExitStack() as stack:
                yield await stack.enter_async_context(await _connected(f"unix:{data_dir / 'kvstore.sock'}"))
        finally:
            stop.set()


async def _connected(endpoint: str) -> AsyncClient:
    async with asyncio.timeout(30):
        while True:
            client = AsyncClient(endpoint)
            try:
                async with client:
                    await client.ping()
                return AsyncClient(endpoint)
            except ConnectionLost:
                await asyncio.sleep(0.05)


async def replay(trace: Trace, clock: TraceClock, client: AsyncClient) -> int:
    """Each request as a worker makes it: look up, fetch what is there, then put what was missing. Returns the pages hit."""
    namespace = await client.namespace("replay", "rev-1", SPEC)
    content = np.random.default_rng(3).integers(0, 256, (int(trace.pages.max()) + 1, SPEC.page_bytes), dtype=np.uint8)
    hits, into = 0, np.empty(4096 * SPEC.page_bytes, np.uint8)
    for start, end, time in zip(trace.starts.tolist(), trace.ends.tolist(), trace.times.tolist(), strict=True):
        clock.time = time
        tokens = trace.pages[start:end].astype(np.uint32)
        async with await namespace.match(tokens, lease_s=30) as match:
            hits += match.pages
            await namespace.fetch(match, into[: match.pages * SPEC.page_bytes])
            assert np.array_equal(into[: match.pages * SPEC.page_bytes], content[tokens[: match.pages]].ravel()), "wrong bytes were served"
            if match.pages < len(tokens):
                await namespace.put(tokens, content[tokens[match.pages :]].ravel(), first_page=match.pages)
    return hits


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("policy", "admission"), [("lru", "all"), ("classifier", "all"), ("classifier", "classifier")])
async def test_the_daemon_hits_what_the_lab_says(trace: Trace, tmp_path: Path, policy: str, admission: str) -> None:
    """What is refused on SSD depends on little in so short an excerpt: of that is asked only that it costs nothing."""
    unique = trace.unique_pages
    dram, ssd = unique * 15 // 100 * SLOT, unique * 30 // 100 * BLOCK
    clock = TraceClock()
    async with daemon_with(clock, tmp_path / "d", dram, ssd, policy, admission) as client:
        async with asyncio.timeout(250):
            hits = await replay(trace, clock, client)
    lab = Comparison(trace, batch=HIGH - LOW, hints=False, ssd_loss=None)
    said = lab.run(policy, int(dram * HIGH), ssd * SLOT // BLOCK).hit_ratio
    assert said > 0.04, "nothing is hit: this test shows nothing"
    print(f"{policy}: {hits / int(trace.ends[-1]):.4f} by the daemon, {said:.4f} by the lab, {unique} different pages")
    if admission == "all":
        assert hits / int(trace.ends[-1]) == pytest.approx(said, abs=0.01)
    else:
        assert hits / int(trace.ends[-1]) > said - 0.01
