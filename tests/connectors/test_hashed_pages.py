"""Pages of engines that give hashes: specs, labels, names, memory."""

from random import Random

import numpy as np
import pytest

from kvstore_client import BadRequest, KVSpec
from kvstore_connectors.hashed_pages import label, namespace_name, page_tokens_for, rows_component, scattered
from kvstore_connectors.sglang_restore import restorable


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("row_bytes", [1, 96, 4099, 256 * 1024, 16 << 20, 3 * 97 * 1021])
def test_a_spec_has_the_bytes_of_the_rows(rows: int, row_bytes: int) -> None:
    tokens = page_tokens_for(row_bytes, 16)
    spec = KVSpec(tokens, (rows_component("full", rows, row_bytes, tokens),), hash_bytes=32, group_layers=1)
    assert spec.page_bytes == rows * row_bytes
    assert set(range(0, spec.page_bytes, row_bytes)) <= set(spec.slice_layout(spec.whole()).offsets)  # no slice goes across rows


def test_sizes_that_no_spec_can_say_are_refused() -> None:
    prime = 4_294_967_291
    with pytest.raises(BadRequest, match="factors"):
        rows_component("full", 1, prime, 1)
    with pytest.raises(BadRequest, match="whole"):
        rows_component("full", 1, 17, 4)
    assert rows_component("state", 1, 17, 4).head_dim == 17
    assert rows_component("window", 1, 16, 4, window=8).window == 8


def test_no_two_lists_of_fields_have_one_label() -> None:
    lists = [(b"a", b"bc"), (b"ab", b"c"), (b"abc",), (b"abc", b""), (b"", b"abc"), (b"a", b"b", b"c"), ()]
    assert len({label(*fields) for fields in lists}) == len(lists)
    assert all(len(label(*fields)) == 32 for fields in lists)


def test_names_are_readable_allowed_and_as_different_as_what_they_name() -> None:
    spec, other = (KVSpec(1, (rows_component("full", 1, size, 1),), hash_bytes=32, flat=True) for size in (64, 128))
    names = {namespace_name("x", "org/mödel:" + "y" * 300, "kv0", fingerprint, one) for fingerprint in ("f", "g") for one in (spec, other)}
    assert len(names) == 4
    for name in names:
        assert len(name) <= 200
        assert all(character.isascii() and (character.isalnum() or character in "._-") for character in name)


def test_memory_is_seen_by_its_addresses() -> None:
    one, other = np.arange(64, dtype=np.uint8), np.arange(64, 128, dtype=np.uint8)
    at = scattered([[one.ctypes.data + 8, other.ctypes.data]], 16)
    places = at.places[0]
    assert bytes(at.memory[places[0] : places[0] + 16]) == one[8:24].tobytes()
    assert bytes(at.memory[places[1] : places[1] + 16]) == other[:16].tobytes()
    at.memory[places[0]] = 255
    assert one[8] == 255
    assert len(at.memory) == max(places) + 16


def test_the_rule_of_restorable_lengths_against_its_definition() -> None:
    random = Random(7)
    for _ in range(2000):
        before, pages, trailing = random.randrange(4), random.randrange(7), random.randrange(5)
        at_root = before == 0 and random.random() < 0.5
        there = [random.random() < 0.7 for _ in range(before + pages)]
        found = restorable(there, before, trailing, at_root=at_root)
        assert found <= set(range(1, pages + 1))
        for length in range(1, pages + 1):
            end = before + length
            needed = range(before, end) if not trailing else range(end - trailing, end)
            good = all(there[page] if page >= 0 else at_root for page in needed)
            assert (length in found) == good
