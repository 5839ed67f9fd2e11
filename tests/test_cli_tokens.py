"""Token ids as the command line takes them from files."""

from pathlib import Path

import numpy as np
import pytest

from kvstore.cli.common import parse_tokens
from kvstore.errors import BadRequest

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


@pytest.mark.parametrize(("text", "said"), [("1,-2,3 ", "-2"), ("12-3", "12-3"), ("", "there are none"), ("[]\n ", "there are none")])
def test_text_that_is_no_token_ids(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadRequest, match=f"can't read tokens from .*{said}"):
        parse_tokens(f"@{tmp_path / 't.csv'}")
