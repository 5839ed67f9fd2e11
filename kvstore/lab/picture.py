"""Pictures of a comparison. matplotlib is not among the daemon's packages; who wants pictures installs it."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kvstore.errors import Unsupported
from kvstore.lab.measure import Row


def can_draw() -> None:
    """Raises Unsupported without matplotlib: to be asked before a long run."""
    if find_spec("matplotlib") is None:
        raise Unsupported("a picture needs matplotlib: pip install matplotlib")


def draw(rows: Sequence[Row], unlimited: float, title: str, path: Path) -> None:
    """Hit ratio against DRAM capacity where there are several, else bars by policy. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    if len({row.dram_bytes for row in rows}) > 1:
        for policy in dict.fromkeys(row.policy for row in rows):
            mine = [row for row in rows if row.policy == policy]
            style = "k--" if policy == "clairvoyant" else "o-"
            axes.plot([row.dram_percent for row in mine], [100 * row.hit_ratio for row in mine], style, label=policy, markersize=4)
        axes.axhline(100 * unlimited, color="grey", linewidth=1, label="unlimited")
        axes.set_xscale("log")
        axes.set_xlabel("DRAM, % of the bytes of all different pages")
        axes.set_ylabel("token hit ratio, %")
        axes.grid(visible=True, alpha=0.3)
    else:
        names = [row.policy for row in rows]
        dram = [100 * (row.hit_ratio if row.dram_hit_ratio is None else row.dram_hit_ratio) for row in rows]
        axes.barh(names, dram, label="DRAM (the bound: any tier)")
        axes.barh(names, [100 * (row.ssd_hit_ratio or 0) for row in rows], left=dram, label="SSD")
        axes.axvline(100 * unlimited, color="grey", linewidth=1, label="unlimited")
        axes.invert_yaxis()
        axes.set_xlabel("token hit ratio, %")
    axes.set_title(title)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Unsupported(f"can't write the picture {path}: {error}") from error
