"""Cold fetches of 16 MiB blobs from SSD over loopback TCP, with fio's psync reads of the same file beside them.

Blobs are put durably, and fetched one after the other, one outstanding, over one connection, verified at both ends, into memory that is
there before the clock starts, as a worker's is. Before each repetition the blob file is dropped from the page cache (posix_fadvise
DONTNEED), and it is looked at whether that worked. What a hypervisor keeps in its own cache can't be dropped from here. Two cases:

- `after_start`: the daemon has just been started, its DRAM is empty, so the memory for what is fetched has to be made, too.
- `running`: the same daemon, once its DRAM is as full as it gets, of other blobs, which are on SSD too. What is fetched is on SSD only.

Next to them, as many bytes of the same file: the fetch once more, then from DRAM; what is read by the daemon's own code alone, verified,
into memory that is there (`read_alone`); and fio with psync, in blocks of an extent, with as many threads as the daemon has readers, and
with one.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.report import Report, arguments
from bench.striped_fetch import GIB, MIB, PAGE_TOKENS, blob_spec
from kvstore.digests import DIGEST_BYTES
from kvstore.tiers.ssd import DEFAULT_EXTENT_BYTES, BlobFile
from kvstore_client import AsyncClient, Match, Namespace
from kvstore_workers.daemon_process import DaemonProcess

READERS = 4
"""The daemon's default `reader_threads`."""
BLOCK = DEFAULT_EXTENT_BYTES + 16
"""An extent with its header: whole pages of the file."""
CASES = ("after_start", "running")
"""As in the names of what is measured."""
_SIZE = 16 * MIB
_SETS = 3
"""Times as many blobs on SSD as a repetition fetches; DRAM has room for half as many."""
_SHIFT = 4096 + 256
"""Blobs are windows of one run of random bytes, so far apart."""
_LOOKS = 256


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


class Blobs:
    """What is put and fetched, and the memory that it is fetched into."""

    def __init__(self, plan: Plan) -> None:
        self.count = _SETS * plan.blobs
        self._bytes = np.random.default_rng(2).integers(0, 256, _SIZE + self.count * _SHIFT, dtype=np.uint8)
        self.target = np.ones(plan.blobs * _SIZE, np.uint8)

    def payload(self, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of one blob."""
        return self._bytes[index * _SHIFT : index * _SHIFT + _SIZE]

    def place(self, number: int) -> npt.NDArray[np.uint8]:
        """Where the blob that is fetched as the `number`th goes."""
        return self.target[number * _SIZE : (number + 1) * _SIZE]

    async def put(self, daemon: DaemonProcess) -> None:
        """Put them all, durably."""
        async with AsyncClient(daemon.endpoint, connections=1, shared_memory=False) as client:
            namespace = await client.namespace("cold", "bench", blob_spec(_SIZE))
            for index in range(self.count):
                await namespace.put(tokens(index), self.payload(index), durable=True)

    async def fetch(self, namespace: Namespace, matches: Sequence[tuple[int, Match]]) -> float:
        """GiB/s of one fetch after the other. What comes is compared with what was put."""
        started = time.perf_counter()
        for number, (_, match) in enumerate(matches):
            await namespace.fetch(match, self.place(number))
        took = time.perf_counter() - started
        for number, (index, _) in enumerate(matches):
            if not np.array_equal(self.place(number), self.payload(index)):
                sys.exit(f"blob {index} came back with other bytes")
        return len(matches) * _SIZE / GIB / took


def tokens(index: int) -> npt.NDArray[np.uint32]:
    """The prompt of one blob."""
    return np.full(PAGE_TOKENS, index, np.uint32)


def measure(report: Report, plan: Plan) -> dict[str, Any]:
    """All repetitions. Returns what was measured, and where."""
    fio = shutil.which("fio")
    if fio is None:
        print("fio is not installed: there will be no ratio for SSD (Debian: apt-get install fio)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=plan.folder) as name:
        folder = Path(name)
        blobs = Blobs(plan)
        with _daemon(folder, plan) as daemon:
            asyncio.run(blobs.put(daemon))
        runs = _Repetitions(report, plan, blobs, folder, fio)
        for repetition in range(plan.repetitions):
            runs.once(repetition)
        kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True).stdout.strip()
        return {
            "file_system": kind,
            "bytes": plan.blobs * _SIZE,
            "bytes_on_ssd": blobs.count * _SIZE,
            "dram": _dram(plan),
            "block": BLOCK,
            "threads": READERS,
            "dropped_by": "posix_fadvise DONTNEED, no process having the blobs mapped",
            "still_cached_at_most": max(runs.cached),
        }


class _Repetitions:
    """Measures everything once, each with what it reads dropped from the page cache before."""

    def __init__(self, report: Report, plan: Plan, blobs: Blobs, folder: Path, fio: str | None) -> None:
        self.cached: list[float] = []
        self._report = report
        self._plan = plan
        self._blobs = blobs
        self._folder = folder
        self._fio = fio
        self._file = max(folder.rglob("data.mdb"), key=lambda path: path.stat().st_size)

    def once(self, repetition: int) -> None:
        """Both cases and what is beside them."""
        self._drop()
        with _daemon(self._folder, self._plan) as daemon:
            asyncio.run(self._fetch_cold(daemon, repetition))
        self._drop()
        self._report.add("read_alone_16MiB", repetition, self._read(), "GiB/s")
        if self._fio is not None:
            for threads, what in ((READERS, "fio_16MiB"), (1, "fio_1_thread_16MiB")):
                self._drop()
                self._report.add(what, repetition, _fio(self._fio, self._file, threads, self._plan), "GiB/s")

    def _drop(self) -> None:
        self.cached.append(_drop(self._file))

    async def _fetch_cold(self, daemon: DaemonProcess, repetition: int) -> None:
        async with AsyncClient(daemon.endpoint, connections=1, shared_memory=False) as client:
            namespace = await client.namespace("cold")
            cold = await self._on_ssd_only(namespace)
            self._report.add("ssd_cold_after_start_16MiB", repetition, await self._blobs.fetch(namespace, cold), "GiB/s")
            self._report.add("ssd_then_dram_16MiB", repetition, await self._blobs.fetch(namespace, cold), "GiB/s")
            await _release(cold)
            for index in range(self._blobs.count):
                match = await namespace.match(tokens(index), lease_s=60)
                await namespace.fetch(match, self._blobs.place(0))
                await match.release()
            cold = await self._on_ssd_only(namespace)
            self._drop()
            self._report.add("ssd_cold_running_16MiB", repetition, await self._blobs.fetch(namespace, cold), "GiB/s")
            await _release(cold)

    async def _on_ssd_only(self, namespace: Namespace) -> list[tuple[int, Match]]:
        """Leases on as many blobs as are fetched, none of them in DRAM, in no order of the file."""
        found: list[tuple[int, Match]] = []
        for index in np.random.default_rng(7).permutation(self._blobs.count).tolist():
            match = await namespace.match(tokens(index), lease_s=600)
            if match.pages and not match.dram_pages and len(found) < self._plan.blobs:
                found.append((index, match))
            else:
                await match.release()
        if len(found) < self._plan.blobs:
            sys.exit(f"only {len(found)} blobs are on SSD and not in DRAM")
        return found

    def _read(self) -> float:
        """GiB/s of reading and verifying one blob after the other, as the daemon does."""
        spec, took = blob_spec(_SIZE), 0.0
        layout = spec.slice_layout(spec.whole())
        target = memoryview(bytearray(b"\1" * (_SIZE + DIGEST_BYTES * layout.count)))
        file = BlobFile.readonly(self._file.parent)
        try:
            (number,) = file.namespace_numbers()
            blobs = [blob for blob, _ in file.stored_blobs(number, limit=self._plan.blobs)]
            started = time.perf_counter()
            for blob in blobs:
                file.read(number, blob, layout, target)
            took = time.perf_counter() - started
        finally:
            file.close()
        return len(blobs) * _SIZE / GIB / took


async def _release(matches: Sequence[tuple[int, Match]]) -> None:
    for _, match in matches:
        await match.release()


def _dram(plan: Plan) -> int:
    return 3 * plan.blobs * _SIZE // 2


def _daemon(folder: Path, plan: Plan) -> DaemonProcess:
    """A daemon that has room for half of the blobs in DRAM, and no scrubber that reads meanwhile."""
    environment = {"KVSTORE_SCRUB_RATE": "0", "KVSTORE_READER_THREADS": str(READERS)}
    ssd = 2 * _SETS * plan.blobs * _SIZE
    return DaemonProcess(folder / "data", "--dram", str(_dram(plan)), "--ssd", str(ssd), environment=environment)


def _drop(path: Path) -> float:
    """Drop a file from the page cache. Returns the share of it that is there all the same, by sample."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size, there = os.fstat(descriptor).st_size, 0
        for at in range(0, size, max(4096, size // _LOOKS & ~4095)):
            try:
                there += os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                pass  # as it should be
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the attempts may have started to read
        return there / _LOOKS
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
        for case, fio in itertools.product(CASES, ("fio", "fio_1_thread")):
            report.ratio(f"ssd_cold_{case}_vs_{fio}", f"ssd_cold_{case}_16MiB", f"{fio}_16MiB")
    report.show("cold fetches from SSD")
    report.write(settings.json)
    report.draw(settings.png, "GiB/s")


if __name__ == "__main__":
    main()
