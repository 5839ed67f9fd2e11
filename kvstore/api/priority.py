"""Who sends first on a link: interactive fetches hold back bulk, for a bounded time, where both leave by the same address.

What a socket was given the kernel sends, fairly shared with the others; so bulk must be held back before it is there. While an interactive
fetch is under way, bulk stops before its next piece, until the kernel has sent the fetch off; and while there has been one of late,
sockets with bulk take little more than what is on its way (TCP_NOTSENT_LOWAT), so that there is little to wait for.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass

from kvstore.api.wire import Channel
from kvstore.api.wire.writing import SEND, WritingHalf

INTERACTIVE, BULK = "interactive", "bulk"

_ALERT_S = 10.0
"""How long after an interactive fetch bulk keeps its sockets short."""
_LOOK_S = 0.001
"""How often what is held back looks whether it may go on."""
_STUCK_S = 0.05
"""An interactive fetch whose client has taken nothing for so long holds nobody back any more."""
_HELD_S = 0.4
_LET_S = 0.1
"""After bulk was held back for so long, it has so long for itself, whatever is interactive."""
_STEP = 128 << 10
"""How much bulk is sent between two looks then."""
_LEAST_AHEAD = 64 << 10
_MOST_AHEAD = 1 << 20
_AHEAD_S = 0.002
"""What a socket with bulk takes that is not yet on its way, in bytes, and in time at the client's measured rate."""

_NOTSENT_LOWAT = 25
_OUTQ_NOT_SENT = 0x894B
"""SIOCOUTQNSD: bytes in a TCP socket that were not sent yet."""
_NO_LIMIT = 0
"""The system's default, which is none as a rule."""


@dataclass(eq=False, slots=True)
class _Urgent:
    """An interactive fetch, until the kernel has sent it off."""

    channel: Channel
    sending: bool = True
    """Whether more of it is to come from here."""
    unsent: int = -1
    changed: float = 0.0


class LinkTraffic:
    """The fetches that leave by one address of the daemon."""

    def __init__(self) -> None:
        self._urgent: set[_Urgent] = set()
        self._bulk: Counter[Channel] = Counter()
        self._ahead: dict[Channel, int] = {}
        self._short: set[Channel] = set()
        """Those that take little more than what is on its way."""
        self._alert_until = 0.0
        self._held_s = 0.0
        self._looked = 0.0
        self._let_until = 0.0

    @property
    def crowded(self) -> bool:
        """Whether there is bulk under way."""
        return bool(self._bulk)

    @property
    def step(self) -> int:
        """So much bulk is sent between two looks whether it may go on."""
        return SEND if time.monotonic() >= self._alert_until else _STEP

    @contextlib.contextmanager
    def fetching(self, channel: Channel, priority: str, bytes_s: float) -> Iterator[None]:
        """While a fetch is answered over a channel, at about so many bytes a second."""
        if priority != INTERACTIVE:
            self._bulk[channel] += 1
            self._ahead[channel] = min(max(int(bytes_s * _AHEAD_S), _LEAST_AHEAD), _MOST_AHEAD)
            self._shorten(channel)
            try:
                yield
            finally:
                self._bulk[channel] -= 1
                if not self._bulk[channel]:
                    del self._bulk[channel], self._ahead[channel]
                    if channel in self._short:
                        self._short.discard(channel)
                        _set_lowat(channel.sock, _NO_LIMIT)
            return
        now = time.monotonic()
        alert, self._alert_until = now < self._alert_until, now + _ALERT_S
        if not alert:
            for other in self._bulk:
                self._shorten(other)
        self._forget(now)
        urgent = _Urgent(channel, changed=now)
        self._urgent.add(urgent)
        try:
            yield
        finally:
            urgent.sending = False
            if not self._bulk:
                self._urgent.discard(urgent)  # nobody would look after it

    def _shorten(self, channel: Channel) -> None:
        if time.monotonic() < self._alert_until:
            self._short.add(channel)
            _set_lowat(channel.sock, self._ahead[channel])

    def turn(self, channel: WritingHalf) -> Awaitable[None] | None:
        """What to wait for until bulk may send its next piece over a channel; None if it may now."""
        return self._turn(channel) if self._urgent else None

    async def _turn(self, channel: WritingHalf) -> None:
        until = time.monotonic() + _HELD_S
        while self._urgent and self._must_wait(channel):
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() >= until:  # also where looks are far apart, because the loop is busy
                self._let_until = time.monotonic() + _LET_S
                return

    def _forget(self, now: float) -> None:
        """Those that were sent off, or are stuck."""
        self._urgent -= {urgent for urgent in self._urgent if _over(urgent, now)}

    def _must_wait(self, channel: WritingHalf) -> bool:
        now = time.monotonic()
        self._forget(now)
        if not self._urgent or now < self._let_until:
            return False
        if now - self._looked < 10 * _LOOK_S:
            self._held_s += now - self._looked
        else:
            self._held_s = max(self._held_s - (now - self._looked), 0.0)
        self._looked = now
        if self._held_s > _HELD_S:
            self._held_s, self._let_until = 0.0, now + _LET_S
            return False
        return all(urgent.channel is not channel for urgent in self._urgent)  # it may wait for the rest of this very frame


class Traffic:
    """All links of a daemon, by the address that they end at."""

    def __init__(self) -> None:
        self._links: dict[str, LinkTraffic] = {}

    def of(self, sock: socket.socket) -> LinkTraffic | None:
        """What goes over the link of a socket; None for a Unix socket, where nothing queues."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        return self._links.setdefault(sock.getsockname()[0], LinkTraffic())


def _over(urgent: _Urgent, now: float) -> bool:
    unsent = _unsent(urgent.channel.sock)
    if unsent != urgent.unsent:
        urgent.unsent, urgent.changed = unsent, now
    return (not urgent.sending and unsent == 0) or now - urgent.changed > _STUCK_S


def _unsent(sock: socket.socket) -> int:
    """Bytes that a socket was given and has not sent; 0 if it is closed."""
    if sock.fileno() < 0:
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), _OUTQ_NOT_SENT, b"\0\0\0\0"))[0])
    except OSError:
        return 0


def _set_lowat(sock: socket.socket, nbytes: int) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, struct.pack("I", nbytes))
