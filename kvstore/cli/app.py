"""The commands, put together, and what becomes of errors."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore import __version__
from kvstore.cli.common import credentials, print_error
from kvstore.cli.lazily import LazyGroup
from kvstore.errors import KVStoreError


class Commands(LazyGroup):
    """Where each command is."""

    places = {  # noqa: RUF012
        "serve": ("serve", "serve"),
        "status": ("watch", "status"),
        "top": ("watch", "top"),
        "ns": ("namespaces", "app"),
        "leases": ("leases", "leases"),
        "check": ("check", "check"),
        "migrate": ("migrate", "migrate"),
        "doctor": ("doctor", "doctor"),
        "plan": ("plan", "plan"),
        "simulate": ("simulate", "simulate"),
        "why": ("why", "why"),
        **{name: ("data", name) for name in ("put", "get", "match")},
        **{name: ("text", name) for name in ("recipes", "drop", "rebuild")},
        **{name: ("prefixes", name) for name in ("prefetch", "pin", "unpin", "abandon", "delete")},
    }


app = typer.Typer(
    cls=Commands,
    name="kvstore",
    help="A store for the attention state (KV cache) of LLM services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    token: Annotated[
        str,
        typer.Option(
            envvar="KVSTORE_TOKEN", help="Bearer token, if the daemon wants one; others see it here, so better in the environment."
        ),
    ] = "",
    tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="KVSTORE_TLS_CA", help="Certificates (PEM) to trust instead of the system's."),
    ] = None,
) -> None:
    credentials.token, credentials.tls_ca = token.strip(), tls_ca


def main() -> None:
    """Run the command line. Errors that the store knows end in one line on standard error and exit code 2."""
    try:
        app()
    except KVStoreError as error:
        print_error(error)
        sys.exit(2)
