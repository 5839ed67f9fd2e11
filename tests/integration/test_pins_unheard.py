"""Pins whose answers are not heard: none stays that nobody has the number of, and none is made twice."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvstore.api.wire import FrameType
from kvstore_client import AsyncClient, Component, Conflict, ConnectionLost, DeadlineExceeded, KVSpec, NotFound
from kvstore_client.connection import Connection
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess

SPEC = KVSpec(4, (Component("full", 2, 2, 8),), hash_bytes=16, flat=True)
PAGES = b"".join(page.to_bytes(16, "little") for page in range(20))


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.endpoint, timeout=20, shared_memory=False) as client:
        yield client


@pytest.fixture
async def namespace(client: AsyncClient) -> AsyncIterator[Namespace]:
    namespace = await client.namespace("unheard", "rev", SPEC)
    await namespace.put(PAGES, np.zeros((20, SPEC.page_bytes), np.uint8))
    yield namespace
    await namespace.drop()


async def is_unpinned(namespace: Namespace) -> None:
    """All pages can be deleted, soon."""
    for _ in range(100):
        try:
            assert await namespace.delete(PAGES) == 20
        except Conflict:
            await asyncio.sleep(0.05)
        else:
            return
    pytest.fail("a pin is left over")


def unheard(monkeypatch: pytest.MonkeyPatch, times: int, of: FrameType = FrameType.PIN) -> list[int]:
    """The connection breaks when the daemon has answered a PIN, or another request, so often. Returns the pages that it told of."""
    call, told = Connection.call, list[int]()

    async def cut_off(self: Connection, kind: FrameType, message: Any, *rest: Any) -> Any:
        answer = await call(self, kind, message, *rest)
        if kind is of:
            told.append(getattr(answer[0], "pages", 0))
            if len(told) <= times:
                self._channel.sock.shutdown(socket.SHUT_RDWR)
                raise ConnectionLost("cut off")
        return answer

    monkeypatch.setattr(Connection, "call", cut_off)
    return told


async def test_a_pin_that_is_asked_for_again_is_the_same_one(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    told = unheard(monkeypatch, 2)
    number, pages = await namespace.pin(PAGES, 60)
    assert (pages, told) == (20, [20, 20, 20])
    with pytest.raises(Conflict):
        await namespace.delete(PAGES)
    await namespace.unpin(number)
    assert await namespace.delete(PAGES) == 20


async def test_an_unpin_whose_answer_is_lost_is_no_error(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    number, _ = await namespace.pin(PAGES, 60)
    told = unheard(monkeypatch, 1, FrameType.UNPIN)
    await namespace.unpin(number)
    assert len(told) == 1, "the second time it is not there"
    with pytest.raises(NotFound):
        await namespace.unpin(number)
    assert await namespace.delete(PAGES) == 20


async def test_a_pin_that_is_never_heard_of_ends(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    told = unheard(monkeypatch, 1000)
    while not told:  # on a machine that stood still it was not asked for at all
        with pytest.raises(DeadlineExceeded):
            await namespace.pin(PAGES, 60, timeout=0.5)
    await is_unpinned(namespace)


@pytest.mark.parametrize("closed", [False, True])
async def test_a_pin_that_comes_too_late_ends(daemon: DaemonProcess, client: AsyncClient, namespace: Namespace, closed: bool) -> None:
    async with AsyncClient(daemon.endpoint, timeout=20, shared_memory=False) as other:
        theirs = await other.namespace("unheard")
        daemon.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded):
                await theirs.pin(PAGES, 60, timeout=0.2)
            if closed:
                await other.close()
        finally:
            daemon.send_signal(signal.SIGCONT)
        await client.ping()
        await is_unpinned(namespace)


async def test_who_cancels_a_pin_leaves_none(namespace: Namespace, daemon: DaemonProcess) -> None:
    daemon.send_signal(signal.SIGSTOP)
    try:
        task = asyncio.create_task(namespace.pin(PAGES, 60))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        daemon.send_signal(signal.SIGCONT)
    await namespace.client.ping()
    await is_unpinned(namespace)
