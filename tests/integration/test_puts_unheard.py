"""Puts whose PUT_READY is not heard: none stays open, with the room that it takes, until its time is over."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvstore.api.wire import FrameType
from kvstore_client import AsyncClient, Component, ConnectionLost, KVSpec, put
from kvstore_client.connection import Connection
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat

SPEC = KVSpec(4, (Component("full", 4, 2, 16384),), max_slice_bytes=1 << 20)
"""Pages of 1 MiB."""
PAGES = 3
TOKENS = np.arange(PAGES * SPEC.page_tokens, dtype=np.uint32)


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.endpoint, timeout=20, shared_memory=False) as client:
        await client.pool.connection(1)  # by which the session goes on
        yield client


@pytest.fixture
async def namespace(client: AsyncClient) -> AsyncIterator[Namespace]:
    namespace = await client.namespace("unheard-puts", "rev", SPEC)
    yield namespace
    await namespace.drop()


def unheard(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> list[int]:
    """The connection breaks when the daemon has answered the first PUT. Returns the handles that it told of."""
    call, told = Connection.call, list[int]()

    async def cut_off(self: Connection, kind: FrameType, message: Any, *rest: Any) -> Any:
        answer = await call(self, kind, message, *rest)
        if kind is FrameType.PUT:
            told.append(answer[0].handle)
            if len(told) == 1:
                self._channel.sock.shutdown(socket.SHUT_RDWR)
                raise error("cut off")
        return answer

    monkeypatch.setattr(Connection, "call", cut_off)
    return told


async def none_is_open(daemon: DaemonProcess) -> None:
    async with asyncio.timeout(5):
        while stat(daemon.http)["puts_open"]:
            await asyncio.sleep(0.05)


async def test_a_put_that_is_asked_for_again(daemon: DaemonProcess, namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put, "ALONE_AT_ONCE_BYTES", 0)  # what is wanted is asked first
    told = unheard(monkeypatch, ConnectionLost)
    done = await namespace.put(TOKENS, np.zeros((PAGES, SPEC.page_bytes), np.uint8))
    assert (done.new_pages, len(told)) == (PAGES, 2)
    await none_is_open(daemon)


@pytest.mark.parametrize("error", [ConnectionLost, asyncio.CancelledError])
async def test_a_stream_that_is_not_begun(
    daemon: DaemonProcess, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    told = unheard(monkeypatch, error)
    with pytest.raises(error):
        async with namespace.stream_put(TOKENS):
            pytest.fail("it was begun")
    assert len(told) == 1
    await none_is_open(daemon)


async def test_a_put_that_is_cut_off(
    daemon: DaemonProcess, client: AsyncClient, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the daemon has not read yet of the connection that broke must not come after the ABORT, which goes by another one."""
    monkeypatch.setattr(put, "ALONE_AT_ONCE_BYTES", 1 << 30)
    call, asked = Connection.call, list[FrameType]()

    async def noted(self: Connection, kind: FrameType, message: Any, *rest: Any) -> Any:
        asked.append(kind)
        return await call(self, kind, message, *rest)

    async def cut_off(self: Connection, *_: Any) -> None:
        self.give_up("cut off")
        raise asyncio.CancelledError

    monkeypatch.setattr(Connection, "call", noted)
    monkeypatch.setattr(Connection, "send_frames", cut_off)
    with pytest.raises(asyncio.CancelledError):
        await namespace.put(TOKENS, np.zeros((PAGES, SPEC.page_bytes), np.uint8))
    await none_is_open(daemon)
    assert asked[-2:] == [FrameType.CLOSE, FrameType.ABORT]
