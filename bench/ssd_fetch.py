"""Cold fetches of 16 MiB blobs from SSD over loopback TCP, with fio's psync reads of the same file beside them.

A GiB of blobs is put durably and the daemon stopped. Every repetition drops the blob file from the page cache (posix_fadvise DONTNEED, and
it is looked at whether that worked), starts the daemon, whose DRAM is empty then, and fetches each blob once, one outstanding, over one
connection, verified at both ends; then it drops the file again and has fio read it with psync, in blocks of an extent, with as many threads
as the daemon has readers, and with one. What a hypervisor keeps in its own cache can't be dropped from here.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.report import Report, arguments
from bench.striped_fetch import GIB, MIB, PAGE_TOKENS, blob_spec
from kvstore.tiers.ssd import DEFAULT_EXTENT_BYTES
from kvstore_client import AsyncClient
from kvstore_workers.daemon_process import DaemonProcess

READERS = 4
"""The daemon's default `reader_threads`."""
BLOCK = DEFAULT_EXTENT_BYTES + 16
"""An extent with its header: whole pages of the file."""
_SIZE = 16 * MIB


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure, and where."""

    repetitions: int
    blobs: int
    folder: Path | None

    @classmethod
    def of(cls, *, quick: bool, folder: Path | None = None) -> "Plan":
        """5 times 1 GiB; for a look, 3 times 256 MiB."""
        return cls(3, 16, folder) if quick else cls(5, 64, folder)


def tokens(index: int) -> npt.NDArray[np.uint32]:
    """The prompt of one blob."""
    return np.full(PAGE_TOKENS, index, np.uint32)


def measure(report: Report, plan: Plan) -> dict[str, Any]:
    """All repetitions. Returns what was measured, and where."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=plan.folder) as name:
        folder = Path(name)
        source = np.random.default_rng(2).integers(0, 256, plan.blobs * _SIZE, dtype=np.uint8)
        with _daemon(folder, plan) as daemon:
            asyncio.run(_put(daemon, source, plan))
        blobs = max(folder.rglob("data.mdb"), key=lambda path: path.stat().st_size)
        fio = shutil.which("fio")
        if fio is None:
            print("fio is not installed: there will be no ratio for SSD (Debian: apt-get install fio)", file=sys.stderr)
        cached = []
        for repetition in range(plan.repetitions):
            cached.append(_drop(blobs))
            with _daemon(folder, plan) as daemon:
                report.add("ssd_cold_16MiB", repetition, asyncio.run(_fetch(daemon, source, plan)), "GiB/s")
                report.add("ssd_then_dram_16MiB", repetition, asyncio.run(_fetch(daemon, source, plan)), "GiB/s")
            if fio is not None:
                for threads, what in ((READERS, "fio_16MiB"), (1, "fio_1_thread_16MiB")):
                    cached.append(_drop(blobs))
                    report.add(what, repetition, _fio(fio, blobs, threads, plan), "GiB/s")
        kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True).stdout.strip()
        return {
            "file_system": kind,
            "bytes": plan.blobs * _SIZE,
            "block": BLOCK,
            "threads": READERS,
            "dropped_by": "posix_fadvise DONTNEED, no process having the file mapped",
            "still_cached_at_most": max(cached),
        }


def _daemon(folder: Path, plan: Plan) -> DaemonProcess:
    """A daemon that has room for all, and no scrubber that reads meanwhile."""
    room = str(2 * plan.blobs * _SIZE)
    environment = {"KVSTORE_SCRUB_RATE": "0", "KVSTORE_READER_THREADS": str(READERS), "KVSTORE_HIGH_WATERMARK": "1.0"}
    return DaemonProcess(folder / "data", "--dram", room, "--ssd", room, environment=environment)


async def _put(daemon: DaemonProcess, source: npt.NDArray[np.uint8], plan: Plan) -> None:
    async with AsyncClient(daemon.endpoint, connections=1, shared_memory=False) as client:
        namespace = await client.namespace("cold", "bench", blob_spec(_SIZE))
        for index in range(plan.blobs):
            await namespace.put(tokens(index), source[index * _SIZE : (index + 1) * _SIZE], durable=True)


async def _fetch(daemon: DaemonProcess, source: npt.NDArray[np.uint8], plan: Plan) -> float:
    """GiB/s of one fetch after the other. What comes is compared with what was put."""
    async with AsyncClient(daemon.endpoint, connections=1, shared_memory=False) as client:
        namespace = await client.namespace("cold")
        target = np.ones(plan.blobs * _SIZE, np.uint8)
        matches = [await namespace.match(tokens(index), lease_s=600) for index in range(plan.blobs)]
        started = time.perf_counter()
        for index, match in enumerate(matches):
            await namespace.fetch(match, target[index * _SIZE : (index + 1) * _SIZE])
        took = time.perf_counter() - started
        if not np.array_equal(target, source):
            sys.exit("a blob came back with other bytes")
        return plan.blobs * _SIZE / GIB / took


def _drop(path: Path) -> float:
    """Drop a file from the page cache. Returns the share of it that is there all the same, by sample."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size, there = os.fstat(descriptor).st_size, 0
        for at in range(0, size, max(4096, size // 256 & ~4095)):
            try:
                there += os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                pass  # as it should be
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the attempts may have started to read
        return there / 256
    finally:
        os.close(descriptor)


def _fio(fio: str, path: Path, threads: int, plan: Plan) -> float:
    """GiB/s of psync reads, each thread its part of as many bytes as the blobs have."""
    part = plan.blobs * _SIZE // threads // BLOCK * BLOCK
    command = [
        fio, "--name=cold", f"--filename={path}", "--readonly", "--rw=read", "--ioengine=psync", f"--bs={BLOCK}", f"--numjobs={threads}",
        "--thread", f"--size={part}", f"--offset_increment={part}", "--invalidate=1", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return float(read["io_bytes"]) / GIB / (float(read["runtime"]) / 1000)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="on the file system to measure (default: the system's temporary one)")
    settings: argparse.Namespace = parser.parse_args()
    plan = Plan.of(quick=settings.quick, folder=settings.folder)
    report = Report("ssd_fetch", {})
    report.settings = measure(report, plan)
    if report.values("fio_16MiB"):
        report.ratio("ssd_cold_vs_fio", "ssd_cold_16MiB", "fio_16MiB")
        report.ratio("ssd_cold_vs_fio_1_thread", "ssd_cold_16MiB", "fio_1_thread_16MiB")
    report.show("cold fetches from SSD")
    report.write(settings.json)
    report.draw(settings.png, "GiB/s")


if __name__ == "__main__":
    main()
