"""A client on the daemon's machine: views, fetches and puts through shared memory, with numpy's copy of the same bytes beside them.

Blobs are rotated over at least 512 MiB, so that no transfer finds its bytes in a cache; all are in the daemon's DRAM. One outstanding
transfer. Every repetition runs numpy's copy, our fetch (verified slice by slice after the copy), our puts (verified by the daemon in its
own copy; once out of a buffer that it reads, once out of any memory) and lease and view next to each other; ratios are medians over
repetitions. Mooncake's shared-memory path (mooncake_client and its dummy client, which verify nothing) is measured beside them where
it is installed, in this interpreter or in the one that --peer-python names; see bench/mooncake_same_host.py.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.mooncake_same_host import Mooncake
from bench.report import Report, arguments
from bench.striped_fetch import GIB, MIB, PAGE_TOKENS, ROTATION, blob_spec
from kvstore_client import AsyncClient, Client
from kvstore_client.blocking import Namespace as BlockingNamespace
from kvstore_client.match import Match
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess

Bytes = npt.NDArray[np.uint8]
VIEWS = 200
"""Leases and views of a repetition, whose median is its value."""


def tokens(index: int) -> npt.NDArray[np.uint32]:
    """The prompt of one blob."""
    return np.full(PAGE_TOKENS, index, np.uint32)


class Ours:
    """A client's calls on blobs of one size."""

    def __init__(self, client: AsyncClient, size: int, source: Bytes, buffer: Bytes, target: Bytes) -> None:
        self._client = client
        self._size = size
        self._count = len(source) // size
        self._source, self._buffer, self._target = source, buffer, target
        self._kept: Namespace
        self._matches: list[Match] = []
        self._namespaces = 0

    def _of(self, whole: Bytes, index: int) -> Bytes:
        return whole[index * self._size : (index + 1) * self._size]

    async def warm_up(self) -> None:
        """Put what is fetched, and make the segments that puts will find."""
        self._kept = await self._client.namespace("kept", "bench", blob_spec(self._size))
        for index in range(self._count):
            await self._kept.put(tokens(index), self._of(self._buffer, index))
            self._matches.append(await self._kept.match(tokens(index), lease_s=3600))
        await self.put_from(self._buffer, 0.0)
        await self.fetch(0.0)

    async def _timed(self, seconds: float, one: Callable[[int], Awaitable[object]]) -> float:
        """GiB/s of whole rotations, for at least so long."""
        moved, took = 0, 0.0
        while not moved or took < seconds:
            started = time.perf_counter()
            for index in range(self._count):
                await one(index)
            took += time.perf_counter() - started
            moved += self._count * self._size
        return moved / GIB / took

    async def copy(self, seconds: float) -> float:
        """Numpy's copy, GiB/s."""

        async def one(index: int) -> None:
            np.copyto(self._of(self._target, index), self._of(self._source, index))

        return await self._timed(seconds, one)

    async def fetch(self, seconds: float) -> float:
        """Fetches into the caller's memory, GiB/s."""
        return await self._timed(seconds, lambda index: self._kept.fetch(self._matches[index], self._of(self._target, index)))

    async def put_from(self, memory: Bytes, seconds: float) -> float:
        """Puts, GiB/s: rotations into a namespace that is dropped after each, so that every blob is new."""
        moved, took = 0, 0.0
        while not moved or took < seconds:
            self._namespaces += 1
            namespace = await self._client.namespace("puts", f"bench {self._namespaces}", blob_spec(self._size))
            started = time.perf_counter()
            for index in range(self._count):
                await namespace.put(tokens(index), self._of(memory, index))
            took += time.perf_counter() - started
            moved += self._count * self._size
            await namespace.drop()
        return moved / GIB / took

    async def view(self) -> float:
        """Lease and view of one blob, median in µs."""
        took = []
        for turn in range(VIEWS):
            started = time.perf_counter()
            match = await self._kept.match(tokens(turn % self._count), lease_s=60)
            view = await self._kept.view(match)
            took.append(time.perf_counter() - started)
            if not view.valid:
                sys.exit("a view was not valid")
            await match.release()
        return float(np.median(took)) * 1e6

    def view_blocking(self, namespace: BlockingNamespace) -> float:
        """As `view`, by the blocking client, which makes small requests in the calling thread."""
        took = []
        for turn in range(VIEWS):
            started = time.perf_counter()
            match = namespace.match(tokens(turn % self._count), lease_s=60)
            view = namespace.view(match)
            took.append(time.perf_counter() - started)
            if not view.valid:
                sys.exit("a view was not valid")
            match.release()
        return float(np.median(took)) * 1e6

    def verify(self) -> None:
        """What was fetched last is what was put."""
        if not np.array_equal(self._target[: self._count * self._size], self._source[: self._count * self._size]):
            sys.exit("blobs came back with other bytes")


async def measure(report: Report, settings: argparse.Namespace) -> None:
    """All sizes."""
    source = np.random.default_rng(1).integers(0, 256, ROTATION, dtype=np.uint8)
    target = np.zeros(ROTATION, np.uint8)
    target[:: 4096 // 2] = 1  # so that the pages are there
    for size in settings.sizes:
        mooncake = Mooncake.start(settings.peer_python, size * MIB, ROTATION)
        if isinstance(mooncake, str):
            print(f"Mooncake is left out: {mooncake}", file=sys.stderr)
        try:
            await _one(report, settings, size, source, target, None if isinstance(mooncake, str) else mooncake)
        finally:
            if not isinstance(mooncake, str):
                mooncake.close()


async def _one(report: Report, settings: argparse.Namespace, size: int, source: Bytes, target: Bytes, mooncake: Mooncake | None) -> None:
    label = f"{size}MiB"
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, _daemon(Path(folder)) as daemon:
        blocking = await asyncio.to_thread(Client, daemon.endpoint, connections=1)
        async with AsyncClient(daemon.endpoint, connections=1) as client:
            if await client.same_host.connection() is None:
                sys.exit("there is no shared memory with the daemon")
            buffer = client.buffer(ROTATION).array
            buffer[:] = source
            ours = Ours(client, size * MIB, source, buffer, target)
            await ours.warm_up()
            for repetition in range(settings.repetitions):
                report.add(f"numpy_copy_{label}", repetition, await ours.copy(settings.seconds), "GiB/s")
                target[:] = 0
                report.add(f"fetch_{label}", repetition, await ours.fetch(settings.seconds), "GiB/s")
                ours.verify()
                report.add(f"put_{label}", repetition, await ours.put_from(buffer, settings.seconds), "GiB/s")
                report.add(f"put_any_memory_{label}", repetition, await ours.put_from(source, settings.seconds), "GiB/s")
                report.add(f"lease_and_view_{label}", repetition, await ours.view(), "µs")
                kept = await asyncio.to_thread(blocking.namespace, "kept")
                report.add(f"lease_and_view_{label}_blocking", repetition, ours.view_blocking(kept), "µs")
                if mooncake is not None:
                    got, put = await asyncio.to_thread(mooncake.measure, settings.seconds)
                    report.add(f"mooncake_get_{label}", repetition, got, "GiB/s")
                    report.add(f"mooncake_put_{label}", repetition, put, "GiB/s")
        await asyncio.to_thread(blocking.close)
        daemon.kill()
    for what in ("fetch", "put", "put_any_memory"):
        report.ratio(f"{what}_{label}_vs_numpy_copy", f"{what}_{label}", f"numpy_copy_{label}")
    if mooncake is not None:
        report.ratio(f"fetch_{label}_vs_mooncake", f"fetch_{label}", f"mooncake_get_{label}")
        report.ratio(f"put_{label}_vs_mooncake", f"put_{label}", f"mooncake_put_{label}")


def _daemon(folder: Path) -> DaemonProcess:
    """A daemon whose DRAM holds all that is there at a time, so that the disk is left out."""
    return DaemonProcess(folder / "data", "--dram", str(3 * ROTATION), "--ssd", "1GiB", environment={"KVSTORE_HIGH_WATERMARK": "1.0"})


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], metavar="MIB")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement, at least")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="a Python that has Mooncake")
    settings = parser.parse_args()
    if settings.quick:
        settings.sizes, settings.repetitions, settings.seconds = [16], 3, 0.1
    shown = {"sizes_MiB": settings.sizes, "seconds": settings.seconds, "rotation_MiB": ROTATION // MIB, "views": VIEWS}
    cached = "blobs in the daemon's DRAM, none in a CPU cache"
    verified = "fetch: slices after the copy; put: the daemon's copy; view: nothing, as it was when it was put"
    report = Report("same_host", {**shown, "cached": cached, "verified": verified})
    asyncio.run(measure(report, settings))
    report.show("shared memory on one host")
    report.write(settings.json)
    report.draw(settings.png, "GiB/s (µs for views)")


if __name__ == "__main__":
    main()
