"""kvstore: the SDK over TCP (no shared memory), with a daemon whose DRAM holds everything. Both ends verify every slice."""

import asyncio
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.peers.peer import MIB, ROTATION, Bytes, Meter, Moved, Peer, Shape
from bench.striped_fetch import PAGE_TOKENS, blob_spec
from kvstore.api.wire import Component, KVSpec
from kvstore_client import AsyncClient, Client
from kvstore_client.match import Match
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess

_LAYER = 64 << 10


def spec_of(page_bytes: int) -> KVSpec:
    """A KV spec whose page is one part of so many bytes; layers of 64 KiB where it is no whole number of MiB."""
    if page_bytes % MIB == 0 or page_bytes <= _LAYER:
        return blob_spec(page_bytes)
    return KVSpec(PAGE_TOKENS, (Component("full", page_bytes // _LAYER, 1, _LAYER // PAGE_TOKENS // 4),))


def tokens(shape: Shape, index: int) -> npt.NDArray[np.uint32]:
    """The prompt of one transfer."""
    return np.full(PAGE_TOKENS * shape.pages, index, np.uint32)


class Ours(Peer):
    """Clients with 1, 2, 4, … connections; each transfer is striped over all of a client's connections."""

    name = "ours"

    def __init__(self, source: Bytes, folder: Path) -> None:
        super().__init__(source, folder)
        self._runner = asyncio.Runner()
        self._clients: dict[int, AsyncClient] = {}
        self._kept: dict[tuple[Shape, int], list[Match]] = {}
        self._at: dict[Shape, int] = {}
        self._filled: dict[Shape, Namespace] = {}
        self._turn = 0

    def start(self) -> None:
        self._daemon = DaemonProcess(
            self.folder / "data", "--dram", str(4 * ROTATION), "--ssd", "1GiB", environment={"KVSTORE_HIGH_WATERMARK": "1.0"}
        ).wait_ready()

    def servers(self) -> list[int]:
        return [self._daemon.pid]

    def stop(self) -> None:
        self._runner.run(self._close())
        self._runner.close()
        self._daemon.kill()

    async def _close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _client(self, connections: int) -> AsyncClient:
        if connections not in self._clients:
            client = AsyncClient(self._daemon.endpoint, connections=connections, shared_memory=False)
            self._clients[connections] = await client.__aenter__()
        return self._clients[connections]

    def fill(self, shape: Shape) -> None:
        self._runner.run(self._fill(shape))
        self.put(shape, 1, 0.3)  # segments are made by this one; later ones find the slots free

    async def _fill(self, shape: Shape) -> None:
        client = await self._client(1)
        self._filled[shape] = namespace = await client.namespace(f"kept-{shape.label}", f"kept {shape.label}", spec_of(shape.page_bytes))
        for index in range(shape.count):
            await namespace.put(tokens(shape, index), self._bytes(self.source, shape, index))

    def _bytes(self, whole: Bytes, shape: Shape, index: int) -> Bytes:
        return whole[index * shape.nbytes : (index + 1) * shape.nbytes]

    async def _matches(self, shape: Shape, connections: int) -> list[Match]:
        """Leased matches of all that is kept."""
        if (shape, connections) not in self._kept:
            client = await self._client(connections)
            namespace = await client.namespace(f"kept-{shape.label}")
            self._kept[shape, connections] = [await namespace.match(tokens(shape, i), lease_s=3600) for i in range(shape.count)]
        return self._kept[shape, connections]

    def get(self, shape: Shape, connections: int, seconds: float) -> Moved:
        return self._runner.run(self._get(shape, connections, seconds))

    async def _get(self, shape: Shape, connections: int, seconds: float) -> Moved:
        matches, meter = await self._matches(shape, connections), Meter(self.servers())
        at = self._at.get(shape, 0)
        with meter:
            ends = time.perf_counter() + seconds
            while True:
                index = at % shape.count
                started = time.perf_counter()
                await matches[index].namespace.fetch(matches[index], self._bytes(self.target, shape, index))
                ended = time.perf_counter()
                meter.times.append(ended - started)
                at += 1
                if ended >= ends:
                    break
        self._at[shape] = at
        meter.nbytes = len(meter.times) * shape.nbytes
        return meter.moved("SDK")

    def get_blocking(self, shape: Shape, connections: int, seconds: float) -> Moved:
        """Gets by the blocking client, which makes small requests in the calling thread."""
        meter, at = Meter(self.servers()), 0
        with Client(self._daemon.endpoint, connections=connections, shared_memory=False) as client:
            namespace = client.namespace(f"kept-{shape.label}")
            matches = [namespace.match(tokens(shape, index), lease_s=3600) for index in range(shape.count)]
            with meter:
                ends = time.perf_counter() + seconds
                while time.perf_counter() < ends:
                    index = at % shape.count
                    started = time.perf_counter()
                    namespace.fetch(matches[index], self._bytes(self.target, shape, index))
                    meter.times.append(time.perf_counter() - started)
                    at += 1
        meter.nbytes = len(meter.times) * shape.nbytes
        return meter.moved("blocking SDK")

    def match_and_get(self, shape: Shape, connections: int, seconds: float) -> Moved:
        """Gets of what is not matched yet: match with a lease, fetch, release."""
        return self._runner.run(self._match_and_get(shape, connections, seconds))

    async def _match_and_get(self, shape: Shape, connections: int, seconds: float) -> Moved:
        namespace = (await self._matches(shape, connections))[0].namespace
        meter, index = Meter(self.servers()), 0
        with meter:
            ends = time.perf_counter() + seconds
            while time.perf_counter() < ends:
                prompt = tokens(shape, index % shape.count)
                started = time.perf_counter()
                async with await namespace.match(prompt) as match:
                    await namespace.fetch(match, self._bytes(self.target, shape, index % shape.count))
                meter.times.append(time.perf_counter() - started)
                index += 1
        meter.nbytes = len(meter.times) * shape.nbytes
        return meter.moved("SDK")

    def put(self, shape: Shape, connections: int, seconds: float) -> Moved:
        return self._runner.run(self._put(shape, connections, seconds))

    async def _put(self, shape: Shape, connections: int, seconds: float) -> Moved:
        client, meter = await self._client(connections), Meter(self.servers())
        while not meter.times or meter.seconds < seconds:
            self._turn += 1
            namespace = await client.namespace(f"puts-{self._turn}", f"puts {self._turn}", spec_of(shape.page_bytes))
            with meter:
                ends = time.perf_counter() + seconds - meter.seconds
                for index in range(shape.count):
                    started = time.perf_counter()
                    await namespace.put(tokens(shape, index), self._bytes(self.source, shape, index))
                    ended = time.perf_counter()
                    meter.times.append(ended - started)
                    if ended > ends:
                        break
            await namespace.drop()
        meter.nbytes = len(meter.times) * shape.nbytes
        return meter.moved("SDK")

    def fetch_all(self, shape: Shape) -> None:
        self._runner.run(self._fetch_all(shape))

    async def _fetch_all(self, shape: Shape) -> None:
        for index, match in enumerate(await self._matches(shape, 1)):
            await match.namespace.fetch(match, self._bytes(self.target, shape, index))

    def clear(self) -> None:
        self._runner.run(self._clear())

    async def _clear(self) -> None:
        for matches in self._kept.values():
            for match in matches:
                await match.release()
        for namespace in self._filled.values():
            await namespace.drop()
        self._kept.clear()
        self._filled.clear()
