"""What is taken for tokens, and for digests."""

import array
from typing import Any

import numpy as np
import pytest

from kvstore_client import BadRequest, Component, KVSpec
from kvstore_client.tokens import token_view

FULL = (Component("full", 2, 1, 8),)
TOKENS, DIGESTS = KVSpec(4, FULL), KVSpec(4, FULL, hash_bytes=32, flat=True)
IDS = np.arange(8, dtype=np.uint32)
ROWS = np.random.default_rng(1).integers(0, 256, (3, 32), dtype=np.uint8)


@pytest.mark.parametrize(
    "given",
    [
        ROWS, ROWS[:, ::1], np.asfortranarray(ROWS), ROWS.reshape(-1), ROWS.tobytes(),
        bytearray(ROWS.tobytes()), ROWS.data, list(map(bytes, ROWS)), tuple(map(bytes, ROWS)),
    ],
)  # fmt: skip
def test_digests_however_they_are_given(given: Any) -> None:
    assert token_view(given, DIGESTS) == ROWS.tobytes()


@pytest.mark.parametrize("given", [[], np.zeros((0, 32), np.uint8), b""])
def test_no_digests(given: Any) -> None:
    assert len(token_view(given, DIGESTS)) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (ROWS[:, :20], r"digests of 32 bytes, and these are a 2-d array of uint8: give a uint8 array of shape \(pages, 32\), a list"),
        (ROWS.astype(np.int64), "2-d array of int64"),
        (ROWS.view(np.uint32), "2-d array of uint32"),
        (np.arange(64, dtype=np.uint32), "1-d array of uint32: give a uint8 array"),
        (ROWS.view("S32"), "array of .S32"),
        (["a" * 32], "these are a list"),
        ([b"a" * 31], "these are a list"),
        (ROWS.tobytes().hex(), "these are a str"),
        (None, "these are a NoneType"),
        (np.arange(64, dtype=np.uint32).data, "these are a memoryview of 'I': give a uint8 array"),
        (ROWS.tobytes()[:36], "36 bytes of digests: give some of 32 bytes each"),
        (ROWS.tobytes()[:20], "20 bytes of digests"),
    ],
)
def test_what_are_no_digests(given: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        token_view(given, DIGESTS)


@pytest.mark.parametrize(
    "given", [IDS, IDS.data, memoryview(IDS.tobytes()).cast("I"), array.array("I", range(8)), np.arange(16, dtype=np.uint32)[::2] // 2]
)
def test_tokens_however_they_are_given(given: Any) -> None:
    assert token_view(given, TOKENS) == IDS.tobytes()


@pytest.mark.parametrize("given", [IDS.tobytes(), bytearray(8), ROWS.data, memoryview(IDS.tobytes()), b"".join(map(bytes, ROWS))])
def test_bytes_do_not_say_of_what_they_are(given: Any) -> None:
    with pytest.raises(
        BadRequest, match=r"tokens are (bytes|a bytearray|a memoryview of bytes).*np.asarray\(token_ids, np.uint32\).*np.frombuffer"
    ):
        token_view(given, TOKENS)


@pytest.mark.parametrize("given", [ROWS, list(map(bytes, ROWS)), [1, 2], None, array.array("q", range(8)), np.arange(8.0).data])
def test_what_are_no_tokens(given: Any) -> None:
    with pytest.raises(BadRequest, match="uint32"):
        token_view(given, TOKENS)
