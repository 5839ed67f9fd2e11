"""The readers: what they make of good files, and what they say of bad ones."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.hints import Ended, Hints, Turn
from kvstore.lab.readers import BadTrace, ReadOptions, read_trace
from kvstore.lab.trace import Op
from kvstore.trace_record import Header, Line, NamespaceLine, UseLine, encode_ids, encode_line
from kvstore.trace_record import Hints as LineHints
from kvstore_workers.trace import excerpt_path


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def request(time: int, length: int, *ids: int) -> dict[str, Any]:
    return {"timestamp": time, "input_length": length, "output_length": 1, "hash_ids": list(ids)}


def turn(time: float, size: int, *ids: int, **more: Any) -> dict[str, Any]:
    return {"t": time, "type": "n", "in": size, "out": 5, "hash_ids": list(ids), "stop": "tool_use"} | more


def session(name: str, *requests: dict[str, Any], block_size: int = 64) -> dict[str, Any]:
    return {"id": name, "block_size": block_size, "hash_id_scope": "local", "requests": list(requests)}


def recorded(path: Path, lines: list[Line]) -> Path:
    path.write_bytes(b"".join(encode_line(line) for line in lines))
    return path


def ids(*values: int) -> str:
    return encode_ids(np.array(values, np.uint64))


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake(tmp_path: Path, packed: bool) -> None:
    path = written(tmp_path / "trace", [request(0, 1024, 7, 900), "", request(1500, 700, 7, 5)])
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    trace = read_trace(path, ReadOptions())
    assert trace.times.tolist() == [0.0, 1.5]
    assert trace.pages.tolist() == [1, 2, 1, 0]
    assert trace.ends.tolist() == [2, 4]
    assert trace.last_tokens.tolist() == [512, 188]
    assert trace.prompt_tokens.tolist() == [1024, 700]


def test_the_excerpt() -> None:
    trace = read_trace(excerpt_path(), ReadOptions())
    assert len(trace) == 500
    assert (np.diff(trace.times) >= 0).all()


def test_weka(tmp_path: Path) -> None:
    sub = {"t": 10.0, "type": "subagent", "requests": [turn(0.0, 128, 50, 51, stop="end_turn")]}
    first = session("b", turn(0.0, 256, 1, 2, 3, 4), turn(5.0, 400, 1, 2, 3, 4, 5, 6), sub)
    path = written(tmp_path / "trace", [first, session("a", turn(1.0, 128, 1, 2))])
    trace = read_trace(path, ReadOptions(page_tokens=128, start_hours=2, seed=3))
    draw = random.Random(3)
    a, b = draw.uniform(0, 7200), draw.uniform(0, 7200)
    assert sorted(trace.times.tolist()) == pytest.approx(sorted([a + 1, b, b + 5, b + 10]))
    by_time = {round(time - (b if round(time - b, 6) in (0, 5, 10) else a), 6): n for n, time in enumerate(trace.times.tolist())}
    pages = {time: trace.pages[(trace.ends[n - 1] if n else 0) : trace.ends[n]].tolist() for time, n in by_time.items()}
    assert [len(pages[time]) for time in (0, 1, 5, 10)] == [2, 1, 3, 1]
    assert pages[5][:2] == pages[0]
    assert not set(pages[1]) & set(pages[0]), "ids of two sessions are different pages"
    assert not set(pages[10]) & set(pages[5]), "a sub-agent is a branch of its own"
    hints = {time: trace.hints[n] for time, n in by_time.items()}
    assert hints[0] is not None
    assert hints[5] is not None
    assert hints[10] is not None
    assert (hints[0].turn, hints[5].ended, hints[10].turn, hints[10].ended) == (
        Turn.MAIN, Ended.TOOL_CALL, Turn.SUB_AGENT, Ended.SUBAGENT_DONE,
    )  # fmt: skip
    assert hints[0].session == hints[5].session != hints[10].session


def test_of_sessions_that_begin_alike_the_longest_is_kept(tmp_path: Path) -> None:
    same = [turn(float(n), 64 * (n + 1), *range(1, n + 2)) for n in range(4)]
    path = written(tmp_path / "trace", [session("a", *same[:3]), session("b", *same), session("c", *same[:2])])
    options = ReadOptions(page_tokens=64)
    assert len(read_trace(path, options)) == 4 + 2
    assert len(read_trace(path, ReadOptions(page_tokens=64, keep_duplicates=True))) == 3 + 4 + 2


def test_records(tmp_path: Path) -> None:
    lines: list[Line] = [
        Header(started=5.0), NamespaceLine(3, 16, 100.0),
        UseLine(0.5, 3, ids(10, 11), 40, "get", hints=LineHints(session=7, end="tool_use")),
        UseLine(0.6, 3, ids(10, 11, 12), 48, "put"), NamespaceLine(4, 8), UseLine(0.7, 4, ids(10), 9),
        UseLine(0.8, 3, ids(10, 11, 12), 48, "abandon", first=1), UseLine(0.9, 3, "", 5),
    ]  # fmt: skip
    trace = read_trace(recorded(tmp_path / "trace", lines), ReadOptions())
    assert [space.page_tokens for space in trace.spaces] == [16, 8]
    assert trace.op.tolist() == [Op.GET, Op.PUT, Op.REQUEST, Op.ABANDON, Op.REQUEST]
    assert trace.pages.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert trace.ends.tolist() == [2, 5, 6, 9, 9]
    assert trace.first.tolist() == [0, 0, 0, 1, 0]
    assert trace.hints[0] == Hints(b"7", None, Ended.TOOL_CALL)


BAD_LINES = [
    ("{", "truncated"),
    (request(0, 512, 1) | {"hash_ids": "x"}, "hash_ids"),
    ({"timestamp": 3}, "missing required field"),
    (request(5, 512, 1), "goes back from 0.01 to 0.005"),
    (request(20, 0, 1), "0 tokens"),
    (request(20, 512), "0 blocks"),
    (request(20, 2000, 1), "2000 tokens are not 1 blocks"),
    (request(20, 512, -4), "whole numbers"),
    (request(-1, 512, 1), "not 0 or more"),
    (request(20, 1 << 63, 1), "tokens, not 1 to"),
    (request(20, 10**12 * 512, 1), "tokens, not 1 to"),
    (request(20, 1024, 1, 1), "ids must be chained, and not repeat"),
    (request(20, 1024, 7, 1), "block 1 comes after others than before"),
    (request(20, 1 << 70, 1), "tokens, not 1 to"),
    ('{"timestamp": 20, "input_length": 512, "hash_ids": [1], "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path / "trace", [request(10, 512, 1), line, request(30, 512, 1)])
    with pytest.raises(BadTrace, match=r", line 2: ") as error:
        read_trace(path, ReadOptions())
    assert words in error.value.message
    trace = read_trace(path, ReadOptions(skip_bad=True))
    assert (len(trace), trace.skipped) == (2, 1)


BAD_SESSIONS = [
    (session("x", turn(0.0, 64, 1), block_size=0), "blocks of 0 tokens"),
    (session("x", turn(0.0, 64, 1), block_size=48), "do not make pages of 64"),
    (session("x"), "no requests"),
    (session("x", turn(0.0, 0, 1)), "0 tokens"),
    (session("x", turn(0.0, 64)), "0 blocks"),
    (session("x", turn(4.0, 64, 1), turn(3.0, 64, 1)), "goes back from 4.0 to 3.0"),
    (session("x", turn(0.0, 64, 1)) | {"hash_id_scope": "global"}, "global"),
    (session("x", turn(0.0, 1 << 63, 1)), "tokens, not 1 to"),
    (session("x", turn(0.0, 128, 1, 2), turn(1.0, 128, 3, 2)), "block 2 comes after others than before"),
    (session("x", turn(0.0, 128, 1, 1)), "ids must be chained, and not repeat"),
]


@pytest.mark.parametrize(("line", "words"), BAD_SESSIONS)
def test_a_bad_session_is_named_or_skipped(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path / "trace", [session("good", turn(0.0, 64, 1)), line])
    with pytest.raises(BadTrace, match=r", line 2: ") as error:
        read_trace(path, ReadOptions(page_tokens=64))
    assert words in error.value.message
    assert read_trace(path, ReadOptions(page_tokens=64, skip_bad=True)).skipped == 1


BAD_RECORDS: list[tuple[Line, str]] = [
    (Header(), "a second header"),
    (NamespaceLine(3, 16), "twice"),
    (NamespaceLine(5, 0), "pages of 0 tokens"),
    (NamespaceLine(5, 10**12), "pages of 1000000000000 tokens"),
    (UseLine(1.0, 3, ids(1), 1 << 62), "tokens, not 1 to"),
    (UseLine(1.0, 3, ids(1, 1), 32), "ids must be chained, and not repeat"),
    (UseLine(1.0, 3, ids(2, 1), 32), "block 1 comes after others than before"),
    (UseLine(1.0, 9, ids(1), 16), "before the line that describes it"),
    (UseLine(1.0, 3, ids(1, 2), 31), "31 tokens in 2 whole pages"),
    (UseLine(1.0, 3, "AAAA", 31), "buffer size"),
    (UseLine(0.1, 3, ids(1), 16), "goes back"),
    (UseLine(1.0, 3, ids(1), 16, hints=LineHints(ttl_s=-1.0)), "ttl_s is -1.0"),
    (UseLine(1.0, 3, ids(1), 16, "abandon", first=2), "are abandoned"),
]


@pytest.mark.parametrize(("line", "words"), BAD_RECORDS)
def test_a_bad_record_is_named_or_skipped(tmp_path: Path, line: Line, words: str) -> None:
    path = recorded(tmp_path / "trace", [Header(), NamespaceLine(3, 16), UseLine(0.5, 3, ids(1), 16), line])
    with pytest.raises(BadTrace, match=r", line 4: ") as error:
        read_trace(path, ReadOptions())
    assert words in error.value.message
    assert read_trace(path, ReadOptions(skip_bad=True)).skipped == 1


def test_what_can_not_be_read_at_all(tmp_path: Path) -> None:
    newer = recorded(tmp_path / "newer", [Header(version=2)])
    for path, options, words in [
        (tmp_path / "none", ReadOptions(), "No such file"),
        (written(tmp_path / "empty", []), ReadOptions(), "--format"),
        (written(tmp_path / "other", [{"a": 1}]), ReadOptions(), "no format that is known"),
        (written(tmp_path / "deep", ["[" * 100_000]), ReadOptions(), "--format"),
        (newer, ReadOptions(), "version 2"),
        (newer, ReadOptions(skip_bad=True), "version 2"),
        (newer, ReadOptions(page_tokens=4), "leave --page-tokens out"),
        (written(tmp_path / "all bad", [request(0, 0, 1)]), ReadOptions(skip_bad=True), "1 bad lines were left out"),
    ]:
        with pytest.raises(BadTrace) as error:
            read_trace(path, options)
        assert words in error.value.message
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(request(0, 512, 1)).encode() * 50)[:-20])
    with pytest.raises(BadTrace, match="can't read"):
        read_trace(cut, ReadOptions(format="mooncake"))
    wrong: list[dict[str, Any]] = [{"format": "csv"}, {"page_tokens": -1}, {"page_tokens": 10**12}, {"start_hours": 0.0}]
    for bad in wrong:
        with pytest.raises(BadTrace):
            ReadOptions(**bad)
