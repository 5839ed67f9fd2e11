"""The recording's file: its limit, its errors, and the bounded queue before it."""

import gzip
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.digests import page_key
from kvstore.errors import BadRequest
from kvstore.record_file import Note, Origin, RecordFile, older
from kvstore.recorder import Recorder
from kvstore.trace_record import UseLine, decode_ids, decode_line, page_ids

ORIGIN = Origin(number=5, root=bytes(32), page_tokens=4, label_bytes=16, bytes_per_token=100.0)


def note(pages: int, at: float = 0.0) -> Note:
    return Note(at, ORIGIN, "get", pages * 4, b"", b"".join(bytes([page % 256]) * 16 for page in range(pages)))


def test_keys_of_unknown_pages_go_on_from_the_known_ones() -> None:
    label, extra = b"x" * 16, b"e" * 32
    first = page_key(bytes(32), label + bytes(32))
    second = page_key(first, label + extra)
    assert Note(0, ORIGIN, "get", 8, b"", label * 2, {1: extra}).page_keys() == first + second
    assert Note(0, ORIGIN, "get", 8, first, label, {4: extra}, skipped=4).page_keys() == first + second
    assert len(page_ids(first + second, b"k" * 16)) == 2


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_file_never_passes_its_limit_and_stays_whole(tmp_path: Path, name: str) -> None:
    file = RecordFile(tmp_path / name, 20_000)
    file.open()
    written = sum(file.write([note(10 + number % 50, number) for number in range(start, start + 20)]) for start in range(0, 2000, 20))
    assert file.write([note(1)]) == 0
    file.close()
    raw = (tmp_path / name).read_bytes()
    assert 15_000 < len(raw) <= 20_000
    lines = [decode_line(line) for line in (gzip.decompress(raw) if name.endswith(".gz") else raw).splitlines()]
    assert len(lines) == written + 2
    assert isinstance(lines[-1], UseLine)
    assert len(decode_ids(lines[-1].pages)) == lines[-1].tokens // 4


def test_two_recordings_can_not_be_joined_and_the_last_is_kept(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        file = RecordFile(tmp_path / "t.jsonl", 1 << 20)
        file.open()
        assert file.write([note(3)]) == 1
        file.close()
        last = decode_line((tmp_path / "t.jsonl").read_bytes().splitlines()[-1])
        assert isinstance(last, UseLine)
        ids.append(set(decode_ids(last.pages).tolist()))
    assert not ids[0] & ids[1]
    kept = decode_line((tmp_path / "t.1.jsonl").read_bytes().splitlines()[-1])
    assert isinstance(kept, UseLine)
    assert set(decode_ids(kept.pages).tolist()) == ids[0]


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = RecordFile(tmp_path / "t.jsonl", 1 << 20)
    file.open()
    with Path("/dev/full").open("wb") as full:
        file._raw, real = full, file._raw
        with caplog.at_level(logging.ERROR):
            assert file.write([note(2000)]) == 0
        assert file.write([note(1)]) == 0
        assert [record.message for record in caplog.records] == [
            f"recording has ended: can't write to {tmp_path / 't.jsonl'}: No space left on device"
        ]
        file.close()
    real.close()


async def test_what_does_not_fit_into_the_queue_is_counted(tmp_path: Path) -> None:
    async with Recorder(tmp_path / "t.jsonl", max_bytes=1 << 30) as recorder:
        for number in range(8200):  # without an await: nothing can be written meanwhile
            recorder._take(note(1, number))
    assert (recorder.stats.recorded_requests, recorder.stats.unrecorded_requests) == (8192, 8)
    assert len((tmp_path / "t.jsonl").read_bytes().splitlines()) == 8194


@pytest.mark.parametrize(("name", "old"), [("a.jsonl.gz", "a.2.jsonl.gz"), ("a", "a.2"), (".a.x", ".a.x.2")])
def test_old_files_keep_their_kind(name: str, old: str) -> None:
    assert older(Path("/x") / name, 2) == Path("/x") / old


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_so_many_older_recordings_stay(tmp_path: Path, keep: int) -> None:
    for number in range(6):
        file = RecordFile(tmp_path / "t.jsonl", 1 << 20, keep)
        file.open()
        file.write([note(number + 1)])
        file.close()
    found = {path.name: decode_line(path.read_bytes().splitlines()[-1]) for path in tmp_path.iterdir()}
    pages = {name: line.tokens // 4 for name, line in found.items() if isinstance(line, UseLine)}
    assert pages == {"t.jsonl": 6} | {f"t.{number}.jsonl": 6 - number for number in range(1, keep + 1)}


def test_a_packed_recording_can_be_read_while_it_grows(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "t.jsonl.gz", 1 << 20)
    file.open()
    for number in range(1, 4):
        assert file.write([note(5, number)]) == 1
        assert len(gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes()).splitlines()) == 2 + number
    file.close()


async def test_extra_digests_count_in_the_bounded_queue(tmp_path: Path) -> None:
    extras = {page: bytes(32) for page in range(10_000)}
    async with Recorder(tmp_path / "t.jsonl", max_bytes=1 << 30) as recorder:
        for number in range(100):
            recorder._take(replace(note(1, number), extras=extras))
    assert recorder.stats.unrecorded_requests > 0


def test_only_plain_files_are_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("link", "."):
        with pytest.raises(BadRequest, match="can't record"):
            RecordFile(tmp_path / name, 1 << 20).open()
