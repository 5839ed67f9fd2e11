"""An interactive fetch of 1 MiB over a link of 400 Mbit/s, while two clients pull bulk at full rate.

The link is a veth pair between two network namespaces, limited by `tc ... tbf` (it takes root). Two processes fetch 256 MiB at a
time, one fetch after the other; a third fetches 1 MiB every 250 ms. Each repetition measures, next to each other: the interactive
client alone, the bulk clients alone, all three, and all three with the small fetches said to be bulk too. Blobs are in the daemon's
DRAM, both ends verify.

`interactive_p95_delay_in_stripes` is what the bulk adds to the p95, in times that the link takes for a stripe (1 MiB: the smallest
that is asked for at a time); `bulk_kept` is the share of their rate that the bulk clients together keep.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import numpy as np

from bench.report import Report, arguments
from kvstore.api.wire import Component, KVSpec
from kvstore_client import AsyncClient
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.linked_hosts import LinkedHosts

MIB = 1 << 20
MBIT = 400
EVERY_S = 0.25
BULK_PAGES, SMALL_PAGES = 256, 64
SPEC = KVSpec(16, (Component("full", 1, 1, MIB // 16 // 4),))
STRIPE_S = MIB * 8 / (MBIT * 1e6)


def tokens(number: int, pages: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """A prompt of its own."""
    return np.arange(16 * pages, dtype=np.uint32) + 1_000_000 * number


async def fill(endpoint: str) -> None:
    """Put what is fetched."""
    async with AsyncClient(endpoint, shared_memory=False, timeout=120) as client:
        namespace = await client.namespace("fairness", "bench", SPEC)
        for number, pages in enumerate((SMALL_PAGES, BULK_PAGES, BULK_PAGES)):
            await namespace.put(tokens(number, pages), np.random.default_rng(number).integers(0, 256, pages * MIB, dtype=np.uint8))


async def bulk(endpoint: str, number: int) -> None:
    """A bulk client: for each line of standard input, a number of seconds, it says how many bytes came in that time."""
    async with AsyncClient(endpoint, shared_memory=False, timeout=120) as client:
        namespace = await client.namespace("fairness")
        match = await namespace.match(tokens(number, BULK_PAGES), lease_s=3600)
        out = np.ones(BULK_PAGES * MIB, np.uint8)
        while line := await asyncio.to_thread(sys.stdin.readline):
            arrived = 0

            def progress(nbytes: int, total: int) -> None:
                nonlocal arrived
                arrived = nbytes

            moved, started = 0, time.perf_counter()
            try:
                async with asyncio.timeout(float(line)):
                    while True:
                        arrived = 0
                        await namespace.fetch(match, out, progress=progress)
                        moved += len(out)
                        arrived = 0
            except TimeoutError:
                moved += arrived
            print(json.dumps(moved * 8 / 1e6 / (time.perf_counter() - started)), flush=True)


async def small(endpoint: str) -> None:
    """The interactive client: for each line, seconds and priority, it says how long each fetch took."""
    async with AsyncClient(endpoint, shared_memory=False, timeout=120) as client:
        namespace = await client.namespace("fairness")
        match = await namespace.match(tokens(0, SMALL_PAGES), lease_s=3600)
        source = np.random.default_rng(0).integers(0, 256, SMALL_PAGES * MIB, dtype=np.uint8)
        out, page = np.ones(MIB, np.uint8), 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            seconds, priority = line.split()
            took, begun = [], time.perf_counter()
            while (at := time.perf_counter()) - begun < float(seconds):
                await namespace.fetch(match, out, pages=(page, page + 1), priority=priority)
                took.append(time.perf_counter() - at)
                if not np.array_equal(out, source[page * MIB : (page + 1) * MIB]):
                    sys.exit("a fetch brought other bytes")
                page = (page + 1) % SMALL_PAGES
                await asyncio.sleep(max(EVERY_S - took[-1], 0.0))
            print(json.dumps(took), flush=True)


class Part:
    """A client in a process of its own, on the near host."""

    def __init__(self, hosts: LinkedHosts, *arguments_: str) -> None:
        self._process = subprocess.Popen(
            [*hosts.on("near"), sys.executable, "-m", "bench.fairness", *arguments_],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self, line: str) -> None:
        """Begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """What it measured."""
        out: IO[str] | None = self._process.stdout
        assert out is not None
        if not (line := out.readline()):
            sys.exit("a client of the benchmark died")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(report: Report, settings: argparse.Namespace, interactive: Part, bulks: list[Part]) -> None:
    """All repetitions."""
    seconds = settings.seconds
    delays: list[float] = []

    def p95(took: list[float]) -> float:
        return float(np.percentile(took, 95)) * 1e3

    for repetition in range(settings.repetitions):
        interactive.go(f"{seconds} interactive")
        idle = interactive.result()
        report.add("idle_p50", repetition, float(np.median(idle)) * 1e3, "ms")
        report.add("idle_p95", repetition, p95(idle), "ms")
        for part in bulks:
            part.go(str(seconds))
        report.add("bulk_alone", repetition, sum(part.result() for part in bulks), "Mbit/s")
        for priority in ("interactive", "bulk"):
            for part in bulks:
                part.go(str(seconds + 1))
            time.sleep(0.5)  # they are at full rate
            interactive.go(f"{seconds} {priority}")
            took = interactive.result()
            report.add(f"{priority}_p50", repetition, float(np.median(took)) * 1e3, "ms")
            report.add(f"{priority}_p95", repetition, p95(took), "ms")
            report.add(f"bulk_beside_{priority}", repetition, sum(part.result() for part in bulks), "Mbit/s")
            if priority == "interactive":
                delays.append((p95(took) - p95(idle)) / 1e3 / STRIPE_S)
    report.ratios["interactive_p95_delay_in_stripes"] = round(float(np.median(delays)), 4)
    report.ratio("bulk_kept", "bulk_beside_interactive", "bulk_alone")
    report.ratio("interactive_vs_without_priority_p95", "interactive_p95", "bulk_p95")


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--congestion", help="TCP congestion control, for example cubic [default: the system's]")
    parser.add_argument("--part", choices=["bulk", "small"], help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=1, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.part:
        asyncio.run(small(settings.endpoint) if settings.part == "small" else bulk(settings.endpoint, settings.number))
        return
    if settings.quick:
        settings.repetitions, settings.seconds = 3, 5.0
    shown = {
        "mbit": MBIT,
        "every_ms": EVERY_S * 1e3,
        "seconds": settings.seconds,
        "bulk_clients": 2,
        "connections": 2,
        "congestion": settings.congestion,
    }
    report = Report("fairness", {**shown, "cached": "blobs in the daemon's DRAM", "verified": "both ends"})
    try:
        hosts = LinkedHosts([MBIT])
    except OSError as error:
        sys.exit(f"no network namespaces with limited links can be made here (it takes root): {error}")
    if settings.congestion:
        hosts.congestion(settings.congestion)
    with hosts, tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        arguments_ = ("--host", hosts.far_addresses[0], "--insecure", "--dram", "1GiB", "--ssd", "2GiB")
        daemon = DaemonProcess(Path(folder) / "data", *arguments_, within=hosts.on("far")).wait_ready()
        parts: list[Part] = []
        try:
            with hosts.near():
                asyncio.run(fill(daemon.endpoint))
            where = ("--endpoint", daemon.endpoint)
            parts += [Part(hosts, "--part", "small", *where)]
            parts += [Part(hosts, "--part", "bulk", *where, "--number", str(number)) for number in (1, 2)]
            measure(report, settings, parts[0], parts[1:])
        finally:
            for part in parts:
                part.close()
            daemon.kill()
    report.show("a small fetch beside two bulk clients over one limited link")
    report.write(settings.json)
    report.draw(settings.png, "ms, Mbit/s")


if __name__ == "__main__":
    main()
