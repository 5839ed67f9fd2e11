"""Connections of one daemon take turns: a real store, and real sockets served by one loop."""

import asyncio
import socket
from pathlib import Path

import pytest

from kvstore.api.connection import Connection
from kvstore.api.guard import Guard
from kvstore.api.request_stats import RequestStats
from kvstore.api.sessions import Sessions
from kvstore.api.wire import PROTOCOL_VERSION, Channel, FrameType, encode, pack
from kvstore.api.wire.messages import Empty, Hello, MatchRequest, Message
from kvstore.store import Store
from tests.store.test_store import config, put, settings_named, tokens_of

PIPELINED = 30


class Order(RequestStats):
    """Which requests were answered, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def answered(self, kind: str, began_ns: int) -> None:
        self.kinds.append(kind)
        super().answered(kind, began_ns)


def frame(kind: FrameType, request: int, message: Message, payload: bytes = b"") -> bytes:
    return b"".join(bytes(buffer) for buffer in encode(kind, request, pack(message), payload))


async def test_a_pipeline_of_long_requests_lets_others_have_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.api.connection._TURN_NS", 0)  # every request is a long one
    order, loop = Order(), asyncio.get_running_loop()
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (1, 2, 3), b"v" * 16)
        sessions, large, ends, tasks = Sessions(store), asyncio.Semaphore(1), [], []
        for _ in range(2):
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            ends.append(theirs)
            connection = Connection(Channel(ours), store, sessions, "here", large, Guard(), order)
            tasks.append(asyncio.create_task(connection.serve()))
            await loop.sock_sendall(theirs, frame(FrameType.HELLO, 0, Hello(versions=[PROTOCOL_VERSION], client="test")))
            assert await loop.sock_recv(theirs, 4096)
        matches = [frame(FrameType.MATCH, 1 + n, MatchRequest(namespace=space.id), tokens_of((1, 2, 3))) for n in range(PIPELINED)]
        ends[0].sendall(b"".join(matches))
        ends[1].sendall(frame(FrameType.PING, 1, Empty()))
        async with asyncio.timeout(20):
            while len(order.kinds) < PIPELINED + 1:
                await asyncio.sleep(0.001)
        assert order.kinds.index("PING") <= 2, "one connection held the loop"
        for end in ends:
            end.close()
        await asyncio.gather(*tasks)
