"""Gets and puts over TCP: every store and both limits next to each other, in every repetition."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bench.peers.driver import Driver
from bench.peers.lmcache_server import LMCache
from bench.peers.mooncake_tcp import Mooncake
from bench.peers.ours import Ours
from bench.peers.peer import MIB, Bytes, Moved, Peer, Shape, Unavailable
from bench.peers.resp import Redis, Valkey
from bench.peers.wire import Wire, copy_speed, unpaced
from bench.report import Report

BATCH = Shape(3 * MIB // 2, 32)
MANY = Shape(4096, 64, 16 * MIB)
ONE = Shape(4096, 1, 4 * MIB)
KINDS: tuple[type[Peer], ...] = (Ours, Valkey, Redis, Mooncake, LMCache)


def large(mib: int) -> Shape:
    """Blobs of so many MiB."""
    return Shape(mib * MIB)


def cell(shape: Shape, connections: int) -> str:
    """As rows and ratios name it."""
    return shape.label + (f"_{connections}conn" if connections > 1 else "")


@dataclass(slots=True)
class Plan:
    """How much to measure. Shapes of one group are measured next to each other."""

    groups: list[list[Shape]]
    connections: list[int]
    batch_connections: list[int]
    repetitions: int
    seconds: float
    peers: list[str] = field(default_factory=lambda: [kind.name for kind in KINDS])


class Stores:
    """The drivers of what can be measured here."""

    def __init__(self, source: Bytes, names: list[str]) -> None:
        self.drivers: list[Driver] = []
        self.left_out: dict[str, str] = {}
        for kind in KINDS:
            if kind.name in names:
                try:
                    self.drivers.append(Driver(kind, source))
                except Unavailable as why:
                    self._leave_out(kind.name, why)
        if not any(driver.name == Ours.name for driver in self.drivers):
            self.stop()
            sys.exit(f"our own daemon does not start: {self.left_out.get(Ours.name)}")

    def _leave_out(self, name: str, why: Unavailable) -> None:
        self.left_out[name] = str(why)
        print(f"left out: {why}", file=sys.stderr, flush=True)

    def lose(self, driver: Driver, why: Unavailable) -> None:
        """Go on without a peer that failed; not without ours."""
        self.drivers.remove(driver)
        self._leave_out(driver.name, why)
        if driver.name == Ours.name:
            self.stop()
            sys.exit(f"ours failed: {why}")

    def stop(self) -> None:
        """End all."""
        for driver in self.drivers:
            driver.stop()
        self.drivers.clear()


class Transfers:
    """The section over TCP."""

    def __init__(self, report: Report, plan: Plan, source: Bytes, stores: Stores) -> None:
        self._report, self._plan, self._source, self._stores = report, plan, source, stores
        self._target = np.ones(len(source), np.uint8)
        self._unpaced = unpaced()
        self._wire = Wire() if shutil.which("iperf3") else None
        if self._wire is None:
            stores.left_out["iperf3"] = "iperf3 is not installed (Debian: apt-get install iperf3)"

    def close(self) -> None:
        """End iperf3."""
        if self._wire is not None:
            self._wire.close()

    def run(self) -> None:
        """All groups."""
        for group in self._plan.groups:
            self._each(group, lambda driver, shape: driver.fill(shape))
            for repetition in range(self._plan.repetitions):
                for shape in group:
                    for connections in self._plan.connections if shape.pages == 1 else self._plan.batch_connections:
                        self._cell(shape, connections, repetition)
            self._verify(group)
            for shape in group:
                print(f"  {shape.label}: {self._line(shape)}", flush=True)

    def small(self) -> None:
        """Batches of 4 KiB, and single ones; not with LMCache's server, whose answers wait for Nagle's algorithm, 40 ms each."""
        for driver in [driver for driver in self._stores.drivers if driver.name == LMCache.name]:
            self._stores.drivers.remove(driver)
            driver.stop()
        self._each([MANY, ONE], lambda driver, shape: driver.fill(shape))
        for repetition in range(self._plan.repetitions):
            for shape in (MANY, ONE):
                for driver in self._in_turn(repetition):
                    for what in ("get", "put"):
                        self._times(f"{what}_{shape.label}_{driver.name}", repetition, self._move(driver, what, shape, 1))
                    if driver.name in (Valkey.name, Redis.name):
                        self._times(f"get_{shape.label}_{driver.name}_py", repetition, self._move(driver, "get_by_library", shape, 1))
                    if driver.name == Ours.name:
                        self._times(f"get_{shape.label}_ours_blocking", repetition, self._move(driver, "get_blocking", shape, 1))
                        self._times(f"match_and_get_{shape.label}_ours", repetition, self._move(driver, "match_and_get", shape, 1))
        self._verify([MANY, ONE])

    def _each(self, group: list[Shape], do: Callable[[Driver, Shape], object]) -> None:
        for driver in list(self._stores.drivers):
            try:
                for shape in group:
                    do(driver, shape)
            except Unavailable as why:
                self._stores.lose(driver, why)

    def _verify(self, group: list[Shape]) -> None:
        def one(driver: Driver, shape: Shape) -> None:
            if not driver.verify(shape):
                raise Unavailable(f"{driver.name}: other bytes came back")

        self._each(group, one)
        self._each([group[0]], lambda driver, _: driver.clear())

    def _in_turn(self, repetition: int) -> list[Driver]:
        """The drivers, each time another one first."""
        drivers = list(self._stores.drivers)
        first = repetition % len(drivers)
        return drivers[first:] + drivers[:first]

    def _move(self, driver: Driver, what: str, shape: Shape, connections: int) -> Moved | None:
        try:
            return driver.move(what, shape, connections, self._plan.seconds)
        except Unavailable as why:
            self._stores.lose(driver, why)
            return None

    def _cell(self, shape: Shape, connections: int, repetition: int) -> None:
        name = cell(shape, connections)
        if connections == 1:
            self._report.add(f"memcpy_{name}", repetition, copy_speed(self._source, self._target, shape.nbytes), "GiB/s")
        if self._wire is not None:
            self._add(f"iperf3_{name}", repetition, self._wire.move(connections))
            if self._unpaced:
                self._add(f"iperf3_unpaced_{name}", repetition, self._wire.move(connections, self._unpaced))
        for driver in self._in_turn(repetition):
            for what in ("get", "put"):
                if driver in self._stores.drivers:
                    self._add(f"{what}_{name}_{driver.name}", repetition, self._move(driver, what, shape, connections))
            if connections == 1 and driver.name == Valkey.name and driver in self._stores.drivers:
                self._add(f"get_{name}_{driver.name}_py", repetition, self._move(driver, "get_by_library", shape, connections))

    def _add(self, what: str, repetition: int, moved: Moved | None) -> None:
        if moved is not None:
            self._report.add(what, repetition, moved.speed, "GiB/s")
            self._report.add(f"{what}_client_cpu", repetition, moved.client_cpu / moved.nbytes * (1 << 30), "s/GiB")
            self._report.add(f"{what}_server_cpu", repetition, moved.server_cpu / moved.nbytes * (1 << 30), "s/GiB")
            self._report.rows[-3]["client"] = moved.how

    def _times(self, what: str, repetition: int, moved: Moved | None) -> None:
        if moved is not None:
            self._report.add(f"{what}_p50", repetition, moved.p50_us, "µs")
            self._report.add(f"{what}_p99", repetition, moved.p99_us, "µs")
            self._report.rows[-2]["client"] = moved.how

    def _line(self, shape: Shape) -> str:
        names = [f"get_{shape.label}_{driver.name}" for driver in self._stores.drivers] + [f"iperf3_{shape.label}"]
        return ", ".join(f"{name} {self._report.median(name):.2f}" for name in names if self._report.values(name))
