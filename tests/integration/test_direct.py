"""Small requests of the blocking client, made by the calling thread: the same answers, errors and bounds as by the loop."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import AsyncClient, BadRequest, Client, Conflict, DeadlineExceeded, NotFound, UnknownNamespace
from kvstore_client.blocking import Namespace
from kvstore_client.direct import Line
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import stat, wait_for_baseline

pytestmark = pytest.mark.usefixtures("time_for_a_line")


def line_of(client: Client) -> Line | None:
    """The line, once the client has asked for enough to have one."""
    for _ in range(6):
        client.ping()
    return client._direct._line


@pytest.fixture(params=["tcp", "unix", "near"])
def client(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    endpoint = daemon.unix_endpoint if request.param == "unix" else daemon.endpoint
    with Client(endpoint, connections=1, shared_memory=request.param == "near") as client:
        namespace = open_namespace(client)
        namespace.put(context(8000), content(context(8000)))
        namespace.match(context(8000)).release()  # by now it is known whether there is shared memory
        yield client


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return open_namespace(client)


def test_one_more_connection_of_the_session(client: Client, namespace: Namespace, daemon: DaemonProcess) -> None:
    line = line_of(client)
    assert line is not None
    assert line.welcome.session == client.inner.pool.session
    assert line.near == (client.inner.same_host.now is not None or client.inner.pool.endpoint.startswith("unix:"))
    for _ in range(3):
        assert fetch_checked(namespace, context(8000)) == 4
    assert line_of(client) is line
    assert line.lost is None


def test_a_lease_is_the_client_s_whichever_way_it_was_taken(client: Client, namespace: Namespace) -> None:
    line_of(client)
    tokens = context(8000)
    with namespace.match(tokens) as match:
        longer = np.concatenate([tokens, tokens[:4]])
        namespace.put(longer[len(tokens) :], content(longer, 4), base=match)  # by the loop, upon a lease that was taken here
        match.renew(20)
        assert match.valid
        with pytest.raises(Conflict):
            namespace.delete(tokens)
        lease = match.inner.lease
    assert not match.valid
    with pytest.raises(NotFound):
        client.run(client.inner.renew(lease, 10))
    with namespace.match(longer):
        pass
    assert namespace.delete(longer, from_page=4) == 1  # what was released before is released, though nobody waited for that


def test_errors_are_typed_and_end_nothing(client: Client, namespace: Namespace) -> None:
    line = line_of(client)
    match = namespace.match(context(8000))
    match.release()
    match.inner.lease = 12345
    with pytest.raises(NotFound):
        match.renew(5)
    match.release()  # harmless
    other = client.namespace("other", "rev-2", SPEC)
    with other.match(context(8000)) as nothing:
        assert nothing.pages == 0
    other.drop()
    with pytest.raises(UnknownNamespace):
        other.match(context(8000))
    assert fetch_checked(namespace, context(8000)) == 4
    assert line_of(client) is line


def test_a_deadline_is_kept(client: Client, namespace: Namespace) -> None:
    line = line_of(client)
    with pytest.raises(DeadlineExceeded):
        namespace.match(context(8000), timeout=1e-9)
    for _ in range(2):
        with suppress(DeadlineExceeded):  # by the loop now, which takes an answer that is there as it looks
            namespace.match(context(8000), timeout=1e-9).release()
    assert fetch_checked(namespace, context(8000)) == 4
    assert line_of(client) is not line


def test_a_daemon_that_does_not_answer(data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB") as daemon, Client(daemon.endpoint, timeout=20) as client:
        assert line_of(client) is not None
        daemon._process.send_signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                client.ping(0.2)
            assert time.monotonic() - started >= 0.2
        finally:
            daemon._process.send_signal(signal.SIGCONT)
        client.ping()


def test_an_interrupt(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        line = line_of(client)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        daemon._process.send_signal(signal.SIGSTOP)
        try:
            main = threading.main_thread().ident
            assert main is not None
            killer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))

            def ping() -> None:
                killer.start()
                client.ping()

            with pytest.raises(KeyboardInterrupt):
                ping()
            killer.join()
        finally:
            signal.signal(signal.SIGINT, before)
            daemon._process.send_signal(signal.SIGCONT)
        client.ping()
        assert line_of(client) is not line


def test_threads_share_a_client(client: Client, namespace: Namespace) -> None:
    line_of(client)
    pages: list[int] = []

    def work() -> None:
        pages.extend(fetch_checked(namespace, context(8000)) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pages == [4] * 80


def test_it_outlives_a_restart_of_its_daemon(data_dir: Path) -> None:
    sizes = ("--dram", "16MiB", "--ssd", "64MiB", "--unix-socket", str(data_dir.parent / "s"))
    first = DaemonProcess(data_dir, *sizes).wait_ready()
    with Client(first.unix_endpoint, timeout=30) as client:
        namespace = open_namespace(client)
        namespace.put(context(1), content(context(1)), durable=True)
        before = line_of(client)
        assert before is not None
        match = namespace.match(context(1))
        first.kill()
        with DaemonProcess(data_dir, *sizes).wait_ready():
            assert fetch_checked(namespace, context(1)) == 4
            assert not match.valid
            match.release()
            after = line_of(client)
            assert after is not None
            assert after is not before
            assert after.welcome.epoch == client.inner.pool.epoch != before.welcome.epoch


def test_a_view(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, connections=1) as client:
        namespace = open_namespace(client)
        namespace.put(context(8000), content(context(8000)))
        with namespace.match(context(8000)) as match:
            namespace.view(match)
        line = line_of(client)
        assert line is not None
        assert line.near
        for _ in range(3):
            with namespace.match(context(8000)) as match:
                view = namespace.view(match)
                assert np.array_equal(np.concatenate([part.data for part in view.parts]), content(context(8000)))
                view.check()
            assert not view.valid
        assert line_of(client) is line


def test_nothing_is_left(daemon: DaemonProcess) -> None:
    wait_for_baseline(daemon.http)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(8000), content(context(8000)))
        line = line_of(client)
        assert line is not None
        kept = namespace.match(context(8000))
        assert stat(daemon.http)["leases"] == 1
    assert line.lost is not None
    wait_for_baseline(daemon.http)
    kept.release()


async def test_what_is_called_on_a_thread_with_a_loop(daemon: DaemonProcess) -> None:
    """A blocking call there holds the loop up, but it works."""
    async with AsyncClient(daemon.endpoint) as other:
        with Client(daemon.endpoint) as client:
            assert line_of(client) is not None
        await other.ping()


def test_an_error_is_told_without_how_it_was_found(client: Client, namespace: Namespace) -> None:
    """A call that goes to the loop after all is one call to its caller, also in a traceback."""
    with namespace.match(context(8000)) as match, pytest.raises(BadRequest) as raised:
        namespace.fetch(match, np.empty(3, np.uint8))
    assert raised.value.__context__ is None
