"""Which components a set of parts covers, however large the spec says a model is."""

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore.store.puts.pending import whole_components

SPEC = KVSpec(4, (Component("full", 6, 4, 8), Component("full", 3, 1, 8)))


@st.composite
def part(draw: st.DrawFn) -> PartRange:
    component = draw(st.integers(0, 1))
    layers, heads = SPEC.components[component].layers, SPEC.components[component].kv_heads
    layer, head = draw(st.integers(0, layers - 1)), draw(st.integers(0, heads - 1))
    return PartRange(component, layer, draw(st.integers(layer + 1, layers)), head, draw(st.integers(head + 1, heads)))


@settings(max_examples=300, deadline=None)
@given(st.lists(part(), max_size=6))
def test_covered_is_what_every_layer_and_head_says(parts: list[PartRange]) -> None:
    found = 0
    for index, component in enumerate(SPEC.components):
        seen = np.zeros((component.layers, component.kv_heads), np.bool_)
        for p in parts:
            if p.component == index:
                seen[p.layer_lo : p.layer_hi, p.head_lo : p.head_hi] = True
        found |= int(seen.all()) << index
    assert whole_components(SPEC, tuple(parts)) == found


def test_a_monstrous_spec_costs_no_memory() -> None:
    spec = KVSpec(1, (Component("full", 32_768, 32_768, 1, "i8", planes=1),))
    tracemalloc.start()
    try:
        assert whole_components(spec, (spec.whole(),)) == 1
        assert whole_components(spec, (PartRange(0, 0, 1, 0, 32_768),)) == 0
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
