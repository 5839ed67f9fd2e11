"""The tables of a run, in Markdown. Pure."""

from bench.peers.ratios import GOALS, STORES
from bench.report import Report
from bench.ssd_fetch import CASES

_SSD = (*(f"ssd_cold_{case}" for case in CASES), "ssd_then_dram", "read_alone", "fio", "fio_1_thread")
_SHAPES = ("1MiB", "4MiB", "16MiB", "64MiB", "32x1.5MiB")


def tables(report: Report) -> str:
    """All tables of a run."""
    parts = [goals(report)]
    for what in ("get", "put"):
        cells = [(shape, 1) for shape in _SHAPES] + [(shape, n) for n in (2, 4, 8) for shape in _SHAPES]
        parts.append(_speeds(report, what, [cell for cell in cells if report.values(_row(what, *cell, "ours"))]))
    parts += [_cpu(report), _small(report), _rest(report)]
    return "\n".join(part for part in parts if part)


def goals(report: Report) -> str:
    """The ratios that there are goals for."""
    lines = ["| ratio | median | goal | |", "| --- | --- | --- | --- |"]
    for goal in GOALS:
        if goal.name in report.ratios:
            value = report.ratios[goal.name]
            lines.append(f"| `{goal.name}` | {value:.3g} | {goal.text} | {'met' if goal.met(value) else '**missed**'} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def spread(report: Report, what: str, digits: int = 2) -> str:
    """Median and, in brackets, minimum and maximum; a dash if it was not measured."""
    values = report.values(what)
    return f"{report.median(what):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})" if values else "-"


def _row(what: str, shape: str, connections: int, store: str) -> str:
    cell = shape + (f"_{connections}conn" if connections > 1 else "")
    return f"{what}_{cell}" if what.startswith("iperf3") else f"{what}_{cell}_{store}"


def _speeds(report: Report, what: str, cells: list[tuple[str, int]]) -> str:
    if not cells:
        return ""
    stores = [name for name in ("ours", *STORES, "valkey_py") if any(report.values(_row(what, *cell, name)) for cell in cells)]
    limits = [name for name in ("iperf3", "iperf3_unpaced") if any(report.values(_row(name, *cell, "")) for cell in cells)]
    columns = [*stores, *limits]
    lines = [f"| {what}, GiB/s | connections | {' | '.join(columns)} |", "| --- " * (len(columns) + 2) + "|"]
    for shape, connections in cells:
        measured = [spread(report, _row(what, shape, connections, name)) for name in stores]
        measured += [spread(report, _row(name, shape, connections, "")) for name in limits]
        lines.append(f"| {shape} | {connections} | {' | '.join(measured)} |")
    return "\n".join(lines) + "\n"


def _cpu(report: Report) -> str:
    lines = ["| CPU, s/GiB, one connection | client, get | server, get | client, put | server, put |", "| --- | --- | --- | --- | --- |"]
    for shape in ("16MiB", "64MiB", "32x1.5MiB", "1MiB"):
        for store in ("ours", *STORES):
            rows = [f"{what}_{shape}_{store}_{side}_cpu" for what in ("get", "put") for side in ("client", "server")]
            if report.values(rows[0]):
                lines.append(f"| {store}, {shape} | {' | '.join(spread(report, row) for row in rows)} |")
        if report.values(f"iperf3_{shape}_client_cpu"):
            sending, receiving = (spread(report, f"iperf3_{shape}_{side}_cpu") for side in ("client", "server"))
            lines.append(f"| iperf3 | {receiving} | {sending} | {sending} | {receiving} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _small(report: Report) -> str:
    lines = ["| µs | p50 | p99 |", "| --- | --- | --- |"]
    for shape in ("4KiB", "64x4KiB"):
        for what in ("get", "match_and_get", "put"):
            for store in ("ours", "ours_blocking", "valkey", "valkey_py", "redis", "redis_py", "mooncake", "lmcache"):
                name = f"{what}_{shape}_{store}"
                if report.values(f"{name}_p50"):
                    lines.append(f"| {what} {shape}, {store} | {spread(report, f'{name}_p50', 0)} | {spread(report, f'{name}_p99', 0)} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _rest(report: Report) -> str:
    """Same host and SSD, and the memory's limit."""
    names = ("memcpy_16MiB", "numpy_copy_16MiB", "fetch_16MiB", "put_16MiB", "put_any_memory_16MiB", "mooncake_get_16MiB")
    more = ("mooncake_put_16MiB", "lease_and_view_16MiB", "lease_and_view_16MiB_blocking", *(f"{name}_16MiB" for name in _SSD))
    lines = ["| | median (spread) | unit |", "| --- | --- | --- |"]
    for name in names + more:
        if report.values(name):
            unit = next(row["unit"] for row in report.rows if row["what"] == name)
            lines.append(f"| {name} | {spread(report, name)} | {unit} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""
