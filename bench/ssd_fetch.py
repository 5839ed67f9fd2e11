"""Cold fetches of 16 MiB blobs from SSD over loopback TCP, with fio's psync reads of the same file beside them.

Prefixes of blobs are put durably, and fetched over one connection, verified at both ends, into memory that is there before the clock
starts, as a worker's is. One blob after the other, one outstanding: in no order, so that nothing can be known of the next one, and in
order (`in_order`), where the SDK says what comes next and the daemon reads it ahead. And as a whole (`prefix`), as a worker gets a long
prefix, where the daemon reads the next blobs while it sends one. Before each measurement the blob file is dropped from the page cache
(posix_fadvise DONTNEED). What a process has mapped can't be dropped, and what a hypervisor keeps in its own cache can't be dropped from
here: so how much the daemon had from the disk while it was fetched (`read_bytes` in /proc) stands beside each (`from_disk`). Two cases:

- `after_start`: the daemon has just been started, its DRAM is empty, so the memory for what is fetched has to be made, too. A hypervisor
  may have taken back what is free, and then it is its pace that is measured: so as much memory is touched and freed again just before.
- `running`: the DRAM of the daemon is as full as it gets, of other blobs, which are on SSD too. What is fetched is on SSD only, and
  nobody has touched it since the daemon was started.

Next to them, as many bytes of the same file: the fetch once more, then from DRAM; what is read by the daemon's own code alone, verified,
into memory that is there (`read_alone`); and fio with psync, in blocks of an extent, with as many threads as the daemon has readers, and
with one.
"""

import argparse
import asyncio
import itertools
import json
import mmap
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
from kvstore.digests import DIGEST_BYTES
from kvstore.memfds import populate
from kvstore.store.datadir import BLOBS
from kvstore.tiers.ssd import BlobFile, extents_beside
from kvstore_client import AsyncClient, Match, Namespace
from kvstore_workers.daemon_process import DaemonProcess

READERS = 4
"""The daemon's default `reader_threads`."""
BLOCK = 64 << 10
"""Of fio's reads."""
WAYS = ("", "_in_order", "_prefix")
"""In which a prefix is fetched: the first prefix in the first way, and so on."""
CASES = tuple(f"{when}{way}" for when in ("after_start", "running") for way in WAYS)
"""As in the names of what is measured."""
_SIZE = 16 * MIB
_PREFIXES = len(WAYS) + 2
"""On SSD. The last two fill DRAM, which has room for one and a half."""
_SHIFT = 4096 + 256
"""Blobs are windows of one run of random bytes, so far apart."""


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
        self.each = plan.blobs
        """Blobs of a prefix."""
        self._bytes = np.random.default_rng(2).integers(0, 256, _SIZE + _PREFIXES * plan.blobs * _SHIFT, dtype=np.uint8)
        self._target = np.ones(plan.blobs * _SIZE, np.uint8)

    def tokens(self, prefix: int) -> npt.NDArray[np.uint32]:
        """A prompt."""
        return np.repeat(np.arange(self.each, dtype=np.uint32), PAGE_TOKENS) * _PREFIXES + prefix

    def _payload(self, prefix: int, page: int) -> npt.NDArray[np.uint8]:
        at = (prefix * self.each + page) * _SHIFT
        return self._bytes[at : at + _SIZE]

    async def put(self, daemon: DaemonProcess) -> None:
        """Put them all, durably."""
        async with AsyncClient(daemon.endpoint, connections=1, shared_memory=False) as client:
            namespace = await client.namespace("cold", "bench", blob_spec(_SIZE))
            for prefix in range(_PREFIXES):
                tokens = self.tokens(prefix)
                for page in range(self.each):
                    upto = tokens[: (page + 1) * PAGE_TOKENS]
                    await namespace.put(upto, self._payload(prefix, page), first_page=page, durable=True)

    async def fetch(self, namespace: Namespace, match: Match, prefix: int, way: str) -> float:
        """GiB/s of a prefix. What comes is compared with what was put."""
        pages = list(range(self.each)) if way else np.random.default_rng(7).permutation(self.each).tolist()
        started = time.perf_counter()
        if way == "_prefix":
            await namespace.fetch(match, self._target)
        else:
            for page in pages:
                await namespace.fetch(match, self._target[page * _SIZE : (page + 1) * _SIZE], pages=(page, page + 1))
        took = time.perf_counter() - started
        for page in pages:
            if not np.array_equal(self._target[page * _SIZE : (page + 1) * _SIZE], self._payload(prefix, page)):
                sys.exit(f"page {page} of prefix {prefix} came back with other bytes")
        return self.each * _SIZE / GIB / took


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
            "bytes_on_ssd": _PREFIXES * plan.blobs * _SIZE,
            "dram": _dram(plan),
            "block": BLOCK,
            "threads": READERS,
            "dropped_by": "posix_fadvise DONTNEED",
        }


class _Repetitions:
    """Measures everything once, each with what it reads dropped from the page cache before."""

    def __init__(self, report: Report, plan: Plan, blobs: Blobs, folder: Path, fio: str | None) -> None:
        self._report = report
        self._plan = plan
        self._blobs = blobs
        self._folder = folder
        self._fio = fio
        self._file = extents_beside(folder / "data" / BLOBS)

    def once(self, repetition: int) -> None:
        """Both cases and what is beside them."""
        for prefix in range(len(WAYS)):
            self._drop()
            _touch(_dram(self._plan))
            with _daemon(self._folder, self._plan) as daemon:
                asyncio.run(self._after_start(daemon, prefix, repetition))
        self._drop()
        with _daemon(self._folder, self._plan) as daemon:
            asyncio.run(self._running(daemon, repetition))
        self._drop()
        self._report.add("read_alone_16MiB", repetition, self._read(), "GiB/s")
        if self._fio is not None:
            for threads, what in ((READERS, "fio_16MiB"), (1, "fio_1_thread_16MiB")):
                self._drop()
                self._report.add(what, repetition, _fio(self._fio, self._file, threads, self._plan), "GiB/s")

    def _drop(self) -> None:
        _drop(self._file)

    async def _after_start(self, daemon: DaemonProcess, prefix: int, repetition: int) -> None:
        async with AsyncClient(daemon.endpoint, connections=1, shared_memory=False) as client:
            namespace = await client.namespace("cold")
            await self._fetch_cold(daemon, namespace, prefix, "after_start", repetition)
            if WAYS[prefix]:
                return
            async with await namespace.match(self._blobs.tokens(prefix), lease_s=600) as match:
                self._report.add("ssd_then_dram_16MiB", repetition, await self._blobs.fetch(namespace, match, prefix, ""), "GiB/s")

    async def _running(self, daemon: DaemonProcess, repetition: int) -> None:
        async with AsyncClient(daemon.endpoint, connections=1, shared_memory=False) as client:
            namespace = await client.namespace("cold")
            for prefix in range(len(WAYS), _PREFIXES):
                async with await namespace.match(self._blobs.tokens(prefix), lease_s=600) as match:
                    await self._blobs.fetch(namespace, match, prefix, "")
            self._drop()
            for prefix in range(len(WAYS)):
                await self._fetch_cold(daemon, namespace, prefix, "running", repetition)

    async def _fetch_cold(self, daemon: DaemonProcess, namespace: Namespace, prefix: int, when: str, repetition: int) -> None:
        name = f"ssd_cold_{when}{WAYS[prefix]}"
        async with await namespace.match(self._blobs.tokens(prefix), lease_s=600) as match:
            if match.pages != self._plan.blobs or match.dram_pages:
                sys.exit(f"of {self._plan.blobs} pages of prefix {prefix} there are {match.pages}, and {match.dram_pages} in DRAM")
            before = _read_bytes(daemon.pid)
            self._report.add(f"{name}_16MiB", repetition, await self._blobs.fetch(namespace, match, prefix, WAYS[prefix]), "GiB/s")
            from_disk = (_read_bytes(daemon.pid) - before) / (match.pages * _SIZE)
            self._report.add(f"{name}_from_disk", repetition, from_disk, "of the bytes")

    def _read(self) -> float:
        """GiB/s of reading and verifying one blob after the other, as the daemon does."""
        spec, took = blob_spec(_SIZE), 0.0
        layout = spec.slice_layout(spec.whole())
        target = memoryview(bytearray(b"\1" * (_SIZE + DIGEST_BYTES * layout.count)))
        file = BlobFile.readonly(self._folder / "data" / BLOBS)
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


def _read_bytes(pid: int) -> int:
    """What a process has had from disks so far."""
    figures = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(figures["read_bytes"])


def _dram(plan: Plan) -> int:
    return 3 * plan.blobs * _SIZE // 2


def _daemon(folder: Path, plan: Plan) -> DaemonProcess:
    """A daemon that has room for one and a half prefixes in DRAM, and no scrubber that reads meanwhile."""
    environment = {"KVSTORE_SCRUB_RATE": "0", "KVSTORE_READER_THREADS": str(READERS)}
    ssd = 2 * _PREFIXES * plan.blobs * _SIZE
    return DaemonProcess(folder / "data", "--dram", str(_dram(plan)), "--ssd", str(ssd), environment=environment)


def _touch(nbytes: int) -> None:
    """Have the machine find so much memory, and free it again."""
    memory = mmap.mmap(-1, nbytes)
    with memoryview(memory) as view:
        populate(view)
    memory.close()


def _drop(path: Path) -> None:
    """Drop a file from the page cache, as far as no process has it mapped."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
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
