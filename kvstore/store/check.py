"""Recomputes every invariant of a store at rest: trees, reference counts, DRAM slots. For tests and for `check` commands."""

import numpy as np

from kvstore.radix.check import check as check_tree
from kvstore.radix.pages import DURABLE
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.tiers.blobs import NO_SLOT


def check(store: Store) -> None:
    """Raise AssertionError, saying which invariant broke where. Nothing may be under way: no put, no fetch, no write-behind."""
    used = 0
    for space in store.all_spaces():
        check_tree(space.tree)
        used += _check_blobs(space)
        _check_leases(store, space)
    held = store.usage()["dram"].used
    assert held == used, f"{held} bytes of DRAM are taken, the blobs account for {used}"


def _check_blobs(space: Space) -> int:
    blobs, tree = space.blobs, space.tree
    live = tree.live_slots()
    parts = tree.parts_of(live)
    durable = (tree.pages.flags[live] & DURABLE) != 0
    pages = np.bincount(parts.blob, minlength=blobs.slots.high)
    durable_pages = np.bincount(parts.blob[durable[parts.page]], minlength=blobs.slots.high)
    rows = np.unique(parts.blob)
    assert len(rows) == blobs.count, f"{blobs.count} blobs in the table, {len(rows)} in the tree"
    assert (blobs.pages[rows] == pages[rows]).all(), "a blob counts other pages than need it"
    assert (blobs.durable_pages[rows] == durable_pages[rows]).all(), "a blob counts other durable pages than need it"
    assert not blobs.pins[rows].any(), "a blob is pinned, and nothing is under way"
    assert all(blobs.find(blobs.id_of(row)) == row for row in rows.tolist()), "a blob is not found by its id"
    slots = blobs.slot[rows]
    assert ((slots != NO_SLOT) | blobs.on_ssd[rows]).all(), "a blob is in no tier"
    assert (blobs.on_ssd[rows] | (durable_pages[rows] == 0)).all(), "a durable page's blob is not on SSD"
    resident = slots[slots != NO_SLOT].tolist()
    assert len(set(resident)) == len(resident), "two blobs share a DRAM slot"
    nbytes = sum(space.slot_bytes(slot) for slot in resident)
    assert nbytes == space.resident_bytes, f"{space.resident_bytes} bytes accounted as resident, there are {nbytes}"
    return nbytes


def _check_leases(store: Store, space: Space) -> None:
    expected = np.zeros(space.tree.pages.ranges.high, np.int64)
    for lease in store.leases.of_space(space):
        expected[space.tree.path_slots(space.tree.path_to(space.tree.pages.find_key(lease.boundary)))] += 1
    live = space.tree.live_slots()
    assert (space.tree.pages.leases[live] == expected[live]).all(), "a page counts other leases than cover it"
