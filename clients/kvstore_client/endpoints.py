"""Endpoints of daemons: what they name, and sockets to reach them by."""

import os
import socket
import ssl

from kvstore.api.wire import BadRequest, ConnectionLost, client_context

TLS_SCHEME = "tls://"


def tls_for(endpoint: str, tls: ssl.SSLContext | bool | None) -> ssl.SSLContext | None:
    """The context for an endpoint: one that was given, or the default one if `tls` or the endpoint asks for it. Raises BadRequest."""
    if not tls and not endpoint.startswith(TLS_SCHEME):
        return None
    if endpoint.startswith("unix:"):
        raise BadRequest(f"there is no TLS on a Unix socket ({endpoint}): its file's permissions guard it")
    return tls if isinstance(tls, ssl.SSLContext) else client_context(os.environ.get("KVSTORE_TLS_CA"))


def parse_endpoint(endpoint: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """`host:port`, `tls://host:port`, `[v6]:port` or `unix:PATH` as a socket family and address. Raises BadRequest."""
    if endpoint.startswith("unix:"):
        return socket.AF_UNIX, endpoint[5:]
    host, colon, port = endpoint.removeprefix(TLS_SCHEME).rpartition(":")
    if "/" in host or not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadRequest(f"endpoint {endpoint!r} is neither HOST:PORT, tls://HOST:PORT nor unix:PATH of a data plane")
    host = host.strip("[]") or "127.0.0.1"
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


def new_socket(family: socket.AddressFamily, endpoint: str) -> socket.socket:
    """A socket, not connected. Raises ConnectionLost if there is no descriptor for it."""
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectionLost(f"can't connect to {endpoint}: there is no socket to be had ({reason_of(error)}; see `ulimit -n`)") from error


def reason_of(error: OSError) -> str:
    """Why a connection could not be made, in the system's words."""
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno) if error.errno else str(error)
