"""Links: the ways to one daemon that a client was given, each a pair of addresses. What is known of each, and how it is dialled."""

import asyncio
import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.api.wire import BadRequest, ConnectionLost
from kvstore_client.dealing import Rate
from kvstore_client.endpoints import new_socket, parse_endpoint, reason_of

DIAL_S = 2.0
"""How long a link may take to connect, where there are others."""
_FIRST_REST_S = 0.25
_LONGEST_REST_S = 5.0
_SILENCE_MS = 5_000
"""After so long without a word from the other end a link's connection is over, where there are others."""
_PROBE_S = 1
_NOBODY = {errno.ECONNREFUSED, errno.ENOENT}
"""Said at once where nobody listens, the latter for a Unix socket."""


@dataclass(slots=True)
class Link:
    """One way to the daemon, and what has gone over it."""

    endpoint: str
    local: str = ""
    """The address of this machine that it leaves by; the system chooses if empty."""
    fetched_bytes: int = 0
    put_bytes: int = 0
    stripes: int = 0
    """Stripes and frames of slices that it brought."""
    given_up: int = 0
    """Those that it was asked for, and another link brought, or was asked to bring instead."""
    losses: int = 0
    """Connections that were lost or given up."""
    trouble: str = ""
    """Why nobody could be reached over it when that was last tried; empty if somebody was."""
    store: bytes = field(default=b"", repr=False)
    """To which store it led when it last worked."""
    refused_since: float = field(default=0.0, repr=False)
    """Since when (monotonic) nobody listens there; 0 if somebody does, or did when it was last tried."""
    refused_last: float = field(default=0.0, repr=False)
    """When that was last seen."""
    rates: dict[int, Rate] = field(default_factory=dict, repr=False)
    """By connection: what is known of its speed."""
    _rest_s: float = field(default=0.0, repr=False)
    _not_before: float = field(default=0.0, repr=False)

    @property
    def bytes_s(self) -> float:
        """How fast it was of late, all connections together; 0 if that is not known."""
        return sum(rate.steady for rate in self.rates.values())

    @property
    def resting(self) -> bool:
        """Whether it failed a short while ago, and is left alone."""
        return time.monotonic() < self._not_before

    @property
    def rests_s(self) -> float:
        """How long it is still left alone."""
        return max(self._not_before - time.monotonic(), 0.0)

    def failed(self) -> None:
        """It could not be reached, or a connection of it was lost: leave it alone, longer each time."""
        self._rest_s = min(max(2 * self._rest_s, _FIRST_REST_S), _LONGEST_REST_S)
        self._not_before = time.monotonic() + self._rest_s

    def refused(self, now: float) -> None:
        """Nobody listens there; with 0 for the time, something else is wrong."""
        self.refused_since = (self.refused_since or now) if now else 0.0
        self.refused_last = now

    def works(self) -> None:
        """Bytes came over it."""
        self._rest_s = self._not_before = 0.0


def make_links(endpoints: str | Sequence[str], local_addresses: Sequence[str] = ()) -> list[Link]:
    """A link for each endpoint or local address; both in pairs, if there are several of both. Raises BadRequest."""
    names = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    locals_ = list(local_addresses) or [""]
    if not names:
        raise BadRequest("no endpoint was given")
    if len(names) > 1 and len(locals_) > 1 and len(names) != len(locals_):
        raise BadRequest(f"{len(names)} endpoints and {len(locals_)} local addresses: give one of either, or as many of both")
    count = max(len(names), len(locals_))
    pairs = list(zip(names * (count // len(names)), locals_ * (count // len(locals_)), strict=True))
    if len(set(pairs)) != count:
        raise BadRequest("a link is given twice")
    for name, local in pairs:
        family, _ = parse_endpoint(name)
        if family == socket.AF_UNIX and (count > 1 or local):
            raise BadRequest(f"{name} is no link among several: a Unix socket has no network address")
    return [Link(*pair) for pair in pairs]


async def dial(link: Link, *, alone: bool) -> socket.socket:
    """A connected socket to the link's endpoint. Unless it is `alone`, it soon finds out that the link is dead. Raises ConnectionLost."""
    family, address = parse_endpoint(link.endpoint)
    sock = new_socket(family, link.endpoint)
    sock.setblocking(False)
    try:
        if link.local:
            sock.bind((link.local, 0))
        if not alone:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
        async with asyncio.timeout(None if alone else DIAL_S):
            await asyncio.get_running_loop().sock_connect(sock, address)
    except TimeoutError:
        sock.close()
        link.trouble = f"no answer within {DIAL_S:g} s"
        raise ConnectionLost(f"can't connect to {link.endpoint} within {DIAL_S:g} s") from None
    except OSError as error:
        sock.close()
        link.refused(time.monotonic() if error.errno in _NOBODY else 0.0)
        reason = link.trouble = reason_of(error)
        by = f" from {link.local}" if link.local else ""
        raise ConnectionLost(f"can't connect to {link.endpoint}{by}: {reason}; is a daemon there? (`kvstore serve` starts one)") from error
    except BaseException:
        sock.close()
        raise
    link.refused_since, link.trouble = 0.0, ""
    return sock
