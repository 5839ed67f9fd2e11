"""What several commands need: where the daemon is, how to ask it, and output for people or scripts."""

import contextlib
import functools
import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from kvstore.errors import BadRequest, ConnectionLost, DeadlineExceeded, KVStoreError, NotFound, error_from_code

if TYPE_CHECKING:  # imported where they are needed: commands that need no SDK start in half the time without
    from rich.console import Console

    from kvstore_client import Client

DEFAULT_HTTP = "http://127.0.0.1:7420"
DEFAULT_DATA = "127.0.0.1:7421"
DEFAULT_TIMEOUT_S = 10.0
_PIPED_WIDTH = 10_000
_SLOWEST = 8 << 20
"""Bytes a second that are moved at least, by a disk or a network that works at all."""
_LATE = "is the daemon stopped, stuck or far away? --timeout gives it longer"

P = ParamSpec("P")

HttpOption = Annotated[str, typer.Option("--http", envvar="KVSTORE_HTTP", help="The daemon's control plane.")]
EndpointOption = Annotated[
    str,
    typer.Option("--endpoint", "-e", envvar="KVSTORE_ENDPOINT", help="The data plane: HOST:PORT, tls://HOST:PORT or unix:PATH."),
]
FromTokenOption = Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Only from the page on that this token is in.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NamespaceArgument = Annotated[str, typer.Argument(help="Namespace, by name or id.")]
PrefillOption = Annotated[float, typer.Option(min=0, help="Microseconds to compute a token; 0 if it is not known.")]
PositionOption = Annotated[float, typer.Option(min=0, help="Nanoseconds more for each token before it.")]
TimeoutOption = Annotated[
    float,
    typer.Option(
        min=0.1,
        envvar="KVSTORE_TIMEOUT",
        help="Seconds to wait for each answer of the daemon; where pages move, a second more for each 8 MiB.",
    ),
]


@dataclass(slots=True)
class Credentials:
    """What the commands show the daemon; set once from the options before the command."""

    token: str = ""
    tls_ca: Path | None = None

    def tls(self, address: str) -> ssl.SSLContext | None:
        """For a URL or an endpoint that asks for TLS."""
        if not address.startswith(("https://", "tls://")):
            return None
        from kvstore.api.wire import client_context

        return client_context(self.tls_ca)


credentials = Credentials()


@contextlib.contextmanager
def connect(endpoint: str, timeout: float) -> Iterator["Client"]:
    """A client of the data plane, each of whose calls may take `timeout` seconds. What was waited for in vain is said."""
    from kvstore_client import Client

    waited_for = "a first answer"
    try:
        with Client(endpoint, token=credentials.token, tls=credentials.tls(endpoint), timeout=timeout) as client:
            waited_for = "the answer to what it was asked"
            yield client
    except DeadlineExceeded as late:
        raise DeadlineExceeded(f"{late.message} (waited for {waited_for}): {_LATE}") from late


def moving_s(timeout: float, nbytes: int) -> float:
    """How long so many bytes may take to be moved."""
    return timeout + nbytes / _SLOWEST


def http_open(base: str, path: str, *, method: str = "GET", body: object | None = None, timeout: float) -> Any:
    """The response to one request to the control plane, to be closed. The only place that makes one. Raises BadRequest for no URL."""
    if not base.startswith(("http://", "https://")):
        raise BadRequest(f"--http is {base!r}, which is no URL: give http://HOST:PORT (or https://), such as {DEFAULT_HTTP}")
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {credentials.token}"} if credentials.token else {})
    request = urllib.request.Request(base.rstrip("/") + path, data, headers, method=method)
    return urllib.request.urlopen(request, timeout=timeout, context=credentials.tls(base))


def http_json(base: str, path: str, *, method: str = "GET", body: object | None = None, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
    """One request to the control plane. Raises the daemon's typed error, ConnectionLost or DeadlineExceeded."""
    try:
        with http_open(base, path, method=method, body=body, timeout=timeout) as response:
            raw = response.read()
            return json.loads(raw) if raw else None
    except urllib.error.HTTPError as error:
        raise http_problem(error) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise DeadlineExceeded(f"no answer from {base} within {timeout:g} s (waited for {method} {path}): {_LATE}") from None
        raise unreachable(base, error) from None


def http_problem(error: urllib.error.HTTPError) -> KVStoreError:
    """The typed error that a daemon's problem+json stands for; ConnectionLost if it is not one."""
    try:
        problem = json.loads(error.read())
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or not isinstance(problem.get("code"), str):
        return ConnectionLost(f"what answers at {error.url} is no control plane of kvstore: it says HTTP {error.code} ({error.reason})")
    return error_from_code(problem["code"], str(problem.get("detail", error)))


def unreachable(base: str, error: Exception) -> ConnectionLost:
    """Nobody answers at an address, or not in HTTP."""
    reason = getattr(error, "reason", error) or type(error).__name__
    if isinstance(reason, ssl.SSLCertVerificationError):
        return ConnectionLost(f"the certificate at {base} does not verify: {reason.verify_message}; --tls-ca names a file of whom to trust")
    if isinstance(reason, ssl.SSLError):
        return ConnectionLost(f"what answers at {base} does not speak TLS: is it http://?")
    if isinstance(reason, http.client.RemoteDisconnected):
        return ConnectionLost(
            f"what answers at {base} closed the connection without a word: is it https://, or the port of the data plane?"
        )
    if isinstance(reason, http.client.BadStatusLine) and str(reason).startswith("kV"):
        return ConnectionLost(f"the data plane answers at {base}: the control plane (HTTP) has a port of its own, 7420 by default")
    if isinstance(reason, http.client.HTTPException | ValueError):
        return ConnectionLost(f"what answers at {base} does not do so in HTTP and JSON as a daemon does ({type(reason).__name__})")
    return ConnectionLost(f"no daemon answers at {base} ({reason}); start one with `kvstore serve`, or give --http http://HOST:PORT")


def misses(command: Callable[P, None]) -> Callable[P, None]:
    """End a command with exit code 1 for what is not in the store: that is an answer, not an error, and those end in 2 (`app.main`)."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except NotFound as nothing:
            print_error(nothing)
            raise typer.Exit(1) from None

    return run


def print_error(error: KVStoreError) -> None:
    """One line on standard error."""
    print(f"kvstore: {error.code}: {error.message}", file=sys.stderr)


def table_console() -> "Console":
    """A console for tables. Not a terminal, it is as wide as they need: nothing is cut when output is piped.

    Names may have colons (`team:smile:v1`), which are no emoji.
    """
    from rich.console import Console

    console = Console(emoji=False)
    return console if console.is_terminal else Console(width=_PIPED_WIDTH, emoji=False)


def of_several_tenants(stat: dict[str, Any]) -> bool:
    """Whether `/v1/stat` tells of namespaces of other tenants than the token's, as it does with admin access."""
    return any(item.get("tenant") not in (None, stat["tenant"]) for item in stat["namespaces"])


def counted(number: int, what: str) -> str:
    """So many of something, for people: `1 page`, `2 pages`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def seconds_text(seconds: float | None) -> str:
    """Seconds for people; a question mark where nobody knows."""
    if seconds is None:
        return "?"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:,.1f} s"


def print_json(data: object) -> None:
    """JSON on standard output."""
    typer.echo(json.dumps(data, indent=None if not os.isatty(1) else 2))
