"""Scatter reads: whatever range is asked for, the pieces are those that numpy slicing gives."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.api.wire import Run, check_run, cut, pack_runs, unpack_runs
from kvstore.digests import blob_id, slice_digest
from kvstore.errors import BadRequest, Corrupt
from kvstore.kvspec import Component, KVSpec, PartRange
from kvstore_client.plan import FetchPlan, page_items, page_parts

LAYERS, HEADS, PLANES, TOKENS, DIM = 6, 4, 2, 4, 8


def spec_with(limit: int) -> KVSpec:
    return KVSpec(TOKENS, (Component("full", LAYERS, HEADS, DIM, "u8", PLANES),), max_slice_bytes=limit)


def ranges(lo: int, hi: int) -> "st.SearchStrategy[tuple[int, int]]":
    return st.tuples(st.integers(lo, hi - 1), st.integers(lo + 1, hi)).filter(lambda t: t[0] < t[1])


def grid(layer_cuts: list[int], head_cuts: list[int]) -> list[PartRange]:
    layers, heads = sorted({0, LAYERS, *layer_cuts}), sorted({0, HEADS, *head_cuts})
    return [PartRange(0, a, b, c, d) for a, b in pairwise(layers) for c, d in pairwise(heads)]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, LAYERS), max_size=3), st.lists(st.integers(0, HEADS), max_size=3),
    ranges(0, LAYERS), ranges(0, HEADS), st.sampled_from([1, 2, 5]),
)  # fmt: skip
def test_any_writer_geometry_serves_any_reader(
    layer_cuts: list[int], head_cuts: list[int], layers: tuple[int, int], heads: tuple[int, int], connections: int
) -> None:
    spec = spec_with(4096)
    page = np.random.default_rng(1).integers(0, 256, (LAYERS, PLANES, HEADS, TOKENS, DIM), dtype=np.uint8)
    stored = grid(layer_cuts, head_cuts)
    payloads = [np.ascontiguousarray(page[p.layer_lo : p.layer_hi, :, p.head_lo : p.head_hi]).tobytes() for p in stored]
    blobs = [bytes([i]) * 16 for i in range(len(stored))]
    wanted = PartRange(0, *layers, *heads)
    items = page_items(page_parts(spec, tuple(stored), wanted), blobs, 0)
    plan = FetchPlan(items, connections)
    out = np.zeros(spec.part_bytes(wanted), np.uint8)
    for stripe in plan.stripes:
        sent = []
        for run in unpack_runs(pack_runs(stripe.runs)):
            blob = stripe.blobs[run.blob][0]
            layout = spec.slice_layout(stored[blob])
            check_run(run, layout)
            sent += [payloads[blob][p.offset : p.offset + p.size] for p in cut(run, layout)]
        assert [len(s) for s in sent] == [p.size for p in stripe.pieces]
        for piece, data in zip(stripe.pieces, sent, strict=True):
            out[piece.target : piece.target + piece.size] = np.frombuffer(data, np.uint8)
    expected = page[layers[0] : layers[1], :, heads[0] : heads[1]]
    assert np.array_equal(out, np.ascontiguousarray(expected).ravel())


def test_a_range_that_is_not_stored_is_refused() -> None:
    spec = spec_with(4096)
    with pytest.raises(BadRequest):
        page_parts(spec, (PartRange(0, 0, 3, 0, HEADS),), spec.whole())


def whole_plan() -> tuple[FetchPlan, npt.NDArray[np.uint8], list[bytes]]:
    spec = KVSpec(64, (Component("full", 40, 1, 512, "u8", 1),), max_slice_bytes=65536)
    layout = spec.slice_layout(spec.whole())
    payload = np.random.default_rng(1).integers(0, 256, layout.payload_bytes, dtype=np.uint8)
    digests = [slice_digest(payload[o : o + s].tobytes()) for o, s in zip(layout.offsets, layout.sizes, strict=False)]
    return FetchPlan(page_items(page_parts(spec, (spec.whole(),), spec.whole()), [blob_id(b"".join(digests))], 0), 8), payload, digests


def test_a_large_blob_is_striped_and_its_id_checked() -> None:
    plan, _, digests = whole_plan()
    assert len(plan.stripes) > 1
    assert sum(len(s.pieces) for s in plan.stripes) == len(digests)
    for stripe in plan.stripes:
        mine = [digests[p.slice] for p in stripe.pieces]
        plan.arrived(stripe, 0, mine, b"".join(mine))
    plan.verify()


def test_another_blob_is_noticed_after_a_stripe_was_fetched_twice() -> None:
    plan, _, _ = whole_plan()
    for stripe in (*plan.stripes, plan.stripes[0]):
        other = [slice_digest(b"other")] * len(stripe.pieces)
        plan.arrived(stripe, 0, other, b"".join(other))
    with pytest.raises(Corrupt):
        plan.verify()


def test_another_blob_under_this_id_is_noticed() -> None:
    plan, _, _ = whole_plan()
    for stripe in plan.stripes:
        other = [slice_digest(b"other")] * len(stripe.pieces)
        plan.arrived(stripe, 0, other, b"".join(other))
    with pytest.raises(Corrupt):
        plan.verify()


def test_bytes_changed_on_the_way_are_noticed() -> None:
    plan, _, digests = whole_plan()
    with pytest.raises(Corrupt):
        plan.arrived(plan.stripes[0], 0, [slice_digest(b"x")], digests[0])


@pytest.mark.parametrize(
    "run",
    [
        Run(0, 0, 0),
        Run(0, 0, 10, segments=0),
        Run(0, 0, 10, stride=5, segments=2),
        Run(0, 1 << 60, 1),
        Run(0, 0, 1 << 60),
        Run(0, 0, 8, 1 << 60, 3),
    ],
)
def test_runs_outside_a_blob_are_refused(run: Run) -> None:
    spec = spec_with(4096)
    with pytest.raises(BadRequest):
        check_run(run, spec.slice_layout(spec.whole()))


def test_torn_and_endless_run_lists_are_refused() -> None:
    with pytest.raises(BadRequest):
        unpack_runs(bytes(33))
    with pytest.raises(BadRequest):
        unpack_runs(pack_runs([Run(0, 0, 1, 1, (1 << 32) - 1)]))
