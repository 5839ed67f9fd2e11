"""The main job, `make demo`: a daemon, several workers, a real request trace, and every fetched byte checked."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.api.wire import BadRequest, Component, KVSpec, KVStoreError
from kvstore_client import AsyncClient, fingerprint_revision
from kvstore_workers.busy_machine import warn_if_busy
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.replay import replay
from kvstore_workers.trace import BLOCK_TOKENS, Request, excerpt_path, model_hits, read_mooncake
from kvstore_workers.worker import Outcome

_LAYERS = 8
_GIB = 1 << 30


def demo_spec(bytes_per_token: int) -> KVSpec:
    """A small model's KV spec: pages of 512 tokens, 8 layers, 1 KV head, bf16."""
    unit = _LAYERS * 2 * 2
    if bytes_per_token < unit or bytes_per_token % unit:
        raise BadRequest(f"--bytes-per-token is a multiple of {unit}, not {bytes_per_token}")
    return KVSpec(BLOCK_TOKENS, (Component("full", _LAYERS, 1, bytes_per_token // unit),))


async def run(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns the exit code: 0 only if every byte was right, and the hits are those that were due."""
    console = Console()
    requests = read_mooncake(arguments.trace)[: arguments.requests]
    spec = demo_spec(arguments.bytes_per_token)
    model = fingerprint_revision("demo", "1")
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", ignore_cleanup_errors=True) as folder:
        daemon = DaemonProcess(Path(folder) / "data", "--dram", arguments.dram, "--ssd", arguments.ssd)
        with daemon:
            console.print(f"daemon at {daemon.endpoint}, DRAM {arguments.dram}, SSD {arguments.ssd}; {arguments.workers} workers")
            console.print(f"{len(requests)} requests of {arguments.trace.name}, {arguments.bytes_per_token} bytes of KV a token")
            async with AsyncClient(daemon.endpoint) as client:
                namespace = await client.namespace("demo", model, spec)
            started = time.perf_counter()
            outcomes = await _replay(console, requests, arguments, daemon, namespace.id)
            seconds = time.perf_counter() - started
            stat = await asyncio.to_thread(_stat, daemon.http)
            with console.status("stopping the daemon: what is only in DRAM is flushed"):
                code = await asyncio.to_thread(daemon.stop)
    return _report(console, requests, outcomes, stat, seconds, code)


async def _replay(
    console: Console, requests: list[Request], arguments: argparse.Namespace, daemon: DaemonProcess, namespace: str
) -> list[Outcome]:
    endpoints = [daemon.endpoint, daemon.unix_endpoint or daemon.endpoint]
    workers: list[tuple[str, ...]] = [
        ("--endpoint", endpoints[n % 2], "--namespace", namespace, "--name", f"worker {n}", "--compute-us", str(arguments.compute_us))
        for n in range(arguments.workers)
    ]
    columns = (
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    hit = asked = fetched = put = wrong = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(requests), text="")

        def show(outcome: Outcome) -> None:
            nonlocal hit, asked, fetched, put, wrong
            hit, asked = hit + outcome.hit_tokens, asked + outcome.input_tokens
            fetched, put = fetched + outcome.fetched_bytes, put + outcome.put_bytes
            wrong += outcome.wrong_bytes
            text = f"hit {hit / asked:.1%}, got {fetched / _GIB:.2f} GiB, put {put / _GIB:.2f} GiB, wrong {wrong}"
            progress.update(task, advance=1, text=text)

        return await replay(requests, workers, show)


def _stat(http: str) -> Any:
    with urllib.request.urlopen(f"{http}/v1/stat", timeout=10) as response:
        return json.loads(response.read())


def _report(console: Console, requests: list[Request], outcomes: list[Outcome], stat: Any, seconds: float, code: int) -> int:
    hit = sum(o.hit_tokens for o in outcomes)
    wrong = sum(o.wrong_bytes for o in outcomes)
    due, asked = model_hits(requests)
    totals, tiers = stat["totals"], stat["tiers"]
    given_up = totals["evicted_ssd_pages"] + totals["dropped_pages"]
    table = Table(show_header=False, title=f"{len(outcomes)} requests in {seconds:.1f} s")
    table.add_row("hit ratio in tokens", f"{hit / asked:.2%} ({hit:,} of {asked:,})")
    table.add_row("  an infinite cache would have", f"{due / asked:.2%} (whole pages; a partial last block is no hit)")
    for name, nbytes, times in (
        ("fetched", sum(o.fetched_bytes for o in outcomes), [o.fetch_s for o in outcomes]),
        ("put", sum(o.put_bytes for o in outcomes), [o.put_s for o in outcomes]),
    ):
        busy = sum(t for t in times if t >= 0)
        table.add_row(name, f"{nbytes / _GIB:.2f} GiB, {nbytes / _GIB / busy if busy else 0:.2f} GiB/s while at it")
    for name in ("match", "fetch", "put"):
        took = np.array([t for o in outcomes if (t := getattr(o, f"{name}_s")) >= 0]) * 1000
        if len(took):
            table.add_row(f"{name} p50, p99", f"{np.percentile(took, 50):.2f} ms, {np.percentile(took, 99):.2f} ms")
    for tier, usage in tiers.items():
        table.add_row(f"{tier.upper()} at the end", f"{usage['used'] / _GIB:.2f} of {usage['capacity'] / _GIB:.2f} GiB")
    table.add_row("pages demoted to SSD", f"{totals['demoted_pages']:,} ({totals['demoted_stored_bytes'] / _GIB:.2f} GiB)")
    table.add_row("pages promoted to DRAM", f"{totals['promoted_blobs']:,} ({totals['promoted_stored_bytes'] / _GIB:.2f} GiB)")
    table.add_row("pages given up for room", f"{given_up:,}")
    table.add_row("wrong bytes", f"[bold {'red' if wrong else 'green'}]{wrong}")
    console.print(table)
    failures = []
    if wrong:
        failures.append(f"{wrong} fetched bytes were wrong")
    if not given_up and hit != due:
        failures.append(f"there was room for everything, but {hit:,} tokens were hit where {due:,} were due")
    if not (tiers["dram"]["used"] and tiers["ssd"]["used"]):
        failures.append("not both tiers were used: choose a smaller --dram")
    if code:
        failures.append(f"the daemon ended with exit code {code}")
    for failure in failures:
        console.print(f"[bold red]failed:[/] {failure}")
    return 1 if failures else 0


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--trace", type=Path, default=excerpt_path(), help="a trace in Mooncake's JSONL format")
    parser.add_argument("--requests", type=int, default=500, help="how many of its requests")
    parser.add_argument("--workers", type=int, default=4, help="worker processes")
    parser.add_argument("--bytes-per-token", type=int, default=512, help="bytes of KV a token")
    parser.add_argument("--compute-us", type=float, default=25.0, help="modelled prefill time a token, in microseconds")
    parser.add_argument("--dram", default="768MiB", help="the daemon's DRAM tier")
    parser.add_argument("--ssd", default="6GiB", help="the daemon's SSD tier")
    arguments = parser.parse_args()
    warn_if_busy()
    try:
        sys.exit(asyncio.run(run(arguments)))
    except KVStoreError as error:
        sys.exit(f"demo: {error.code}: {error.message}")


if __name__ == "__main__":
    main()
