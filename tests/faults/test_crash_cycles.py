"""kill -9 under mixed load, over and over: what was acknowledged as durable is there, byte for byte. `make crash`: 200 cycles."""

import asyncio
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import AsyncClient, Client, ConnectionLost, DeadlineExceeded
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import unexpected
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.test_crash import Load

KILLS = int(os.environ.get("KVSTORE_TEST_KILLS", "3"))
SIZES = ("--dram", "8MiB", "--ssd", "16GiB")
_SAMPLE = 20


class Unrest(threading.Thread):
    """A client that leaves leases, cancels transfers, forks contexts, and creates and drops namespaces until the daemon dies."""

    def __init__(self, endpoint: str, cycle: int) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._cycle = cycle
        self.done = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._work())
        except (ConnectionLost, DeadlineExceeded):
            pass  # the daemon was killed
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            self.failure = error

    async def _work(self) -> None:
        async with AsyncClient(self._endpoint, timeout=20, reconnect=0) as client:
            pages = await client.namespace("pages", "rev-1", SPEC)
            for number in itertools.count():
                tokens = context(5_000_000 + 1000 * self._cycle + number, 16)
                await pages.put(tokens, content(tokens))
                fork = np.concatenate([tokens[: 8 * SPEC.page_tokens], context(number, 2)])
                await pages.put(fork, content(fork, 8), first_page=8)
                match = await pages.match(tokens, lease_s=60)
                out = np.empty(match.pages * SPEC.page_bytes, np.uint8)
                for work in (pages.fetch(match, out), pages.put(context(number + 10**7, 16), content(context(number + 10**7, 16)))):
                    task = asyncio.create_task(work)
                    await asyncio.sleep(0.001)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                passing = await client.namespace(f"passing{number % 3}", f"passing-{number % 3}", SPEC)
                await passing.drop()
                self.done += 1


@pytest.mark.timeout(3600 if KILLS > 20 else 300)
def test_kill_9_under_mixed_load(data_dir: Path) -> None:
    rng = np.random.default_rng(1)
    acknowledged: list[int] = []
    unrest = 0
    for cycle in range(KILLS):
        daemon = DaemonProcess(data_dir, *SIZES).wait_ready()
        with Client(daemon.endpoint) as client:
            sample = rng.choice(acknowledged, min(_SAMPLE, len(acknowledged)), replace=False) if acknowledged else np.empty(0, np.int64)
            none_missing(open_namespace(client), sample.tolist())
        loads = [Load(daemon.endpoint, 10_000_000 * worker + 100_000 * cycle) for worker in range(2)]
        others = Unrest(daemon.endpoint, cycle)
        threads: tuple[Load | Unrest, ...] = (*loads, others)
        for thread in threads:
            thread.start()
        loads[0].join(timeout=float(rng.uniform(0.1, 0.6)))
        daemon.kill()
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive(), "a client hangs after its daemon was killed"
            if thread.failure is not None:
                raise thread.failure
        acknowledged += [seed for load in loads for seed in load.durable]
        unrest += others.done
        assert not (words := unexpected(daemon)), "\n".join(words)
    print(f"{KILLS} kills, {len(acknowledged)} contexts acknowledged as durable, {unrest} rounds of unrest")
    assert len(acknowledged) > KILLS
    with DaemonProcess(data_dir, *SIZES) as daemon, Client(daemon.endpoint) as client:
        none_missing(open_namespace(client), acknowledged)


def none_missing(namespace: Namespace, seeds: list[int]) -> None:
    """Fail if one of these contexts is not there with all its pages."""
    gone = [seed for seed in seeds if fetch_checked(namespace, context(seed)) != 4]
    assert not gone, f"{len(gone)} of {len(seeds)} contexts acknowledged as durable are gone: {gone[:10]}"
