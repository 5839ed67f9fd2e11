"""Recomputes every invariant of a store at rest: trees, reference counts, DRAM slots. For tests and for `check` commands."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.kvspec import PartRange
from kvstore.radix.check import check as check_tree
from kvstore.radix.pages import GHOST, RECIPE, Slots
from kvstore.store.puts.pending import Pending, whole_components
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.tiers.blobs import NO_SLOT, BlobTable


def check(store: Store) -> None:
    """Raise AssertionError, saying which invariant broke where. Nothing may be under way: no put, no fetch, no write-behind."""
    used: Counter[str] = Counter()
    for space in store.all_spaces():
        check_tree(space.tree)
        used[space.settings.tenant] += check_blobs(space, store.figures.pending_of(space))
        _check_leases(store, space)
        _check_recipe_flags(space)
        store.replacement.check(space)
    held = store.figures.usage()["dram"].used
    assert held == used.total(), f"{held} bytes of DRAM are taken, the blobs account for {used.total()}"
    for tenant, nbytes in used.items():
        held = store.figures.usage_of(tenant)["dram"].used
        assert held == nbytes, f"{held} bytes of DRAM are counted for tenant {tenant}, its blobs account for {nbytes}"
        assert not store.quotas.in_flight(tenant), f"{store.quotas.in_flight(tenant)} bytes of tenant {tenant} are in flight"


def _check_recipe_flags(space: Space) -> None:
    flags = space.tree.pages.flags
    flagged = np.flatnonzero((flags[: space.tree.pages.ranges.high] & RECIPE) != 0)
    assert space.text is not None or not len(flagged), "a page has a recipe, and its namespace keeps none"
    assert not (flags[flagged] & GHOST).any(), "a ghost counts as a page with a recipe"


def check_recipes_there(store: Store) -> None:
    """Raise AssertionError unless every page that may be discarded for its recipe has one, and the counts are right. Blocking."""
    file = store.recipes.file
    for space in store.all_spaces():
        slots = space.tree.live_slots()
        slots = slots[(space.tree.pages.flags[slots] & RECIPE) != 0]
        have = file.have(space.number, space.digest, [space.tree.pages.key_bytes(int(slot)) for slot in slots])
        assert all(have), f"{have.count(False)} pages count as having a recipe, and have none"
        found, after = 0, None
        while True:
            count, bad, after = file.scan(space.number, space.digest, after)
            assert not bad, "a recipe does not verify"
            found += count
            if after is None:
                break
        counted = store.recipes.holding(space).recipes
        assert found == counted, f"{counted} recipes are counted, there are {found}"


def check_counts(space: Space) -> None:
    """Raise AssertionError unless the blob table says what the tree needs. True between any two changes of a namespace."""
    blobs, tree = space.blobs, space.tree
    live = tree.live_slots()
    parts = tree.parts_of(live)
    named = _named(space, live)
    rows = np.unique(parts.blob)
    pages = np.bincount(parts.blob, minlength=blobs.slots.high)
    durable_pages = np.bincount(parts.blob[named], minlength=blobs.slots.high)
    assert len(live) == tree.page_count, "page count and page slots differ"
    assert len(live) + tree.ghost_count == len(tree.pages.key_index), "the key index holds other pages than the tree"
    counted = rows if space.loading else slice(blobs.slots.high)  # pages that are still to come count already
    assert (blobs.pages[counted] == pages[counted]).all(), "a blob counts other pages than need it"
    # A record that is to be written anew still counts for the blobs that it names.
    assert (blobs.durable_pages[rows] >= durable_pages[rows]).all(), "a blob counts fewer durable pages than need it"
    assert ((blobs.slot[rows] != NO_SLOT) | blobs.on_ssd[rows]).all(), "a blob is in no tier"
    assert (blobs.on_ssd[rows] | (durable_pages[rows] == 0)).all(), "a durable page's blob is not on SSD"


def unneeded(blobs: BlobTable, first: int, last: int) -> npt.NDArray[np.int64]:
    """Those of these rows whose blob is in a tier though no page needs it, and nobody uses it. None, between any two changes."""
    part = slice(first, last)
    kept = (blobs.slot[part] != NO_SLOT) | blobs.on_ssd[part]
    return first + np.flatnonzero(kept & (blobs.pages[part] == 0) & (blobs.pins[part] == 0))


def check_blobs(space: Space, pending: Sequence[Pending] = ()) -> int:
    """Raise AssertionError unless the blob table is right and nothing is under way. Returns the bytes of DRAM it accounts for."""
    check_counts(space)
    blobs, tree = space.blobs, space.tree
    live = tree.live_slots()
    parts = tree.parts_of(live)
    _check_cover(space, live)
    durable_pages = np.bincount(parts.blob[_named(space, live)], minlength=blobs.slots.high)
    pins = np.zeros(blobs.slots.high, np.int64)
    for waiting in pending:
        np.add.at(pins, waiting.rows[waiting.rows >= 0], 1)
    rows = np.union1d(parts.blob, np.flatnonzero(pins)).astype(np.int32)
    assert len(rows) == blobs.count, f"{blobs.count} blobs in the table, {len(rows)} in the tree or pending"
    assert (blobs.durable_pages[rows] == durable_pages[rows]).all(), "a blob counts other durable pages than need it"
    assert (blobs.pins[rows] == pins[rows]).all(), "a blob is pinned by something else than pending pages, and nothing is under way"
    assert all(blobs.find(blobs.id_of(row)) == row for row in rows.tolist()), "a blob is not found by its id"
    slots = blobs.slot[rows]
    assert ((slots != NO_SLOT) | blobs.on_ssd[rows]).all(), "a pending blob is in no tier"
    resident = slots[slots != NO_SLOT].tolist()
    assert len(set(resident)) == len(resident), "two blobs share a DRAM slot"
    nbytes = sum(space.slot_bytes(slot) for slot in resident)
    assert nbytes == space.resident_bytes, f"{space.resident_bytes} bytes accounted as resident, there are {nbytes}"
    return nbytes


def _named(space: Space, live: Slots) -> npt.NDArray[np.bool_]:
    """For each part of these pages, whether a durable record names it."""
    _, part = space.tree.parts.of(space.tree.pages.part[live])
    return space.tree.parts.durable[part]


def _check_cover(space: Space, live: Slots) -> None:
    """A component that a page's mask names is there with all its layers and heads, each once."""
    parts = space.tree.parts_of(live)
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for page in range(len(live)):
        mine = parts.page == page if len(live) < 2000 else slice(0)
        shape = tuple(sorted((int(c), *(int(x) for x in r)) for c, r in zip(parts.component[mine], parts.ranges[mine], strict=True)))
        if shape in seen:
            continue
        seen.add(shape)
        ranges = tuple(PartRange(*row) for row in shape)
        named = sum(1 << c for c in {row[0] for row in shape})
        assert whole_components(space.spec, ranges) == named, f"a page has only some parts of a component: {shape}"
        assert not any(a.overlaps(b) for i, a in enumerate(ranges) for b in ranges[:i]), f"two parts of a page overlap: {shape}"


def _check_leases(store: Store, space: Space) -> None:
    expected = np.zeros(space.tree.pages.ranges.high, np.int64)
    for lease in (lease for kind in (store.leases, store.pins) for lease in (*kind.of_space(space), *kind.ended_of_space(space))):
        for boundary in lease.boundaries:
            expected[space.tree.path_slots(space.tree.path_to(space.tree.pages.find_key(boundary)))] += 1
    live = space.tree.live_slots()
    assert (space.tree.pages.leases[live] == expected[live]).all(), "a page counts other leases than cover it"
