"""`kvstore status` and `kvstore top`: looking at a running daemon."""

import contextlib
import json
import time
from collections.abc import Generator
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvstore.api.request_stats import quantile_s
from kvstore.cli.common import (
    DEFAULT_HTTP,
    DEFAULT_TIMEOUT_S,
    HttpOption,
    JsonOption,
    TimeoutOption,
    http_json,
    of_several_tenants,
    print_json,
    table_console,
)  # fmt: skip
from kvstore.size_text import size_text

_FIRST_S = 1.0
_RATES = (
    ("matches", "matches/s", False),
    ("fetch_bytes", "fetched", True),
    ("put_bytes", "put", True),
    ("demoted_stored_bytes", "to SSD", True),
    ("promoted_stored_bytes", "from SSD", True),
)


def status(http: HttpOption = DEFAULT_HTTP, timeout: TimeoutOption = DEFAULT_TIMEOUT_S, as_json: JsonOption = False) -> None:
    """Show a daemon's tiers, namespaces and totals."""
    stat = http_json(http, "/v1/stat", timeout=timeout)
    if as_json:
        print_json(stat)
        return
    follows = " (by recency now)" if stat.get("follows_lru") and stat["policy"] != "lru" else ""
    policy = f", policy {stat['policy']}{follows}" if "policy" in stat else ""
    table_console().print(f"kvstore {stat['version']}, up {stat['uptime_s']:.0f} s{policy}, at {', '.join(stat['endpoints'])}")
    if rates := stat.get("rates"):
        ssd, link = (f"{size_text(rates[name]['bytes_s'])}/s{'' if rates[name]['measured'] else ' (a guess)'}" for name in ("ssd", "link"))
        table_console().print(f"reads from SSD {ssd}, fetches from DRAM {link}")
    table_console().print(_tiers(stat), _namespaces(stat), *([_requests(stat, None), _totals(stat)] if "totals" in stat else []))


def top(
    http: HttpOption = DEFAULT_HTTP,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between looks.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Stop after so many looks; 0 for never.")] = 0,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Watch a daemon live: tiers, rates and namespaces. Ctrl-C ends it. With --json a line a look, in a pipe tables in a row."""
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            for look in looks(http, interval, count, timeout):
                print(json.dumps(look.stat | {"time": time.time(), "per_s": rates(*look)}), flush=True)
            return
        console = table_console()
        with Live(console=console, refresh_per_second=4) if console.is_terminal else contextlib.nullcontext() as live:
            for look in looks(http, interval, count, timeout):
                if live is not None:
                    live.update(shown(*look))
                else:
                    console.print(time.strftime("%Y-%m-%dT%H:%M:%S%z"), shown(*look))
                    console.file.flush()


class Look(NamedTuple):
    """What `/v1/stat` says, what it said at the look before (None if that was before a restart), and the seconds between them."""

    stat: dict[str, Any]
    last: dict[str, Any] | None
    seconds: float


def looks(http: str, interval: float, count: int, timeout: float = DEFAULT_TIMEOUT_S) -> Generator[Look, None, None]:
    """One look after the other. It is asked once before the first, for rates that are those of now."""
    last, last_time = http_json(http, "/v1/stat", timeout=timeout), time.monotonic()
    done = 0
    while not count or done < count:
        time.sleep(interval if done else min(interval, _FIRST_S))
        stat, now = http_json(http, "/v1/stat", timeout=timeout), time.monotonic()
        yield Look(stat, last if last["epoch"] == stat["epoch"] else None, now - last_time)
        last, last_time = stat, now
        done += 1


def rates(stat: dict[str, Any], last: dict[str, Any] | None, seconds: float) -> dict[str, float]:
    """How fast the totals rise, each a second; none over a restart, from which they count anew."""
    return {name: (value - last["totals"][name]) / seconds for name, value in stat.get("totals", {}).items()} if last else {}


def shown(stat: dict[str, Any], last: dict[str, Any] | None, seconds: float) -> Group:
    """A look, in tables."""
    restarted = [] if last else ["the daemon was restarted since the last look"]
    of_all = [_rates(stat, rates(stat, last, seconds)), _requests(stat, last)] if "totals" in stat else []  # else no admin access
    return Group(_tiers(stat), *restarted, *of_all, _namespaces(stat))


def _tiers(stat: dict[str, Any]) -> Table:
    table = Table("tier", "used", "capacity", "share")
    for name, usage in stat["tiers"].items():
        bar = ProgressBar(total=usage["capacity"], completed=usage["used"], width=30)
        table.add_row(name, size_text(usage["used"]), size_text(usage["capacity"]), bar)
    return table


def _rates(stat: dict[str, Any], per_s: dict[str, float]) -> Table:
    table = Table(*(title for _, title, _ in _RATES), "leases", "puts open", "backlog", "clients")
    cells = []
    for field, _, is_bytes in _RATES:
        rate = per_s.get(field)
        cells.append("-" if rate is None else f"{size_text(rate)}/s" if is_bytes else f"{rate:.0f}")
    table.add_row(
        *cells, str(stat["leases"]), str(stat["puts_open"]), str(stat["writeback_backlog_pages"]), str(stat["sessions"])
    )  # fmt: skip
    return table


def _requests(stat: dict[str, Any], last: dict[str, Any] | None) -> Table | str:
    """Requests since the last look, or since the start, and what they took: estimates, as they are read off buckets that double."""
    table = Table("requests", "count", "p50 (about)", "p99 (about)")
    for kind, times in stat["requests"].items():
        counts = times["buckets"]
        if last is not None and kind in last["requests"]:
            counts = [now - before for now, before in zip(counts, last["requests"][kind]["buckets"], strict=True)]
        if any(counts):
            table.add_row(kind, f"{sum(counts):,}", *(_time_text(quantile_s(counts, share)) for share in (0.5, 0.99)))
    for code, count in stat["errors"].items():
        count -= last["errors"].get(code, 0) if last is not None else 0
        if count:
            table.add_row(f"error: {code}", f"{count:,}")
    return table if table.row_count else f"no requests {'yet' if last is None else 'since the last look'}"


def _time_text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"


def _namespaces(stat: dict[str, Any]) -> Table:
    tenants = of_several_tenants(stat)
    table = Table(*(["tenant"] if tenants else []), "namespace", "id", "pages", "blobs", "in DRAM")
    for item in stat["namespaces"]:
        cells = (item["name"], item["id"], f"{item['pages']:,}", f"{item['blobs']:,}", size_text(item["dram_bytes"]))
        table.add_row(*([item["tenant"]] if tenants else []), *cells)
    return table


def _totals(stat: dict[str, Any]) -> Table:
    table = Table("since start", "count")
    for name, value in stat["totals"].items():
        if value:
            table.add_row(name.replace("_", " "), size_text(value) if name.endswith("bytes") else f"{value:,}")
    return table
