"""Copies of blobs in DRAM: whether they still are what was verified when they came, as memory may change."""

import asyncio
from concurrent.futures import Executor

import numpy as np

from kvstore.errors import Corrupt
from kvstore.kvspec import SliceLayout
from kvstore.store.space import Space
from kvstore.store.waits import finish_despite_cancel
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.dram import Arena
from kvstore.tiers.stored import verify_stored


def verifies(name: bytes, layout: SliceLayout, stored: memoryview) -> bool:
    """Whether the stored form of a blob is what its id names. Takes the time of a hash."""
    try:
        verify_stored(name, layout, stored)
    except Corrupt:
        return False
    return True


def lies_in(piece: memoryview, whole: memoryview) -> bool:
    """Whether a piece is of this very memory, not only equal to it."""
    start, at = (np.frombuffer(view, np.uint8).ctypes.data for view in (whole, piece))
    return bool(start <= at < start + len(whole))


class Copies:
    """Verifies them in a reader's thread."""

    def __init__(self, arena: Arena, readers: Executor) -> None:
        self._arena = arena
        self._readers = readers

    async def bad_ones(self, space: Space, rows: list[int]) -> dict[int, int]:
        """Those of the blobs whose copy in DRAM does not verify, and the slot that it is in."""
        blobs = space.blobs
        slots = {row: int(blobs.slot[row]) for row in rows if blobs.slot[row] != NO_SLOT}
        looked = [
            (row, blobs.id_of(row), blobs.layout_of(row), self._arena.view(slot)[: space.stored_bytes(row)]) for row, slot in slots.items()
        ]
        for row in slots:
            space.pin(row)
        try:
            bad = await finish_despite_cancel(asyncio.get_running_loop().run_in_executor(self._readers, _bad_ones, looked))
        finally:
            for row in slots:
                space.unpin(row)
        return {row: slots[row] for row in bad}


def _bad_ones(looked: list[tuple[int, bytes, SliceLayout, memoryview]]) -> list[int]:
    return [row for row, name, layout, view in looked if not verifies(name, layout, view)]
