"""The command line against a real daemon, as a script would use it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_workers.daemon_process import DaemonProcess

PAGE_BYTES = 2 * 2 * 4 * 8 * 2


def kvstore(daemon: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVSTORE_HTTP": daemon.http, "KVSTORE_ENDPOINT": daemon.endpoint}
    return subprocess.run([sys.executable, "-m", "kvstore", *arguments], env=environment, capture_output=True, text=True, timeout=30)


def as_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_page_goes_in_and_comes_out(daemon: DaemonProcess, tmp_path: Path) -> None:
    shape = ("--layers", "2", "--kv-heads", "1", "--head-dim", "8", "--page-tokens", "4")
    made = as_json(kvstore(daemon, "ns", "create", "cli", *shape, "--model", "m@abc", "--json"))
    data = np.random.default_rng(1).integers(0, 256, 2 * PAGE_BYTES, dtype=np.uint8)
    data.tofile(tmp_path / "in")
    np.save(tmp_path / "tokens.npy", np.arange(9, dtype=np.uint32))
    done = as_json(kvstore(daemon, "put", "cli", "-t", f"@{tmp_path / 'tokens.npy'}", "-d", str(tmp_path / "in"), "--durable", "--json"))
    assert (done["new_pages"], done["bytes"]) == (2, len(data))
    found = as_json(kvstore(daemon, "match", "cli", "-t", "0,1,2,3,9,9,9,9", "--json"))
    assert (found["pages"], found["tokens"], found["asked_tokens"]) == (1, 4, 8)
    got = as_json(kvstore(daemon, "get", made["id"], "-t", "0,1,2,3,4,5,6,7", "-o", str(tmp_path / "out"), "--json"))
    assert got["pages"] == 2
    assert (tmp_path / "out").read_bytes() == data.tobytes()
    assert "cli" in [n["name"] for n in as_json(kvstore(daemon, "ns", "list", "--json"))]
    assert as_json(kvstore(daemon, "status", "--json"))["totals"]["put_pages"] >= 2
    assert "namespace" in kvstore(daemon, "top", "--count", "1").stdout
    assert "cli" in kvstore(daemon, "status").stdout
    for words in (kvstore(daemon, "ns", "show", "cli").stdout, kvstore(daemon, "ns", "list").stdout, kvstore(daemon, "status").stdout):
        assert made["id"] in words, "piped output is whole"
    looks = [json.loads(line) for line in kvstore(daemon, "top", "--count", "2", "--interval", "0.1", "--json").stdout.splitlines()]
    assert [look["totals"]["put_pages"] >= 2 for look in looks] == [True, True]
    assert looks[1]["per_s"]["put_pages"] == 0
    for command in ("match", "get"):
        arguments = [command, "cli", "-t", "7,7,7,7", *(["-o", str(tmp_path / "none")] if command == "get" else [])]
        assert kvstore(daemon, *arguments).returncode == 1, "a miss is no error"
    assert as_json(kvstore(daemon, "ns", "drop", "cli", "--yes", "--json"))["dropped"] == made["id"]
    gone = kvstore(daemon, "ns", "show", "cli")
    assert gone.returncode == 1
    assert "unknown_namespace" in gone.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("match", "nope", "-t", "1,2,3,4"), "unknown_namespace"),
        (("match", "nope", "-t", "one,two"), "can't read tokens"),
        (("match", "nope", "-t", "@/nowhere.npy"), "can't read tokens"),
        (("ns", "create", "x", "--layers", "1", "--kv-heads", "1", "--head-dim", "8"), "fingerprint"),
        (("ns", "create", "x", "--layers", "1", "--kv-heads", "1", "--head-dim", "8", "--model", "m@main"), "does not name fixed weights"),
        (("ns", "create", "x", "--layers", "0", "--kv-heads", "1", "--head-dim", "8", "--model", "m@1"), "layers"),
    ],
)
def test_errors_are_one_line_that_helps(daemon: DaemonProcess, arguments: tuple[str, ...], words: str) -> None:
    done = kvstore(daemon, *arguments)
    assert done.returncode == (2 if arguments[0] == "match" else 1)
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_no_daemon_is_said_plainly() -> None:
    done = subprocess.run([sys.executable, "-m", "kvstore", "status", "--http", "http://127.0.0.1:1"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "kvstore serve" in done.stderr


def test_help_and_version(daemon: DaemonProcess) -> None:
    assert "serve" in kvstore(daemon, "--help").stdout
    assert kvstore(daemon, "--version").stdout.startswith("kvstore ")
