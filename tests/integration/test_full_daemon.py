"""A daemon that has as many connections as it takes: the next client is told so, and one that is in goes on with what it has."""

import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import PROTOCOL_VERSION, Busy, Component, ConnectionLost, FrameType, KVSpec
from kvstore.api.wire.messages import Hello
from kvstore_client import AsyncClient, Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import RawClient, wait_for_baseline
from tests.integration.test_tls import Authority

ENVIRONMENT = {"KVSTORE_MAX_CONNECTIONS": "2", "KVSTORE_SHARED_MEMORY": "false"}
BIG = KVSpec(4, (Component("full", 8, 2, 16384),), max_slice_bytes=1 << 20)


def test_who_finds_a_daemon_full_is_told_so_and_what_to_raise(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", environment=ENVIRONMENT) as daemon:
        with RawClient(daemon.endpoint), RawClient(daemon.endpoint):
            with RawClient(daemon.endpoint, hello=False) as late:
                late.send(FrameType.HELLO, 5, Hello(versions=[PROTOCOL_VERSION], client="late"))
                error = late.error()
                assert error.code == "busy"
                assert "max_connections" in error.message
                assert late.closed()
            with pytest.raises(Busy, match="max_connections"), Client(daemon.endpoint):
                pass
            strangers = [RawClient(daemon.endpoint, hello=False) for _ in range(40)]  # they say nothing, and are not kept without bound
            assert "max_connections" in strangers[-1].error().message
            assert strangers[-1].closed()
            for endpoint in (daemon.endpoint, daemon.unix_endpoint):
                with pytest.raises(Busy, match="max_connections"), Client(endpoint):
                    pass
            for stranger in strangers:
                stranger.sock.close()
        wait_for_baseline(daemon.http, 0)
        with Client(daemon.endpoint) as client:
            client.ping()


def test_who_is_not_told_why_is_told_what_happened(tmp_path: Path) -> None:
    """A daemon that is full can't say so over TLS without a handshake, to which it does not sit down with everybody."""
    authority = Authority.make(tmp_path)
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", *authority.arguments, environment=ENVIRONMENT) as daemon:
        sockets = [RawClient(daemon.endpoint, hello=False).sock for _ in range(2 + 32)]
        with pytest.raises(ConnectionLost, match=r"before it said anything.*as many connections as it takes"):
            Client(daemon.endpoint, tls=authority.client())
        for one in sockets:
            one.close()


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_is_closed_before_it_said_anything(reset: bool) -> None:
    """By whoever is there, with what the client has sent read or not."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            while True:
                try:
                    taken, _ = server.accept()
                except OSError:
                    return
                if not reset:
                    taken.recv(1 << 16)
                taken.close()

        threading.Thread(target=refuse, daemon=True).start()
        for _ in range(5):
            with pytest.raises(ConnectionLost, match=r"before it said anything.*as many connections as it takes.*tls://"):
                Client(f"127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)


async def test_a_client_whose_second_connection_is_refused_goes_on_with_its_first(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * BIG.page_bytes, dtype=np.uint8)
    tokens = np.arange(12, dtype=np.uint32)
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", environment=ENVIRONMENT) as daemon:
        with RawClient(daemon.endpoint):
            async with AsyncClient(daemon.endpoint, connections=4, local_addresses=["127.0.0.2"]) as client:
                namespace = await client.namespace("big", "rev-1", BIG)
                await namespace.put(tokens, data)
                async with await namespace.match(tokens) as match:
                    out = np.zeros(len(data), np.uint8)
                    await namespace.fetch(match, out)
                assert np.array_equal(out, data)
                assert len({await client.pool.connection(slot) for slot in range(4)}) == 1
        refused = [line for line in daemon.lines if "more than 2 connections" in line]
        assert 0 < len(refused) < 4, refused  # it does not ask again and again
