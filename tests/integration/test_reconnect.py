"""Daemons that go and come again: what is under way meanwhile is done in the end, and an absence long ago does not count."""

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from kvstore.api.wire import Component, FrameType, KVSpec, PartRange
from kvstore.api.wire.messages import Empty
from kvstore_client import AsyncClient, Client, ConnectionLost, DeadlineExceeded
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import stat

T = TypeVar("T")

HALVES = (PartRange(0, 0, 4, 0, 2), PartRange(0, 4, 8, 0, 2))
PUT_ID = b"both halves".ljust(16)


class Place:
    """Daemons one after the other, at one address, over one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._socket = data_dir.parent / "s"

    def start(self) -> DaemonProcess:
        return DaemonProcess(self._data_dir, "--dram", "16MiB", "--ssd", "64MiB", "--unix-socket", str(self._socket)).wait_ready()


def beside(work: Callable[[], T]) -> tuple[threading.Thread, list[T | BaseException]]:
    """Do something in another thread; its result, or its error, comes in the list."""
    done: list[T | BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - it is told by the test
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, done


@pytest.mark.parametrize("near", [False, True], ids=["sent", "shared memory"])
def test_what_waits_outlives_a_clean_stop(data_dir: Path, near: bool) -> None:
    """A put that waits for another shard is put again: nobody has cancelled it."""
    place = Place(data_dir)
    daemon = place.start()
    tokens = context(1)
    by_part = content(tokens).reshape(len(tokens) // SPEC.page_tokens, 2, -1)
    with Client(daemon.unix_endpoint, shared_memory=near) as first, Client(daemon.unix_endpoint, shared_memory=near) as second:
        namespaces = [open_namespace(client) for client in (first, second)]

        def put(number: int) -> int:
            half = np.ascontiguousarray(by_part[:, number])
            return namespaces[number].put(tokens, half, parts=(HALVES[number],), put_id=PUT_ID, whole_s=20).pending_pages

        waits, done = beside(lambda: put(0))
        while not stat(daemon.http)["pending_pages"]:
            assert not done
            time.sleep(0.01)
        daemon.stop()
        daemon = place.start()
        assert put(1) == 0
        waits.join()
        assert done == [0]
        assert fetch_checked(namespaces[1], tokens) == 4
    daemon.stop()


@pytest.mark.parametrize("near", [False, True], ids=["sent", "shared memory"])
def test_a_put_waits_for_other_shards_no_longer_for_being_sent_again(daemon: DaemonProcess, near: bool) -> None:
    spec = KVSpec(4, (Component("full", 2, 2, 16384),))
    with Client(daemon.unix_endpoint, shared_memory=near, timeout=20) as client:
        namespace = client.namespace("one-wait", "rev one-wait", spec)
        half = PartRange(0, 0, 1, 0, 2)
        data = np.zeros(4 * spec.part_bytes(half), np.uint8)
        put_id = b"shared" if near else b"sent"
        waits, done = beside(
            lambda: namespace.put(np.arange(16, dtype=np.uint32), data, parts=(half,), put_id=put_id.ljust(16), whole_s=0.5).pending_pages
        )
        while not done:
            time.sleep(0.2)
            break_all(client)
        waits.join()
    assert done == [4], "its wait began anew each time"


def break_all(client: Client) -> None:
    """End the connections of a client, as a network would."""
    for connection in (*client.inner.pool._slots, client.inner.same_host.now):
        if connection is not None and connection.lost is None:
            connection._channel.sock.shutdown(socket.SHUT_RDWR)


def test_an_absence_long_ago_does_not_count(data_dir: Path) -> None:
    place = Place(data_dir)
    daemon = place.start()
    with Client(daemon.unix_endpoint, reconnect=20) as client:
        client.ping()
        daemon.kill()
        with pytest.raises(DeadlineExceeded):
            client.ping(timeout=0.1)
        place.start().kill()  # it was back, and nobody asked it for anything
        for link in client.inner.links:
            link.refused_since -= 1000
            link.refused_last -= 1000
        comes, started = beside(place.start)
        client.ping()
        comes.join()
    assert isinstance(started[0], DaemonProcess)
    started[0].stop()


async def cut_short(endpoint: str, unix_endpoint: str) -> None:
    """Requests, with a descriptor and without, over connections that take nothing any more."""
    async with AsyncClient(endpoint, shared_memory=False) as client:
        connection, beside_it = await client.pool.connection(), await client.pool.open_beside(unix_endpoint)
        connection._channel.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost):
            await connection.call(FrameType.PING, Empty(), Empty)
        beside_it._channel.sock.shutdown(socket.SHUT_WR)
        with socket.socket() as passed, pytest.raises(ConnectionLost):
            await beside_it.call_with(FrameType.PING, Empty(), Empty, passed.fileno())
        await beside_it.close()


async def test_a_request_that_could_not_be_sent_leaves_nothing_unheard(daemon: DaemonProcess) -> None:
    """What went wrong is told where the request was made, and not once more by the loop."""
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
    await cut_short(daemon.endpoint, daemon.unix_endpoint)
    gc.collect()
    assert told == []


def test_a_client_outlives_a_restart_of_its_daemon(data_dir: Path) -> None:
    sizes = ("--dram", "16MiB", "--ssd", "64MiB")
    socket_path = data_dir.parent / "s"
    first = DaemonProcess(data_dir, *sizes, "--unix-socket", str(socket_path)).wait_ready()
    client = Client(first.unix_endpoint, timeout=30)
    namespace = open_namespace(client)
    namespace.put(context(1), content(context(1)), durable=True)
    first.kill()
    started = threading.Thread(
        target=lambda: restarted.append(DaemonProcess(data_dir, *sizes, "--unix-socket", str(socket_path)).wait_ready())
    )
    restarted: list[DaemonProcess] = []
    started.start()
    assert namespace.match(context(1), lease_s=0).pages in (0, 4), "it may still be loading"
    started.join()
    assert fetch_checked(namespace, context(1)) == 4
    namespace.put(context(2), content(context(2)))
    client.close()
    restarted[0].stop()


def test_a_fetch_outlives_a_kill_of_its_daemon(data_dir: Path) -> None:
    """Killed in the middle of the fetch, and started again: the rest comes, and every layer group is announced once."""
    flags = ("--dram", "64MiB", "--ssd", "256MiB", "--unix-socket", str(data_dir.parent / "s"))
    spec = KVSpec(4, (Component("full", 8, 2, 256),), group_layers=2)
    tokens = np.arange(300 * spec.page_tokens, dtype=np.uint32)
    data = np.random.default_rng(3).integers(0, 256, (300, 8, spec.layer_bytes(spec.whole())), dtype=np.uint8)
    daemons = [DaemonProcess(data_dir, *flags).wait_ready()]
    killed = threading.Event()

    def kill_and_start_again() -> None:
        killed.wait()
        daemons[0].kill()
        daemons.append(DaemonProcess(data_dir, *flags).wait_ready())

    starting = threading.Thread(target=kill_and_start_again)
    starting.start()
    with Client(daemons[0].unix_endpoint, connections=2, timeout=30) as client:
        namespace = client.namespace("long", "rev-1", spec)
        namespace.put(tokens, data, durable=True)
        match = namespace.match(tokens)
        out = np.zeros_like(data)
        told: list[tuple[int, int]] = []

        def progress(done: int, total: int) -> None:
            if done > total // 4 and not killed.is_set():
                killed.set()
                time.sleep(0.3)  # in the client's thread: nothing more is received before the daemon is dead

        namespace.fetch(match, out, group_layers=2, on_group=lambda low, high: told.append((low, high)), progress=progress)
        assert np.array_equal(out, data)
        assert sorted(told) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    starting.join()
    daemons[1].stop()
