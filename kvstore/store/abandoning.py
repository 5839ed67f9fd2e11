"""What of a context nobody will ask for again: after a compaction, or when a session says that it is over.

A session that comes back with a shorter context, which begins as its last one and then goes another way, has compacted it; one that
shares nothing with it is another matter (a title for the conversation, say), and says nothing of it. What comes after
the part that both share is abandoned, as far as nobody else has used it: no other session was last at one of these pages or
below, nobody who names no session has used them, and no sub-agent. A page's use is one of all pages before it, so what nobody
else used is the end of the path, and all that hangs from it.
"""

from dataclasses import dataclass

import numpy as np

from kvstore.radix.pages import ANONYMOUS, BRANCHED, GHOST, Slots
from kvstore.store.session_ends import Line
from kvstore.store.space import Space

MIN_CUT_PAGES = 2
MIN_CUT_SHARE = 0.1
"""A context that lost less than this share of the last one has only had its end rewritten."""
_LOOK_PAGES = 1 << 17
"""What has more pages below it is taken to be of use to somebody: looking on would hold up the loop for over ten milliseconds."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Of the path in `slots`, the pages from `first` on are the first to go: they, and those that hang from them, are `cooled`."""

    slots: Slots
    first: int
    cooled: Slots

    @property
    def pages(self) -> int:
        """How many pages are the first to go now."""
        return len(self.cooled)


def last_slots(space: Space, line: Line) -> Slots:
    """The path to where a line was last, ghosts at its end included; empty if that is not known."""
    key = space.ends.get(line)
    slot = -1 if key is None else space.tree.pages.find_any(key)
    return space.tree.path_slots(space.tree.path_to(slot)) if slot >= 0 else np.empty(0, np.int32)


def common_pages(one: Slots, other: Slots) -> int:
    """How many pages two paths share."""
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    return length if same.all() else int(same.argmin())


def is_compaction(last: int, common: int, asked: int) -> bool:
    """Whether a context of `asked` pages, of which `common` are the front of the last context of `last` pages, is that one compacted."""
    cut = last - common
    return 0 < common < asked < last and cut >= MIN_CUT_PAGES and cut > MIN_CUT_SHARE * last


def abandon_line(space: Space, line: Line, first: int = 0, *, respecting: int = ANONYMOUS | BRANCHED) -> Abandoned:
    """Forget where a line was last; what of that path, from page `first` on, nobody else has used is the first to go.

    Pages with one of the flags `respecting` stay.
    """
    slots = last_slots(space, line)
    space.ends.take(line)
    live = np.flatnonzero(space.tree.pages.flags[slots] & GHOST)
    slots = slots[: live[0]] if len(live) else slots
    used = np.flatnonzero(space.tree.pages.flags[slots] & respecting)
    first = max(first, int(used[-1]) + 1 if len(used) else 0)
    if first < len(slots):
        first = max(first, _end_of_use(space, slots, first))
    return Abandoned(slots, first, _cool(space, int(slots[first]), first) if first < len(slots) else np.empty(0, np.int32))


def _end_of_use(space: Space, slots: Slots, first: int) -> int:
    """How many pages of a path, whose pages from `first` on are asked about, somebody is last at, or below."""
    tree = space.tree
    nodes, looked, child = tree.nodes, 0, -1
    for node in reversed(tree.path_to(int(slots[-1])).nodes):
        depth, start, count = nodes.depth[node], nodes.start[node], nodes.count[node]
        if depth + count <= first:
            break
        for other in nodes.children_of(node):
            for at in nodes.subtree(other) if other != child else ():
                looked += nodes.count[at]
                if looked > _LOOK_PAGES or _last_end(space, nodes.start[at], nodes.count[at]) >= 0:
                    return min(depth + count, len(slots))
        skipped = max(first - depth, 0)
        looked += count - skipped
        if looked > _LOOK_PAGES:
            return min(depth + count, len(slots))
        found = _last_end(space, start + skipped, count - skipped)
        if found >= 0:
            return min(depth + skipped + found + 1, len(slots))
        child = node
    return 0


def _last_end(space: Space, start: int, count: int) -> int:
    """The last of the pages in consecutive slots that somebody was last at, counted from the first, or -1."""
    return space.ends.last_of(space.tree.pages.key[start : start + count])


def _cool(space: Space, slot: int, depth: int) -> Slots:
    """Make the page in a slot, and all below it, the first to go. Returns the slots of them all."""
    tree, cooled = space.tree, list[Slots]()
    nodes = tree.nodes
    top = int(tree.pages.node[slot])
    for node in nodes.subtree(top):
        first = slot if node == top else nodes.start[node]
        below = np.arange(first, nodes.start[node] + nodes.count[node], dtype=np.int32)
        tree.cool(below, depth if node == top else nodes.depth[node])
        cooled.append(below[(tree.pages.flags[below] & GHOST) == 0])
    return np.concatenate(cooled)
