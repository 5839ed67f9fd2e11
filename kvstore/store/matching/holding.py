"""What leases and pins hold: how many there are, and the largest of them with what they keep in DRAM."""

import asyncio
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvstore.columns import distinct
from kvstore.radix.pages import Slots
from kvstore.store.matching.leases import Lease, Leases
from kvstore.store.space import Space
from kvstore.tiers.blobs import NO_SLOT


@dataclass(frozen=True, slots=True)
class Holding:
    """One lease, or pin, and the bytes that its pages have in DRAM now, each blob once."""

    lease: Lease
    is_pin: bool
    dram_bytes: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """How many there are, the payload bytes of all of them (a page that two hold counts twice), and the largest."""

    leases: int
    pins: int
    nbytes: int
    largest: list[Holding]


async def holdings(leases: Leases, pins: Leases, spaces: Iterable[Space], count: int) -> Holdings:
    """Those on some namespaces, and the `count` largest. One is looked at in a turn of the loop, so some may have ended meanwhile."""
    wanted = {space.number for space in spaces}
    found = [(one, kind) for kind in (leases, pins) for one in kind.each() if one.space.number in wanted]
    largest = []
    for one, kind in heapq.nlargest(count, found, key=lambda each: each[0].nbytes):
        await asyncio.sleep(0)
        if kind.find(one.owner, one.id) is one:
            largest.append(Holding(one, kind is pins, _dram_bytes(one)))
    of_pins = sum(kind is pins for _, kind in found)
    return Holdings(len(found) - of_pins, of_pins, sum(one.nbytes for one, _ in found), largest)


def _dram_bytes(lease: Lease) -> int:
    space = lease.space
    rows = distinct(space.tree.parts_of(_slots(lease)).blob)
    return int(space.blobs.stored_of(rows[space.blobs.slot[rows] != NO_SLOT]).sum())


def _slots(lease: Lease) -> Slots:
    """Those of its pages."""
    tree = lease.space.tree
    paths = [tree.path_slots(tree.path_to(tree.pages.find_key(boundary))) for boundary in lease.boundaries]
    return np.concatenate(paths)
