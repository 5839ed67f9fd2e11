"""Layer streaming over loopback TCP: when the first layer group can be used, and what layer order costs.

One context of 64 MiB, 32 layers in 8 groups, fetched again and again from the daemon's DRAM: once in layer order, with the
time at which each group is there, and once unstreamed, page after page; then a put streamed group by group and followed by
a consumer in the same process. Streamed and unstreamed repetitions alternate; ratios are medians over repetitions.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.report import Report, arguments
from kvstore.api.wire import Component, KVSpec
from kvstore_client import AsyncClient, Match, Namespace
from kvstore_workers.daemon_process import DaemonProcess

MIB = 1 << 20
LAYERS, GROUPS = 32, 8
GROUP_LAYERS = LAYERS // GROUPS
SPEC = KVSpec(16, (Component("full", LAYERS, 8, 64),), group_layers=GROUP_LAYERS)
"""32 KiB a layer: a page is 1 MiB, in 8 slices of 4 layers."""

Bytes = npt.NDArray[np.uint8]


def context(pages: int, number: int) -> npt.NDArray[np.uint32]:
    """Tokens of one context."""
    return np.arange(pages * SPEC.page_tokens, dtype=np.uint32) + np.uint32(number * 1_000_000)


class Contexts:
    """Several contexts in rotation, so that no fetch finds its bytes in a cache."""

    def __init__(self, namespace: Namespace, pages: int, count: int) -> None:
        self._namespace = namespace
        self.pages = pages
        self.count = count
        self.data = np.random.default_rng(1).integers(0, 256, (count, pages, LAYERS, SPEC.layer_bytes(SPEC.whole())), dtype=np.uint8)
        self.out = np.ones_like(self.data)
        self._matches: list[Match] = []

    async def put(self) -> None:
        """Put all of them."""
        for number in range(self.count):
            await self._namespace.put(context(self.pages, number), self.data[number])
            self._matches.append(await self._namespace.match(context(self.pages, number), lease_s=3600))

    async def unstreamed(self, number: int) -> float:
        """Seconds of a whole fetch, page after page."""
        started = time.perf_counter()
        await self._namespace.fetch(self._matches[number], self.out[number])
        return time.perf_counter() - started

    async def streamed(self, number: int) -> tuple[list[float], float]:
        """Seconds until each group was there, and of the whole fetch, in layer order."""
        at: list[float] = []
        started = time.perf_counter()
        await self._namespace.fetch(
            self._matches[number], self.out[number], group_layers=GROUP_LAYERS, on_group=lambda *_: at.append(time.perf_counter() - started)
        )
        return at, time.perf_counter() - started

    def verify(self) -> None:
        """What was fetched is what was put."""
        if not np.array_equal(self.out, self.data):
            sys.exit("a context came back with other bytes")


async def followed(producer: Namespace, consumer: Namespace, contexts: Contexts, number: int) -> tuple[float, float]:
    """Seconds until a follower has the first group, and all, of a put that is streamed as fast as it goes."""
    put_id, tokens = number.to_bytes(16, "little"), context(contexts.pages, 1000 + number)
    source, out = contexts.data[number % contexts.count], contexts.out[number % contexts.count]
    groups = [np.ascontiguousarray(source[:, low : low + GROUP_LAYERS]) for low in range(0, LAYERS, GROUP_LAYERS)]
    first: list[float] = []
    started = time.perf_counter()

    async def produce() -> None:
        async with producer.stream_put(tokens, put_id=put_id) as put:
            for index, data in enumerate(groups):
                await put.send(index * GROUP_LAYERS, (index + 1) * GROUP_LAYERS, data)
            await put.commit()

    async def consume() -> None:
        async with consumer.follow(put_id) as follower:
            await follower.fetch(out, group_layers=GROUP_LAYERS, on_group=lambda *_: first.append(time.perf_counter() - started))
            await follower.committed()

    await asyncio.gather(produce(), consume())
    took = time.perf_counter() - started
    await producer.delete(tokens)
    return first[0], took


async def measure(report: Report, settings: argparse.Namespace) -> None:
    """All repetitions."""
    pages = settings.mib * MIB // SPEC.page_bytes
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        environment = {"KVSTORE_HIGH_WATERMARK": "1.0"}
        with DaemonProcess(Path(folder) / "data", "--dram", "2GiB", "--ssd", "1GiB", environment=environment) as daemon:
            async with (
                AsyncClient(daemon.endpoint, connections=settings.connections, shared_memory=False) as client,
                AsyncClient(daemon.endpoint, connections=settings.connections, shared_memory=False) as other,
            ):
                namespace = await client.namespace("stream", "bench", SPEC)
                contexts = Contexts(namespace, pages, max(2, 512 // settings.mib))
                await contexts.put()
                for number in range(contexts.count):
                    await contexts.unstreamed(number)
                for repetition in range(settings.repetitions):
                    number = repetition % contexts.count
                    report.add("unstreamed", repetition, await contexts.unstreamed(number), "s")
                    at, whole = await contexts.streamed((number + 1) % contexts.count)
                    report.add("first_group", repetition, at[0], "s")
                    report.add("streamed", repetition, whole, "s")
                contexts.verify()
                theirs = await other.namespace("stream")
                for repetition in range(settings.repetitions):
                    first, whole = await followed(namespace, theirs, contexts, repetition)
                    report.add("followed_first_group", repetition, first, "s")
                    report.add("followed", repetition, whole, "s")
            daemon.kill()
    report.ratio("first_group_vs_whole", "first_group", "streamed")
    report.ratio("streamed_vs_unstreamed", "streamed", "unstreamed")
    report.ratio("followed_first_group_vs_whole", "followed_first_group", "followed")


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of a context")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=15)
    settings = parser.parse_args()
    if settings.quick:
        settings.repetitions = 5
    shown = {"MiB": settings.mib, "layers": LAYERS, "groups": GROUPS, "connections": settings.connections, "rotation_MiB": 512}
    report = Report("layer_stream", {**shown, "cached": "blobs in the daemon's DRAM", "verified": "both ends"})
    asyncio.run(measure(report, settings))
    report.show("layer streaming over loopback TCP")
    report.write(settings.json)
    report.draw(settings.png, "s")


if __name__ == "__main__":
    main()
