"""The leaf-first rule: whoever evicts by value must not take a page before what is below it.

A page is worth at least what the pages below it are worth, as they are useless without it. Raised so, and with the least recent and
deepest first among equals, the least valuable k pages never include one with a descendant outside them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.columns import nth_least, runs_of
from kvstore.radix.pages import Slots
from kvstore.radix.tables import ROOT, TreeTables

_Values = npt.NDArray[Any]
"""Of any type that has an order."""


def raised(tree: TreeTables, slots: Slots, values: _Values) -> _Values:
    """`values`, each raised to the highest among the page's descendants in `slots` (ascending, without repeats)."""
    if not len(slots):
        return values
    owner = tree.pages.node.take(slots)
    starts, length = runs_of(owner, values)
    if 2 * len(starts) > len(slots):
        return _raised(tree, owner, values)
    return np.repeat(_raised(tree, owner.take(starts), values.take(starts)), length)


def _raised(tree: TreeTables, owner: Slots, values: _Values) -> _Values:
    """As `raised`, of the pages of these nodes in their order; one may stand for all equal ones in a row."""
    first, length = runs_of(owner)
    values = _raised_in_runs(values, first, length)
    below = _best_below(tree, owner[first], values[first], values[first + length - 1])
    return values if below is None else _higher(values, np.repeat(below, length))


def _raised_in_runs(values: _Values, first: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> _Values:
    """Each value as the highest from itself to the end of its run; `first` is where runs begin. By doubling steps."""
    rises = np.zeros(len(values), np.bool_)
    np.greater(values[1:], values[:-1], out=rises[:-1])
    rises[first[1:] - 1] = False
    unordered = np.logical_or.reduceat(rises, first)
    if not unordered.any():
        return values
    first, length = first[unordered], length[unordered]
    ends = length.cumsum()
    place = np.arange(ends[-1])
    left = np.repeat(ends, length) - place  # how many there are up to the end of the run
    place += np.repeat(first - (ends - length), length)
    some, step, longest = values.take(place), 1, int(length.max())
    while step < longest:
        np.copyto(some[:-step], np.maximum(some[:-step], some[step:]), where=left[:-step] > step)
        step *= 2
    values = values.copy()
    values[place] = some
    return values


def _best_below(tree: TreeTables, nodes: Slots, top: _Values, bottom: _Values) -> _Values | None:
    """For each node the highest value in the nodes below it, or `bottom` if that is higher; None if it is so for all.

    `top` and `bottom` are the highest and the lowest value of each node's own.
    """
    up = _nearest_above(np.asarray(tree.nodes.parent), nodes, tree.nodes.slots.high)
    highest = top.max()
    best, below = np.append(top, highest), np.append(bottom, highest)  # the last is above those with nothing above them
    moving = (top > below.take(up)).nonzero()[0]
    if not len(moving):
        return None
    while len(moving):
        above = up.take(moving)
        np.maximum.at(below, above, best.take(moving))
        moving = above[below.take(above) > best.take(above)]
        best[moving] = below.take(moving)
    return below[:-1]


def _nearest_above(parent_of: npt.NDArray[np.int32], nodes: Slots, high: int) -> npt.NDArray[np.int64]:
    """For each of some nodes (all below `high`) the place among them of the nearest one above it, -1 for none."""
    place = np.zeros(high, np.int64)  # of others 0, which does not lead back to them
    place[nodes] = asking = np.arange(len(nodes))
    found, above = np.full(len(nodes), -1, np.int64), parent_of.take(nodes)
    while len(asking):
        guess = place.take(above)
        there = nodes.take(guess) == above
        found[asking[there]] = guess[there]
        further = (above > ROOT) > there  # a node with no page among the slots: go on above it
        asking, above = asking[further], parent_of.take(above[further])
    return found


def _higher(one: _Values, other: _Values) -> _Values:
    found: _Values = np.maximum(one, other)
    return found


def depth_of(tree: TreeTables, slots: Slots) -> npt.NDArray[np.int64]:
    """How many pages are above each."""
    owner = tree.pages.node.take(slots)
    depth, start = np.asarray(tree.nodes.depth)[owner], np.asarray(tree.nodes.start)[owner]
    found: npt.NDArray[np.int64] = depth.astype(np.int64) + slots - start
    return found


def least(values: _Values, count: int) -> npt.NDArray[np.int64]:
    """The places of the `count` least values and of all that equal the highest of them, in no order. See `in_order`."""
    if count >= len(values):
        return np.arange(len(values))
    return np.flatnonzero(values <= nth_least(values, count - 1)) if count > 0 else np.empty(0, np.int64)


def in_order(values: _Values, recency: npt.NDArray[np.int64], depth: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The places of values, the least first; of equals the least recent first, and of those the deepest."""
    return np.lexsort((-depth, recency, values))
