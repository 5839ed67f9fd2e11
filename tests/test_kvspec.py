"""KV specs: sizes, slices, identity, and what they refuse."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.digests import NO_EXTRA, extra_digest
from kvstore.errors import BadRequest
from kvstore.kvspec import Component, KVSpec, PartRange, namespace_digest
from kvstore.store.puts.pending import whole_components
from kvstore_client.fingerprint import fingerprint_folder, fingerprint_revision


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 128), st.integers(1, 64), st.sampled_from([8192, 65536, 1 << 20]))
def test_slices_tile_the_part_at_layer_boundaries(layers: int, heads: int, head_dim: int, page_tokens: int, limit: int) -> None:
    spec = KVSpec(page_tokens, (Component("full", layers, heads, head_dim),), max_slice_bytes=limit)
    layout, layer = spec.slice_layout(spec.whole()), spec.layer_bytes(spec.whole())
    assert layout.payload_bytes == spec.page_bytes == layers * layer
    assert max(layout.sizes) <= limit
    assert (layout.count, layout.payload_bytes) == (len(layout.sizes), sum(layout.sizes))
    assert len(layout.sizes) == spec._slice_count(spec.whole())
    boundaries = set(layout.offsets)
    assert boundaries >= {layer * i for i in range(layers)} if layer > limit else all(o % layer == 0 for o in boundaries)


def test_a_namespace_differs_in_whatever_the_bytes_depend_on() -> None:
    base = Component("full", 4, 2, 64)
    specs = [
        KVSpec(16, (base,)),
        KVSpec(32, (base,)),
        KVSpec(16, (Component("full", 4, 2, 64, dtype="f16"),)),
        KVSpec(16, (Component("full", 4, 4, 32),)),
        KVSpec(16, (Component("full", 4, 2, 64, planes=1),)),
        KVSpec(16, (base,), max_slice_bytes=65536),
    ]
    identities = {namespace_digest(tenant, model, spec) for tenant in "ab" for model in ("m1", "m2") for spec in specs}
    assert len(identities) == 2 * 2 * len(specs)


@pytest.mark.parametrize(
    "bad",
    [
        {"page_tokens": 0},
        {"page_tokens": 1 << 20},
        {"components": []},
        {"axis_order": "token,layer"},
        {"max_slice_bytes": 5 << 20},
        {"components": [{"kind": "full", "layers": 0, "kv_heads": 1, "head_dim": 1}]},
        {"components": [{"kind": "full", "layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "f12"}]},
        {"components": [{"kind": "window", "layers": 1, "kv_heads": 1, "head_dim": 1}]},
        {"components": [{"kind": "full", "layers": 60000, "kv_heads": 60000, "head_dim": 60000}]},
        {"components": [{"layers": 1}]},
        {"surprise": 1},
        {"group_layers": -1},
        {"components": [{"kind": "full", "layers": 65535, "kv_heads": 1, "head_dim": 8}], "group_layers": 1},
    ],
)
def test_a_bad_spec_is_refused(bad: dict[str, object]) -> None:
    good = KVSpec(16, (Component("full", 1, 1, 8),)).to_dict()
    assert KVSpec.from_dict(good).to_dict() == good
    with pytest.raises(BadRequest):
        KVSpec.from_dict(good | bad)


def test_which_components_are_whole() -> None:
    spec = KVSpec(16, (Component("full", 4, 2, 8), Component("state", 2, 1, 8)))
    left, top, bottom = PartRange(0, 0, 4, 0, 1), PartRange(0, 0, 2, 1, 2), PartRange(0, 2, 4, 1, 2)
    state = PartRange(1, 0, 2, 0, 1)
    assert whole_components(spec, (left, top, bottom)) == 0b01
    assert whole_components(spec, (left, top, state)) == 0b10
    assert whole_components(spec, (left, top, bottom, state)) == 0b11
    assert whole_components(spec, ()) == 0
    assert left.overlaps(PartRange(0, 3, 4, 0, 2))
    assert not left.overlaps(top)
    assert not left.overlaps(state)


def test_extra_keys_are_typed_and_length_prefixed() -> None:
    lists: list[list[tuple[str, bytes]]] = [[("image", b"ab")], [("image", b"a"), ("b", b"")], [("imagea", b"b")], [("adapter", b"ab")]]
    assert len({extra_digest(keys) for keys in lists}) == len(lists)
    assert extra_digest([]) == NO_EXTRA == bytes(np.zeros(32, np.uint8))


def test_a_change_from_a_token_on_concerns_the_page_it_is_in() -> None:
    spec = KVSpec(4, (Component("full", 1, 1, 1),))
    assert [spec.first_page(from_token=token) for token in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert spec.first_page(3) == 3
    for wrong in ({"from_page": 1, "from_token": 4}, {"from_token": -1}, {"from_page": -1}):
        with pytest.raises(BadRequest):
            spec.first_page(**wrong)


FULL = Component("full", 2, 1, 16)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("component kind 5 is not full", lambda: Component(5, 1, 1, 1)),  # type: ignore[arg-type]
        ("dtype .'bf16'. is not one of", lambda: Component("full", 1, 1, 1, dtype=["bf16"])),  # type: ignore[arg-type]
        ("layers is '2', not a whole number", lambda: Component("full", "2", 1, 1)),  # type: ignore[arg-type]
        ("layers is True, not a whole number", lambda: Component("full", True, 1, 1)),
        ("window is '4', not a whole number", lambda: Component("window", 1, 1, 1, window="4")),  # type: ignore[arg-type]
        ("window is 1.5, not a whole number", lambda: Component("window", 1, 1, 1, window=1.5)),  # type: ignore[arg-type]
        ("components is Component.*, not a tuple of Component", lambda: KVSpec(4, FULL)),  # type: ignore[arg-type]
        ("components is None, not a tuple", lambda: KVSpec(4, None)),  # type: ignore[arg-type]
        ("components is .'full',., not a tuple", lambda: KVSpec(4, ("full",))),  # type: ignore[arg-type]
        ("page_tokens is '4', not a whole number", lambda: KVSpec("4", (FULL,))),  # type: ignore[arg-type]
        ("flat is 1, not True or False", lambda: KVSpec(4, (FULL,), hash_bytes=16, flat=1)),  # type: ignore[arg-type]
        ("component is 'x', not a whole number", lambda: KVSpec(4, (FULL,)).whole("x")),  # type: ignore[arg-type]
        ("the part range is .0, 1., not a PartRange", lambda: KVSpec(4, (FULL,)).check_range((0, 1))),  # type: ignore[arg-type]
        ("PartRange.* is not of whole numbers", lambda: KVSpec(4, (FULL,)).check_range(PartRange(0, "0", 1, 0, 1))),  # type: ignore[arg-type]
        ("from_token is '9', not a whole number", lambda: KVSpec(4, (FULL,)).first_page(0, "9")),  # type: ignore[arg-type]
        ("the extra keys are 'ab', not", lambda: extra_digest("ab")),  # type: ignore[arg-type]
        ("the extra keys are None, not", lambda: extra_digest(None)),  # type: ignore[arg-type]
        ("an extra key is 5, not a pair", lambda: extra_digest([5])),  # type: ignore[list-item]
        ("an extra key is .'image', 'x'., not a pair of text", lambda: extra_digest([("image", "x")])),  # type: ignore[list-item]
        ("an extra key is .b'image', b'x'., not a pair of text", lambda: extra_digest([(b"image", b"x")])),  # type: ignore[list-item]
        ("model is 5, not text", lambda: fingerprint_revision(5, "abc")),  # type: ignore[arg-type]
        ("revision is None, not text", lambda: fingerprint_revision("m", None)),  # type: ignore[arg-type]
        ("settings is 5, not a mapping", lambda: fingerprint_revision("m", "abc", settings=5)),  # type: ignore[arg-type]
        ("settings is .*object.*, not a mapping of text", lambda: fingerprint_revision("m", "abc", settings={"a": object()})),  # type: ignore[dict-item]
        ("folder is None, not the path of a folder", lambda: fingerprint_folder(None)),  # type: ignore[arg-type]
    ],
)
def test_what_is_of_the_wrong_kind_is_named(words: str, make: Callable[[], object]) -> None:
    with pytest.raises(BadRequest, match=words):
        make()


def test_numbers_of_numpy_and_lists_make_the_same_spec() -> None:
    spec = KVSpec(np.int64(4), [Component("full", np.int32(2), np.uint8(1), np.int64(16))])  # type: ignore[arg-type]
    assert spec == KVSpec(4, (FULL,))
    assert hash(spec) == hash(KVSpec(4, (FULL,)))
    assert namespace_digest("t", "m", spec) == namespace_digest("t", "m", KVSpec(4, (FULL,)))
    assert spec.whole(np.int64(0)) == PartRange(0, 0, 2, 0, 1)  # type: ignore[arg-type]
    assert extra_digest([["a", bytearray(b"x")]]) == extra_digest([("a", b"x")])  # type: ignore[list-item]
