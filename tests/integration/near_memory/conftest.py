"""A daemon, and a client that has shared memory with it."""

from collections.abc import AsyncIterator, Iterator

import pytest

from kvstore_client import AsyncClient
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.near_memory.pages import SPEC


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("near"), "--dram", "128MiB", "--ssd", "256MiB") as running:
        yield running


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.endpoint, timeout=20) as one:
        assert await one.same_host.connection() is not None
        yield one


@pytest.fixture
async def namespace(client: AsyncClient) -> AsyncIterator[Namespace]:
    found = await client.namespace("near", "rev-1", SPEC)
    yield found
    await found.drop()
