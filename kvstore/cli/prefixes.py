"""`kvstore prefetch`, `pin`, `unpin`, `abandon` and `delete`: what a daemon is told about prefixes."""

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
    moving_s,
    print_json,
)  # fmt: skip
from kvstore.cli.labels import DigestsOption, MaybeTokensOption, labels_of
from kvstore.cli.lacks import nothing_text
from kvstore.errors import BadRequest, NotFound
from kvstore.lease_times import MAX_PIN_S, check_seconds

if TYPE_CHECKING:  # the SDK is imported when it connects
    from kvstore_client.blocking import Namespace


@misses
def prefetch(
    namespace: NamespaceArgument,
    tokens: MaybeTokensOption = None,
    digests: DigestsOption = None,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Bring a prefix from SSD into DRAM, as far as there is room. Exit code 1 if nothing of it is there, 2 for an error.

    Of a flat namespace it brings all pages of the list that are there.
    """
    given = labels_of(tokens, digests)
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        ids = given.of(space.spec)
        known, known_in_dram = _there(space, ids)
        blobs = space.prefetch(ids, timeout=moving_s(timeout, (known - known_in_dram) * space.spec.page_bytes))
        pages, in_dram = _there(space, ids)
        if not pages:
            raise NotFound(nothing_text(namespace, space.spec, space.match(ids, lease_s=0), whole_list=True))
        asked = given.tokens(space.spec) // space.spec.page_tokens
    if as_json:
        print_json({"pages": pages, "dram_pages": in_dram, "blobs": blobs})
    else:
        gaps = f"; {asked - pages} of {asked} digests missing" if space.spec.flat and pages < asked else ""
        typer.echo(f"{counted(blobs, 'blob')} brought up; {in_dram} of {counted(pages, 'page')} in DRAM{gaps}")


def _there(space: "Namespace", ids: memoryview) -> tuple[int, int]:
    """How many pages of a prefix can be used, or of a flat namespace's list are there, whatever lacks between; and how many are in DRAM."""
    found = space.match(ids, lease_s=0, holes=space.spec.flat)
    return found.known_pages if space.spec.flat else found.pages, found.dram_pages


@misses
def pin(
    namespace: NamespaceArgument,
    ttl: Annotated[float, typer.Option(help="Seconds from now after which it ends; at most 30 days.")],
    tokens: MaybeTokensOption = None,
    digests: DigestsOption = None,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Keep a prefix from being evicted for some time. Exit code 1 if nothing of it is there, 2 for an error."""
    check_seconds("--ttl", ttl, MAX_PIN_S)
    given = labels_of(tokens, digests)
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        number, pages = space.pin(given.of(space.spec), ttl)
    if as_json:
        print_json({"pin": str(number), "pages": pages, "ttl_s": ttl})
    else:
        typer.echo(f"{counted(pages, 'page')} kept for {ttl:g} s; end it with: kvstore unpin {namespace} {number}")


@misses
def unpin(
    namespace: NamespaceArgument,
    number: Annotated[int, typer.Argument(metavar="PIN", min=0, max=(1 << 63) - 1, help="What `kvstore pin` printed.")],
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """End a pin. Exit code 1 if it is over already, 2 for an error."""
    with connect(endpoint, timeout) as client:
        client.namespace(namespace).unpin(number)
    if as_json:
        print_json({"unpinned": str(number)})
    else:
        typer.echo("unpinned")


@misses
def abandon(
    namespace: NamespaceArgument,
    tokens: MaybeTokensOption = None,
    digests: DigestsOption = None,
    session: Annotated[str, typer.Option("--session", "-s", help="The session instead, as it is named in hints.")] = "",
    from_token: FromTokenOption = 0,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Say that nobody will come back to a context, or a session: what only it uses is the first to go.

    Exit code 1 if that is nothing, 2 for an error.
    """
    if (tokens is not None or digests is not None) == bool(session) or (session and from_token):
        raise BadRequest("say what to abandon: either --tokens or --digests, and perhaps --from-token, or --session")
    given = None if session else labels_of(tokens, digests)
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        pages = space.abandon_session(session) if given is None else space.abandon(given.of(space.spec), from_token=from_token)
    if session:
        nothing = "no use by this session is known since the daemon's start, or others use all of it"
    else:
        nothing = f"nothing of it is there{' from that token on' if from_token else ''}, or contexts that are there go on from it"
    _print_affected(pages, "abandoned", nothing, as_json)


@misses
def delete(
    namespace: NamespaceArgument,
    tokens: MaybeTokensOption = None,
    digests: DigestsOption = None,
    from_token: FromTokenOption = 0,
    endpoint: EndpointOption = DEFAULT_DATA,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Delete a prefix and all that hangs from it, on every tier. Exit code 1 if nothing of it is there, 2 for an error."""
    given = labels_of(tokens, digests)
    with connect(endpoint, timeout) as client:
        space = client.namespace(namespace)
        pages = space.delete(given.of(space.spec), from_token=from_token)
    _print_affected(pages, "deleted", f"nothing of it is there{' from that token on' if from_token else ''}", as_json)


def _print_affected(pages: int, what: str, nothing: str, as_json: bool) -> None:
    """How many pages it was done to, or with exit code 1 why to none."""
    if as_json:
        print_json({f"{what}_pages": pages})
    else:
        typer.echo(f"{counted(pages, 'page')} {what}{'' if pages else f': {nothing}'}")
    if not pages:
        raise typer.Exit(1)
