"""`kvstore migrate`: a data directory that an older version wrote, brought to today's format."""

import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.child import go_on_in_a_child
from kvstore.cli.common import JsonOption, counted, print_json
from kvstore.cli.progress import progress
from kvstore.errors import DataDirError
from kvstore.size_text import size_text

if TYPE_CHECKING:
    from kvstore.store.migrating.report import MigrationReport

_SHOWN = 20


def migrate(
    data_dir: Annotated[
        Path | None, typer.Option(envvar="KVSTORE_DATA_DIR", help="The store to migrate; by default ~/.local/share/kvstore.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file, as for `kvstore serve`: its data_dir, if --data-dir is not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bring the data directory of a stopped daemon, written by an older version, to the format of this one.

    Needs room on the disk for all blobs once more. It may be killed at any point, and run again. Exit code 0: it is done, or
    nothing was to do; 1: it is done, and some blobs could not be brought along; 2: it could not be done, and nothing is lost.
    """
    from kvstore.config import default_data_dir, load_config  # the other commands start faster without the daemon's imports

    if data_dir is None and config is not None:
        data_dir = load_config({}, config).data_dir
    path = data_dir or default_data_dir()
    if (signal_number := go_on_in_a_child()) is not None:
        raise DataDirError(
            f"LMDB ended the migration of {path} at a damaged page ({signal.strsignal(signal_number)}): start the version of kvstore that "
            "wrote it until it saves what can be read (it does so after two starts that end like this), and migrate then"
        )
    from kvstore.store.migrating.migrate import migrate as run

    with progress("written anew", quiet=as_json) as tell:
        report = run(path, tell)
    if as_json:
        print_json(asdict(report) | {"lost_blobs": report.lost_blobs, "lost_pages": report.lost_pages})
    else:
        _show(path, report)
    raise typer.Exit(1 if report.lost_blobs else 0)


def _show(path: Path, report: "MigrationReport") -> None:
    if report.from_format == report.to_format:
        typer.echo(f"{path} is of format {report.to_format} already: nothing to do")
        return
    typer.echo(
        f"{path} is of format {report.to_format} now, and was of {report.from_format}: {counted(len(report.namespaces), 'namespace')}, "
        f"{counted(report.moved_blobs, 'blob')}, {size_text(report.moved_bytes)} written anew in {report.seconds:.1f} s"
    )
    if not report.lost_blobs:
        return
    typer.echo(
        f"LOST: {counted(report.lost_blobs, 'blob')} could not be brought along, {counted(report.lost_pages, 'page')} can't be served"
    )
    names = {space.id: space.name for space in report.namespaces}
    for loss in report.losses[:_SHOWN]:
        typer.echo(f"  {names[loss.namespace]}: {loss.what}")
    if (rest := report.lost_blobs - _SHOWN) > 0:
        typer.echo(f"  and {rest} more (--json lists up to {len(report.losses)})")
    typer.echo("Nothing has to be repaired: the daemon drops these pages by itself when they are asked for; clients put them again.")
    if report.kept is not None:
        typer.echo(f"Some of the old blobs could not be read at all: they are kept in {report.kept}, for you to delete.")
