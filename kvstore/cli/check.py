"""`kvstore check`: is the store what it should be?"""

import http.client
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.child import go_on_in_a_child
from kvstore.cli.common import (
    DEFAULT_HTTP,
    DEFAULT_TIMEOUT_S,
    JsonOption,
    TimeoutOption,
    counted,
    http_json,
    http_open,
    http_problem,
    print_json,
    unreachable,
)
from kvstore.cli.progress import Tell, progress
from kvstore.errors import BadRequest, DataDirError, KVStoreError, error_from_code
from kvstore.size_text import size_text
from kvstore.sizes import parse_size

_LONGEST_STEP_S = 60.0
"""Between two lines of a daemon that checks its store."""
_SHOWN = 20


def check(
    data_dir: Annotated[
        Path | None, typer.Option(envvar="KVSTORE_DATA_DIR", help="The store to check; by default ~/.local/share/kvstore.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file, as for `kvstore serve`: its data_dir, if --data-dir is not given.")
    ] = None,
    http: Annotated[
        str | None, typer.Option("--http", envvar="KVSTORE_HTTP", help=f"Check a running daemon's store; by default {DEFAULT_HTTP}.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Of a running daemon: bytes a second to read at most, for example 200MiB.")] = None,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Verify trees, journal and every blob of a stopped or running store. Changes nothing.

    A data directory that a daemon has open is checked by that daemon, while it serves. Exit code 0: clean; 1: damage was
    found; 2: the check could not run.
    """
    bytes_per_s = _rate(rate)
    if data_dir is None and config is not None:
        from kvstore.config import load_config

        data_dir = load_config({}, config).data_dir
    if data_dir is None and http is not None:
        look: Callable[[Tell], dict[str, Any]] = partial(_running, http, bytes_per_s, timeout)
    elif (signal_number := go_on_in_a_child()) is not None:
        look = partial(_ended, signal_number)
    else:
        look = partial(_stopped, data_dir, http, bytes_per_s, timeout)
    with progress("checked", quiet=as_json) as tell:
        report = look(tell)
    if as_json:
        print_json(report)
    else:
        _show(report)
    raise typer.Exit(0 if report["clean"] else 1)


def _rate(text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise BadRequest(f"--rate: {error}") from error


def _stopped(data_dir: Path | None, http: str | None, rate: int | None, timeout: float, tell: Tell) -> dict[str, Any]:
    from kvstore.config import default_data_dir  # the other commands start faster without the daemon's imports
    from kvstore.store.checking.stopped import check_stopped
    from kvstore.store.datadir import DataDirInUse

    path = data_dir or default_data_dir()
    try:
        report = check_stopped(path, lambda p: tell(p.namespace, p.done_bytes, p.total_bytes))
    except DataDirInUse as error:
        return _locked(error, http or DEFAULT_HTTP, rate, timeout, tell)
    return asdict(report)


def _ended(signal_number: int, _: Tell) -> dict[str, Any]:
    """LMDB ended the process that looked."""
    from kvstore.store.checking.verify import CheckReport

    report = CheckReport()
    what = f"journal, blobs or recipes: LMDB ended the check at a damaged page ({signal.strsignal(signal_number)}); there may be more"
    report.add("structure", "", f"{what}. A daemon that ends so twice while it loads saves what can be read at its next start")
    report.all_read = False
    return asdict(report)


def _locked(error: KVStoreError, http: str, rate: int | None, timeout: float, tell: Tell) -> dict[str, Any]:
    """Somebody has the directory: it should be the daemon at `http`."""
    try:
        pid = http_json(http, "/v1/stat", timeout=timeout).get("pid")
    except KVStoreError as refused:
        raise DataDirError(f"{error.message}; and {refused.message}") from None
    holder = re.search(r"\(pid (\d+)\)", error.message)
    if holder is not None and pid is not None and int(holder[1]) != pid:
        raise DataDirError(f"{error.message}; the daemon at {http} is another one (pid {pid}): give the right one with --http alone")
    return _running(http, rate, timeout, tell)


def _running(base: str, rate: int | None, timeout: float, tell: Tell) -> dict[str, Any]:
    """Have a daemon that answers in time check its own store, and follow it."""
    http_json(base, "/healthz", timeout=timeout)
    query = "" if rate is None else f"?bytes_per_s={rate}"
    try:
        with http_open(base, f"/v1/check{query}", method="POST", timeout=_LONGEST_STEP_S) as response:
            for raw in response:
                line = json.loads(raw)
                if line["event"] == "progress":
                    tell(line["namespace"], line["done_bytes"], line["total_bytes"])
                elif line["event"] == "result":
                    found: dict[str, Any] = line["report"]
                    return found
                else:
                    raise error_from_code(line["code"], line["detail"])
    except urllib.error.HTTPError as error:
        raise http_problem(error) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise unreachable(base, error) from None
    raise KVStoreError("the daemon's answer ended before the result: it was stopped; check again")


# --- telling of what was found ---------------------------------------------------------------------------------------------


def _show(report: dict[str, Any]) -> None:
    spaces = {space["id"]: space for space in report["namespaces"]}
    pages, recipes = (sum(space[key] for space in spaces.values()) for key in ("pages", "recipes"))
    typer.echo(
        f"checked {counted(len(spaces), 'namespace')}: {counted(pages, 'page')}, {counted(report['checked_blobs'], 'blob')}, "
        f"{counted(recipes, 'recipe')}, {size_text(report['checked_bytes'])} in {report['seconds']:.1f} s"
    )
    for note in report["notes"]:
        typer.echo(f"note: {note}")
    if report["clean"]:
        typer.echo("clean: everything verifies")
        return
    typer.echo(f"DAMAGE: {counted(len(report['damage']) + report['more_damage'], 'finding')}, {_lost(report)}")
    for damage in report["damage"][:_SHOWN]:
        where = f"{spaces[damage['namespace']]['name']}: " if damage["namespace"] in spaces else ""
        typer.echo(f"  {where}{damage['what']}")
    if (rest := len(report["damage"]) + report["more_damage"] - _SHOWN) > 0:
        typer.echo(f"  and {rest} more (--json lists up to {len(report['damage'])})")
    for space in spaces.values():
        if space["lost_pages"]:
            keys = ", ".join(key[:16] for key in space["lost_keys"][:4])
            lost = counted(space["lost_pages"], "page")
            typer.echo(f"  {space['name']} ({space['id']}) loses {lost}, these and what is below them: {keys}…")
    typer.echo(
        "Nothing has to be repaired: the daemon never serves bytes that do not verify. It drops what is damaged by itself, at its next "
        "start or when it next reads it; clients then get a miss and put the pages again. Look for the cause: disk, memory, or a copy "
        "made of a running store."
    )


def _lost(report: dict[str, Any]) -> str:
    """What can't be served any more, as far as it is known."""
    lost = sum(space["lost_pages"] for space in report["namespaces"]) + report.get("unnamed_lost_pages", 0)
    if report.get("all_read", True):
        return f"{counted(lost, 'page')} can't be served any more"
    known = f"{counted(lost, 'page')} and " if lost else ""
    return f"{known}all pages that only what can't be read knew of can't be served as it is: how many is not known"
