"""Fetch and put over four links of 400 Mbit/s, with iperf3 over the same four at once beside it.

The links are veth pairs between two network namespaces, each limited by `tc ... tbf` in both directions (it takes root). One
outstanding fetch of 512 MiB (eight pages of 64 MiB), both ends verify. Each repetition runs iperf3 (-l 1M, one stream a link, all
four at once, in the direction of what follows), our get and our put, next to each other: with four equal links; with one at a
quarter; and a get in which one link is cut when half of it is there, beside one in which none is. `cut_lost_vs_share` is the time
that the cut costs, by the time that the other three take for what the cut link would still have carried: 1 if nothing else is lost.
"""

import argparse
import asyncio
import json
import shutil
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
from kvstore_workers.linked_hosts import LinkedHosts

MIB = 1 << 20
LINKS, MBIT = 4, 400
SLOW = 3
CUT = 1
PAGE_TOKENS = 16
_SETTLE_S = 0.3


class Iperf:
    """iperf3 servers on the far host, one a link."""

    def __init__(self, hosts: LinkedHosts) -> None:
        self._hosts = hosts
        self._servers: list[subprocess.Popen[bytes]] = []
        try:
            for address in hosts.far_addresses:
                self._servers.append(iperf_server("-B", address, "-p", "5201", before=hosts.on("far")))
        except BaseException:
            self.close()
            raise

    def measure(self, seconds: float, *, get: bool) -> float:
        """Mbit/s received, all links together."""
        clients = [
            subprocess.Popen(
                [
                    *self._hosts.on("near"),
                    "iperf3",
                    "-c",
                    address,
                    "-p",
                    "5201",
                    "-l",
                    "1M",
                    "-t",
                    str(max(1, round(seconds))),
                    "-J",
                    *(["-R"] if get else []),
                ],
                stdout=subprocess.PIPE,
            )
            for address in self._hosts.far_addresses
        ]
        said = [json.loads(client.communicate()[0])["end"] for client in clients]
        time.sleep(_SETTLE_S)  # for what is left in the queues
        return float(sum(end["sum_received"]["bits_per_second"] for end in said) / 1e6)

    def close(self) -> None:
        """End the servers."""
        for server in self._servers:
            server.terminate()
            server.wait()


class Bench:
    """One client, and what it moves."""

    def __init__(self, client: AsyncClient, hosts: LinkedHosts, mib: int) -> None:
        self.client = client
        self.hosts = hosts
        self.spec = KVSpec(PAGE_TOKENS, (Component("full", 64, 1, MIB // PAGE_TOKENS // 4),))
        self.tokens = np.arange(PAGE_TOKENS * (mib // 64), dtype=np.uint32)
        self.source = np.random.default_rng(1).integers(0, 256, mib * MIB, dtype=np.uint8)
        self.target: npt.NDArray[np.uint8] = np.ones(mib * MIB, np.uint8)
        self._match: Match

    async def warm_up(self) -> None:
        """Put what the gets will fetch, and a put whose slots later ones find free."""
        namespace = await self.client.namespace("kept", "bench", self.spec)
        await namespace.put(self.tokens, self.source)
        self._match = await namespace.match(self.tokens, lease_s=3600)
        await self.put()

    def rate(self, seconds: float) -> float:
        """Mbit/s."""
        return len(self.source) * 8 / 1e6 / seconds

    async def get(self, cut_at: int | None = None) -> tuple[float, float]:
        """Seconds of one fetch, and how much of the bytes was still missing when the link was cut."""
        self.target[:] = 0
        left = 0.0

        def progress(nbytes: int, total: int) -> None:
            nonlocal left
            if cut_at is not None and not left and nbytes >= cut_at:
                left = 1 - nbytes / total
                self.hosts.cut(CUT)

        namespace: Namespace = self._match.namespace
        started = time.perf_counter()
        await namespace.fetch(self._match, self.target, progress=progress if cut_at is not None else None, timeout=120)
        took = time.perf_counter() - started
        if not np.array_equal(self.source, self.target):
            sys.exit("a fetch brought other bytes")
        return took, left

    async def put(self) -> float:
        """Seconds of one put of everything, new each time."""
        namespace = await self.client.namespace("puts", "bench puts", self.spec)
        started = time.perf_counter()
        await namespace.put(self.tokens, self.source, timeout=120)
        took = time.perf_counter() - started
        await namespace.drop()
        return took

    async def mend(self) -> None:
        """Plug the link in again, and wait until it carries."""
        self.hosts.mend(CUT)
        for _ in range(20):
            before = self.client.links[CUT].fetched_bytes
            await self.get()
            if self.client.links[CUT].fetched_bytes > before:
                return
        sys.exit("a link that works again is not used")


async def measure(report: Report, settings: argparse.Namespace, hosts: LinkedHosts, daemon: DaemonProcess, iperf: Iperf) -> None:
    """All of it."""
    with hosts.near():
        async with AsyncClient(daemon.endpoints, connections=LINKS, shared_memory=False, timeout=120) as client:
            bench = Bench(client, hosts, settings.mib)
            await bench.warm_up()
            for repetition in range(settings.repetitions):
                for label, slow in (("4x400", MBIT), ("quarter", MBIT / 4)):
                    hosts.limit(SLOW, slow)
                    await bench.get()  # what is known of the links is of before
                    for what in ("get", "put"):
                        speed = await asyncio.to_thread(iperf.measure, settings.seconds, get=what == "get")
                        report.add(f"iperf3_{what}_{label}", repetition, speed, "Mbit/s")
                        took = (await bench.get())[0] if what == "get" else await bench.put()
                        report.add(f"{what}_{label}", repetition, bench.rate(took), "Mbit/s")
                hosts.limit(SLOW, MBIT)
                await bench.get()
                whole, _ = await bench.get()
                cut, left = await bench.get(len(bench.source) // 2)
                report.add("get_uncut", repetition, whole, "s")
                report.add("get_cut", repetition, cut, "s")
                report.add("cut_lost", repetition, cut - whole, "s")
                report.add("cut_share", repetition, left * whole / (LINKS - 1), "s")
                await bench.mend()
    for label in ("4x400", "quarter"):
        for what in ("get", "put"):
            report.ratio(f"{what}_{label}_vs_iperf3", f"{what}_{label}", f"iperf3_{what}_{label}")
    report.ratio("cut_lost_vs_share", "cut_lost", "cut_share")


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=512, help="bytes of a fetch and of a put; a multiple of 64")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run of iperf3, in whole ones")
    settings = parser.parse_args()
    if settings.quick:
        settings.mib, settings.repetitions, settings.seconds = 256, 3, 2.0
    if shutil.which("iperf3") is None:
        sys.exit("this is measured beside iperf3, which is not installed (Debian: apt-get install iperf3)")
    shown = {"links": LINKS, "mbit": MBIT, "MiB": settings.mib, "iperf3_seconds": settings.seconds, "streams_a_link": 1}
    report = Report("links", {**shown, "cached": "blobs in the daemon's DRAM, none in a CPU cache", "verified": "both ends"})
    try:
        hosts = LinkedHosts([MBIT] * LINKS)
    except OSError as error:
        sys.exit(f"no network namespaces with limited links can be made here (it takes root): {error}")
    first, *more = hosts.far_addresses
    with hosts, tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        iperf = Iperf(hosts)
        try:
            with DaemonProcess(
                Path(folder) / "data", "--host", first, "--listen", ",".join(more), "--insecure",
                "--dram", f"{3 * settings.mib}MiB", "--ssd", "2GiB", environment={"KVSTORE_HIGH_WATERMARK": "1.0"}, within=hosts.on("far"),
            ) as daemon:  # fmt: skip
                asyncio.run(measure(report, settings, hosts, daemon, iperf))
                daemon.kill()
        finally:
            iperf.close()
    report.show("four links, beside iperf3 over all of them")
    report.write(settings.json)
    report.draw(settings.png, "Mbit/s, s")


if __name__ == "__main__":
    main()
