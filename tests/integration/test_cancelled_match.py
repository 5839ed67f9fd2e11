"""Matches that are cancelled at any moment leave no lease behind, whatever the daemon had done by then."""

import asyncio

import pytest

from kvstore_client import AsyncClient
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context
from tests.integration.raw import stat

_MOMENTS = 12


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_a_cancelled_match_leaves_no_lease(daemon: DaemonProcess, shared_memory: bool) -> None:
    async with AsyncClient(daemon.endpoint, shared_memory=shared_memory) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        await namespace.put(context(1), content(context(1)))
        cancelled = 0
        for turn in range(10 * _MOMENTS):
            match = asyncio.create_task(namespace.match(context(1), lease_s=300))
            for _ in range(turn % _MOMENTS):
                await asyncio.sleep(0)
            match.cancel()
            try:
                await (await match).release()
            except asyncio.CancelledError:
                cancelled += 1
        assert cancelled
        async with asyncio.timeout(20):
            while (await asyncio.to_thread(stat, daemon.http))["leases"]:
                await client.ping()
