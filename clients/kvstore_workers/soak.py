"""The soak, `make soak`: mixed load on a small daemon for a long time, after which nothing may have grown and no byte been wrong.

Workers put (in memory and durably), fork, fetch wholes and sub-ranges, let leases run out, cancel transfers, create and drop
namespaces; now and then one is killed. The working set is four times the DRAM tier, and larger than the SSD tier.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvstore.api.wire import KVStoreError
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.soak_report import Sample, Verdict, judge, take_sample, verdict_table
from kvstore_workers.soak_worker import CONTEXT_PAGES, SPEC

_MIB, _GIB = 1 << 20, 1 << 30
_WORKING_SET = 4
"""Times the DRAM tier."""
_SSD = 3
_WARM_UP = 0.2
"""Share of the time that is not judged."""
_TOLERATED = frozenset({"busy", "no_space", "not_found", "missing_parent", "unknown_namespace", "conflict", "cancelled"})
"""Errors that this load may well get: no room just now, evicted meanwhile, dropped by another worker."""
_SETTLE_S = 30.0
_FILL_S = 600.0
_HELD = ("leases", "puts_open", "sessions", "connections", "pinned_blobs", "pending_pages")


@dataclass(slots=True)
class Result:
    """All that the soak saw."""

    minutes: float
    settings: dict[str, Any]
    seconds: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    fetched_bytes: int = 0
    put_bytes: int = 0
    wrong_bytes: int = 0
    workers_killed: int = 0
    failures: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def add(self, line: bytes) -> None:
        """Take in a worker's report."""
        report = json.loads(line)
        self.operations += Counter(report["operations"])
        self.errors += Counter(report["errors"])
        self.fetched_bytes += report["fetched_bytes"]
        self.put_bytes += report["put_bytes"]
        self.wrong_bytes += report["wrong_bytes"]


class Soak:
    """A daemon and its workers, from the first fill to the look at what is left."""

    def __init__(self, arguments: argparse.Namespace, data_dir: Path, console: Console) -> None:
        dram = arguments.dram_mib << 20
        self.contexts = _WORKING_SET * dram // (CONTEXT_PAGES * SPEC.page_bytes)
        self._arguments = arguments
        self._console = console
        self._rng = random.Random(arguments.seed)
        self._seeds = iter(range(arguments.seed, arguments.seed + 1_000_000))
        self._data_dir = data_dir
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: set[asyncio.Task[None]] = set()
        sizes = {"dram": f"{arguments.dram_mib}MiB", "ssd": f"{_SSD * arguments.dram_mib}MiB"}
        self.result = Result(arguments.minutes, {**sizes, "workers": arguments.workers, "contexts": self.contexts, "seed": arguments.seed})
        self._daemon = DaemonProcess(data_dir, "--dram", sizes["dram"], "--ssd", sizes["ssd"], environment={"KVSTORE_SEGMENT": "4MiB"})

    async def run(self) -> Result:
        """Run it all."""
        with self._daemon, self._last_words():
            before = await self._stat()
            started = time.monotonic()
            try:
                await self._start_workers(fill=True)
                await self._filled()
                started = time.monotonic()
                await self._watch(started, started + 60 * self._arguments.minutes)
            finally:
                await self._stop_workers()
            self.result.seconds = time.monotonic() - started
            await self._look_at_what_is_left(before)
            code = await asyncio.to_thread(self._daemon.stop)
            lines = list(self._daemon.lines)
        if code:
            self.result.failures.append(f"the daemon ended with exit code {code}")
        if bad := [line for line in lines if "Traceback" in line or "CRITICAL" in line or "never awaited" in line]:
            self.result.failures.append(f"the daemon's log tells of a bug: {bad[0]}")
        return self.result

    @contextmanager
    def _last_words(self) -> Iterator[None]:
        """If the daemon is gone, show what it said."""
        try:
            yield
        except OSError:
            print("\n".join(list(self._daemon.lines)[-60:]), file=sys.stderr)
            raise

    async def _filled(self) -> None:
        """Wait until every context was put once, durably: only then can both tiers be as full as they get."""
        deadline = time.monotonic() + _FILL_S
        while self.result.operations["fill"] < self.contexts:
            if time.monotonic() > deadline or any(process.returncode is not None for process in self._processes):
                self.result.failures.append(f"the tiers were not filled within {_FILL_S:.0f} s")
                return
            await asyncio.sleep(0.1)

    async def _watch(self, started: float, end: float) -> None:
        warm = started + _WARM_UP * (end - started)
        next_kill = time.monotonic() + self._arguments.kill_every
        while (now := time.monotonic()) < end:
            await asyncio.sleep(min(self._arguments.sample, end - now))
            if time.monotonic() >= warm:
                sample = take_sample(await self._stat(), self._daemon.pid, self._data_dir)
                self.result.samples.append(sample)
                self.result.times.append(time.monotonic() - started)
            if time.monotonic() >= next_kill:
                await self._kill_one()
                next_kill = time.monotonic() + self._arguments.kill_every
            dead = [process for process in self._processes if process.returncode is not None]
            if dead:
                self.result.failures.append(f"{len(dead)} workers ended by themselves; what they printed says why")
                return
            self._progress(time.monotonic() - started)

    def _progress(self, seconds: float) -> None:
        result = self.result
        text = f"{seconds:6.0f} s  {result.operations.total():,} operations, got {result.fetched_bytes / _GIB:.2f} GiB, "
        text += f"put {result.put_bytes / _GIB:.2f} GiB, wrong {result.wrong_bytes}"
        if self._console.is_terminal:
            self._console.print(text, end="\r")

    # --- workers -------------------------------------------------------------------------------------------------------

    async def _start_workers(self, *, fill: bool) -> None:
        for number in range(self._arguments.workers):
            share = ("--fill-first", str(number), "--fill-step", str(self._arguments.workers)) if fill else ()
            await self._start_one(*share)

    async def _start_one(self, *arguments: str) -> None:
        endpoint = self._rng.choice([self._daemon.endpoint, self._daemon.unix_endpoint or self._daemon.endpoint])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstore_workers.soak_worker", "--endpoint", endpoint, "--contexts", str(self.contexts),
            "--seed", str(next(self._seeds)), *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        reader = asyncio.create_task(self._read(process))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if line.endswith(b"\n"):
                self.result.add(line)

    async def _kill_one(self) -> None:
        """Kill a worker in the middle of whatever it does, and start another in its place."""
        process = self._processes.pop(self._rng.randrange(len(self._processes)))
        process.kill()
        await process.wait()
        self.result.workers_killed += 1
        await self._start_one()

    async def _stop_workers(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    await process.wait()
            except TimeoutError:
                self.result.failures.append("a worker did not end: it hangs in an operation")
                process.kill()
                await process.wait()
            except asyncio.CancelledError:
                process.kill()
                raise
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await asyncio.gather(*self._readers)

    # --- the daemon ----------------------------------------------------------------------------------------------------

    async def _stat(self) -> Any:
        return await asyncio.to_thread(self._stat_now)

    def _stat_now(self) -> Any:
        with urllib.request.urlopen(f"{self._daemon.http}/v1/stat", timeout=30) as response:
            return json.loads(response.read())

    async def _look_at_what_is_left(self, before: Any) -> None:
        """All clients are gone: nothing may be held for them."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            now = await self._stat()
            held = {name: now[name] for name in _HELD if now[name]}
            for name, segments in (("tasks", 0), ("descriptors", 2)):  # a segment is two descriptors
                over = now[name] - segments * now["dram_segments"]["count"] - before[name] + segments * before["dram_segments"]["count"]
                if over > 0:
                    held[name] = over
            if not held:
                return
            if time.monotonic() > deadline:
                self.result.failures.append(f"held for nobody at the end: {held}")
                return
            await asyncio.sleep(0.2)


def report(console: Console, result: Result) -> list[Verdict]:
    """Print the tables, and complete the list of failures."""
    if len(result.samples) < 8:
        result.failures.append(f"{len(result.samples)} samples are too few for a verdict: let it run longer, or sample more often")
        verdicts: list[Verdict] = []
    else:
        verdicts = judge(result.times, result.samples)
        console.print(
            verdict_table(verdicts, f"{len(result.samples)} samples in {result.seconds:.0f} s, the first {_WARM_UP:.0%} left out")
        )
    table = Table(show_header=False, title="what was done")
    table.add_row("operations", f"{result.operations.total():,}: " + ", ".join(f"{n} {c:,}" for n, c in result.operations.most_common()))
    table.add_row("bytes", f"fetched {result.fetched_bytes / _GIB:.2f} GiB, put {result.put_bytes / _GIB:.2f} GiB")
    table.add_row("errors by code", ", ".join(f"{code} {count:,}" for code, count in result.errors.most_common()) or "none")
    table.add_row("workers killed", str(result.workers_killed))
    table.add_row("wrong bytes", f"[bold {'red' if result.wrong_bytes else 'green'}]{result.wrong_bytes}")
    console.print(table)
    result.failures += [f"{v.measure.name} grew from {v.first:.0f} to {v.last:.0f}" for v in verdicts if not v.flat]
    result.failures += [
        f"{count} errors {code}, which this load should never get" for code, count in result.errors.items() if code not in _TOLERATED
    ]
    if result.wrong_bytes:
        result.failures.append(f"{result.wrong_bytes} fetched bytes were wrong")
    if not (result.fetched_bytes and result.put_bytes):
        result.failures.append("nothing was moved: this run shows nothing")
    for failure in result.failures:
        console.print(f"[bold red]failed:[/] {failure}")
    return verdicts


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long")
    parser.add_argument(
        "--dram-mib", type=int, default=64, help="the daemon's DRAM tier; SSD is three times, the working set four times as large"
    )
    parser.add_argument("--workers", type=int, default=4, help="worker processes")
    parser.add_argument("--sample", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds between two killed workers")
    parser.add_argument("--seed", type=int, default=1, help="of the load; what meets what still depends on timing")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-soak-", ignore_cleanup_errors=True) as folder:
            result = asyncio.run(Soak(arguments, Path(folder) / "data", console).run())
    except KVStoreError as error:
        sys.exit(f"soak: {error.code}: {error.message}")
    verdicts = report(console, result)
    if arguments.json:
        flat = [{"name": v.measure.name, "first": v.first, "last": v.last, "slope_an_hour": v.slope, "flat": v.flat} for v in verdicts]
        arguments.json.write_text(json.dumps({**msgspec.to_builtins(result), "verdicts": flat}, indent=1))
    sys.exit(1 if result.failures else 0)


if __name__ == "__main__":
    main()
