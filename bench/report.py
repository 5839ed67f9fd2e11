"""What every benchmark shares: repetitions, medians and spread, ratios, and the JSON and PNG that they can write."""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvstore_workers.busy_machine import warn_if_busy


class _Parser(argparse.ArgumentParser):
    """Says before anything is measured if the machine is busy."""

    def parse_args(self, *given: Any, **named: Any) -> Any:
        parsed = super().parse_args(*given, **named)
        if getattr(parsed, "part", None) is None:  # one that a benchmark starts of itself: busy with what is measured
            warn_if_busy()
        return parsed


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that all benchmarks have."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short form, for a look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every repetition")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the result (needs matplotlib)")
    return parser


@dataclass(slots=True)
class Report:
    """Rows of repetitions, and ratios between them."""

    name: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, repetition: int, value: float, unit: str) -> None:
        """One repetition of one measurement."""
        self.rows.append({"what": what, "repetition": repetition, "value": value, "unit": unit})

    def values(self, what: str) -> list[float]:
        """All repetitions of a measurement."""
        return [row["value"] for row in self.rows if row["what"] == what]

    def median(self, what: str) -> float:
        """The median of a measurement."""
        return float(np.median(self.values(what)))

    def ratio(self, name: str, ours: str, theirs: str) -> None:
        """The median over repetitions of ours to theirs, measured next to each other."""
        pairs = zip(self.values(ours), self.values(theirs), strict=True)
        self.ratios[name] = round(float(np.median([a / b for a, b in pairs])), 4)

    def show(self, title: str) -> None:
        """Print medians, spread and ratios."""
        table = Table("measurement", "median", "min", "max", "unit", title=title)
        for what in dict.fromkeys(row["what"] for row in self.rows):
            values = self.values(what)
            unit = next(row["unit"] for row in self.rows if row["what"] == what)
            table.add_row(what, f"{np.median(values):.3f}", f"{min(values):.3f}", f"{max(values):.3f}", unit)
        Console(width=120).print(table)
        for name, value in self.ratios.items():
            print(f"{name}: {value:.3f}")

    def write(self, path: Path | None) -> None:
        """Write the JSON, if it is wanted."""
        if path is not None:
            data = {
                "name": self.name,
                "commit": _commit(),
                "machine": _machine(),
                "settings": self.settings,
                "rows": self.rows,
                "ratios": self.ratios,
            }
            path.write_text(json.dumps(data, indent=1) + "\n")

    def draw(self, path: Path | None, ylabel: str) -> None:
        """Draw medians as bars, if it is wanted."""
        if path is None:
            return
        try:
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot
        except ImportError:
            sys.exit("--png needs matplotlib: pip install matplotlib")
        names = list(dict.fromkeys(row["what"] for row in self.rows))
        figure, axes = pyplot.subplots(figsize=(10, 0.3 * len(names) + 1.5))
        axes.barh(names, [self.median(n) for n in names])
        axes.invert_yaxis()
        axes.set_xlabel(ylabel)
        axes.set_title(self.name)
        figure.tight_layout()
        figure.savefig(path)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def _machine() -> dict[str, Any]:
    return {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version(), "processor": _processor()}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
