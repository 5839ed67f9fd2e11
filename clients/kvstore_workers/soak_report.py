"""The soak's figures: what is sampled, when it counts as flat, and the table at the end. Pure but for reading /proc and files."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that must not grow: its last quarter may be over its first by a share, or by an absolute amount."""

    name: str
    unit: int
    share: float
    amount: float


MEASURES = (
    Measure("anonymous memory", _MIB, 0.03, 4 * _MIB),
    Measure("segments' memory", _MIB, 0.05, 4 * _MIB),
    Measure("lent memory", _MIB, 0.25, 20 * _MIB),
    Measure("descriptors", 1, 0.0, 6),
    Measure("tasks", 1, 0.0, 30),
    Measure("segments", 1, 0.0, 2),
    Measure("leases", 1, 0.25, 20),
    Measure("journal file", _MIB, 0.05, 1 * _MIB),
    Measure("blobs file", _MIB, 0.05, 8 * _MIB),
    Measure("index file", _MIB, 0.05, 1 * _MIB),
)
"""Segments are made and given back as sizes compete; lent memory, leases, tasks and descriptors follow the clients of the moment.

Anonymous memory comes in steps of up to a MiB (an arena of Python's), so that the slope of a run of minutes says little.
What it may grow by in 20 minutes is some 60 bytes an operation, at 100 a second.
"""

Sample = dict[str, float]


def take_sample(stat: Any, pid: int, data_dir: Path) -> Sample:
    """All measures of a daemon now, in bytes or counts. RSS of mapped files is left out: it is the page cache's."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    shared = _shared_memory(pid)
    return {
        "anonymous memory": int(status["RssAnon"].split()[0]) * 1024,
        "segments' memory": shared["kvstore-segment"],
        "lent memory": shared["kvstore-buffer"],
        "descriptors": stat["descriptors"],
        "tasks": stat["tasks"],
        "segments": stat["dram_segments"]["count"],
        "leases": stat["leases"],
        "journal file": (data_dir / "journal" / "data.mdb").stat().st_size,
        "blobs file": (data_dir / "blobs.extents").stat().st_size,
        "index file": (data_dir / "blobs" / "data.mdb").stat().st_size,
    }


def _shared_memory(pid: int) -> Counter[str]:
    """Bytes that a process has of memory files, by their names: of its own segments, and of what its clients lend it."""
    found: Counter[str] = Counter()
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):  # a map begins
            name = others[4].removeprefix("/memfd:") if len(others) > 4 else ""
        elif first == "Rss:":
            found[name] += int(others[0]) * 1024
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a measure went: medians of its first and last quarter, and the slope of a line through all samples, an hour."""

    measure: Measure
    first: float
    last: float
    slope: float

    @property
    def flat(self) -> bool:
        """Whether the last quarter is over the first by no more than the tolerance."""
        return self.last - self.first <= max(self.measure.share * self.first, self.measure.amount)


def judge(times: list[float], samples: list[Sample]) -> list[Verdict]:
    """Verdicts over samples taken at `times` (seconds). Needs at least 8 of them."""
    quarter = len(samples) // 4
    found = []
    for measure in MEASURES:
        values = np.array([sample[measure.name] for sample in samples])
        slope = float(np.polyfit(np.array(times) / 3600, values, 1)[0])
        found.append(Verdict(measure, float(np.median(values[:quarter])), float(np.median(values[-quarter:])), slope))
    return found


def verdict_table(verdicts: list[Verdict], title: str) -> Table:
    """The table of what must be flat."""
    table = Table("", "first quarter", "last quarter", "an hour", "may grow by", "flat", title=title)
    for v in verdicts:
        unit, places = v.measure.unit, 1 if v.measure.unit > 1 else 0
        allowed = max(v.measure.share * v.first, v.measure.amount) / unit
        suffix = " MiB" if unit > 1 else ""
        table.add_row(
            v.measure.name, f"{v.first / unit:.{places}f}{suffix}", f"{v.last / unit:.{places}f}{suffix}", f"{v.slope / unit:+.1f}{suffix}",
            f"{allowed:.{places}f}{suffix}", "[green]yes" if v.flat else "[bold red]no",
        )  # fmt: skip
    return table
