"""What is remembered of the parts of puts, which clients name, is bounded."""

import pytest

from kvstore.errors import BadRequest
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.store.puts.parts import parts_of

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
