"""An engine's thread that is interrupted while it waits for the link's loop: the loop goes on for the others."""

import concurrent.futures._base
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from kvstore_client import job, turn
from kvstore_connectors import link_loop
from kvstore_connectors.hashed_link import LinkOptions, StoreLink
from kvstore_workers.daemon_process import DaemonProcess
from tests.interrupts import interrupted

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # interrupted before it began
LOOP = (link_loop.__file__, job.__file__, turn.__file__, threading.__file__, concurrent.futures._base.__file__)
TIMES = 300


@pytest.fixture
def link(daemon: DaemonProcess) -> Iterator[StoreLink]:
    link = StoreLink(LinkOptions(endpoint=daemon.endpoint, lookup_timeout_s=20), "test", logging.getLogger("tests.links"))
    yield link
    link.close()


def asking(link: StoreLink) -> Callable[[], bool]:
    """A question to the store, for whatever thread."""

    async def ping() -> bool:
        await link.client.ping()
        return True

    return lambda: link.wait(link.attempt(ping, False, 20), False)


def answered(ask: Callable[[], bool]) -> bool:
    """Whether another thread gets an answer."""
    answers: list[bool] = []
    other = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    other.start()
    other.join(20)
    return answers == [True]


def test_its_loop_waits_for_nobody_who_was_interrupted(link: StoreLink) -> None:
    ask, at = asking(link), 0
    while interrupted(ask, at, LOOP):
        assert answered(ask), f"the loop hangs (interrupted at {at})"
        at += 1
    assert at >= 5


def test_a_link_whose_end_is_interrupted_ends_all_the_same(daemon: DaemonProcess) -> None:
    at, more = 0, True
    while more:
        link = StoreLink(LinkOptions(endpoint=daemon.endpoint), "test", logging.getLogger("tests.links"))
        assert asking(link)()
        more = interrupted(link.close, at, (link_loop.__file__, turn.__file__))
        link.close()
        assert not link.alive, f"interrupted at {at}"
        at += 1
    assert at >= 3


def test_interrupts_at_random_moments(link: StoreLink) -> None:
    """Signals, as they come."""
    ask, chance = asking(link), random.Random(1)
    assert ask()
    main, done, came = threading.get_ident(), threading.Event(), 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def send() -> None:
        time.sleep(chance.uniform(0, 0.002))
        if not done.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)

    def asked() -> None:
        """Ask until the signal is there."""
        sender = threading.Thread(target=send)
        sender.start()
        try:
            while sender.is_alive():
                ask()
        finally:
            sender.join()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        for number in range(TIMES):
            try:
                asked()
            except KeyboardInterrupt:
                came += 1
            if number % 10 == 9:
                assert answered(ask), f"the loop hangs (interrupt {number})"
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        done.set()
        signal.signal(signal.SIGUSR1, before)
    assert came > TIMES / 2
