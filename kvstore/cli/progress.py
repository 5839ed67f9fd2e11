"""Telling people how far a long command is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvstore.size_text import size_text

Tell = Callable[[str, int, int], None]
"""Of what, bytes done, of so many."""
_LINE_S = 5.0


@contextmanager
def progress(verb: str, *, quiet: bool) -> Iterator[Tell]:
    """A bar on a terminal, else a line now and then; on standard error, as results go to standard output."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
            TransferSpeedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("opening", total=None)
            yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)
        return
    last = time.monotonic()

    def line(name: str, done: int, total: int) -> None:
        nonlocal last
        if not quiet and time.monotonic() - last >= _LINE_S:
            last = time.monotonic()
            typer.echo(f"{name}: {size_text(done)} of {size_text(total)} {verb}", err=True)

    yield line
