"""`make factory`: worker processes of three kinds around a real daemon replay real traces, every byte checked, and a report."""

import argparse
import asyncio
import json
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvstore.api.wire import BadRequest, KVStoreError
from kvstore_workers.busy_machine import warn_if_busy
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.picture import can_draw, draw
from kvstore_workers.factory.report import PARTS, Journalled, report
from kvstore_workers.factory.running import factory
from kvstore_workers.factory.settings import Settings
from kvstore_workers.trace import AGENTS, excerpt_path

_GIB = 1 << 30
_IDLE_SHARE = 0.05
_SETTLE_S = 120.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One run of several: with which workers, and under which settings."""

    name: str
    kinds: list[Kind]
    settings: Settings


def phases(arguments: argparse.Namespace) -> list[Phase]:
    """The runs that the command line asks for."""
    traces = [_trace(text) for text in arguments.trace or [f"{excerpt_path()}@1", f"{excerpt_path(AGENTS)}@10"]]
    kinds = [kind for kind in (Kind.PREFILL, Kind.MIDFILL, Kind.DECODE) for _ in range(getattr(arguments, kind.value))]
    base = Settings(
        endpoint="", unix_endpoint="", namespace="", socket="", journal="", traces=traces, seconds=arguments.seconds,
        turns=arguments.turns, control=arguments.control, reuse=arguments.store == "on", seed=arguments.seed, slots=arguments.slots,
        probes=arguments.probes if arguments.store == "on" else 0,
    )  # fmt: skip
    found = []
    if arguments.mode in ("both", "disaggregated"):
        found.append(Phase("disaggregated", kinds, base))
    if arguments.mode in ("both", "aggregated"):
        settings = msgspec.structs.replace(base, aggregated=True, probes=0)
        found.append(Phase("aggregated", [Kind.AGGREGATED] * len(kinds), settings))
    return found


def _trace(text: str) -> tuple[str, float]:
    path, _, speed = text.rpartition("@")
    try:
        return (path, float(speed)) if path else (text, 1.0)
    except ValueError:
        raise BadRequest(f"--trace {text}: FILE, or FILE@SPEED with a number") from None


async def run(arguments: argparse.Namespace) -> int:
    """Run all phases. Returns the exit code: 0 only if every turn was served and every byte was right."""
    console = Console()
    if arguments.png:
        can_draw()
    journals: dict[str, Journalled] = {}
    reports: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-factory-", ignore_cleanup_errors=True) as folder:
        for phase in phases(arguments):
            place = Path(folder) / phase.name
            place.mkdir()
            with DaemonProcess(place / "data", "--dram", arguments.dram, "--ssd", arguments.ssd) as daemon:
                console.print(f"{phase.name}: daemon at {daemon.endpoint}, DRAM {arguments.dram}; {len(phase.kinds)} worker processes")
                async with factory(daemon, place, phase.settings, phase.kinds, arguments.bytes_per_token) as running:
                    with console.status(f"{phase.name}: replaying {arguments.seconds:g} s of arrivals"):
                        await running.finished(arguments.seconds + phase.settings.deadline_s + _SETTLE_S)
                between = await asyncio.to_thread(_between_tiers, daemon.http)
                daemon.kill()
            journals[phase.name] = await asyncio.to_thread(_journal, phase, Path(running.settings.journal), arguments.journal)
            reports[phase.name] = report(journals[phase.name], phase.settings.cost())
            reports[phase.name]["moved"] |= between
    return _finish(console, arguments, journals, reports)


def _between_tiers(http: str) -> dict[str, int]:
    """Bytes that the daemon has moved between its tiers."""
    with urllib.request.urlopen(f"{http}/v1/stat", timeout=30) as response:
        totals = json.loads(response.read())["totals"]
    return {"tier_dram_to_ssd": totals["demoted_stored_bytes"], "tier_ssd_to_dram": totals["promoted_stored_bytes"]}


def _journal(phase: Phase, path: Path, keep: Path | None) -> Journalled:
    if keep is not None:
        keep.with_name(f"{keep.name}.{phase.name}").write_bytes(path.read_bytes())
    return Journalled.read(path)


def _finish(console: Console, arguments: argparse.Namespace, journals: dict[str, Journalled], reports: dict[str, dict[str, Any]]) -> int:
    show(console, reports)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"name": "factory", "settings": {k: str(v) for k, v in vars(arguments).items()}, "runs": reports}, indent=1)
        )
    if arguments.png:
        draw(journals, arguments.png)
    failures = [f"{name}: {text}" for name, found in reports.items() for text in failed(found)]
    for failure in failures:
        console.print(f"[bold red]failed:[/] {failure}")
    return 1 if failures else 0


def failed(found: dict[str, Any]) -> list[str]:
    """What of a run is not as it must be."""
    failures = []
    if found["wrong_bytes"]:
        failures.append(f"{found['wrong_bytes']} bytes were wrong")
    if found["done"] != found["turns"]:
        failures.append(f"{found['done']} of {found['turns']} turns were served")
    if not found["verified_bytes"]:
        failures.append("no byte was checked: this run shows nothing")
    if found["hbm_idle_share"] > _IDLE_SHARE:
        failures.append(f"HBM idle byte-seconds are {found['hbm_idle_share']:.1%} of the used ones, over {_IDLE_SHARE:.0%}")
    return failures


def show(console: Console, reports: dict[str, dict[str, Any]]) -> None:
    """Print the tables."""
    table = Table("", *reports, title="the factory")
    rows: list[tuple[str, Any]] = [
        ("turns served", lambda r: f"{r['done']} of {r['turns']} in {r['seconds']:.1f} s"),
        ("TTFT p50, p95", lambda r: f"{r['ttft']['ttft']['p50'] * 1000:.0f} ms, {r['ttft']['ttft']['p95'] * 1000:.0f} ms"),
        *((f"  {part}, mean", lambda r, part=part: f"{r['ttft'][part]['mean'] * 1000:.1f} ms") for part in PARTS),
        ("  of short turns p50, p95", lambda r: f"{r['ttft_short']['p50'] * 1000:.0f} ms, {r['ttft_short']['p95'] * 1000:.0f} ms"),
        ("tokens/s in, out", lambda r: f"{r['input_tokens_s']:,.0f}, {r['output_tokens_s']:,.0f}"),
        ("utilisation", lambda r: ", ".join(f"{kind} {share:.0%}" for kind, share in r["utilisation"].items())),
        ("ready buffer, mean, std", lambda r: f"{r['ready_mean']:.1f}, {r['ready_std']:.1f} turns"),
        ("followed while being filled", lambda r: f"{r['followed']} turns"),
        *((f"GiB {name}", lambda r, name=name: f"{r['moved'].get(name, 0) / _GIB:.2f}") for name in _names(reports)),
        ("HBM used, moving, GiB s", lambda r: ", ".join(f"{r['hbm_byte_seconds'][n] / _GIB:.2f}" for n in ("used", "moving"))),
        ("HBM idle, GiB s", lambda r: f"{r['hbm_byte_seconds']['idle'] / _GIB:.3f} ({r['hbm_idle_share']:.2%} of used)"),
        ("recompute avoided", lambda r: f"{r['cached_tokens']:,} tokens, {r['cached_share']:.1%} of the prompts"),
        ("compute of fills", lambda r: f"{r['compute_s']:.1f} s"),
        ("  with the store off", lambda r: f"{r['compute_s_store_off']:.1f} s"),
        ("bytes checked, wrong", lambda r: f"{r['verified_bytes'] / _GIB:.2f} GiB, {r['wrong_bytes']}"),
    ]
    for name, text in rows:
        table.add_row(name, *(text(found) for found in reports.values()))
    console.print(table)
    for found in reports.values():
        if streaming := found["streaming"]:
            longest = max(p["cached_tokens"] for p in streaming["pairs"])
            console.print(
                f"layer streaming: TTFT of midfills with up to {longest:,} cached tokens is {streaming['ratio']:.2f} of that with "
                f"whole-prefix fetches (median of {len(streaming['pairs'])} pairs; {streaming['least']:.2f} to {streaming['most']:.2f})"
            )


def _names(reports: dict[str, dict[str, Any]]) -> list[str]:
    return sorted({name for found in reports.values() for name in found["moved"] if name != "suffixes_lost"})


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--trace", action="append", metavar="FILE@SPEED", help="traces in Mooncake's format, each so many times as fast")
    parser.add_argument("--seconds", type=float, default=36.0, help="turns that arrive within so many seconds")
    parser.add_argument("--turns", type=int, default=100_000, help="so many turns at most")
    parser.add_argument("--mode", choices=("both", "disaggregated", "aggregated"), default="both")
    parser.add_argument("--prefill", type=int, default=3, help="workers of this kind")
    parser.add_argument("--midfill", type=int, default=1, help="workers of this kind")
    parser.add_argument("--decode", type=int, default=2, help="workers of this kind")
    parser.add_argument("--slots", type=int, default=8, help="turns that a decode worker has in its batch")
    parser.add_argument("--control", choices=("smoothed", "direct"), default="smoothed", help="admission (docs/factory.md)")
    parser.add_argument("--store", choices=("on", "off"), default="on", help="off: every fill recomputes all")
    parser.add_argument("--probes", type=int, default=10, help="pairs of midfills with and without layer streaming, at the end")
    parser.add_argument("--seed", type=int, default=1, help="of the output lengths")
    parser.add_argument("--bytes-per-token", type=int, default=256, help="bytes of KV a token")
    parser.add_argument("--dram", default="256MiB", help="the daemon's DRAM tier")
    parser.add_argument("--ssd", default="16GiB", help="the daemon's SSD tier")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the runs over time (needs matplotlib)")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep the journals, as FILE.disaggregated and FILE.aggregated")
    arguments = parser.parse_args()
    warn_if_busy()
    try:
        sys.exit(asyncio.run(run(arguments)))
    except KVStoreError as error:
        sys.exit(f"factory: {error.code}: {error.message}")


if __name__ == "__main__":
    main()
