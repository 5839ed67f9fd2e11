"""Puts out of a client's memory while DRAM is full."""

import asyncio
import time
from pathlib import Path

import numpy as np

from kvstore_client import AsyncClient
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.near_memory.pages import SPEC, fetched, random_pages, tokens
from tests.integration.raw import stat

_PUTS = 4
_READ = 20
"""Pages that are being read: of 64 MiB of DRAM they leave no room for a put of two."""


async def test_puts_without_room_wait_until_there_is_some(tmp_path: Path) -> None:
    """What is sent behind a PUT is refused with it, in any order: none of that is told as if somebody had cancelled it."""
    stays = {"KVSTORE_HIGH_WATERMARK": "1.0"}  # until somebody waits for room: nothing is moved away before it is leased
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "512MiB", environment=stays) as daemon:
        async with AsyncClient(daemon.endpoint, timeout=60) as client:
            assert await client.same_host.connection() is not None
            namespace = await client.namespace("near", "rev-1", SPEC)
            await namespace.put(tokens(1, _READ), random_pages(1, _READ))
            data = {seed: random_pages(seed, 2) for seed in range(2, 2 + _PUTS)}
            puts = []
            async with await namespace.match(tokens(1, _READ)) as match:
                assert match.pages == _READ
                for seed, pages in data.items():
                    puts.append(asyncio.create_task(namespace.put(tokens(seed, 2), pages)))
                    await asyncio.sleep(0.03)  # all of it is sent
                    _hear_nothing(0.3)  # the daemon has said all that it will say to that, and it is heard in one go
                    await asyncio.sleep(0.01)
                assert [put.exception() for put in puts if put.done()] == [], "refused, or there was room"
            assert [result.new_pages for result in await asyncio.gather(*puts)] == [2] * _PUTS
            for seed, pages in data.items():
                assert np.array_equal(await fetched(namespace, seed, 2), pages)
            assert stat(daemon.http)["puts_open"] == 0


def _hear_nothing(seconds: float) -> None:
    """Hold the client's loop."""
    time.sleep(seconds)
