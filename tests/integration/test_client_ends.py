"""A blocking client whose daemon stands still or dies, and whose other threads are still at it when it is closed."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import BadRequest, Client, ConnectionLost, DeadlineExceeded
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, open_namespace
from tests.integration.raw import stat

_ASKS = 10
"""So many small requests, that the client makes them in the calling thread."""


def test_a_close_ends_the_calls_of_other_threads(daemon: DaemonProcess) -> None:
    for _ in range(5):
        client = Client(daemon.endpoint)
        namespace = open_namespace(client)
        told: list[str] = []
        begun = threading.Barrier(4)

        def ask(namespace=namespace, told=told, begun=begun) -> None:  # type: ignore[no-untyped-def]
            begun.wait()
            try:
                while True:
                    namespace.match(context(1)).release()
            except (BadRequest, ConnectionLost) as error:
                told.append(error.message)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        client.ping()
        client.close()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert len(told) == 3


def test_a_client_that_is_dropped_says_so_and_ends(tmp_path: Path) -> None:
    def looping() -> int:
        return sum(thread.name == "kvstore-client" for thread in threading.enumerate())

    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "16MiB") as daemon:
        before = looping()
        client: Client | None = Client(daemon.endpoint)
        assert client is not None
        held = [open_namespace(client)]
        for _ in range(_ASKS):
            held[0].match(context(1), lease_s=0)
        del client
        gc.collect()
        assert held[0].match(context(1), lease_s=0).pages == 0  # a namespace keeps its client
        with pytest.warns(ResourceWarning, match="was not closed"):
            held.clear()
        until = time.monotonic() + 20
        while looping() > before or stat(daemon.http)["connections"]:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_host_without_an_address_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"can't connect to nowhere\.invalid:7421: [A-Z]") as error:
        Client("nowhere.invalid:7421", reconnect=0)
    assert "Unknown error" not in error.value.message


def test_a_deadline_is_not_waited_for_twice(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for _ in range(_ASKS):
            namespace.match(context(1), lease_s=0)
        attempts = 0
        inner = client.inner.call

        async def counted(*args, **given):  # type: ignore[no-untyped-def]
            nonlocal attempts
            attempts += 1
            return await inner(*args, **given)

        client.inner.call = counted  # type: ignore[method-assign]
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
                namespace.match(context(1), lease_s=0, timeout=0.3)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert attempts == 1
        client.ping()


def test_a_thread_that_waits_holds_up_no_other(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(2), content(context(2)))
        for _ in range(_ASKS):
            match = namespace.match(context(2))
            match.release()
        match = namespace.match(context(2))
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            match.release()  # it is not answered, so what goes by the loop asks first whether it is done
            waits = threading.Thread(target=lambda: namespace.match(context(2), lease_s=0, timeout=60))
            waits.start()
            time.sleep(0.1)
            with pytest.raises(DeadlineExceeded):
                client.ping(timeout=0.2)
            assert waits.is_alive()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        waits.join(20)
        assert not waits.is_alive()


def test_an_extension_that_failed_is_as_if_it_had_not_been(data_dir: Path) -> None:
    sizes = ("--dram", "16MiB", "--ssd", "64MiB")
    with DaemonProcess(data_dir, *sizes) as daemon, Client(daemon.endpoint, reconnect=0) as client:
        namespace = open_namespace(client)
        with namespace.session() as session:
            session.extend(context(1)[:8])
            daemon.kill()
            with pytest.raises(ConnectionLost):
                session.extend(context(1)[8:])
            assert np.array_equal(session.tokens, context(1)[:8])
            with DaemonProcess(data_dir, *sizes, "--port", daemon.endpoint.rpartition(":")[2]) as again:
                again.wait_ready()
                session.extend(context(1)[8:])
                session.put(content(context(1)))
                assert namespace.match(context(1), lease_s=0).pages == len(context(1)) // SPEC.page_tokens


def test_objects_are_neither_sent_nor_received_into(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        data = content(context(1))
        objects = np.empty(data.nbytes // np.dtype(object).itemsize, object)
        with pytest.raises(BadRequest, match="Python objects"):
            namespace.put(context(1), objects)
        namespace.put(context(1), data)
        with namespace.match(context(1)) as match, pytest.raises(BadRequest, match="Python objects"):
            namespace.fetch(match, objects)


def test_the_endpoint_of_the_environment_is_taken(daemon: DaemonProcess) -> None:
    code = "from kvstore_client import Client; c = Client(); print(c.inner.links[0].endpoint); c.close()"
    environment = {**os.environ, "KVSTORE_ENDPOINT": daemon.endpoint}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == daemon.endpoint
