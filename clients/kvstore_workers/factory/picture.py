"""A picture of runs over time. Needs matplotlib, which is in none of the project's packages: who wants pictures installs it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvstore.api.wire import Unsupported
from kvstore_workers.factory.report import Journalled


def can_draw() -> None:
    """Raises Unsupported without matplotlib: to be asked before a long run."""
    if find_spec("matplotlib") is None:
        raise Unsupported("a picture needs matplotlib: pip install matplotlib")


def draw(runs: dict[str, Journalled], path: Path) -> None:
    """For each run: turns by where they are, HBM by what its bytes do, and TTFT, over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(runs), 9), layout="constrained")
    panels: Any = figure.subplots(3, len(runs), sharex="col", squeeze=False)
    for column, (name, journal) in enumerate(runs.items()):
        times = [s.at - journal.begun for s in journal.samples]
        turns, hbm, ttft = (row[column] for row in panels)
        for what in ("waiting", "filling", "ready", "decoding"):
            turns.plot(times, [getattr(s, what) for s in journal.samples], label=what, linewidth=1)
        turns.set_title(name)
        turns.set_ylabel("turns")
        turns.legend(loc="upper right")
        held = [[s.hbm[i] / (1 << 20) for s in journal.samples] for i in range(3)]
        hbm.stackplot(times, *held, labels=["used", "idle", "moving"])
        hbm.set_ylabel("HBM of all workers, MiB")
        hbm.legend(loc="upper right")
        points = [
            (arrived.at - journal.begun, journal.filled[number].token_at - arrived.at, arrived.kind)
            for number, arrived in journal.arrived.items()
            if number in journal.filled
        ]
        for kind in sorted({k for _, _, k in points}):
            ttft.plot([x for x, _, k in points if k == kind], [y for _, y, k in points if k == kind], ".", markersize=4, label=kind)
        ttft.set_ylabel("TTFT, s, by arrival")
        ttft.set_xlabel("seconds")
        ttft.legend(loc="upper right")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Unsupported(f"can't write the picture {path}: {error}") from error
