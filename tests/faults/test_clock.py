"""Steps of the wall clock. Leases and time limits do not know it; what was promised to be retained is, whatever it does."""

import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import NotFound
from kvstore_client import Client, NoSpace
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import Held, unexpected
from tests.integration.pages import SPEC, content, context, fetch_checked
from tests.integration.raw import RawClient
from tests.integration.raw_put import start_put

HOURS = 3600.0
RETENTION_S = 2 * 3600


class Shifted:
    """A daemon whose wall clock can be stepped while it runs."""

    def __init__(self, folder: Path) -> None:
        self._data = folder / "data"
        self._shift = folder / "shift"
        self.step_to(0)

    def step_to(self, seconds: float) -> None:
        """Set the wall clock so far from the right time."""
        new = self._shift.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self._shift)

    def start(self, **settings: object) -> DaemonProcess:
        environment = {f"KVSTORE_{name.upper()}": str(value) for name, value in settings.items()}
        environment |= {"PYTHONPATH": str(Path(__file__).parent / "shifted_clock"), "SHIFTED_CLOCK": str(self._shift)}
        return DaemonProcess(self._data, "--dram", "8MiB", "--ssd", "4MiB", environment=environment)


def retained(client: Client) -> Namespace:
    return client.namespace("pages", "rev-1", SPEC, retention_s=RETENTION_S)


def fill(namespace: Namespace, first: int) -> list[int]:
    """Put contexts durably until the SSD tier is full of what is retained. Returns those that were acknowledged."""
    done: list[int] = []
    for seed in range(first, first + 200):
        try:
            namespace.put(context(seed), content(context(seed)), durable=True)
        except NoSpace:
            return done
        done.append(seed)
    raise AssertionError("the SSD tier never fills up: what is retained is given up")


def all_there(namespace: Namespace, seeds: list[int]) -> None:
    missing = [seed for seed in seeds if fetch_checked(namespace, context(seed)) != 4]
    assert not missing, f"{len(missing)} of {len(seeds)} contexts are gone long before their retention ended"


@pytest.fixture
def shifted(tmp_path: Path) -> Shifted:
    return Shifted(tmp_path)


def test_a_step_while_it_runs_does_not_shorten_what_was_promised(shifted: Shifted) -> None:
    promised: list[int] = []
    with shifted.start() as daemon:
        with Client(daemon.endpoint) as client:
            namespace = retained(client)
            for number, step in enumerate([0, 10 * HOURS, 200 * 365 * 24 * HOURS, -10 * HOURS, 0]):
                shifted.step_to(step)
                promised += fill(namespace, 10_000 * number)
            assert len(promised) > 5
            all_there(namespace, promised)
        assert not unexpected(daemon)
    with shifted.start() as daemon, Client(daemon.endpoint) as client:
        all_there(retained(client), promised)


def test_a_start_with_a_clock_behind_goes_on_from_the_last_record(shifted: Shifted) -> None:
    """A machine that boots with its clock ten hours back, and then learns the time: what it promised meanwhile is kept."""
    with shifted.start() as daemon, Client(daemon.endpoint) as client:
        before = [1, 2]
        for seed in before:
            retained(client).put(context(seed), content(context(seed)), durable=True)
    shifted.step_to(-10 * HOURS)
    with shifted.start() as daemon, Client(daemon.endpoint) as client:
        meanwhile = [11, 12]
        for seed in meanwhile:
            retained(client).put(context(seed), content(context(seed)), durable=True)
    shifted.step_to(0)
    with shifted.start() as daemon, Client(daemon.endpoint) as client:
        later = fill(retained(client), 30_000)
        all_there(retained(client), before + meanwhile + later)


def test_leases_and_idle_puts_do_not_know_the_wall_clock(shifted: Shifted) -> None:
    with shifted.start(put_idle=1) as daemon, Client(daemon.endpoint) as client, RawClient(daemon.endpoint) as raw:
        namespace = retained(client)
        namespace.put(context(1), content(context(1)))
        long = namespace.match(context(1), lease_s=3000)
        for number, step in enumerate([10 * HOURS, -10 * HOURS]):
            short = namespace.match(context(1), lease_s=0.5)
            assert start_put(raw, 500 + 10 * number).handle
            shifted.step_to(step)
            deadline = time.monotonic() + 20
            while (found := Held.by(daemon)).leases > 1 or found.puts_open:
                assert time.monotonic() < deadline, f"after a step of the clock, these do not end in time: {found}"
                time.sleep(0.05)
            assert found.leases == 1, "a step of the clock ended a lease that had most of an hour to go"
            client.run(namespace.inner.client.renew(long.inner.lease, 3000))
            with pytest.raises(NotFound):
                client.run(namespace.inner.client.renew(short.inner.lease, 3000))
        assert fetch_checked(namespace, context(1)) == 4
        out = np.zeros(4 * SPEC.page_bytes, np.uint8)
        assert namespace.fetch(long, out) == len(out)
