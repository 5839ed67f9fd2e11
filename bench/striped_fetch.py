"""Striped fetch and put over loopback TCP, with iperf3 beside it.

One outstanding transfer; blobs rotated over at least 512 MiB on both sides, so that no transfer finds its bytes in a cache;
slices verified at both ends. Every repetition runs iperf3 (-l 1M, as many streams as we have connections), our puts and our
gets next to each other; ratios are medians over repetitions. A get's blobs are in the daemon's DRAM.
"""

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.iperf import iperf_server
from bench.report import Report, arguments
from kvstore.api.wire import Component, KVSpec
from kvstore_client import AsyncClient
from kvstore_client.match import Match
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess

MIB, GIB = 1 << 20, 1 << 30
ROTATION = 512 * MIB
PAGE_TOKENS = 16


def blob_spec(size: int) -> KVSpec:
    """A KV spec whose page is one part of `size` bytes, in slices of at most 1 MiB."""
    layers = max(1, size // MIB)
    return KVSpec(PAGE_TOKENS, (Component("full", layers, 1, size // layers // PAGE_TOKENS // 4),))


class Iperf:
    """An iperf3 server on loopback."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process = iperf_server("-B", "127.0.0.1", "-p", str(self.port))

    def measure(self, streams: int, seconds: float) -> float:
        """GiB/s received."""
        command = [
            "iperf3",
            "-c",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-l",
            "1M",
            "-P",
            str(streams),
            "-t",
            str(max(1, round(seconds))),
            "-J",
        ]  # it knows whole seconds only, and 0 is for ever
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        received: float = json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]
        return received / 8 / GIB

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()


class Bench:
    """Transfers of one size over one number of connections."""

    def __init__(
        self, namespace: Namespace, size: int, seconds: float, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]
    ) -> None:
        self._namespace = namespace
        self._size = size
        self._count = ROTATION // size
        self._seconds = seconds
        self._source = source
        self._target = target
        self._matches: list[Match] = []

    async def warm_up(self) -> None:
        """Put what the gets will fetch."""
        await self.put_all()
        for index in range(self._count):
            self._matches.append(await self._namespace.match(np.full(PAGE_TOKENS, index, np.uint32), lease_s=3600))

    def _bytes(self, index: int) -> npt.NDArray[np.uint8]:
        return self._source[index * self._size : (index + 1) * self._size]

    async def get(self) -> float:
        """GiB/s of gets, one after the other."""
        moved, index, started = 0, 0, time.perf_counter()
        while time.perf_counter() - started < self._seconds:
            at = (index % self._count) * self._size
            moved += await self._namespace.fetch(self._matches[index % self._count], self._target[at : at + self._size])
            index += 1
        return moved / GIB / (time.perf_counter() - started)

    async def put_all(self) -> float:
        """Seconds to put the whole rotation, one blob after the other."""
        started = time.perf_counter()
        for index in range(self._count):
            await self._namespace.put(np.full(PAGE_TOKENS, index, np.uint32), self._bytes(index))
        return time.perf_counter() - started

    async def verify(self) -> None:
        """The bytes fetched are those that were put."""
        for index in range(self._count):
            at = index * self._size
            if not np.array_equal(self._target[at : at + self._size], self._bytes(index)):
                sys.exit(f"blob {index} came back with other bytes")


async def measure(report: Report, settings: argparse.Namespace) -> None:
    """All sizes and connection counts."""
    iperf = Iperf() if shutil.which("iperf3") else None
    if iperf is None:
        print("iperf3 is not installed: there will be no ratios (Debian: apt-get install iperf3)", file=sys.stderr)
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, ROTATION, dtype=np.uint8)
    target = np.zeros(ROTATION, np.uint8)
    target[:: 4096 // 2] = 1  # so that the pages are there
    try:
        for size in settings.sizes:
            for connections in settings.connections:
                await _one(report, settings, size * MIB, connections, iperf, source, target)
    finally:
        if iperf is not None:
            iperf.close()


async def _one(
    report: Report, settings: argparse.Namespace, size: int, connections: int, iperf: Iperf | None,
    source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8],
) -> None:  # fmt: skip
    label = f"{size // MIB}MiB" + (f"_{connections}conn" if connections > 1 else "")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, _daemon(Path(folder)) as daemon:
        async with AsyncClient(daemon.endpoint, connections=connections, shared_memory=False) as client:
            kept = Bench(await client.namespace("kept", "bench", blob_spec(size)), size, settings.seconds, source, target)
            await kept.warm_up()
            await _puts(client, size, 0.0, source)  # segments are made by this one; later ones find the slots free
            for repetition in range(settings.repetitions):
                if iperf is not None:
                    speed = await asyncio.to_thread(iperf.measure, connections, settings.seconds)
                    report.add(f"iperf3_{label}", repetition, speed, "GiB/s")
                report.add(f"get_{label}", repetition, await kept.get(), "GiB/s")
                report.add(f"put_{label}", repetition, await _puts(client, size, settings.seconds, source), "GiB/s")
            await kept.verify()
        daemon.kill()
    for what in ("get", "put"):
        if iperf is not None:
            report.ratio(f"{what}_{label}_vs_iperf3", f"{what}_{label}", f"iperf3_{label}")
        print(f"{what}_{label}: {report.median(f'{what}_{label}'):.2f} GiB/s", *_ratio_text(report, what, label), flush=True)


def _daemon(folder: Path) -> DaemonProcess:
    """A daemon whose DRAM holds all that is there at a time, so that the disk is left out."""
    return DaemonProcess(folder / "data", "--dram", str(3 * ROTATION), "--ssd", "1GiB", environment={"KVSTORE_HIGH_WATERMARK": "1.0"})


def _ratio_text(report: Report, what: str, label: str) -> list[str]:
    ratio = report.ratios.get(f"{what}_{label}_vs_iperf3")
    return [] if ratio is None else [f"({ratio:.2f} of iperf3)"]


async def _puts(client: AsyncClient, size: int, seconds: float, source: npt.NDArray[np.uint8]) -> float:
    """GiB/s of puts: rotations into a namespace that is dropped after each, so that every blob is new."""
    moved, took = 0, 0.0
    while not moved or took < seconds:
        namespace = await client.namespace("puts", "bench puts", blob_spec(size))
        took += await Bench(namespace, size, seconds, source, source).put_all()
        moved += ROTATION
        await namespace.drop()
    return moved / GIB / took


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], metavar="MIB")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    settings = parser.parse_args()
    if settings.quick:
        settings.sizes, settings.connections, settings.repetitions = [16], [1], 3
    shown = {"sizes_MiB": settings.sizes, "connections": settings.connections, "seconds": settings.seconds, "rotation_MiB": ROTATION // MIB}
    report = Report("striped_fetch", {**shown, "cached": "blobs in the daemon's DRAM, none in a CPU cache", "verified": "both ends"})
    asyncio.run(measure(report, settings))
    report.show("striped fetch over loopback TCP")
    report.write(settings.json)
    report.draw(settings.png, "GiB/s")


if __name__ == "__main__":
    main()
