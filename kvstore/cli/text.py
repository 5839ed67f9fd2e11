"""`kvstore recipes`, `drop` and `rebuild`: what it takes to compute pages again, giving up pages of which that is kept, and doing it."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.common import (
    DEFAULT_DATA,
    DEFAULT_TIMEOUT_S,
    EndpointOption,
    FromTokenOption,
    JsonOption,
    NamespaceArgument,
    TimeoutOption,
    connect,
    counted,
    misses,
    print_json,
)  # fmt: skip
from kvstore.cli.labels import MaybeTokensOption, TokensOption, parse_tokens
from kvstore.errors import BadRequest
from kvstore.size_text import size_text

if TYPE_CHECKING:
    from kvstore_client.text import RebuildState

_TELL_S = 2.0


def recipes(
    namespace: NamespaceArgument,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete those of pages that are gone: of --tokens, or with --all, of all.")
    ] = False,
    tokens: MaybeTokensOption = None,
    from_token: FromTokenOption = 0,
    everything: Annotated[bool, typer.Option("--all", help="Of the whole namespace.")] = False,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Say how many recipes a namespace has, or delete some. Pages that are there keep theirs."""
    if (tokens is not None) + everything != delete or (from_token and tokens is None):
        raise BadRequest("say which recipes to delete: --delete with either --tokens, and perhaps --from-token, or --all")
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        deleted = 0
        if delete:
            of = None if tokens is None else parse_tokens(tokens)
            deleted = space.delete_recipes(of, from_token=None if of is None else from_token)
        count, nbytes = space.recipes()
    if as_json:
        print_json({"recipes": count, "bytes": nbytes} | ({"deleted": deleted} if delete else {}))
    else:
        typer.echo((f"{counted(deleted, 'recipe')} deleted; " if delete else "") + f"{counted(count, 'recipe')}, {size_text(nbytes)}")


@misses
def drop(
    namespace: NamespaceArgument,
    tokens: TokensOption,
    from_token: FromTokenOption = 0,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Give up a prefix and all that hangs from it in DRAM and on SSD, and keep what it takes to compute it again.

    Exit code 1 if nothing of it is there, 2 for an error; pages without a recipe are refused.
    """
    with connect(endpoint, timeout) as client:
        pages = client.namespace(namespace).drop_to_text(parse_tokens(tokens).data, from_token=from_token)
    if as_json:
        print_json({"dropped_pages": pages})
    else:
        typer.echo(f"{counted(pages, 'page')} dropped to text")
    if not pages:
        raise typer.Exit(1)


@misses
def rebuild(
    namespace: NamespaceArgument,
    tokens: TokensOption,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait at most.")] = 30.0,
    check: Annotated[bool, typer.Option("--check", help="Compute pages that are there once more, and compare them.")] = False,
    from_token: FromTokenOption = 0,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Have the missing pages of a prefix computed again by a rebuild worker, and wait until they are there.

    With --check, those that are there are compared instead (from --from-token on), and how far they lie apart is printed. Exit code 1 if
    the time is over before, 2 for an error.
    """
    if from_token and not check:
        raise BadRequest("--from-token goes with --check: what is missing is computed from the first missing page on")
    ids = parse_tokens(tokens).data
    deadline = time.monotonic() + wait
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        if check:
            state = space.rebuild_check(ids, from_page=from_token // space.spec.page_tokens, wait_s=wait)
            _print_check(state, as_json)
            raise typer.Exit(0 if state.checked_pages else 1)
        while True:
            left = max(0.0, deadline - time.monotonic())
            state = space.rebuild(ids, wait_s=min(left, _TELL_S))
            if state.pages >= state.wanted_pages or left <= _TELL_S:
                break
            if not as_json:
                typer.echo(f"{state.pages} of {counted(state.wanted_pages, 'page')}; {_jobs(state)}", err=True)
    if as_json:
        print_json(asdict(state))
    else:
        typer.echo(f"{state.pages} of {counted(state.wanted_pages, 'page')} there{_why_not(state)}")
    if state.pages < state.wanted_pages:
        raise typer.Exit(1)


def _jobs(state: "RebuildState") -> str:
    return f"{counted(state.claimed_jobs, 'job')} claimed, {state.waiting_jobs} waiting"


def _why_not(state: "RebuildState") -> str:
    """What a rebuild that is not done waits for."""
    if state.pages >= state.wanted_pages:
        return ""
    nobody = "; does a rebuild worker of this namespace run (docs/rebuild.md)?" if state.waiting_jobs and not state.claimed_jobs else ""
    return f" in time: {_jobs(state)}{nobody}"


def _print_check(state: "RebuildState", as_json: bool) -> None:
    if as_json:
        figures = {dtype: asdict(drift) | {"mean_abs": drift.mean_abs} for dtype, drift in state.drift.items()}
        print_json({"checked_pages": state.checked_pages, "drift": figures})
        return
    typer.echo(f"{counted(state.checked_pages, 'page')} compared" if state.checked_pages else "no worker has compared them in time")
    for dtype, drift in state.drift.items():
        typer.echo(
            f"{dtype}: {drift.differing:,} of {drift.elements:,} elements differ, max {drift.max_abs:.3g}, mean {drift.mean_abs:.3g}"
        )
