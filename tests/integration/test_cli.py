"""The command line against a real daemon, as a script would use it."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_workers.daemon_process import DaemonProcess
from tests.commands import from_nothing
from tests.commands import kvstore as run

PAGE_BYTES = 2 * 2 * 4 * 8 * 2
CREATE = ("ns", "create", "x", "--layers", "1", "--kv-heads", "1", "--head-dim", "8")


def of(daemon: DaemonProcess) -> dict[str, str]:
    """An environment in which a daemon is found."""
    return {"KVSTORE_HTTP": daemon.http, "KVSTORE_ENDPOINT": daemon.endpoint}


def kvstore(daemon: DaemonProcess, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run(*arguments, environment=of(daemon), stdin=stdin)


def as_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "line",
    [
        "serve --policy best",
        "status",
        "ns list",
        "match nope -t 1,2,3,4",
        "drop nope -t 1,2,3,4",
        "unpin nope 1",
        "why nope -t 1,2,3,4",
        "check --data-dir nowhere",
        "doctor --dram lots",
        "plan --bytes-per-token 0 -n 1 -c 1000",
        "simulate nowhere",
    ],
)
def test_a_command_from_nothing_is_what_all_others_here_are_forks_of(daemon: DaemonProcess, tmp_path: Path, line: str) -> None:
    words = [str(tmp_path / word) if word == "nowhere" else word for word in line.split()]
    done, forked = (how(*words, environment=of(daemon)) for how in (from_nothing, run))
    assert (done.returncode, done.stderr) == (forked.returncode, forked.stderr)
    assert done.stdout.split()[:2] == forked.stdout.split()[:2]
    assert done.returncode == (0 if line in ("status", "ns list") else 2)


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
    assert gone.returncode == 2
    assert "unknown_namespace" in gone.stderr


def test_what_is_watched_through_a_pipe_comes_look_by_look_and_plain(daemon: DaemonProcess) -> None:
    environment = {**os.environ, "KVSTORE_HTTP": daemon.http}
    command = [sys.executable, "-m", "kvstore", "top", "--interval", "0.1"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        try:
            seen = ""
            while seen.count("capacity") < 3:  # it does not end by itself
                line = watching.stdout.readline()
                assert line, watching.stderr.read()
                seen += line
            watching.stdout.close()
            assert watching.wait(20) is not None
            assert "Traceback" not in watching.stderr.read()
        finally:
            watching.kill()
    assert "\x1b" not in seen
    assert seen.isprintable() or all(line.isprintable() for line in seen.splitlines())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("serve", ["by default 127.0.0.1", "by default 7421", "by default kvstore.sock in the data directory"]),
        ("check", ["by default ~/.local/share/kvstore", "by default http://127.0.0.1:7420"]),
        ("doctor", ["by default ~/.local/share/kvstore"]),
    ],
)
def test_help_names_the_defaults(command: str, words: list[str]) -> None:
    told = run(command, "--help", environment={"COLUMNS": "400", "TERM": "dumb"})
    assert all(some in told.stdout for some in words), told.stdout
    assert " . " not in told.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("match", "nope", "-t", "1,2,3,4"), "unknown_namespace"),
        (("match", "nope", "-t", "one,two"), "can't read tokens"),
        (("match", "nope", "-t", "@/nowhere.npy"), "can't read tokens"),
        (("put", "nope", "-t", "1,2,3,4", "-d", "/nowhere"), "unknown_namespace"),
        (("status", "--http", "127.0.0.1:7420"), "give http://HOST:PORT"),
        (CREATE, "fingerprint"),
        ((*CREATE, "--model", "m@main"), "does not name fixed weights"),
        ((*CREATE, "--model", "m@1", "--flat"), "give --hash-bytes"),
        ((*CREATE, "--model", "m@1", "--lossy"), "it goes with recipes"),
        ((*CREATE, "--model", "m@1", "--rebuild", "tolerant"), "it goes with recipes"),
        (("ns", "create", "x", "--layers", "0", "--kv-heads", "1", "--head-dim", "8", "--model", "m@1"), "layers"),
    ],
)
def test_errors_are_one_line_that_helps(daemon: DaemonProcess, arguments: tuple[str, ...], words: str) -> None:
    done = kvstore(daemon, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [("status",), ("match", "x", "-t", "1"), ("put", "x", "-t", "1", "-d", "x"), ("ns", "list")])
def test_no_daemon_is_said_plainly_and_is_an_error(command: tuple[str, ...]) -> None:
    done = run(*command, environment={"KVSTORE_HTTP": "http://127.0.0.1:1", "KVSTORE_ENDPOINT": "127.0.0.1:1"})
    assert done.returncode == 2
    assert "connection_lost" in done.stderr
    assert "127.0.0.1:1" in done.stderr


def test_another_http_server_is_said_to_be_no_daemon() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # it answers everything with 501 and HTML
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            base = f"http://127.0.0.1:{server.server_port}"
            done = run("leases", "--http", base)
        finally:
            server.shutdown()
            serving.join()
    assert done.returncode == 2
    assert f"what answers at {base}/v1/leases?limit=20 is no control plane of kvstore: it says HTTP 501" in done.stderr


def test_files_of_numpy(daemon: DaemonProcess, tmp_path: Path) -> None:
    """What only pickle could read is refused, without the advice to use it; an array's bytes are what is put."""
    kvstore(daemon, *CREATE[:2], "files", *CREATE[3:], "--page-tokens", "4", "--model", "m@1")
    np.save(tmp_path / "objects.npy", np.array([1, "x"], object), allow_pickle=True)
    np.save(tmp_path / "page.npy", np.arange(4 * 2 * 8, dtype=np.uint16))
    (tmp_path / "none.npy").write_bytes(b"PK\x03\x04")
    for name, words in (("objects", "save numbers, as with numpy.save"), ("none", "not what numpy.save writes")):
        for arguments in (("-t", f"@{tmp_path / name}.npy", "-d", "x"), ("-t", "1,2,3,4", "-d", f"{tmp_path / name}.npy")):
            done = kvstore(daemon, "put", "files", *arguments)
            assert (done.returncode, words in done.stderr) == (2, True), done.stderr
            assert "allow_pickle" not in done.stderr
    done = kvstore(daemon, "put", "files", "-t", "1,2,3,4", "-d", str(tmp_path / "page.npy"))
    assert done.stdout.startswith("1 new page, 0 were there; 128 B"), done.stdout + done.stderr
    assert kvstore(daemon, "match", "files", "-t", "1,2,3,4").stdout.startswith("4 of 4 tokens: 1 page, 1 in DRAM and 0 only on SSD")


def test_help_and_version(daemon: DaemonProcess) -> None:
    assert "serve" in kvstore(daemon, "--help").stdout
    assert kvstore(daemon, "--version").stdout.startswith("kvstore ")
