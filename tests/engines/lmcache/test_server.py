"""LMCache's own server with the adapter, as docs/lmcache.md has it: what a user reads at its start."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.lmcache.objects import plugin
from tests.ports import own_port

SCRIPTS = Path(sys.executable).parent
START_S = 120.0


@contextmanager
def server(endpoint: str, said: Path) -> Iterator[None]:
    spec = json.dumps(plugin(endpoint))
    command = [str(SCRIPTS / "lmcache"), "server", "--l1-size-gb", "1", "--eviction-policy", "LRU", "--l2-adapter", spec]
    with said.open("w") as out:
        process = subprocess.Popen(
            [*command, "--port", str(own_port()), "--http-port", str(own_port())], stdout=out, stderr=subprocess.STDOUT, cwd=said.parent
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


def wait_for(said: Path, words: str) -> None:
    until = time.monotonic() + START_S
    while words not in said.read_text():
        if time.monotonic() > until:
            pytest.fail(f"it never said {words!r}, but:\n{said.read_text()}")
        time.sleep(0.1)


def test_it_says_that_the_store_answers(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "128MiB") as daemon, server(daemon.endpoint, tmp_path / "said"):
        wait_for(tmp_path / "said", f"kvstore L2 adapter: {daemon.endpoint}, revision test-1")
        wait_for(tmp_path / "said", f"kvstore at {daemon.endpoint} answers")


def test_it_says_that_nobody_is_there(tmp_path: Path) -> None:
    with server("127.0.0.1:9", tmp_path / "said"):
        wait_for(tmp_path / "said", "kvstore at 127.0.0.1:9 is away, and the engine goes on without it")
