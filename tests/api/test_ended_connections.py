"""What a connection held goes with it at once, however it ended: nothing waits for Python to look for cycles."""

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.connection import Connection
from kvstore.api.data_plane import DataPlane, bind_tcp
from kvstore.api.guard import Guard
from kvstore.api.wire import PROTOCOL_VERSION, Component, FrameType, KVSpec, Run, encode, pack, pack_runs
from kvstore.api.wire.messages import FetchRequest, Hello, Message
from kvstore.store import Store
from kvstore_client import AsyncClient
from tests.store.test_store import config

SPEC = KVSpec(4, (Component("full", 2, 2, 16384),), max_slice_bytes=1 << 18)
DATA = np.random.default_rng(1).integers(0, 256, SPEC.page_bytes, dtype=np.uint8)
TOKENS = np.arange(4, dtype=np.uint32)
SMALL, LARGE = 512 << 10, SPEC.page_bytes


@pytest.fixture(autouse=True)
def _no_look_for_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[DataPlane, str, str, bytes]]:
    """A data plane, its endpoint, and the namespace and id of a blob of 1 MiB in its DRAM."""
    big = config(tmp_path / "d", dram_bytes=64 << 20, ssd_bytes=64 << 20, segment_bytes=4 << 20, extent_bytes=1 << 20)
    async with Store(big) as store:
        listener = bind_tcp("127.0.0.1", 0)
        plane = DataPlane(store, Guard(), client_timeout_s=0.5)
        async with plane.listen([listener]):
            async with AsyncClient(listener[1], shared_memory=False) as client:
                namespace = await client.namespace("ends", "rev", SPEC)
                await namespace.put(TOKENS, DATA)
                found = await namespace.match(TOKENS, lease_s=0)
                [(_, _, blob)] = found.parts()
            await ended(plane)
            yield plane, listener[1], namespace.id, blob


async def ended(plane: DataPlane) -> None:
    async with asyncio.timeout(10):
        while plane.connection_count:
            await asyncio.sleep(0.01)


def sending(connection: "weakref.ref[Connection]") -> bool:
    """Whether it waits for its client to take something."""
    found = connection()
    return found is not None and found._outbox.lock.locked()


def frame(kind: FrameType, number: int, message: Message, payload: bytes = b"") -> bytes:
    return b"".join(bytes(one) for one in encode(kind, number, pack(message), payload))


@pytest.mark.parametrize("nbytes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("how", ["leaves", "stalls", "garbage", "expelled"])
async def test_nothing_is_left_of_a_slow_reader(tmp_path: Path, nbytes: int, how: str) -> None:
    loop = asyncio.get_running_loop()
    async with serving(tmp_path) as (plane, endpoint, namespace, blob):
        host, port = endpoint.split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, (host, int(port)))
            await loop.sock_sendall(sock, frame(FrameType.HELLO, 0, Hello(versions=[PROTOCOL_VERSION], client="slow")))
            await loop.sock_recv(sock, 1 << 16)
            [connection] = map(weakref.ref, plane._serving)
            for number in range(1, 17):  # more than the sockets hold
                fetch = FetchRequest(namespace=namespace, blobs=1)
                await loop.sock_sendall(sock, frame(FrameType.FETCH, number, fetch, blob + pack_runs([Run(0, 0, nbytes)])))
            while not sending(connection):
                await asyncio.sleep(0.01)
            if how == "garbage":
                await loop.sock_sendall(sock, bytes(64))
            elif how == "leaves":
                sock.close()
            elif how == "expelled":
                [task] = plane._serving.values()
                next(iter(plane._serving)).expel(task)
                del task
            await ended(plane)
            await asyncio.sleep(0)  # the task that served it
            assert connection() is None, gc.get_referrers(connection())
