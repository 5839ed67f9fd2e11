"""The trace format: what is written is read back, and ids tell nothing without the secret."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.trace_record import Header, Hints, Line, NamespaceLine, UseLine, decode_ids, decode_line, encode_ids, encode_line, page_ids

ids = st.lists(st.integers(0, 2**64 - 1), max_size=20).map(lambda values: np.array(values, np.uint64))
hints = st.none() | st.builds(Hints, session=st.none() | st.integers(0, 2**31), end=st.sampled_from([None, "tool_use"]), hot=st.booleans())
uses = st.builds(
    UseLine, t=st.floats(0, 1e9), ns=st.integers(0, 9), pages=ids.map(encode_ids), tokens=st.integers(0, 10**7),
    op=st.sampled_from(["request", "get", "put", "abandon"]), first=st.integers(0, 100), hints=hints,
)  # fmt: skip


@given(st.just(Header(started=1.5)) | st.just(NamespaceLine(0, 64, 25_000.0)) | uses)
def test_lines_come_back(line: Line) -> None:
    data = encode_line(line)
    assert data.count(b"\n") == 1
    assert decode_line(data) == line


@given(ids)
def test_ids_come_back(wanted: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> None:
    assert (decode_ids(encode_ids(wanted)) == wanted).all()


def test_equal_pages_have_equal_ids_under_one_secret_only() -> None:
    keys = b"a" * 32 + b"b" * 32 + b"a" * 32
    first, second, third = page_ids(keys, b"s" * 16).tolist()
    assert first == third != second
    assert page_ids(keys, b"t" * 16)[0] != first


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"kind":"other"}', b'{"kind":"use","t":"now","ns":0,"pages":"","tokens":1}'])
def test_what_is_no_line_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_line(data)


def test_pages_that_are_not_whole_ids_are_refused() -> None:
    for text in ("AAAA", "not base64!"):
        with pytest.raises(ValueError, match=r"."):
            decode_ids(text)
