"""What is pending of a computation enters the tree: whole pages at the front, and what pages lack that are there.

Bookkeeping on the loop's thread: no await, no I/O.
"""

import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES
from kvstore.kvspec import PartRange
from kvstore.radix.components import Masks
from kvstore.radix.pages import Slots
from kvstore.radix.values import NewPages
from kvstore.store.puts.pending import Pending, whole_components
from kvstore.store.space import Space


def is_whole(space: Space, ranges: tuple[PartRange, ...]) -> bool:
    """Whether a page of these parts is whole, and nothing of it is of a component that is not."""
    whole, required = whole_components(space.spec, ranges), space.tree.rules.required
    return whole & required == required and all(whole >> part.component & 1 for part in ranges)


def bring_in(space: Space, put_id: bytes, pending: Pending) -> bytes | None:
    """Insert the whole pages at the front, and give pages that exist what they lack. Returns the key of the last page that gained."""
    tree, rules = space.tree, space.tree.rules
    masks = pending.masks(space.spec)
    slots = _existing(space, pending)
    existing = len(slots)
    gained = _fill_in(space, pending, slots, masks)
    whole = (masks[existing:] & rules.required) == rules.required
    count = len(whole) if whole.all() else int(whole.argmin())
    parent = pending.key(pending.first + existing - 1)
    at = tree.pages.find_key(parent)
    pending.waits = bool(count) and at < 0 and parent != tree.root_key
    if count and not pending.waits:
        run = slice(existing, existing + count)
        here = _of_whole_components(pending, masks)[run]
        first = pending.first + existing
        width = tree.pages.token_bytes
        extras = pending.extras_of(first, count)
        rows = np.where(here, pending.rows[run], np.int32(-1))
        keys = pending.keys[run.start * KEY_BYTES : run.stop * KEY_BYTES]
        space.insert(parent, pending.labels[run.start * width : run.stop * width], extras, NewPages(keys, put_id, rows, pending.ranges))
        let_go(space, pending, run, here)
        gained = pending.key(first + count - 1)
    return gained


def _existing(space: Space, pending: Pending) -> Slots:
    """The slots of those pages at the front that are in the tree."""
    slots: list[int] = []
    for page in range(pending.first, pending.end):
        slot = space.tree.pages.find_key(pending.key(page))
        if slot < 0:
            break
        slots.append(slot)
    return np.array(slots, np.int32)


def _fill_in(space: Space, pending: Pending, slots: Slots, masks: Masks) -> bytes | None:
    """Give pages that exist the optional components that they lack. First commit wins: of what they have nothing is taken."""
    if not len(slots):
        return None
    run, tree = slice(0, len(slots)), space.tree
    has = tree.pages.components[slots]
    component_bits = np.array([1 << r.component for r in pending.ranges], np.uint16)
    here = pending.rows[run] >= 0
    wanted = _of_whole_components(pending, masks)[run] & ((has[:, np.newaxis] & component_bits) == 0)
    if wanted.any():
        rows = np.where(wanted, pending.rows[run], np.int32(-1))
        space.add_parts(slots, rows, pending.ranges)
    let_go(space, pending, run, here & (wanted | ((has[:, np.newaxis] & component_bits) != 0)))
    gained = np.flatnonzero(wanted.any(axis=1))
    return pending.key(pending.first + int(gained[-1])) if len(gained) else None


def _of_whole_components(pending: Pending, masks: Masks) -> npt.NDArray[np.bool_]:
    """Which rows (pages, parts) are here and belong to a component that is whole on its page."""
    bits = np.array([1 << r.component for r in pending.ranges], np.uint16)
    return np.asarray((pending.rows >= 0) & ((masks[:, np.newaxis] & bits) != 0))


def let_go(space: Space, pending: Pending, run: slice, which: npt.NDArray[np.bool_]) -> None:
    """Unpin some rows: they are in the tree now, or not needed."""
    rows = pending.rows[run]
    gone = rows[which].tolist()
    rows[which] = -1
    for row in gone:
        space.unpin(row)
