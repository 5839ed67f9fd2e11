"""What is remembered of the parts of puts, which clients name, is bounded."""

import numpy as np
import pytest

from kvstore.errors import BadRequest
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.store.puts.parts import overlaps, parts_of
from kvstore.store.puts.request import Ack, PutRequest, check_parts

SPEC = KVSpec(page_tokens=1, components=(Component("full", 4096, 64, 1, "bf16", 1),), group_layers=1)


def test_parts_of_few_slices_are_thought_out_once() -> None:
    few = (PartRange(0, 0, 8, 0, 64), PartRange(0, 8, 16, 0, 64))
    assert parts_of(SPEC, few) is parts_of(SPEC, few)
    assert (parts_of(SPEC, few).slice_base, parts_of(SPEC, few).overlapping) == ((0, 8, 16), False)


def test_parts_of_many_slices_are_not_kept() -> None:
    """Each would take tens of MiB, and a client can name hundreds of them in puts that are refused."""
    many = tuple(PartRange(0, 0, 4096 - number, 0, 64) for number in range(16))
    parts = parts_of(SPEC, many)
    assert parts.overlapping
    assert parts.slice_base[-1] == 16 * 4096 - 120
    assert parts_of(SPEC, many) is not parts


def test_slices_are_not_written_out_to_think_of_parts() -> None:
    """A client that names hundreds of ranges of thousands of slices in a put that is refused held the loop for that."""
    spec = KVSpec(page_tokens=1, components=(Component("full", 4096, 64, 3, "f32", 1),), max_slice_bytes=4096, group_layers=1)
    for part in parts_of(spec, tuple(PartRange(0, 0, 4000 - number, 0, 64) for number in range(32))).layouts:
        assert not {"sizes", "offsets"} & vars(part).keys()


def test_which_parts_overlap() -> None:
    rng = np.random.default_rng(5)
    for count in (1, 2, 40):
        lows = rng.integers(0, [3, 20, 20], (count, 3))
        highs = lows + rng.integers(1, 6, (count, 3))
        ranges = tuple(PartRange(int(c), int(a), int(b), int(d), int(e)) for (c, a, d), (_, b, e) in zip(lows, highs, strict=True))
        found = overlaps(ranges)
        assert all(found[n, m] == (m < n and ranges[n].overlaps(ranges[m])) for n in range(count) for m in range(count))


def test_parts_that_overlap_are_refused_where_pages_have_both() -> None:
    def request(*spans: tuple[int, int]) -> PutRequest:
        ranges = (PartRange(0, 0, 8, 0, 64), PartRange(0, 8, 16, 0, 64), PartRange(0, 4, 12, 0, 8))
        return PutRequest(bytes(16), bytes(16), {}, 0, ranges, Ack.MEMORY, spans)

    check_parts(SPEC, request((0, 2), (0, 2), (2, 4)), 4)
    for spans in ((), ((0, 2), (0, 3), (2, 4)), ((0, 3), (0, 2), (2, 4))):
        with pytest.raises(BadRequest, match="two parts of component 0 overlap"):
            check_parts(SPEC, request(*spans), 4)


def test_no_more_than_so_many_are_kept() -> None:
    first = (PartRange(0, 0, 1, 0, 64),)
    parts = parts_of(SPEC, first)
    for layer in range(1, 300):
        parts_of(SPEC, (PartRange(0, layer, layer + 1, 0, 64),))
    assert parts_of(SPEC, first) is not parts


def test_what_lies_outside_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(BadRequest):
            parts_of(SPEC, (PartRange(0, 0, 4097, 0, 64),))
        with pytest.raises(BadRequest):
            parts_of(SPEC, ())
