"""How fast bytes really move: measured while they do, smoothed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

_KEEP = 0.8
"""What is left of earlier samples' weight with each new one."""
_LONG_S = 0.5
"""A meter that is never idle takes a sample so often."""
START_LINK_BYTES_S = START_SSD_BYTES_S = float(1 << 30)
"""Until something was measured: a link of about 10 Gbit/s, and a disk of some years ago."""
_LEAST_BYTES = 256 << 10
"""Less tells of the round trip, or of how long the disk takes to begin, not of the rate."""
_MOST_TOLD_BYTES = 1 << 30
"""What a client says of itself weighs no more than so much."""
_TOLD_BYTES_S = 1 << 20, 1 << 37
"""Rates that can be true."""


@dataclass(slots=True)
class Rate:
    """Bytes a second. Samples fade; long ones weigh more than short ones."""

    bytes_s: float
    measured: bool = False
    _nbytes: float = 0.0
    _seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        self._nbytes = _KEEP * self._nbytes + nbytes
        self._seconds = _KEEP * self._seconds + max(seconds, 1e-9)
        self.bytes_s, self.measured = self._nbytes / self._seconds, True


class Meter:
    """Measures what moves at the same time as one: bytes over the time in which anything did. Feeds `rates`."""

    def __init__(self, *rates: Rate, least_bytes: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._rates = rates
        self._least_bytes = least_bytes
        self._now = now
        self._active = 0
        self._since = 0.0
        self._nbytes = 0
        self._spoiled = False

    def begin(self) -> None:
        """Something begins to move. Follow with `end`."""
        if not self._active:
            self._start()
        self._active += 1

    def end(self, nbytes: int, *, spoiled: bool = False) -> None:
        """It has moved so many bytes; `spoiled`: something else held it up meanwhile, so it tells nothing."""
        self._active -= 1
        self._nbytes += nbytes
        self._spoiled |= spoiled
        seconds = self._now() - self._since
        if self._active and seconds < _LONG_S:
            return
        if self._nbytes >= self._least_bytes and not self._spoiled:
            for rate in self._rates:
                rate.add(self._nbytes, seconds)
        self._start()

    def _start(self) -> None:
        self._since, self._nbytes, self._spoiled = self._now(), 0, False


class Rates:
    """A daemon's: reads from SSD, and fetches of what is in DRAM by all clients, and by those of each tenant."""

    def __init__(self) -> None:
        self.link = Rate(START_LINK_BYTES_S)
        self.ssd = Rate(START_SSD_BYTES_S)
        self.reads = Meter(self.ssd, least_bytes=_LEAST_BYTES)
        self._links: dict[str, Rate] = {}

    def link_of(self, tenant: str) -> Rate:
        """What clients of a tenant reach: nobody is told how fast others are."""
        return self._links.setdefault(tenant, Rate(START_LINK_BYTES_S))


class ClientLink:
    """What fetches of one client reach; they count for its tenant and for the daemon too."""

    def __init__(self, rates: Rates, tenant: str) -> None:
        self._tenant = rates.link_of(tenant)
        self._own = Rate(START_LINK_BYTES_S)
        self.meter = Meter(self._own, self._tenant, rates.link, least_bytes=_LEAST_BYTES)

    @property
    def bytes_s(self) -> float:
        """Its own rate, or as long as it is not known that of its tenant."""
        return self._own.bytes_s if self._own.measured else self._tenant.bytes_s

    def told(self, nbytes: int, seconds: float) -> None:
        """What the client says that it copied out of shared memory, and how long that took. Nobody else's estimates learn from it."""
        least, most = _TOLD_BYTES_S
        if nbytes >= _LEAST_BYTES and seconds > 0 and least <= nbytes / seconds <= most:
            share = min(1.0, _MOST_TOLD_BYTES / nbytes)
            self._own.add(int(nbytes * share), seconds * share)
