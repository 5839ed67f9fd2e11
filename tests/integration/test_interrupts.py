"""A blocking client that is interrupted, as by Ctrl-C, at any point of a small request: nothing stays held, or goes astray.

A signal's handler runs as a call returns or a function begins, so that is where the tests raise, at one point after the other.
"""

import concurrent.futures._base
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.api.wire import reading, writing
from kvstore_client import Client, blocking, direct, job, loop_thread, turn
from kvstore_client.blocking import Namespace
from kvstore_client.direct import current
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import content, context, open_namespace
from tests.interrupts import interrupted, reached

pytestmark = [
    pytest.mark.usefixtures("time_for_a_line"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),  # interrupted before it began
]
LINE = (direct.__file__, turn.__file__, reading.__file__, writing.__file__)
LOOP = (loop_thread.__file__, job.__file__, threading.__file__, concurrent.futures._base.__file__)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.endpoint, connections=1, shared_memory=False) as client:
        yield client


@pytest.fixture
def namespace(client: Client) -> Namespace:
    namespace = open_namespace(client)
    namespace.put(context(8000), content(context(8000)))
    return namespace


def by_the_line(client: Client) -> bool:
    """Whether a small request goes by the line now."""
    sent: list[direct.Line] = []

    async def look() -> None:
        if (line := current()) is not None:
            sent.append(line)
        await client.inner.ping()

    client.quickly(look)
    return bool(sent)


def line_of(client: Client) -> None:
    for _ in range(6):
        client.ping()
    assert by_the_line(client)


def test_its_line_is_free_again(client: Client) -> None:
    line_of(client)
    at = 0
    while interrupted(client.ping, at, LINE):
        assert current() is None, f"what this thread does next goes by the line (interrupted at {at})"
        assert by_the_line(client), f"the line is held by nobody (interrupted at {at})"
        at += 1
    assert at > 10


def test_nothing_comes_to_its_buffer_later(client: Client, namespace: Namespace) -> None:
    line_of(client)
    with namespace.match(context(8000)) as match:
        out, at = np.empty(match.pages * namespace.spec.page_bytes, np.uint8), 0
        while interrupted(lambda: namespace.fetch(match, out), at, LINE):
            out[:] = 7
            client.ping()
            assert np.all(out == 7), f"interrupted at {at}"
            at += 1
    assert at > 10


def test_calls_from_a_handler_do_not_take_the_line_of_what_they_interrupt(client: Client) -> None:
    line_of(client)
    line, at = client._direct._line, 0

    def ask() -> None:
        client.ping(5)
        client.namespaces()  # by the loop, which waits for the line to settle first

    while reached(client.ping, at, ask, LINE):
        assert client._direct._line is line, f"it was lost (asked at {at})"
        assert by_the_line(client)
        at += 1
    assert at > 10


def test_its_loop_waits_for_nobody_who_was_interrupted(client: Client) -> None:
    """What goes by the loop of all threads: whoever is interrupted as it takes a lock must not leave it to the loop."""
    answers: list[bool] = []

    def ask() -> None:
        client._thread.run(client.inner.ping())
        answers.append(True)

    at = 0
    while interrupted(ask, at, LOOP):
        answers.clear()
        other = threading.Thread(target=ask, daemon=True)
        other.start()
        other.join(20)
        assert answers, f"the loop hangs (interrupted at {at})"
        at += 1
    assert at >= 5


def test_a_client_whose_close_is_interrupted_is_closed_by_the_next(daemon: DaemonProcess) -> None:
    at, more = 0, True
    while more:
        client = Client(daemon.endpoint, connections=1, shared_memory=False)
        client.ping()
        more = interrupted(client.close, at, (*LOOP, blocking.__file__))
        client.close()
        client._thread._thread.join(10)
        assert not client._thread._thread.is_alive(), f"its thread goes on (interrupted at {at})"
        assert client.closed
        at += 1
    assert at >= 10


def test_threads_that_close_a_client_at_once(daemon: DaemonProcess) -> None:
    for _ in range(50):
        client = Client(daemon.endpoint, connections=1, shared_memory=False)
        both, errors = threading.Barrier(3), list[BaseException]()

        def close(client: Client = client, both: threading.Barrier = both, errors: list[BaseException] = errors) -> None:
            both.wait(20)
            try:
                client.close()
            except BaseException as error:  # noqa: BLE001 - whatever it is
                errors.append(error)

        closers = [threading.Thread(target=close, daemon=True) for _ in range(3)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(20)
            assert not closer.is_alive()
        assert not errors
        assert client.closed


def test_calls_from_a_handler_come_through_while_another_is_begun(client: Client) -> None:
    """By the loop of all threads, at any point of another call of this thread."""
    calls = [0]

    def ask() -> None:
        client._thread.run(client.inner.ping())
        calls[0] += 1

    def ask_all() -> None:
        at = 0
        while reached(ask, at, ask, LOOP):
            at += 1

    asker = threading.Thread(target=ask_all, daemon=True)
    asker.start()
    asker.join(60)
    assert not asker.is_alive(), f"it waits for itself (after {calls[0]} calls)"
    assert calls[0] > 20
