"""Scatter reads: whatever range is asked for, the pieces are those that numpy slicing gives."""

from itertools import groupby, pairwise, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.api.wire import Run, check_run, cut, pack_alike, pack_runs, unpack_alike, unpack_runs, whole_slices
from kvstore.digests import blob_id, slice_digest
from kvstore.errors import BadRequest, Corrupt
from kvstore.kvspec import Component, KVSpec, PartRange, SliceLayout
from kvstore_client.blocks import Block, PageBlobs, PageShape
from kvstore_client.plan import FetchPlan, layer_groups, page_parts
from kvstore_client.stripes import PackedStripe, Stripe

LAYERS, HEADS, PLANES, TOKENS, DIM = 6, 4, 2, 4, 8


def spec_with(limit: int, dim: int = DIM, group_layers: int = 0) -> KVSpec:
    return KVSpec(TOKENS, (Component("full", LAYERS, HEADS, dim, "u8", PLANES),), max_slice_bytes=limit, group_layers=group_layers)


def ranges(lo: int, hi: int) -> "st.SearchStrategy[tuple[int, int]]":
    return st.tuples(st.integers(lo, hi - 1), st.integers(lo + 1, hi)).filter(lambda t: t[0] < t[1])


def grid(layer_cuts: list[int], head_cuts: list[int]) -> list[PartRange]:
    layers, heads = sorted({0, LAYERS, *layer_cuts}), sorted({0, HEADS, *head_cuts})
    return [PartRange(0, a, b, c, d) for a, b in pairwise(layers) for c, d in pairwise(heads)]


def block(spec: KVSpec, stored: tuple[PartRange, ...], wanted: PartRange, blobs: list[bytes]) -> Block:
    """One page."""
    return Block(PageShape(page_parts(spec, stored, wanted)), PageBlobs(b"".join(blobs), len(blobs)), 0, range(0, 1 << 30, 1 << 30))


def receive(stripe: Stripe, first: int, pieces: list[bytes], out: npt.NDArray[np.uint8]) -> None:
    """Put pieces that were sent where they go."""
    sent, found, at = b"".join(pieces), list[int](), 0
    for offset, size, its in stripe.spans(first, len(pieces)):
        out[offset : offset + size] = np.frombuffer(sent[at : at + size], np.uint8)
        at += size
        assert sum(its) == size
        found += its
    assert (at, found) == (len(sent), [len(piece) for piece in pieces])


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
    plan = FetchPlan([block(spec, tuple(stored), wanted, blobs)], connections)
    out = np.zeros(spec.part_bytes(wanted), np.uint8)
    for stripe in plan.stripes:
        sent = []
        count, asked = stripe.asked()
        for run in unpack_runs(asked[16 * count :]):
            blob = asked[16 * run.blob]
            layout = spec.slice_layout(stored[blob])
            check_run(run, layout)
            sent += [payloads[blob][p.offset : p.offset + p.size] for p in cut(run, layout)]
        receive(stripe, 0, sent, out)
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
    return FetchPlan([block(spec, (spec.whole(),), spec.whole(), [blob_id(b"".join(digests))])], 8), payload, digests


def test_a_large_blob_is_striped_and_its_id_checked() -> None:
    plan, _, digests = whole_plan()
    assert len(plan.stripes) > 1
    assert sum(s.pieces for s in plan.stripes) == len(digests)
    at = 0
    for stripe in plan.stripes:
        mine = digests[at : at + stripe.pieces]
        plan.arrived(stripe, 0, mine, b"".join(mine))
        at += stripe.pieces
    plan.verify()


def test_another_blob_is_noticed_after_a_stripe_was_fetched_twice() -> None:
    plan, _, _ = whole_plan()
    for stripe in (*plan.stripes, plan.stripes[0]):
        other = [slice_digest(b"other")] * stripe.pieces
        plan.arrived(stripe, 0, other, b"".join(other))
    with pytest.raises(Corrupt):
        plan.verify()


def test_another_blob_under_this_id_is_noticed() -> None:
    plan, _, _ = whole_plan()
    for stripe in plan.stripes:
        other = [slice_digest(b"other")] * stripe.pieces
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


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([Run(0, 5, 7), Run(0, 5, 8), Run(0, 5, 7, 9, 2), Run(0, 1 << 40, 1 << 40)]))))
def test_runs_come_as_they_were_sent(asked: list[tuple[int, Run]]) -> None:
    runs = [run._replace(blob=blob) for blob, run in asked]
    found = unpack_alike(pack_runs(runs))
    assert [run for alike in found for run in alike.each()] == unpack_runs(pack_runs(runs)) == runs
    assert all(one.run[1:] != other.run[1:] for one, other in pairwise(found)), "alike ones are together"
    assert sum(alike.nbytes for alike in found) == sum(run.length * run.segments for run in runs)


@given(st.integers(0, 1 << 17), st.integers(2, 300), st.booleans())
def test_runs_of_neighbours_come_as_they_were_sent(first: int, count: int, torn: bool) -> None:
    runs = [Run(first + number + (torn and number == count - 1), 5, 7, 9, 2) for number in range(count)]
    found = unpack_alike(pack_runs(runs))
    assert [run for alike in found for run in alike.each()] == runs
    assert len(found) == 1
    if not torn:
        assert pack_alike(runs[:1], [first], count) == pack_runs(runs)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(-1, 1), st.integers(-1, 1), st.integers(1, 2))
def test_whole_slices_are_those_that_a_run_is_cut_into(first: int, last: int, before: int, after: int, segments: int) -> None:
    layout = SliceLayout((30, 50, 20, 50))
    start, end = layout.offsets[first] + before, layout.offsets[last] + after
    run = Run(0, start, end - start, 1 << 10, segments)
    if start < 0 or start >= end or end > layout.payload_bytes:
        return
    whole = [(p.slice, p.offset, p.offset + p.size) for p in cut(run._replace(segments=1), layout) if p.whole]
    all_whole = segments == 1 and sum(high - low for _, low, high in whole) == run.length
    assert whole_slices(run, layout) == (whole if all_whole else [])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, LAYERS), max_size=2), st.lists(st.integers(0, HEADS), max_size=1), ranges(0, LAYERS), ranges(0, HEADS),
    st.integers(0, 4), st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 6000), st.integers(1, 9),
    st.sampled_from([DIM, 256]),
)  # fmt: skip
def test_pages_in_groups_whatever_frames_and_stripes_they_come_in(
    layer_cuts: list[int], head_cuts: list[int], layers: tuple[int, int], heads: tuple[int, int], group_layers: int,
    whole_pages: list[bool], stripe_bytes: int, frame: int, dim: int,
) -> None:  # fmt: skip
    """Pages that are stored whole, and others that are cut; each group is told of once, in order, and what is named wrong is noticed."""
    spec, wanted = spec_with(4096, dim, 2), PartRange(0, *layers, *heads)
    data = np.random.default_rng(2).integers(0, 256, (len(whole_pages), LAYERS, PLANES, HEADS, TOKENS, dim), dtype=np.uint8)
    payloads: dict[bytes, tuple[bytes, SliceLayout]] = {}
    sources: list[tuple[tuple[PartRange, ...], PageBlobs, range]] = []
    groups, size = layer_groups(wanted, group_layers), spec.part_bytes(wanted)
    for whole, alike in groupby(range(len(whole_pages)), lambda page: whole_pages[page]):
        pages = list(alike)
        stored, ids = (spec.whole(),) if whole else tuple(grid(layer_cuts, head_cuts)), b""
        for page, part in product(pages, stored):
            layout = spec.slice_layout(part)
            payload = np.ascontiguousarray(data[page, part.layer_lo : part.layer_hi, :, part.head_lo : part.head_hi]).tobytes()
            slices = [payload[low:high] for low, high in pairwise(layout.offsets)]
            blob = blob_id(b"".join(map(slice_digest, slices)))
            payloads[blob] = payload, layout
            ids += blob
        sources.append((stored, PageBlobs(ids, len(stored)), range(pages[0] * size, (pages[-1] + 1) * size, size)))
    told: list[int] = []
    blocks = []
    for number, group in enumerate(groups):
        shift = (group.layer_lo - wanted.layer_lo) * size // (wanted.layer_hi - wanted.layer_lo)
        for stored, blobs, targets in sources:
            places = range(targets.start + shift, targets.stop + shift, size)
            shape = PageShape(page_parts(spec, stored, group))
            blocks.append(Block(shape, blobs, 0, list(places) if number % 2 else places, number))
    plan = FetchPlan(blocks, 1, on_group=told.append, stripe_bytes=stripe_bytes)
    out, again = (np.zeros(len(whole_pages) * size, np.uint8) for _ in range(2))
    for stripe in plan.stripes:
        count, asked = stripe.asked()
        sent: list[bytes] = []
        for run in unpack_runs(asked[16 * count :]):
            payload, layout = payloads[asked[16 * run.blob : 16 * (run.blob + 1)]]
            check_run(run, layout)
            sent += [payload[p.offset : p.offset + p.size] for p in cut(run, layout)]
        assert len(sent) == stripe.pieces
        for first in range(0, len(sent), frame):
            some = sent[first : first + frame]
            digests = [slice_digest(piece) for piece in some]
            assert sum(stretch.nbytes for stretch in stripe.stretches(first, frame)) == sum(map(len, some))
            receive(stripe, first, some, out)
            plan.arrived(stripe, first, digests, b"".join(digests))
        packed = bytearray(stripe.nbytes)
        for first in range(0, len(sent), frame):
            receive(PackedStripe(stripe), first, sent[first : first + frame], np.frombuffer(packed, np.uint8))
        stripe.into(again.data, memoryview(packed))
    plan.verify()
    expected = np.ascontiguousarray(data[:, layers[0] : layers[1], :, heads[0] : heads[1]]).ravel()
    assert np.array_equal(out, expected)
    assert np.array_equal(again, expected)
    assert told == list(range(len(groups)))


@pytest.mark.parametrize("wrong", [0, 3, 6])
@pytest.mark.parametrize("groups", [1, 3])
def test_one_blob_of_many_that_is_another_is_noticed(wrong: int, groups: int) -> None:
    spec, pages = spec_with(4096, group_layers=2), 7
    layout = spec.slice_layout(spec.whole())
    digests = [[slice_digest(bytes([page, number])) for number in range(layout.count)] for page in range(pages)]
    ids = [blob_id(b"".join(its)) for its in digests]
    name = ids[wrong] = slice_digest(b"another")
    blobs = PageBlobs(b"".join(ids))
    plan = FetchPlan(
        [
            Block(PageShape(page_parts(spec, (spec.whole(),), group)), blobs, 0, range(0, pages * spec.page_bytes, spec.page_bytes), number)
            for number, group in enumerate(layer_groups(spec.whole(), LAYERS // groups))
        ],
        1,
    )
    (stripe,) = plan.stripes
    each = layout.count // groups
    sent = [digests[page][group * each + i] for group in range(groups) for page in range(pages) for i in range(each)]
    plan.arrived(stripe, 0, sent, b"".join(sent))
    with pytest.raises(Corrupt, match=name.hex()):
        plan.verify()
