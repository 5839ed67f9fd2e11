"""Eviction policies beside leaf-LRU and the clairvoyant bound, on real traces: token hit ratios, and what two tiers write to SSD.

Each cell is one deterministic run of the policy lab (`kvstore/lab`), so there is one repetition. The gap closed is
(policy - leaf-LRU) / (bound - leaf-LRU), averaged over the cells where the bound is at least 3 points ahead of leaf-LRU. A policy that
looks at hints runs without them (its plain name) and with them (`NAME+hints`). On the trace of random reuse nobody should differ from LRU.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import Report, arguments
from kvstore.lab.compare import Comparison
from kvstore.lab.picture import can_draw
from kvstore.lab.readers import ReadOptions, read_trace
from kvstore.lab.synthetic import random_reuse
from kvstore.lab.trace import Trace
from kvstore.tiers.policies.make import BASELINES, NAMES

TRACES = Path(__file__).parents[2] / "shared" / "traces"
FILES = {
    "conversation": ("mooncake_conversation.jsonl.gz", 24.0),
    "toolagent": ("mooncake_toolagent.jsonl.gz", 24.0),
    "agents_24h": ("weka_cc_even.jsonl.gz", 24.0),
    "agents_4h": ("weka_cc_even.jsonl.gz", 4.0),
}
_PERCENT = (1.0, 2.0, 5.0, 10.0, 25.0)
_TWO_TIERS = ((1.0, 5.0), (2.0, 10.0), (5.0, 25.0))
"""DRAM and SSD; the last is the one that is asked about, the others show what it does where SSD is short."""
_CHAT = ("conversation", "toolagent")
_LEAST_GAP = 3.0
_BOUND, _LRU, _ALL = "clairvoyant", "lru", "classifier:all"


def traces(settings: argparse.Namespace) -> Iterator[tuple[str, Trace]]:
    """The traces that are there, one in memory at a time; says which are not."""
    for name in settings.only or FILES:
        file, hours = FILES[name]
        if (settings.traces / file).is_file():
            yield name, read_trace(settings.traces / file, ReadOptions(start_hours=hours))
        else:
            print(f"bench.policy: {name} is LEFT OUT: no file {settings.traces / file}; say where with --traces", file=sys.stderr)
    yield "random", random_reuse(3_000 if settings.quick else 12_000)


def runs(names: tuple[str, ...]) -> list[tuple[str, str, bool]]:
    """What is run: its name, the policy, and whether it sees hints."""
    plain = [(name, name, False) for name in names]
    return plain + [(f"{name}+hints", name, True) for name in names if name not in BASELINES]


def measure(report: Report, name: str, trace: Trace, settings: argparse.Namespace) -> None:
    """All sizes of DRAM alone, and two tiers on the chat traces."""
    with_hints, without = Comparison(trace), Comparison(trace, hints=False)
    report.add(f"{name}_unlimited", 0, 100 * without.unlimited(), "%")
    for percent in settings.percent:
        for label, policy, hints in [*runs(NAMES), (_BOUND, _BOUND, False)]:
            comparison = with_hints if hints else without
            row = comparison.run(policy, comparison.percent(percent))
            report.add(cell(name, percent, label), 0, 100 * row.hit_ratio, "%")
            print(f"{name} {percent:g}% {label}: {100 * row.hit_ratio:.2f}% in {row.run_s:.1f} s", file=sys.stderr)
    if name in _CHAT:
        for percents in settings.two_tiers:
            two_tiers(report, name, without, Comparison(trace, hints=False, ssd_loss=None), percents)


def two_tiers(report: Report, name: str, comparison: Comparison, everything: Comparison, percents: tuple[float, float]) -> None:
    """Bytes written to SSD against those of leaf-LRU and of the classifier when all that leaves DRAM is written."""
    dram, ssd = (comparison.percent(percent) for percent in percents)
    rows = {label: comparison.run(label, dram, ssd) for label in NAMES}
    rows[_ALL] = everything.run("classifier", dram, ssd)
    place = f"{name}_{percents[0]:g}+{percents[1]:g}%"
    for label, row in rows.items():
        report.add(f"{place}_{label}_hit", 0, 100 * row.hit_ratio, "%")
        report.add(f"{place}_{label}_written_per_hit_byte", 0, row.written_per_hit_byte or 0.0, "bytes")
        print(f"{place} {label}: {100 * row.hit_ratio:.2f}%, {row.written_per_hit_byte or 0:.2f} written a byte hit", file=sys.stderr)
    for label, base in (*((label, _LRU) for label in NAMES if label != _LRU), ("classifier", _ALL)):
        written = (rows[label].ssd_written_bytes or 0) / (rows[base].ssd_written_bytes or 1)
        against = "lru" if base == _LRU else "all"
        report.ratios[f"ssd_written_{place}_{label}_vs_{against}"] = round(written, 4)
        report.ratios[f"two_tier_points_{place}_{label}_vs_{against}"] = round(100 * (rows[label].hit_ratio - rows[base].hit_ratio), 2)


def cell(name: str, percent: float, label: str) -> str:
    """The name of a measurement."""
    return f"{name}_{percent:g}%_{label}"


def summarise(report: Report, names: list[str], percents: tuple[float, ...]) -> None:
    """The ratios over all cells: the gap closed, and the worst cells against LRU and against the best of the baselines."""
    for label, _, _ in runs(NAMES):
        gaps, over_lru, over_best = [], [], []
        for name in names:
            for percent in percents:
                mine, lru, bound = (report.median(cell(name, percent, what)) for what in (label, _LRU, _BOUND))
                best = max(report.median(cell(name, percent, base)) for base in BASELINES)
                if name == "random":
                    continue
                over_lru.append(mine - lru)
                over_best.append(mine - best)
                if bound - lru >= _LEAST_GAP:
                    gaps.append((mine - lru) / (bound - lru))
        suffix = "" if label == "classifier" else f"_{label.removeprefix('classifier+')}"
        if gaps and label != _LRU:
            report.ratios[f"gap_closed_mean{suffix}"] = round(sum(gaps) / len(gaps), 4)
            report.ratios[f"worst_points_vs_lru{suffix}"] = round(min(over_lru), 2)
            report.ratios[f"worst_points_vs_best_baseline{suffix}"] = round(min(over_best), 2)
        random = [report.median(cell("random", p, label)) - report.median(cell("random", p, _LRU)) for p in percents]
        if label != _LRU:
            report.ratios[f"random_points_vs_lru{suffix}"] = round(min(random), 2)


def show(report: Report, names: list[str], percents: tuple[float, ...]) -> None:
    """The table of hit ratios, as in the notes beside the traces."""
    table = Table(
        "trace", "policy", *(f"{percent:g}%" for percent in percents), "unlimited", title="token hit ratio, %, by share of all pages"
    )
    for name in names:
        for label in [*(label for label, _, _ in runs(NAMES)), _BOUND]:
            values = [f"{report.median(cell(name, percent, label)):.1f}" for percent in percents]
            table.add_row(name, label, *values, f"{report.median(f'{name}_unlimited'):.1f}" if label == _BOUND else "")
        table.add_section()
    Console(width=120).print(table)
    for ratio, value in report.ratios.items():
        print(f"{ratio}: {value}")


def draw(report: Report, names: list[str], percents: tuple[float, ...], path: Path | None) -> None:
    """A panel for each trace: hit ratio against capacity."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for label in [*(label for label, _, _ in runs(NAMES)), _BOUND]:
            values = [report.median(cell(name, percent, label)) for percent in percents]
            axes.plot(percents, values, "k--" if label == _BOUND else "o-", label=label, markersize=3)
        axes.axhline(report.median(f"{name}_unlimited"), color="grey", linewidth=1)
        axes.set_xscale("log")
        axes.set_title(name)
        axes.set_xlabel("capacity, % of all pages")
    figure.axes[0].set_ylabel("token hit ratio, %")
    figure.axes[0].legend()
    figure.savefig(path)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--traces", type=Path, default=TRACES, help="folder of the trace files [default: ../shared/traces beside the repository]"
    )
    parser.add_argument("--only", action="append", choices=FILES, help="only this trace; may be given more than once")
    settings = parser.parse_args()
    if settings.png is not None:
        can_draw()
    settings.percent, settings.two_tiers = _PERCENT, _TWO_TIERS
    if settings.quick:
        settings.only, settings.percent, settings.two_tiers = settings.only or ["conversation"], (2.0, 10.0), _TWO_TIERS[1:2]
    report = Report("policy", {"percent": settings.percent, "two_tiers_percent": _TWO_TIERS, "policies": NAMES, "least_gap": _LEAST_GAP})
    names = []
    for name, trace in traces(settings):
        measure(report, name, trace, settings)
        names.append(name)
    summarise(report, names, settings.percent)
    show(report, names, settings.percent)
    report.write(settings.json)
    draw(report, names, settings.percent, settings.png)


if __name__ == "__main__":
    main()
