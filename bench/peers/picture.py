"""The picture of a run: gets and puts over one connection by size, and the limit. Needs matplotlib."""

import sys
from importlib.util import find_spec
from pathlib import Path

from bench.peers.ratios import STORES
from bench.report import Report

_SHAPES = ("1MiB", "4MiB", "16MiB", "64MiB", "32x1.5MiB")


def can_draw() -> None:
    """Exits without matplotlib: to be asked before a long run."""
    if find_spec("matplotlib") is None:
        sys.exit("--png needs matplotlib: pip install matplotlib")


def draw(report: Report, path: Path) -> None:
    """Medians with their spread, a group of bars a size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    for number, what in enumerate(("get", "put"), 1):
        axes = figure.add_subplot(2, 1, number)
        shapes = [shape for shape in _SHAPES if report.values(f"{what}_{shape}_ours")]
        names = [name for name in ("ours", *STORES) if any(report.values(f"{what}_{shape}_{name}") for shape in shapes)]
        width = 0.8 / (len(names) or 1)
        for place, name in enumerate(names):
            of = [report.values(f"{what}_{shape}_{name}") or [0.0] for shape in shapes]
            medians = [sorted(values)[len(values) // 2] for values in of]
            spread = [[m - min(v) for m, v in zip(medians, of, strict=True)], [max(v) - m for m, v in zip(medians, of, strict=True)]]
            at = [index - 0.4 + width * (place + 0.5) for index in range(len(shapes))]
            axes.bar(at, medians, width, yerr=spread, capsize=2, label="kvstore" if name == "ours" else name)
        for index, shape in enumerate(shapes):
            if report.values(f"iperf3_{shape}"):
                limit = report.median(f"iperf3_{shape}")
                axes.plot([index - 0.45, index + 0.45], [limit, limit], "k--", label="" if index else "iperf3 -l 1M")
        axes.set_xticks(range(len(shapes)), shapes)
        axes.set_ylabel("GiB/s")
        axes.set_title(f"{what} over one TCP connection on loopback (medians; the lines are minimum and maximum)")
        if shapes:
            axes.set_ylim(top=1.2 * axes.get_ylim()[1])
            axes.legend(loc="upper left", ncols=len(names) + 1)
        axes.grid(visible=True, axis="y", alpha=0.3)
    figure.savefig(path)
