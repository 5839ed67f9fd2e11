"""Which pages a put is of, how they are named, and which of them are there: a run of a prefix, or pages that each stand alone."""

import asyncio
from dataclasses import astuple, dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES, NO_EXTRA, page_key
from kvstore.errors import BadRequest, Busy, MissingParent
from kvstore.kvspec import PartRange
from kvstore.radix.components import Masks
from kvstore.radix.pages import DURABLE, Slots
from kvstore.radix.values import Path
from kvstore.store.puts.assembly import Assemblies
from kvstore.store.puts.put import Put
from kvstore.store.puts.request import Ack

MAX_PUT_PAGES = 4096
MAX_FLAT_PAGES = 256
"""Of a put to a flat namespace: each page is a node of its own, which costs the loop some ten µs."""
MAX_FLAT_PARTS = 4096
"""Of such a put in all: what is wanted of it may alternate from page to page, and is answered in one frame."""
MAX_SHARDS = 256
"""Open puts of one put id."""
_YIELD_EVERY = 256


# --- naming ------------------------------------------------------------------------------------------------------------


def check_pages(put: Put) -> None:
    """Raise BadRequest unless a put is of as many pages as one may be, at a place where they may be."""
    pages, first = put.total_pages - put.first_page, put.first_page
    if put.space.spec.flat:
        parts = pages * len(put.request.ranges)
        if first or put.base_pages or not 0 < pages <= MAX_FLAT_PAGES or (pages > 1 and parts > MAX_FLAT_PARTS):
            raise BadRequest(
                f"a put of {pages} pages ({parts} parts) from page {first} on: in a flat namespace every page stands alone, "
                f"so give 1 to {MAX_FLAT_PAGES} of them (at most {MAX_FLAT_PARTS} parts) from 0 on"
            )
    elif not 0 < pages <= MAX_PUT_PAGES or first < put.base_pages:
        raise BadRequest(f"a put of the pages [{first}, {put.total_pages}): give 1 to {MAX_PUT_PAGES} after the base")


def name_alone(put: Put) -> None:
    """Compute the keys of pages that each stand alone. Raises BadRequest if one is named twice."""
    root, tokens, width = put.space.tree.root_key, put.request.tokens, put.space.tree.pages.token_bytes
    extras = put.request.extras
    keys = [page_key(root, tokens[p * width : (p + 1) * width] + extras.get(p, NO_EXTRA)) for p in range(put.total_pages)]
    if len(set(keys)) < len(keys):
        first: dict[bytes, int] = {}
        for page, key in enumerate(keys):
            if (other := first.setdefault(key, page)) != page:
                raise BadRequest(f"pages {other} and {page} of the put are the same: name each page once")
    put.parent, put.keys = root, b"".join(keys)


async def name_pages(put: Put, path: Path, slots: Slots) -> None:
    """Compute the keys of a prefix's pages, and of those before them that are not in the tree."""
    tree, tokens, base = put.space.tree, put.request.tokens, put.base_pages
    width = tree.pages.token_bytes
    known = slots[put.first_page : put.total_pages]
    keys = [tree.pages.key[known].tobytes()]
    above = slots[: put.first_page]
    parent = tree.pages.key_bytes(int(above[-1])) if len(above) else tree.root_key
    key = tree.key_at(path)
    for page in range(path.pages, put.total_pages):
        extra = put.request.extras.get(page - base, NO_EXTRA)
        key = page_key(key, tokens[(page - base) * width : (page - base + 1) * width] + extra)
        if page < put.first_page:
            parent = key
        else:
            keys.append(key)
        if (page - path.pages) % _YIELD_EVERY == _YIELD_EVERY - 1:
            await asyncio.sleep(0)
    put.parent, put.keys = parent, b"".join(keys)


# --- what is there -----------------------------------------------------------------------------------------------------


def slots_of(put: Put) -> Slots:
    """The slot of each page of the put that is in the tree, -1 for the others."""
    find, first = put.space.tree.pages.find_key, put.first_page
    if put.space.spec.flat:
        return np.array([find(put.keys[at : at + KEY_BYTES]) for at in range(0, len(put.keys), KEY_BYTES)], np.int32)
    slots = np.full(put.total_pages - first, -1, np.int32)
    for page in range(first, put.total_pages):
        slot = find(put.key(page))
        if slot < 0:
            break  # nor is any page below it
        slots[page - first] = slot
    return slots


def masks_of(put: Put) -> Masks | None:
    """Which components the pages of a put have that are in the tree, 0 for the others; None if none of them is."""
    pages = put.space.tree.pages
    if not put.space.spec.flat and pages.find_key(put.key(put.first_page)) < 0:
        return None  # nor is any page below it
    slots = slots_of(put)
    return np.where(slots >= 0, pages.components[slots], np.uint16(0)).astype(np.uint16)


def done_pages(put: Put) -> int:
    """How many pages at the front of a put's prefix are there, from the root on; durably, if the put asks for that.

    Those of the put itself are with all components that it brings.
    """
    tree, there, durable = put.space.tree, slots_of(put), put.request.ack is Ack.DURABLE
    own = there[there >= 0]
    slot = int(own[-1]) if len(own) else tree.pages.find_key(put.parent) if put.first_page else -1
    if slot < 0:
        return 0
    slots = tree.path_slots(tree.path_to(slot))
    missing = (tree.pages.flags[slots] & DURABLE) == 0 if durable else np.zeros(len(slots), np.bool_)
    if tree.rules.optional and len(own):
        bits = np.array([1 << part.component for part in put.request.ranges], np.uint16)
        brought = np.bitwise_or.reduce(np.where(put.in_spans()[: len(own)], bits, np.uint16(0)), axis=1)
        missing[put.first_page :] |= (brought & ~tree.pages.components[own]) != 0
        if durable:
            missing[put.first_page :] |= put.space.unwritten(own)
    return int(missing.argmax()) if missing.any() else len(slots)


@dataclass(frozen=True, slots=True)
class Had:
    """Which pages of a put existed before it was taken in, and with which components (only if there are optional ones)."""

    existed: npt.NDArray[np.bool_]
    components: Masks

    @classmethod
    def now(cls, put: Put) -> Self:
        """As it is now."""
        slots, tree = slots_of(put), put.space.tree
        existed = slots >= 0
        return cls(existed, tree.pages.components[slots[existed]] if tree.rules.optional else np.empty(0, np.uint16))

    def gained(self, put: Put, slots: Slots) -> int:
        """How many of those have a component more, now that the put's pages are in these slots."""
        if not len(self.components):
            return 0
        now = slots[self.existed]
        more = put.space.tree.pages.components[now] & ~self.components
        return int(np.count_nonzero((now >= 0) & (more != 0)))


def runs_of(which: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Where it is true, as half-open runs."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], which.astype(np.int8), [0]])))
    return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))


# --- other shards ------------------------------------------------------------------------------------------------------


def check_parent(put: Put, path: Path, open_ones: list[Put], assemblies: Assemblies) -> None:
    """The page before the put is in the tree, or another shard of the same computation is bringing it."""
    first = put.first_page
    if path.pages >= first:
        return
    others = [p for p in open_ones if p is not put and p.keys]
    coming = any(p.first_page < first <= p.total_pages and p.key(first - 1) == put.parent for p in others)
    pending = assemblies.pending_of(put.space, put.request.put_id)
    if not coming and not any(p.holds(first - 1, put.parent) for p in pending):
        raise MissingParent(f"the put starts at page {first}, but the store has {path.pages} pages of its prefix")


def check_apart(put: Put, open_ones: list[Put], assemblies: Assemblies) -> None:
    """Ranges that shards of one put id bring of one page are equal or disjoint. Of a flat namespace, those of puts that share a page."""
    if len(open_ones) >= MAX_SHARDS:
        raise Busy(f"{MAX_SHARDS} puts with this put id are under way", retry_after_ms=100)
    others: set[tuple[PartRange, int, int]] = set()
    if put.space.spec.flat:  # each put counts its own pages: the numbers of others say nothing
        ours = put.page_keys()
        for other in open_ones:
            if not ours.isdisjoint(other.page_keys()):
                others.update((part, 0, put.total_pages) for part in other.request.ranges)
        for key in ours:
            for pending in assemblies.pending_of(put.space, put.request.put_id, key):
                others.update((part, 0, put.total_pages) for part, _, _ in pending.announced())
    else:
        for other in open_ones:
            others.update(other.announced())
        for pending in assemblies.pending_of(put.space, put.request.put_id):
            others |= pending.announced()
    if not others:
        return
    known = np.array([(*astuple(part), first, last) for part, first, last in others], np.int64)
    for part, first, last in put.announced():
        c, layer_lo, layer_hi, head_lo, head_hi = astuple(part)
        meet = (known[:, 0] == c) & (known[:, 5] < last) & (known[:, 6] > first)
        meet &= (known[:, 1] < layer_hi) & (known[:, 2] > layer_lo) & (known[:, 3] < head_hi) & (known[:, 4] > head_lo)
        meet &= (known[:, 1:5] != (layer_lo, layer_hi, head_lo, head_hi)).any(axis=1)
        if meet.any():
            known_part = PartRange(*(int(x) for x in known[int(meet.argmax()), :5]))
            raise BadRequest(f"{part} overlaps with {known_part}, which another shard brings under this put id")
