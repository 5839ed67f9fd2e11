"""Token ids and digests as the command line takes them from files."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli import labels
from kvstore.cli.labels import labels_of, parse_tokens
from kvstore.cli.whole_pages import read_pages
from kvstore.errors import BadRequest
from kvstore.kvspec import Component, KVSpec

IDS = [11, 7, 128_000, 3]


@pytest.mark.parametrize("name", ["t.csv", "t", "t.json", "t.txt"])
@pytest.mark.parametrize("text", ["11,7,128000,3\n", "11\n7\r\n128000\t3", "[11, 7, 128000, +3]", "11 7 128000 3  "])
def test_numbers_as_text_are_read_whatever_the_file_is_called(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert parse_tokens(f"@{tmp_path / name}").tolist() == IDS


@pytest.mark.parametrize("ids", [IDS, [0x30303009, 0, 1], [10, 13, 32]])
def test_raw_numbers_are_not_taken_for_text(tmp_path: Path, ids: list[int]) -> None:
    np.array(ids, "<u4").tofile(tmp_path / "t")
    assert parse_tokens(f"@{tmp_path / 't'}").tolist() == ids


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,-2,3 ", "from 0 to 4294967295, not -2"),
        ("1,4294967296", "not 4294967296"),
        ("12-3", "'12-3' is no number"),
        ("", "there are none"),
        ("[]\n ", "there are none"),
    ],
)
def test_text_that_is_no_token_ids(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadRequest, match=f"can't read tokens from .*{said}"):
        parse_tokens(f"@{tmp_path / 't.csv'}")


SPEC = KVSpec(4, (Component("full", 1, 1, 8),), hash_bytes=16)
TWO = bytes(range(32))


def test_digests_from_files_are_hex_arrays_or_raw_bytes(tmp_path: Path) -> None:
    (tmp_path / "hex").write_text(f"{TWO[:16].hex()}\n{TWO[16:].hex()}\n")
    (tmp_path / "raw").write_bytes(TWO)
    np.save(tmp_path / "rows.npy", np.frombuffer(TWO, np.uint8).reshape(2, 16))
    np.save(tmp_path / "row.npy", np.frombuffer(TWO, np.uint8))
    for name in ("hex", "raw", "rows.npy", "row.npy"):
        given = labels_of(None, f"@{tmp_path / name}")
        assert (given.of(SPEC).tobytes(), given.tokens(SPEC)) == (TWO, 8), name


@pytest.mark.parametrize(
    ("digests", "said"),
    [
        (b"x" * 17, "17 bytes are not a whole number of digests of 16 bytes"),
        (b"00" * 16 + b" " + b"11" * 15, "digest 1 has 15 bytes, and those of this namespace have 16"),
        (b"00 0g", "5 bytes are not a whole number"),
        (b"000", "'000', the number 0 from 0 on, is not in hex"),
        (b"[]\n", "there are none"),
        (b"", "there are none"),
    ],
)
def test_what_is_no_digests(tmp_path: Path, digests: bytes, said: str) -> None:
    (tmp_path / "d").write_bytes(digests)
    with pytest.raises(BadRequest, match=said):
        labels_of(None, f"@{tmp_path / 'd'}").of(SPEC)


@pytest.mark.parametrize("array", [np.zeros((2, 16), np.uint32), np.zeros((1, 1, 16), np.uint8), np.zeros((0, 16), np.uint8)])
def test_an_array_that_is_no_digests(tmp_path: Path, array: "np.ndarray[Any, Any]") -> None:
    np.save(tmp_path / "d.npy", array)
    with pytest.raises(BadRequest, match=r"can't read digests from .*(not uint8 with one digest a row|there are none)"):
        labels_of(None, f"@{tmp_path / 'd.npy'}")


class Endless(io.RawIOBase):
    """What never ends, as /dev/zero."""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        into[:] = b"1" * len(into)
        return len(into)


def test_what_does_not_end_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "LONGEST", 1 << 20)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    np.save(tmp_path / "long.npy", np.zeros(1 << 20, np.uint8))
    for source in ("-", "@/dev/zero", f"@{tmp_path / 'long.npy'}"):
        for given in ((source, None), (None, source)):
            with pytest.raises(BadRequest, match="it is longer than 1 MiB"):
                labels_of(*given)
    for path in ("-", "/dev/zero"):
        with pytest.raises(BadRequest, match=f"there is more to read from {path} than the 100 bytes"):
            read_pages(Path(path), 100)


@pytest.mark.parametrize("what", ["names", "pages"])
def test_pipes_are_read(what: str) -> None:
    out, into = os.pipe()
    os.write(into, TWO)
    os.close(into)
    try:
        pipe = f"/dev/fd/{out}"
        assert (bytes(labels_of(None, f"@{pipe}").of(SPEC)) if what == "names" else read_pages(Path(pipe), 32).tobytes()) == TWO
    finally:
        os.close(out)
