"""`serve --record` with a real daemon: what is in the file, and what is not."""

import gzip
import json
import stat
import time
from base64 import b64decode
from pathlib import Path

import numpy as np

from kvstore.lab.compare import Comparison
from kvstore.lab.readers import ReadOptions, read_trace
from kvstore.lab.simulation import LabConfig, Simulation
from kvstore.lab.trace import Op
from kvstore.tiers.policies.make import make_policies
from kvstore.trace_record import FORMAT, VERSION, Header, Line, NamespaceLine, UseLine, decode_ids, decode_line
from kvstore_client import Client, Ended, Hints, Turn
from kvstore_workers.daemon_process import DaemonProcess
from tests.commands import kvstore
from tests.integration.pages import SPEC, content, context, open_namespace
from tests.integration.raw import stat as totals_of

TOKENS = context(7, 6)
SECRET_SESSION = "the conversation of a customer"


def talk(daemon: DaemonProcess) -> None:
    """A conversation: a miss, a put, a longer prompt of which the front is there, a sub-agent, an end."""
    hints = Hints(SECRET_SESSION, Turn.MAIN, Ended.TOOL_CALL, 60)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        assert namespace.match(TOKENS[:17], hints=hints).pages == 0
        namespace.put(TOKENS[:16], content(TOKENS[:16]), hints=hints)
        with namespace.match(TOKENS, hints=hints) as match:
            namespace.match(TOKENS[16:23], base=match).release()
            namespace.put(TOKENS[16:], content(TOKENS, 4), base=match)
        namespace.match(TOKENS[:8], hints=Hints(SECRET_SESSION, Turn.SUB_AGENT)).release()
        namespace.match(TOKENS, lease_s=0)
        namespace.abandon(TOKENS, from_token=9)
        assert namespace.abandon(TOKENS, from_page=50) == 0, "that is nothing, and nothing to record"


def lines_of(file: Path) -> list[Line]:
    raw = gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else file.read_bytes()
    return [decode_line(line) for line in raw.splitlines()]


def record(folder: Path, name: str, *arguments: str) -> Path:
    file = folder / name
    with DaemonProcess(
        folder / f"data{len(list(folder.iterdir()))}", "--record", str(file), "--dram", "16MiB", "--ssd", "16MiB", *arguments
    ) as daemon:
        talk(daemon)
    return file


def test_a_recording_names_pages_and_tells_no_content(tmp_path: Path) -> None:
    file = record(tmp_path, "trace.jsonl")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    head, space, *uses = lines_of(file)
    assert isinstance(head, Header)
    assert (head.format, head.version) == (FORMAT, VERSION)
    assert space == NamespaceLine(0, SPEC.page_tokens, SPEC.page_bytes / SPEC.page_tokens)
    assert all(isinstance(use, UseLine) for use in uses)
    said = [(use.op, use.tokens, len(decode_ids(use.pages)), use.first) for use in uses if isinstance(use, UseLine)]
    assert said == [
        ("get", 17, 4, 0), ("put", 16, 4, 0), ("get", 24, 6, 0), ("get", 23, 5, 0), ("put", 24, 6, 0), ("get", 8, 2, 0),
        ("abandon", 24, 6, 2),
    ]  # fmt: skip
    ids = [decode_ids(use.pages) for use in uses if isinstance(use, UseLine)]
    for some in ids:
        assert (some == ids[-1][: len(some)]).all(), "equal prefixes have equal ids, whether they were known or not"
    times = [use.t for use in uses if isinstance(use, UseLine)]
    assert times == sorted(times)
    hints = [use.hints for use in uses if isinstance(use, UseLine)]
    assert [None if h is None else (h.role, h.end, h.ttl_s) for h in hints] == [
        (None, "tool_use", 60), (None, "tool_use", 60), (None, "tool_use", 60), None, None, ("subagent", None, None), None
    ]  # fmt: skip
    sessions = [h.session for h in hints if h is not None]
    assert len(set(sessions[:3])) == 1
    assert sessions[3] != sessions[0], "a sub-agent is a branch of its own"
    raw = file.read_bytes()
    assert SECRET_SESSION.encode() not in raw
    assert b"token_ids" not in raw


def test_a_packed_recording_of_a_daemon_that_runs_or_was_killed_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    with DaemonProcess(tmp_path / "data", "--record", str(file), "--dram", "16MiB", "--ssd", "16MiB") as daemon:
        talk(daemon)
        while totals_of(daemon.http)["totals"]["recorded_requests"] < 6:
            time.sleep(0.01)
        running = read_trace(file, ReadOptions())
        daemon.kill()
    killed = read_trace(file, ReadOptions())
    assert len(running) == len(killed) >= 6


def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    trace = read_trace(record(tmp_path, "trace.jsonl.gz"), ReadOptions())
    comparison = Comparison(trace)
    assert comparison.knows_bytes
    page_bytes = [SPEC.page_bytes]
    hits = Simulation(trace, page_bytes, LabConfig(100 * SPEC.page_bytes), *make_policies("lru", 100, 1)).run().hit_pages.tolist()
    assert [hit for hit, op in zip(hits, trace.op, strict=True) if op == Op.GET] == [0, 4, 4, 2]
    assert comparison.run("lru", comparison.percent(100)).hit_ratio == 10 * SPEC.page_tokens / (17 + 24 + 23 + 8)


def test_packed_with_tokens_when_asked_for(tmp_path: Path) -> None:
    file = record(tmp_path, "trace.jsonl.gz", "--record-tokens")
    plain = gzip.decompress(file.read_bytes())
    assert [type(line) for line in lines_of(file)][:2] == [Header, NamespaceLine], "readers need not know of tokens"
    found = [
        np.frombuffer(b64decode(line.split(b'"token_ids":"')[1].split(b'"')[0]), "<u4") for line in plain.splitlines() if b"ken_ids" in line
    ]
    assert [len(tokens) for tokens in found] == [17, 16, 24, 23, 24, 8]
    for tokens in found:
        assert (tokens == TOKENS[: len(tokens)]).all()


def test_it_ends_at_its_limit_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    limit = {"KVSTORE_RECORD_MAX_BYTES": "8KiB"}
    with DaemonProcess(tmp_path / "data", "--record", str(file), "--dram", "16MiB", environment=limit) as daemon:
        with Client(daemon.endpoint) as client:
            namespace = open_namespace(client)
            for seed in range(200):
                namespace.match(context(seed))
        while (totals := totals_of(daemon.http)["totals"])["recorded_requests"] + totals["unrecorded_requests"] < 200:
            time.sleep(0.05)
        assert daemon.stop() == 0
        said = "\n".join(daemon.lines)
    assert "record_max_bytes is 8192" in said
    written = len(lines_of(file)) - 2
    assert 10 < written < 200
    assert f"recorded {written} requests, left out {200 - written}" in said
    assert file.stat().st_size <= 8192


def test_a_file_that_can_not_be_made_is_said_at_start(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path / "data", "--record", str(tmp_path / "no folder" / "x.jsonl"), "--dram", "16MiB")
    assert daemon.wait_exit() == 2
    assert any("can't record to" in line for line in daemon.lines)


def test_a_recording_of_a_store_that_holds_pages_says_so(tmp_path: Path) -> None:
    said = []
    for name in ("first.jsonl", "second.jsonl"):
        with DaemonProcess(tmp_path / "data", "--record", str(tmp_path / name), "--dram", "16MiB", "--ssd", "16MiB") as daemon:
            with Client(daemon.endpoint) as client:
                namespace = open_namespace(client)
                namespace.match(TOKENS).release()
                namespace.put(TOKENS, content(TOKENS), durable=True)
            assert daemon.stop() == 0
            said.append("\n".join(daemon.lines))
    heads = [lines_of(tmp_path / name)[0] for name in ("first.jsonl", "second.jsonl")]
    assert [head.stored_pages for head in heads if isinstance(head, Header)] == [0, 6]
    assert "hold" not in said[0]
    assert "the store holds 6 pages already" in said[1]
    first, second = (kvstore("simulate", str(tmp_path / name), "--json", "-") for name in ("first.jsonl", "second.jsonl"))
    assert first.stderr.strip() == ""
    assert "the store held 6 pages when the recording began" in second.stderr
    assert "count as misses" in second.stderr
    assert [json.loads(done.stdout)["stored_pages"] for done in (first, second)] == [0, 6]
