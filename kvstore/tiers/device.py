"""The memory of one accelerator behind the tier protocol, and the link that leads to it.

`DevicePool` is what a pool offers; `HostPool` is the stub: real bytes in host memory, with the capacity, bandwidth and latency
of a device. A CUDA pool takes its place by offering the same. Imports nothing of the server.
"""

import mmap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from kvstore.errors import BadRequest
from kvstore.tiers import Usage

_ALIGN = 256


class Handle(Protocol):
    """A call that was asked for."""

    def cancel(self) -> None:
        """It shall not happen."""


class Clock(Protocol):
    """Time and timers. An asyncio event loop is one; tests give another."""

    def time(self) -> float:
        """Seconds, never going back."""

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Handle:
        """Call back at a time."""


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """A device: bytes of memory, bytes a second over its link, seconds until the first byte is there."""

    capacity: int
    bandwidth: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity < _ALIGN or self.bandwidth <= 0 or self.latency_s < 0:
            raise BadRequest(
                f"a device of {self.capacity} bytes, {self.bandwidth:g} bytes/s and {self.latency_s:g} s: give at least {_ALIGN} bytes, "
                "a bandwidth over 0, and a latency of 0 or more"
            )


class DevicePool(Protocol):
    """The tier protocol of one accelerator. A region is named by an int."""

    config: DeviceConfig

    def allocate(self, nbytes: int) -> int | None:
        """A contiguous region, or None if there is no room for it."""

    def view(self, region: int) -> memoryview:
        """The bytes of a region, writable: transfers receive straight into it."""

    def write(self, region: int, data: Any, offset: int = 0) -> None:
        """Copy bytes into a region."""

    def read(self, region: int, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A copy of bytes of a region."""

    def free(self, region: int) -> None:
        """Give a region back. Its views must not be used any more."""

    def usage(self) -> Usage:
        """Capacity, and the bytes of regions."""


class HostPool:
    """The stub: a device's memory as one anonymous mapping; the first gap that is large enough is taken."""

    def __init__(self, config: DeviceConfig) -> None:
        self.config = config
        self._capacity = config.capacity // _ALIGN * _ALIGN
        self._memory = memoryview(mmap.mmap(-1, self._capacity))
        self._gaps: list[tuple[int, int]] = [(0, self._capacity)]
        self._regions: dict[int, tuple[int, int]] = {}
        """By start: bytes asked for, bytes taken."""
        self._used = 0

    def allocate(self, nbytes: int) -> int | None:
        """A contiguous region, or None if there is no room for it."""
        if nbytes <= 0:
            raise BadRequest(f"a region of {nbytes} bytes")
        taken = -(-nbytes // _ALIGN) * _ALIGN
        for index, (start, size) in enumerate(self._gaps):
            if size >= taken:
                self._gaps[index : index + 1] = [(start + taken, size - taken)] if size > taken else []
                self._regions[start] = (nbytes, taken)
                self._used += taken
                return start
        return None

    def view(self, region: int) -> memoryview:
        """The bytes of a region, writable."""
        return self._memory[region : region + self._regions[region][0]]

    def write(self, region: int, data: Any, offset: int = 0) -> None:
        """Copy bytes into a region. Raises BadRequest if they don't fit."""
        source = memoryview(data).cast("B")
        self._inside(region, offset, len(source))[:] = source

    def read(self, region: int, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A copy of bytes of a region. Raises BadRequest for bytes outside it."""
        size = self._regions[region][0] - offset if nbytes is None else nbytes
        return bytes(self._inside(region, offset, size))

    def _inside(self, region: int, offset: int, nbytes: int) -> memoryview:
        view = self.view(region)
        if not 0 <= offset <= offset + nbytes <= len(view):
            raise BadRequest(f"bytes [{offset}, {offset + nbytes}) of a region of {len(view)}")
        return view[offset : offset + nbytes]

    def free(self, region: int) -> None:
        """Give a region back; gaps that touch become one."""
        _, size = self._regions.pop(region)
        self._used -= size
        at = bisect_left(self._gaps, (region, 0))
        start, end = region, region + size
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == start:
            at -= 1
            start = self._gaps.pop(at)[0]
        self._gaps.insert(at, (start, end - start))

    def usage(self) -> Usage:
        """Capacity, and the bytes of regions, rounded up to where the next one can begin."""
        return Usage(self._capacity, self._used)


@dataclass(frozen=True, slots=True)
class Passage:
    """A transfer's place on a link: from `start` to `end` it has the link; `arrivals` are when its pieces are there."""

    start: float
    end: float
    arrivals: tuple[float, ...]


class Link:
    """A simulated link: one transfer at a time has all of it, in the order they were asked for. Latencies overlap."""

    def __init__(self, config: DeviceConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._free_at = 0.0

    def arrival(self, nbytes: int) -> float:
        """When a transfer asked for now would be there."""
        return max(self._clock.time(), self._free_at) + nbytes / self._config.bandwidth + self._config.latency_s

    def seconds(self, nbytes: int) -> float:
        """How long a transfer takes on an idle link."""
        return nbytes / self._config.bandwidth + self._config.latency_s

    def pass_through(self, pieces: Sequence[int]) -> Passage:
        """Ask for a transfer of pieces, one after the other."""
        start = max(self._clock.time(), self._free_at)
        ends = tuple(start + done / self._config.bandwidth for done in accumulate(pieces))
        self._free_at = ends[-1]
        return Passage(start, ends[-1], tuple(end + self._config.latency_s for end in ends))

    def give_back(self, passage: Passage) -> None:
        """A transfer is over before its time, and nothing came after it: the link is free for the next."""
        if self._free_at == passage.end:
            self._free_at = min(max(self._clock.time(), passage.start), passage.end)
