"""What several commands need: where the daemon is, tokens from the command line, and output for people or scripts."""

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from kvstore.api.wire import client_context
from kvstore.errors import BadRequest, ConnectionLost, error_from_code
from kvstore_client import Client

DEFAULT_HTTP = "http://127.0.0.1:7420"
DEFAULT_DATA = "127.0.0.1:7421"

HttpOption = Annotated[str, typer.Option("--http", envvar="KVSTORE_HTTP", help="The daemon's control plane.")]
EndpointOption = Annotated[
    str,
    typer.Option("--endpoint", "-e", envvar="KVSTORE_ENDPOINT", help="The data plane: HOST:PORT, tls://HOST:PORT or unix:PATH."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TokensOption = Annotated[str, typer.Option("--tokens", "-t", help="Token ids: 1,2,3 or @FILE (.npy, or raw uint32 little-endian).")]


@dataclass(slots=True)
class Credentials:
    """What the commands show the daemon; set once from the options before the command."""

    token: str = ""
    tls_ca: Path | None = None

    def tls(self, address: str) -> ssl.SSLContext | None:
        """For a URL or an endpoint that asks for TLS."""
        return client_context(self.tls_ca) if address.startswith(("https://", "tls://")) else None


credentials = Credentials()


def connect(endpoint: str) -> Client:
    """A client of the data plane."""
    return Client(endpoint, token=credentials.token, tls=credentials.tls(endpoint))


def http_json(base: str, path: str, *, method: str = "GET", body: object | None = None) -> Any:
    """One request to the control plane. Raises the daemon's typed error, or ConnectionLost."""
    data = None if body is None else json.dumps(body).encode()
    try:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {credentials.token}"} if credentials.token else {})
        request = urllib.request.Request(base.rstrip("/") + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30, context=credentials.tls(base)) as response:
            raw = response.read()
            return json.loads(raw) if raw else None
    except urllib.error.HTTPError as error:
        try:
            problem = json.loads(error.read())
        except ValueError:
            problem = {}
        raise error_from_code(problem.get("code", "internal"), problem.get("detail", str(error))) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error) or type(error).__name__
        raise ConnectionLost(
            f"no daemon answers at {base} ({reason}); start one with `kvstore serve`, or give --http http://HOST:PORT"
        ) from None


def parse_tokens(text: str) -> npt.NDArray[np.uint32]:
    """Tokens as given on the command line. Raises BadRequest."""
    try:
        if text.startswith("@"):
            path = Path(text[1:])
            if path.suffix == ".npy":
                loaded = np.load(path, allow_pickle=False)
                if loaded.ndim != 1 or loaded.dtype.kind not in "iu":
                    raise ValueError(f"a {loaded.ndim}-d array of {loaded.dtype}, not a 1-d array of integers")
                return np.array(loaded.tolist(), np.uint32)
            raw = path.read_bytes()
            if len(raw) % 4:
                raise ValueError(f"{len(raw)} bytes are not a whole number of uint32")
            return np.frombuffer(raw, "<u4").astype(np.uint32)
        return np.array([int(part) for part in text.split(",")], np.uint32)
    except (OSError, ValueError, OverflowError) as error:
        raise BadRequest(f"can't read tokens from {text[:60]!r}: {error}") from error


def size_text(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def print_json(data: object) -> None:
    """JSON on standard output."""
    typer.echo(json.dumps(data, indent=None if not os.isatty(1) else 2))
