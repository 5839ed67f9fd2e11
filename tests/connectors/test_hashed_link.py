"""The link of an engine to its store: what is down, slow or full is a miss, said once."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore_client import BadRequest, Busy, KVSpec, NoSpace, NotFound
from kvstore_connectors.hashed_link import LinkOptions, StoreLink
from kvstore_connectors.hashed_pages import label, rows_component
from kvstore_workers.daemon_process import DaemonProcess

SPEC = KVSpec(4, (rows_component("full", 1, 64, 4),), hash_bytes=32, flat=True)
log = logging.getLogger("tests.hashed_link")


def look(link: StoreLink, name: str = "link") -> int:
    """-1 if the store is away, else the pages that are there."""

    async def match() -> int:
        namespace = await link.namespace(name, f"rev of {name}", SPEC)
        return (await namespace.match(label(b"page"), lease_s=0)).pages

    return link.wait(link.attempt(match, -1, link.options.lookup_timeout_s), -2)


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not come to pass")


def test_nobody_is_there(caplog: pytest.LogCaptureFixture) -> None:
    link = StoreLink(LinkOptions(endpoint="127.0.0.1:9", lookup_timeout_s=1), "test", log)
    with caplog.at_level(logging.WARNING):
        assert [look(link) for _ in range(5)] == [-1] * 5
    assert said(caplog, "away") == 1
    link.close()
    link.close()
    assert look(link) == -2


@pytest.mark.parametrize("there", [True, False])
def test_at_its_start_it_is_said_whether_the_store_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture, there: bool) -> None:
    with caplog.at_level(logging.INFO), DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "128MiB") as daemon:
        endpoint = daemon.endpoint if there else "127.0.0.1:9"
        link = StoreLink(LinkOptions(endpoint=endpoint), "test", log)
        link.greet()
        until(lambda: said(caplog, f"kvstore at {endpoint} {'answers' if there else 'is away'}") == 1)
        assert not link.away, "that is for those who want something to find out"
        link.close()


def test_a_daemon_that_stops_answering_is_left_alone_until_it_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "128MiB") as daemon:
        link = StoreLink(LinkOptions(endpoint=daemon.endpoint, lookup_timeout_s=0.5), "test", log)
        link.submit(link.namespace("link", "rev of link", SPEC)).result()  # to make one may take longer: the disk has its say
        with caplog.at_level(logging.WARNING):
            until(lambda: look(link) == 0)  # on a machine that stood still the first may have been too late
            caplog.clear()
            daemon.send_signal(signal.SIGSTOP)
            try:
                assert [look(link) for _ in range(5)] == [-1] * 5
                assert link.away
                assert said(caplog, "away") == 1
            finally:
                daemon.send_signal(signal.SIGCONT)
            until(lambda: look(link) == 0)
        assert said(caplog, "again") == said(caplog, "away")
        link.close()


def test_a_daemon_that_comes_back_without_its_data(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "one", "--dram", "64MiB", "--ssd", "128MiB") as daemon:
        link = StoreLink(LinkOptions(endpoint=daemon.endpoint, lookup_timeout_s=20), "test", log)
        assert look(link) == 0

        async def drop() -> None:
            await (await link.namespace("link", "rev of link", SPEC)).drop()

        link.submit(drop()).result()
        assert look(link) == -1  # the namespace is gone
        assert look(link) == 0  # and made again
        link.close()


@pytest.mark.parametrize("error", [NotFound("x"), NoSpace("x"), Busy("x"), BadRequest("x"), OSError("x")], ids=lambda e: type(e).__name__)
def test_what_the_store_says_is_a_miss(daemon: DaemonProcess, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    link = StoreLink(LinkOptions(endpoint=daemon.endpoint), "test", log)

    async def refused() -> int:
        raise error

    with caplog.at_level(logging.WARNING):
        assert [link.wait(link.attempt(refused, -1, 1), -2) for _ in range(3)] == [-1] * 3
    assert len(caplog.records) == (0 if isinstance(error, NotFound) else 1)
    assert not link.away
    link.close()


def test_close_ends_what_is_under_way(daemon: DaemonProcess) -> None:
    link = StoreLink(LinkOptions(endpoint=daemon.endpoint), "test", log)
    ended: list[str] = []

    async def work() -> int:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("ended")
        return 1

    def attempt(what: Callable[[], Awaitable[int]]) -> "object":
        return link.submit(link.attempt(what, 0, 60))

    attempt(work)
    until(lambda: len(link._running) == 1)
    link.close()
    assert ended == ["ended"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lease_s": 0}, "lease_s"),
        ({"lookup_timeout_s": "1"}, "lookup_timeout_s"),
        ({"durable": 1}, "durable"),
        ({"endpoint": 5}, "endpoint"),
        ({"retention_s": 1.5}, "retention_s"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(settings: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        LinkOptions.take(settings)


def test_a_fork_has_no_store_and_leaves_that_of_its_maker_alone(daemon: DaemonProcess) -> None:
    link = StoreLink(LinkOptions(endpoint=daemon.endpoint), "test", log)
    try:
        assert look(link) == 0
        child = os.fork()
        if not child:
            signal.alarm(20)
            code = 1
            try:
                code = 0 if look(link) == -2 and not link.alive else 2
                link.forget()
                link.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert look(link) == 0
    finally:
        link.close()
