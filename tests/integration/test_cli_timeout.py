"""How long commands wait for a daemon that stands still, and what they say then."""

import os
import signal
from collections.abc import Iterator

import pytest
import typer

from kvstore.cli.app import app
from kvstore.cli.common import moving_s
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.test_cli import kvstore


@pytest.fixture(scope="module")
def stopped(daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    os.kill(daemon.pid, signal.SIGSTOP)
    yield daemon
    os.kill(daemon.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("line", "waited_for"),
    [
        ("status", "GET /v1/stat"),
        ("ns drop x --yes", "GET /v1/namespaces/x"),
        ("why x -t 1", "GET /v1/namespaces/x"),
        ("match x -t 1", "a first answer"),
        ("pin x -t 1 --ttl 1", "a first answer"),
        ("rebuild x -t 1", "a first answer"),
    ],
)
def test_a_daemon_that_stands_still_is_not_waited_for_longer_than_asked(stopped: DaemonProcess, line: str, waited_for: str) -> None:
    done = kvstore(stopped, *line.split(), "--timeout", "0.2")
    assert done.returncode == 2
    assert done.stderr.startswith("kvstore: deadline: no answer from ")
    assert f" within 0.2 s (waited for {waited_for}): is the daemon stopped" in done.stderr
    assert "--timeout gives it longer" in done.stderr


def test_a_running_check_asks_first_whether_the_daemon_answers(stopped: DaemonProcess) -> None:
    done = kvstore(stopped, "check", "--http", stopped.http, "--timeout", "0.2")
    assert (done.returncode, "within 0.2 s (waited for GET /healthz)" in done.stderr) == (2, True)


def test_whatever_talks_to_a_daemon_takes_a_timeout() -> None:
    group = typer.main.get_command(app)
    commands = [group.get_command(None, name) for name in group.places]  # type: ignore[attr-defined]
    every = [each for command in commands for each in getattr(command, "commands", {"": command}).values()]
    talking = [each for each in every if {"http", "endpoint"} & {option.name for option in each.params}]
    assert len(talking) >= 17
    assert [each.name for each in talking if "timeout" not in {option.name for option in each.params}] == []


def test_what_moves_pages_has_time_for_their_bytes() -> None:
    assert moving_s(10, 0) == 10
    assert moving_s(10, 80 << 20) == 20
