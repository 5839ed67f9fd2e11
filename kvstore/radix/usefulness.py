"""Which optional parts no boundary can use any more: what goes with a part or page that was dropped. Pure.

A window part is of use while it lies in an unbroken run of pages that have one, if the run is as long as a boundary needs or
begins at the root. So when a run is cut, each piece that is too short goes whole. A state part stands alone.
"""

from kvstore.radix.components import Optional
from kvstore.radix.pages import GHOST
from kvstore.radix.tables import ROOT, TreeTables
from kvstore.radix.values import Path


def useless_parts(tree: TreeTables, rule: Optional, path: Path) -> list[int]:
    """Page slots whose part of an optional component is of no use, in the runs that end before or begin after the end of `path`.

    Only runs in which nothing branches are judged above the cut; others stay until they are the coldest.
    """
    if rule.pages == 1 or not path.pages:
        return []
    above, below = [], []
    slots = tree.path_slots(path)
    at = len(slots)
    if not _has(tree, int(slots[-1]), rule):  # the cut is this page itself: judge what comes after it, too
        at -= 1
        below = _short_runs_below(tree, rule, path)
    first = at
    while first > 0 and at - first < rule.pages and _has(tree, int(slots[first - 1]), rule):
        first -= 1
    if 0 < first < at and at - first < rule.pages and not _branches(tree, path, first, at):
        above = [int(slot) for slot in slots[first:at]]
    return above + below


def _has(tree: TreeTables, slot: int, rule: Optional) -> bool:
    return bool(tree.pages.components[slot] & rule.bit)


def _branches(tree: TreeTables, path: Path, first: int, end: int) -> bool:
    """Whether any page of [first, end) is followed by a page with the component that is not on the path before `end`."""
    tail = path.nodes[-1]
    if end == path.pages and path.tail < tree.nodes.count[tail] and not tree.pages.flags[tree.nodes.start[tail] + path.tail] & GHOST:
        return True  # what goes on there, in the same node, is not what was taken out
    for number, node in enumerate(path.nodes):
        last = tree.nodes.depth[node] + tree.nodes.count[node]
        if first < last <= end:
            on_path = path.nodes[number + 1] if number + 1 < len(path.nodes) else ROOT
            others = [child for child in tree.nodes.children_of(node) if child != on_path]
            if any(not tree.pages.flags[tree.nodes.start[child]] & GHOST for child in others):
                return True
    return False


def _short_runs_below(tree: TreeTables, rule: Optional, path: Path) -> list[int]:
    """The runs that begin right after a path, where even the longest way down is shorter than a boundary needs."""
    node = path.nodes[-1]
    found: list[int] = []
    starts = [(node, path.tail)] if path.tail < tree.nodes.count[node] else [(child, 0) for child in tree.nodes.children_of(node)]
    for start, offset in starts:
        run: list[int] = []
        if _run_down(tree, rule, start, offset, 0, run) < rule.pages:
            found += run
    return found


def _run_down(tree: TreeTables, rule: Optional, node: int, offset: int, length: int, run: list[int]) -> int:
    """The length of the longest run that goes on at `offset` of a node, up to what is needed; its pages are added to `run`."""
    longest, todo = length, [(node, offset, length)]
    while todo and longest < rule.pages:
        node, offset, length = todo.pop()
        first, count = tree.nodes.start[node] + offset, tree.nodes.count[node] - offset
        taken = 0
        while taken < count and length + taken < rule.pages and _has(tree, first + taken, rule):
            run.append(first + taken)
            taken += 1
        longest = max(longest, length + taken)
        if taken == count:
            todo += [(child, 0, length + taken) for child in tree.nodes.children_of(node)]
    return longest
