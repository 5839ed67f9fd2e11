"""KV specs: sizes, slices, identity, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.digests import NO_EXTRA, extra_digest
from kvstore.errors import BadRequest
from kvstore.kvspec import Component, KVSpec, PartRange, namespace_digest
from kvstore.store.pending import overlap, whole_components


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 128), st.integers(1, 64), st.sampled_from([8192, 65536, 1 << 20]))
def test_slices_tile_the_part_at_layer_boundaries(layers: int, heads: int, head_dim: int, page_tokens: int, limit: int) -> None:
    spec = KVSpec(page_tokens, (Component("full", layers, heads, head_dim),), max_slice_bytes=limit)
    layout, layer = spec.slice_layout(spec.whole()), spec.layer_bytes(spec.whole())
    assert layout.payload_bytes == spec.page_bytes == layers * layer
    assert max(layout.sizes) <= limit
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
    assert overlap(left, PartRange(0, 3, 4, 0, 2))
    assert not overlap(left, top)
    assert not overlap(left, state)


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
