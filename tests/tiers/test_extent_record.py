"""Records of the index verify themselves, and where two name the same blocks the right one is found."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.extent_record import ONE_EXTENT, Record, begins_of, blob_key, blob_of, decode_record, encode_record
from kvstore.tiers.free_space import Extent
from kvstore.tiers.overlaps import Claim, losers, shared_blocks

KEY = blob_key(7, b"0123456789abcdef")
EXTENT = st.builds(Extent, st.integers(0, 1 << 40), st.integers(1, (1 << 32) - 1))


@given(st.integers(0, (1 << 64) - 1), st.lists(EXTENT, min_size=1, max_size=5))
def test_a_record_says_what_was_written(commit: int, extents: list[Extent]) -> None:
    value = encode_record(KEY, commit, extents)
    assert decode_record(KEY, value) == Record(commit, tuple(extents))
    assert decode_record(blob_key(8, blob_of(KEY)), value) is None, "a record under another key"
    if len(extents) == 1:
        row = np.frombuffer(value, ONE_EXTENT)[0]
        assert (row["commit"], row["first"], row["blocks"]) == (commit, *extents[0])
        assert begins_of(value) == [extents[0].first]


@pytest.mark.parametrize("extents", [1, 3])
def test_every_flipped_bit_and_every_other_length_is_noticed(extents: int) -> None:
    value = encode_record(KEY, 5, [Extent(100 * n, 10) for n in range(extents)])
    for bit in range(8 * len(value)):
        changed = bytearray(value)
        changed[bit // 8] ^= 1 << bit % 8
        assert decode_record(KEY, bytes(changed)) is None
    assert all(decode_record(KEY, value[:end]) is None for end in range(len(value)))
    assert decode_record(KEY, value + b"\0") is None


def shared(extents: list[Extent]) -> set[int]:
    table = np.array(extents, np.int64).reshape(-1, 2)
    return set(shared_blocks(table[:, 0], table[:, 1]).tolist())


SMALL = st.builds(Extent, st.integers(0, 40), st.integers(1, 12))


@given(st.lists(SMALL, max_size=8))
def test_extents_that_share_blocks_are_found(extents: list[Extent]) -> None:
    def share(one: Extent, other: Extent) -> bool:
        return one.first < other.first + other.blocks and other.first < one.first + one.blocks

    expected = {one.first for n, one in enumerate(extents) if any(share(one, other) for m, other in enumerate(extents) if m != n)}
    assert expected <= shared(extents)
    assert bool(expected) == bool(shared(extents))


def blocks_of(extents: Iterable[Extent]) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]


APART = st.lists(SMALL, min_size=1, max_size=3).filter(lambda extents: len(set(blocks_of(extents))) == len(blocks_of(extents)))


@given(st.lists(st.tuples(st.integers(0, 1000), APART), max_size=8, unique_by=lambda one: one[0]))
def test_the_later_commit_has_the_right(made: list[tuple[int, list[Extent]]]) -> None:
    claims = [Claim(blob_key(1, commit.to_bytes(16, "big")), Record(commit, tuple(extents))) for commit, extents in made]
    random.Random(1).shuffle(claims)
    expected, taken = set(), set[int]()
    for key, record in sorted(claims, key=lambda claim: claim.record.commit if claim.record else 0, reverse=True):
        assert record is not None
        blocks = blocks_of(record.extents)
        if max(blocks) >= 45 or not taken.isdisjoint(blocks):  # what reaches beyond the file has no right to anything
            expected.add(key)
        else:
            taken.update(blocks)
    assert set(losers(claims, 45)) == expected


def test_what_does_not_verify_has_no_right() -> None:
    good = Claim(b"good", Record(1, (Extent(0, 4),)))
    assert losers([Claim(b"bad", None), good], 10) == [b"bad"]
