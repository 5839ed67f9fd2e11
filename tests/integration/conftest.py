"""Fixtures of several files."""

import os
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client, KVSpec, direct
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import content, context, fetch_checked, open_namespace
from tests.integration.raw import RawClient, wait_for_baseline
from tests.integration.rebuilds import SPEC

_names = count()


@pytest.fixture
def space(daemon: DaemonProcess) -> Iterator[Callable[..., Namespace]]:
    """Makes namespaces with recipes; they are dropped at the end."""
    made: list[Namespace] = []
    with Client(daemon.endpoint) as client:

        def make(rebuild: str = "exact", spec: KVSpec = SPEC, **options: Any) -> Namespace:
            name = f"rebuild-{next(_names)}"
            made.append(client.namespace(name, f"revision of {name}", spec, recipes=True, rebuild=rebuild, **options))
            return made[-1]

        yield make
        for one in made:
            one.drop()


@pytest.fixture
def raw(daemon: DaemonProcess) -> Iterator[RawClient]:
    """A raw connection; after the test nothing may be held, and the daemon must serve as before."""
    with Client(daemon.endpoint, connections=1) as client:
        namespace = open_namespace(client)
        namespace.put(context(1), content(context(1)))
    used = wait_for_baseline(daemon.http)
    with RawClient(daemon.endpoint) as connection:
        yield connection
    wait_for_baseline(daemon.http, used)
    with Client(daemon.unix_endpoint, connections=1) as client:
        assert fetch_checked(client.namespace("pages"), context(1)) == 4


@pytest.fixture
def time_for_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking client has a line once it has asked enough, also where the machine stands still for a second just then."""
    monkeypatch.setattr(direct, "_CONNECT_S", 30.0)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
