"""Many pages of a flat namespace removed at once: none can be found from the first moment on, the rest of the work is done in turns."""

import asyncio
from collections.abc import Iterator

from kvstore.columns import distinct
from kvstore.radix.pages import Slots
from kvstore.store.space import Space

_ROWS_AT_ONCE = 128
_PAGES_AT_ONCE = 16


async def remove_alone(space: Space, slots: Slots) -> None:
    """Remove pages that each stand alone, none of them leased, from the tree and the tiers, without ghosts. If cancelled, all the same."""
    work = _remove_alone(space, slots)
    next(work)
    try:
        for _ in work:
            await asyncio.sleep(0)
    finally:
        for _ in work:
            pass


def _remove_alone(space: Space, slots: Slots) -> Iterator[None]:
    """The pages go in the first step. Meanwhile others may put them again, or need their blobs: each is looked at anew."""
    keys = [space.tree.pages.key_bytes(slot) for slot in slots.tolist()]
    rows = distinct(space.bury_alone(slots)).tolist()
    for row in rows:
        space.pin(row)  # or it would go with the last reader, and its number might be another blob's by its turn
    yield
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        for row in rows[at : at + _ROWS_AT_ONCE]:
            space.unpin(row)
        yield
    for at in range(0, len(keys), _PAGES_AT_ONCE):
        if space.dropped:
            return
        space.forget_alone(keys[at : at + _PAGES_AT_ONCE])
        yield
