"""A daemon that stands still: a call ends with its own deadline, and not when something else is tired of waiting."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore_client import AsyncClient, Client, Component, DeadlineExceeded, KVSpec, NotFound, client, direct, transfer
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import content, context, open_namespace
from tests.integration.raw import stat, wait_for_baseline

_LONG_S = 60.0
BIG = KVSpec(4, (Component("full", 8, 2, 16384),), max_slice_bytes=1 << 20)


@contextmanager
def standing_still(daemon: DaemonProcess) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


@pytest.mark.parametrize("near", [False, True], ids=["connections", "shared_memory"])
@pytest.mark.parametrize("pages", [1, 8])
async def test_a_put_does_not_wait_to_give_itself_up(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, near: bool, pages: int
) -> None:
    monkeypatch.setattr(transfer, "_ABORT_S", _LONG_S)
    data, tokens = np.ones(pages * BIG.page_bytes, np.uint8), np.arange(4 * pages, dtype=np.uint32)
    before = wait_for_baseline(daemon.http)
    async with AsyncClient(daemon.endpoint, shared_memory=near) as client:
        namespace = await client.namespace("given-up", "rev-2", BIG)  # of its own: what others leave would go with it
        await namespace.put(tokens[:4] + 1, data[: BIG.page_bytes])  # its ways are open
        with standing_still(daemon), pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(_LONG_S / 3):
                await namespace.put(tokens, data, timeout=0.3)
        await namespace.drop()
    wait_for_baseline(daemon.http, before)


def test_what_was_not_waited_for_counts_for_the_call_that_waits(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_SETTLE_S", _LONG_S)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(2), content(context(2)))
        for _ in range(10):  # so many small requests, that they are made in the calling thread
            match = namespace.match(context(2))
            match.release()
        match = namespace.match(context(2))

        def abandon() -> None:
            with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
                namespace.abandon(context(2), timeout=0.3)
            ended.set()

        ended = threading.Event()
        with standing_still(daemon):
            match.release()  # it is not answered, so what goes by the loop asks first whether it is done
            waits = threading.Thread(target=abandon)
            waits.start()
            waits.join(_LONG_S / 3)
            assert ended.is_set()
        waits.join()


async def test_a_follower_that_waits_for_a_daemon_that_stands_still(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("still", "rev-1", BIG)
        with standing_still(daemon), pytest.raises((DeadlineExceeded, NotFound)):
            async with asyncio.timeout(_LONG_S / 3), namespace.follow(b"nobody".ljust(16), timeout=0.2):
                pass
        await namespace.drop()


@pytest.mark.parametrize("near", [False, True], ids=["connections", "shared_memory"])
async def test_a_lease_is_given_back_without_waiting(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, near: bool) -> None:
    monkeypatch.setattr(client, "_RELEASE_S", _LONG_S)
    wait_for_baseline(daemon.http)
    data, tokens = np.ones(8 * BIG.page_bytes, np.uint8), np.arange(32, dtype=np.uint32)
    async with AsyncClient(daemon.endpoint, shared_memory=near) as one:
        namespace = await one.namespace("still", "rev-1", BIG)
        await namespace.put(tokens, data)
        first, second = await namespace.match(tokens), await namespace.match(tokens)
        with standing_still(daemon):
            fetch = asyncio.create_task(namespace.fetch(first, np.zeros_like(data)))
            put = asyncio.create_task(namespace.put(tokens + 1, data))
            await asyncio.sleep(0.1)
            async with asyncio.timeout(_LONG_S / 3):
                await second.release()
        await asyncio.gather(fetch, put)
        await first.release()
        assert await namespace.delete(tokens) == 8, "what was given back before a request is not leased any more"
        assert stat(daemon.http)["leases"] == 0
        third = await namespace.match(tokens + 1)
        with standing_still(daemon):
            fetch = asyncio.create_task(namespace.fetch(third, np.zeros_like(data)))
            await asyncio.sleep(0.1)
            async with asyncio.timeout(_LONG_S / 3):
                await third.release()
                await one.close()
        await asyncio.gather(fetch, return_exceptions=True)
    wait_for_baseline(daemon.http)


def test_a_thread_gives_a_lease_back_without_waiting(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((client, "_RELEASE_S"), (direct, "_SETTLE_S"), (direct, "_CONNECT_S")):
        monkeypatch.setattr(module, name, _LONG_S)
    data, tokens = np.ones(BIG.page_bytes, np.uint8), np.arange(4, dtype=np.uint32)
    with Client(daemon.endpoint, shared_memory=False) as one:
        namespace = one.namespace("still", "rev-1", BIG)
        namespace.put(tokens, data)
        matches = [namespace.match(tokens) for _ in range(10)]

        def give_back() -> None:
            with pytest.raises(DeadlineExceeded):
                namespace.put(tokens + 9, data, timeout=0.3)
            for match in matches:
                match.release()
            ended.set()

        ended = threading.Event()
        with standing_still(daemon):
            waits = threading.Thread(target=give_back)
            waits.start()
            waits.join(_LONG_S / 3)
            assert ended.is_set()
        waits.join()
        assert namespace.delete(tokens) == 1
        namespace.drop()


async def test_a_buffer_that_could_not_be_lent_leaves_nothing_unheard(daemon: DaemonProcess) -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
    async with AsyncClient(daemon.endpoint) as one:
        namespace = await one.namespace("still", "rev-1", BIG)
        await one.same_host.connection()
        with standing_still(daemon), pytest.raises(DeadlineExceeded):
            await namespace.put(np.arange(4, dtype=np.uint32), np.ones(BIG.page_bytes, np.uint8), timeout=0.3)
        with standing_still(daemon):
            await one.close()
    gc.collect()
    assert told == []
