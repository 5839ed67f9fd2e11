"""`kvstore simulate`: what a cache of some size and policy would have made of a trace."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.cli.common import counted, print_json, table_console
from kvstore.errors import BadRequest
from kvstore.lab.compare import SWEEP_PERCENT, Comparison, size_for
from kvstore.lab.compare import Progress as Told
from kvstore.lab.cost import PrefillCost
from kvstore.lab.measure import Row
from kvstore.lab.picture import can_draw, draw
from kvstore.lab.readers import FORMATS, ReadOptions, read_trace
from kvstore.size_text import size_text
from kvstore.sizes import parse_size
from kvstore.tiers.policies.make import BASELINES, NAMES, SSD_LOSS, make_policies

_BOUND = "clairvoyant"
_GOALS = (0.9, 0.99)


def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace file, plain or gzip; see docs/lab.md.")],
    policy: Annotated[str, typer.Option(help=f"Policies, separated by commas, of {', '.join(NAMES)}.")] = "classifier",
    dram: Annotated[str, typer.Option(help="DRAM: a size such as 64GiB, or a share of all different pages such as 5%.")] = "5%",
    ssd: Annotated[str, typer.Option(help="SSD, in the same ways; 0 for none.")] = "0",
    bytes_per_token: Annotated[float, typer.Option(min=0, help="KV bytes of a token, if the trace does not say.")] = 0.0,
    page_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a page, if the format leaves a choice.")] = 0,
    format_: Annotated[str, typer.Option("--format", help=f"auto, {', '.join(FORMATS)}.")] = "auto",
    start_hours: Annotated[float, typer.Option(help="Agent sessions start within so many hours.")] = 24.0,
    seed: Annotated[int, typer.Option(help="Of their start times.")] = 1,
    keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Keep near-duplicate agent sessions.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out, and say how many there were.")] = False,
    no_hints: Annotated[bool, typer.Option("--no-hints", help="Leave out what clients said of their requests.")] = False,
    ssd_admission: Annotated[
        str, typer.Option(help="all: what leaves DRAM is written to SSD; classifier: what is worth it.")
    ] = "classifier",
    ssd_admission_loss: Annotated[float, typer.Option(min=0, max=1, help="Hits that fewer writes may cost.")] = SSD_LOSS,
    batch: Annotated[float, typer.Option(min=0, max=1, help="Share of a tier that leaves at once.")] = 0.01,
    max_ghosts: Annotated[int, typer.Option(min=0, help="Evicted pages of a namespace that are remembered.")] = 200_000,
    prefill_us: Annotated[float, typer.Option(min=0, help="Prefill cost of a token, microseconds.")] = 100.0,
    prefill_ns_per_position: Annotated[float, typer.Option(min=0, help="And for each token before it, nanoseconds.")] = 1.0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try DRAM sizes from 0.5 to 100% instead of --dram.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures; - for standard output.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the hit ratios (needs matplotlib).")] = None,
) -> None:
    """Replay a trace against the real tree and policies, without any bytes.

    Beside the policies asked for stand leaf-LRU, ARC, S3-FIFO and the clairvoyant bound, which nothing can beat.
    """
    if png is not None:
        can_draw()
    policies = _policies(policy)
    options = ReadOptions(format_, page_tokens, start_hours, seed, keep_duplicates, skip_bad)
    cost = PrefillCost(prefill_us / 1e6, prefill_ns_per_position / 1e9)
    ssd_loss = _ssd_loss(ssd_admission, ssd_admission_loss)
    comparison = Comparison(read_trace(trace, options), bytes_per_token, cost, batch, max_ghosts, not no_hints, ssd_loss)
    _warn(comparison.trace.stored_pages)
    ssd_bytes = _size(comparison, ssd, "--ssd")
    dram_bytes = 0 if sweep else _size(comparison, dram, "--dram")
    runs = (len(SWEEP_PERCENT) if sweep else 1) * (len(policies) - 1)
    with _progress(runs * len(comparison.trace)) as told:
        if sweep:
            rows = comparison.sweep(policies, ssd_bytes, told)
        else:
            rows = [comparison.run(name, dram_bytes, ssd_bytes, told) for name in policies]
    result = _result(comparison, rows, policies[0], sweep=sweep)
    result["settings"] = asdict(options) | {
        "bytes_per_token": bytes_per_token,
        "batch": batch,
        "max_ghosts": max_ghosts,
        "hints": not no_hints,
        "ssd_admission": ssd_admission,
        "ssd_admission_loss": ssd_loss,
    }
    result["settings"] |= asdict(cost)
    _write(result, json_file)
    if str(json_file) != "-":
        _show(comparison, rows, result)
    if png is not None:
        draw(rows, result["unlimited"], comparison.trace.name, png)


def _warn(stored_pages: int) -> None:
    """Of hits that the recording can't tell of."""
    if stored_pages > 0:
        print(
            f"kvstore: warning: the store held {counted(stored_pages, 'page')} when the recording began, and it is not known which: "
            "hits on them count as misses, in each row; record from an empty data directory on to have them all",
            file=sys.stderr,
        )


def _ssd_loss(admission: str, loss: float) -> float | None:
    if admission not in ("all", "classifier"):
        raise BadRequest(f"--ssd-admission is {admission!r}: all or classifier")
    return loss if admission == "classifier" else None


def _policies(text: str) -> list[str]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        make_policies(name, 1, 1)  # refuses what nobody knows before a long trace is read
    return [*dict.fromkeys([*asked, *BASELINES]), _BOUND]


def _size(comparison: Comparison, text: str, option: str) -> int:
    """Bytes from a size or a percentage. Raises BadRequest."""
    try:
        if text.strip().endswith("%"):
            share = float(text.strip()[:-1])
            if not 0 <= share <= 1e6:
                raise ValueError(f"{text!r} is out of range")
            return comparison.percent(share)
        size = parse_size(text)
    except ValueError as error:
        raise BadRequest(f"{option}: {error}, or a share of all different pages such as 5%") from error
    if size and not comparison.knows_bytes:
        raise BadRequest(
            f"{option} is in bytes, and the trace does not say how many a token has: give --bytes-per-token, or a share such as 5%"
        )
    return size


@contextmanager
def _progress(total: int) -> Iterator[Told]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total)
        before = 0

        def told(name: str, done: int) -> None:
            nonlocal before
            bar.update(task, description=name, advance=done - before if done >= before else done)
            before = done

        yield told


def _result(comparison: Comparison, rows: list[Row], policy: str, *, sweep: bool) -> dict[str, Any]:
    trace, unlimited = comparison.trace, comparison.unlimited()
    result: dict[str, Any] = {
        "trace": trace.name, "requests": len(trace), "page_accesses": len(trace.pages), "unique_pages": trace.unique_pages,
        "unique_bytes": comparison.measure.all_bytes, "looked_up_tokens": comparison.measure.looked_up, "skipped_lines": trace.skipped,
        "stored_pages": trace.stored_pages,
        "unlimited": unlimited, "rows": [row.to_dict() for row in rows],
    }  # fmt: skip
    if sweep:
        result["sizing"] = [
            {"policy": name, "share_of_unlimited": goal, "dram_bytes": size_for(rows, name, goal * unlimited)}
            for name in dict.fromkeys((policy, _BOUND))
            for goal in _GOALS
        ]
    return result


def _write(result: dict[str, Any], path: Path | None) -> None:
    if path is None:
        return
    if str(path) == "-":
        print_json(result)
        return
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise BadRequest(f"can't write {path}: {error}") from error


def _show(comparison: Comparison, rows: list[Row], result: dict[str, Any]) -> None:
    console = table_console()
    skipped = f", {counted(result['skipped_lines'], 'bad line')} left out" if result["skipped_lines"] else ""
    console.print(
        f"{result['trace']}: {counted(result['requests'], 'request')}, {result['page_accesses']:,} page accesses, "
        f"{result['unique_pages']:,} different pages{skipped}; with room for all of them {100 * result['unlimited']:.1f}% of tokens hit"
    )
    several = any(row.ssd_bytes for row in rows)
    table = Table("policy", "DRAM", *(["SSD"] if several else []), "hit %", *(["in DRAM", "on SSD"] if several else []), "prefill saved")
    for title in ("SSD written", "written a byte hit") if several else ():
        table.add_column(title)
    for row in rows:
        table.add_row(*_cells(comparison, row, several=several))
    console.print(table)
    for goal in result.get("sizing", []):
        console.print(_goal_text(comparison, goal))


def _cells(comparison: Comparison, row: Row, *, several: bool) -> list[str]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f}"

    cells = [row.policy, _bytes_text(comparison, row.dram_bytes), f"{100 * row.hit_ratio:.1f}", f"{row.saved_s:,.0f} of {row.all_s:,.0f} s"]
    if several:
        cells.insert(2, _bytes_text(comparison, row.ssd_bytes))
        cells[4:4] = [share(row.dram_hit_ratio), share(row.ssd_hit_ratio)]
        written = "" if row.ssd_written_bytes is None else _bytes_text(comparison, row.ssd_written_bytes)
        cells += [written, "" if row.written_per_hit_byte is None else f"{row.written_per_hit_byte:.2f}"]
    return cells


def _bytes_text(comparison: Comparison, size: int) -> str:
    share = f"{100 * size / comparison.measure.all_bytes:.3g}%"
    return f"{size_text(size)} ({share})" if comparison.knows_bytes else share


def _goal_text(comparison: Comparison, goal: dict[str, Any]) -> str:
    wanted = f"{100 * goal['share_of_unlimited']:.0f}% of what unlimited room would give"
    if goal["dram_bytes"] is None:
        return f"{goal['policy']}: no DRAM size that was tried gives {wanted}"
    return f"{goal['policy']}: DRAM of about {_bytes_text(comparison, goal['dram_bytes'])} gives {wanted}"
