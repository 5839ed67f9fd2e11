"""What is asked of every store that is measured: start, fill, get, put, stop; and the timing that all share."""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

MIB, GIB = 1 << 20, 1 << 30
ROTATION = 528 * MIB
"""Bytes that transfers are rotated over: a whole number of 16 MiB blobs and of batches of 32 pages of 1.5 MiB."""
MAX_CONNECTIONS = 8
_TICKS = os.sysconf("SC_CLK_TCK")

Bytes = npt.NDArray[np.uint8]


class Unavailable(Exception):
    """A peer can't be measured here; says why, and what to install."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of transfer: so many pages of so many bytes at once, and so many of them in rotation."""

    page_bytes: int
    pages: int = 1
    bound: int = ROTATION

    @property
    def nbytes(self) -> int:
        """Bytes of one transfer."""
        return self.page_bytes * self.pages

    @property
    def count(self) -> int:
        """Transfers in the rotation."""
        return self.bound // self.nbytes

    @property
    def label(self) -> str:
        """As rows and ratios name it: 16MiB, 32x1.5MiB, 4KiB."""
        size = f"{self.page_bytes / MIB:g}MiB" if self.page_bytes >= MIB else f"{self.page_bytes / 1024:g}KiB"
        return size if self.pages == 1 else f"{self.pages}x{size}"


@dataclass(frozen=True, slots=True)
class Moved:
    """What one measurement moved. CPU is in seconds, of the client's process and of all the server's; times are of one transfer, in µs."""

    nbytes: int
    seconds: float
    client_cpu: float
    server_cpu: float
    p50_us: float
    p99_us: float
    how: str = ""

    @property
    def speed(self) -> float:
        """GiB/s."""
        return self.nbytes / GIB / self.seconds


class Peer(ABC):
    """A store and its client, in the process that measures it. Transfer `i` of a shape has the bytes at `i * nbytes` of the source."""

    name: str

    def __init__(self, source: Bytes, folder: Path) -> None:
        self.source = source
        self.folder = folder
        self.target = np.ones(len(source), np.uint8)

    @abstractmethod
    def start(self) -> None:
        """Start the servers. Raises Unavailable."""

    @abstractmethod
    def servers(self) -> list[int]:
        """The servers' process ids."""

    @abstractmethod
    def fill(self, shape: Shape) -> None:
        """Put what gets of this shape will fetch, and warm up."""

    @abstractmethod
    def get(self, shape: Shape, connections: int, seconds: float) -> Moved:
        """Gets, one outstanding (on each connection, if the client can't use several for one), for about so long."""

    @abstractmethod
    def put(self, shape: Shape, connections: int, seconds: float) -> Moved:
        """Puts of what is not there yet, for about so long. Taking it away again is not counted."""

    @abstractmethod
    def fetch_all(self, shape: Shape) -> None:
        """Get every transfer of the rotation once into the target."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def stop(self) -> None:
        """End the servers."""

    def verify(self, shape: Shape) -> bool:
        """Whether everything comes back with its bytes."""
        self.target[:] = 0
        self.fetch_all(shape)
        nbytes = shape.count * shape.nbytes
        return np.array_equal(self.target[:nbytes], self.source[:nbytes])


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


class Meter:
    """Adds up stretches of work."""

    def __init__(self, servers: list[int]) -> None:
        self._servers = servers
        self.times: list[float] = []
        self.nbytes = 0
        self.seconds = self._client = self._server = 0.0

    def __enter__(self) -> "Meter":
        self._client -= cpu_seconds([os.getpid()])
        self._server -= cpu_seconds(self._servers)
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started
        self._server += cpu_seconds(self._servers)
        self._client += cpu_seconds([os.getpid()])

    def moved(self, how: str = "") -> Moved:
        """The sum."""
        p50, p99 = (float(np.percentile(self.times, q)) * 1e6 for q in (50, 99))
        return Moved(self.nbytes, self.seconds, self._client, self._server, p50, p99, how)


class Link(Protocol):
    """A connection to a store. Bytes come from, and go to, an offset of the source and the target."""

    def get(self, key: str, at: int, nbytes: int) -> None:
        """Get one value."""

    def put(self, key: str, at: int, nbytes: int) -> None:
        """Put one value."""

    def get_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        """Get several values of one size with one call."""

    def put_batch(self, keys: list[str], at: int, nbytes: int) -> None:
        """Put several values of one size with one call."""


class ThreadPeer(Peer):
    """A store whose client blocks: one thread a connection, each with a transfer of its own outstanding."""

    kinds: tuple[str, ...] = ("",)
    """Kinds of client there are; for each shape and direction the faster one counts."""

    def __init__(self, source: Bytes, folder: Path) -> None:
        super().__init__(source, folder)
        self._links: dict[str, list[Link]] = {}
        self._pool = ThreadPoolExecutor(MAX_CONNECTIONS)
        self._turn = 0
        self._at: dict[Shape, int] = {}
        self._best: dict[tuple[Shape, str], str] = {}

    @abstractmethod
    def link(self, kind: str) -> Link:
        """A new connection."""

    @abstractmethod
    def forget(self, keys: list[str]) -> None:
        """Delete values."""

    def links(self, kind: str, connections: int) -> list[Link]:
        """So many connections, kept for the next time."""
        kept = self._links.setdefault(kind, [])
        while len(kept) < connections:
            kept.append(self.link(kind))
        return kept[:connections]

    def fill(self, shape: Shape) -> None:
        for index in range(shape.count):
            _put(self.links(self.kinds[-1], 1)[0], f"k{shape.label}", shape, index)
        for what, run in (("get", self._gets), ("put", self._puts)):
            speeds = {kind: run(shape, 1, 0.15 if len(self.kinds) > 1 else 0.0, kind).speed for kind in self.kinds}
            self._best[shape, what] = max(speeds, key=speeds.__getitem__)

    def get(self, shape: Shape, connections: int, seconds: float) -> Moved:
        return self._gets(shape, connections, seconds, self._best[shape, "get"])

    def put(self, shape: Shape, connections: int, seconds: float) -> Moved:
        return self._puts(shape, connections, seconds, self._best[shape, "put"])

    def get_by_library(self, shape: Shape, connections: int, seconds: float) -> Moved:
        """Gets with the first kind of client, whether or not it is the faster one."""
        return self._gets(shape, connections, seconds, self.kinds[0])

    def fetch_all(self, shape: Shape) -> None:
        for index in range(shape.count):
            _get(self.links(self.kinds[-1], 1)[0], f"k{shape.label}", shape, index)

    def _gets(self, shape: Shape, connections: int, seconds: float, kind: str) -> Moved:
        links, meter = self.links(kind, connections), Meter(self.servers())
        self._at[shape] = first = self._at.get(shape, 0) + 1
        ends = 0.0

        def work(number: int) -> None:
            turn = 0
            while not turn or time.perf_counter() < ends:
                started = time.perf_counter()
                _get(links[number], f"k{shape.label}", shape, (first + number + turn * connections) % shape.count)
                meter.times.append(time.perf_counter() - started)
                turn += 1

        with meter:
            ends = time.perf_counter() + seconds
            self._run(work, connections)
        self._at[shape] += len(meter.times)
        meter.nbytes = len(meter.times) * shape.nbytes
        return meter.moved(kind)

    def _puts(self, shape: Shape, connections: int, seconds: float, kind: str) -> Moved:
        links, meter = self.links(kind, connections), Meter(self.servers())
        while not meter.times or meter.seconds < seconds:
            self._turn += 1
            done = self._put_some(links, meter, f"p{self._turn}", shape, seconds - meter.seconds)
            self.forget([key for index in done for key in _keys(f"p{self._turn}", shape, index)])
        meter.nbytes = len(meter.times) * shape.nbytes
        return meter.moved(kind)

    def _put_some(self, links: list[Link], meter: Meter, prefix: str, shape: Shape, seconds: float) -> list[int]:
        """A rotation of puts at most. Returns which."""
        done: list[int] = []
        ends = time.perf_counter() + seconds

        def work(number: int) -> None:
            for index in range(number, shape.count, len(links)):
                started = time.perf_counter()
                _put(links[number], prefix, shape, index)
                ended = time.perf_counter()
                meter.times.append(ended - started)
                done.append(index)
                if ended > ends:
                    return

        with meter:
            self._run(work, len(links))
        return done

    def _run(self, work: Callable[[int], None], connections: int) -> None:
        if connections == 1:
            work(0)
            return
        together = threading.Barrier(connections)

        def one(number: int) -> None:
            together.wait(60)
            work(number)

        for done in [self._pool.submit(one, number) for number in range(connections)]:
            done.result()


def _keys(prefix: str, shape: Shape, index: int) -> list[str]:
    return [f"{prefix}-{index}-{page}" for page in range(shape.pages)] if shape.pages > 1 else [f"{prefix}-{index}"]


def _get(link: Link, prefix: str, shape: Shape, index: int) -> None:
    keys = _keys(prefix, shape, index)
    if len(keys) == 1:
        link.get(keys[0], index * shape.nbytes, shape.page_bytes)
    else:
        link.get_batch(keys, index * shape.nbytes, shape.page_bytes)


def _put(link: Link, prefix: str, shape: Shape, index: int) -> None:
    keys = _keys(prefix, shape, index)
    if len(keys) == 1:
        link.put(keys[0], index * shape.nbytes, shape.page_bytes)
    else:
        link.put_batch(keys, index * shape.nbytes, shape.page_bytes)
