"""Records of the SSD tier's index that name the same blocks, or such as are not there: which are right. Pure.

Only damage makes such: flipped bits in a record, LMDB pages of long ago that were taken for new ones, a file that was cut short.
"""

from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.tiers.extent_record import Record
from kvstore.tiers.free_space import Blocks, Extent


class Claim(NamedTuple):
    """A key and its record, None if that does not verify."""

    key: bytes
    record: Record | None


def shared_blocks(first: Blocks, blocks: Blocks) -> Blocks:
    """The first blocks of the extents that share blocks with others."""
    order = np.argsort(first, kind="stable")
    first = first[order]
    ends = np.maximum.accumulate(first + blocks[order])
    inside = np.flatnonzero(first[1:] < ends[:-1]) + 1
    if not len(inside):
        return inside
    holders = np.searchsorted(ends, first[inside], side="right")  # the first whose end is behind the begin of another
    around = np.zeros(len(first) + 1, np.int64)
    np.add.at(around, holders, 1)
    np.add.at(around, inside + 1, -1)
    return first[np.cumsum(around)[:-1] > 0]


def losers(claims: Sequence[Claim], file_blocks: int) -> list[bytes]:
    """The keys of those with no right to a block they name: not verified, beyond the file, or of an earlier commit than another."""
    lost = [key for key, record in claims if record is None]
    verified = [(key, record) for key, record in claims if record is not None]
    named = np.array([extent for _, record in verified for extent in record.extents], np.int64).reshape(-1, 2)
    shared = set(shared_blocks(named[:, 0], named[:, 1]).tolist())  # mostly none any more: what does not verify names half of the file
    taken: list[Extent] = []
    for key, record in sorted(verified, key=lambda one: -one[1].commit):
        if any(extent.first + extent.blocks > file_blocks for extent in record.extents):
            lost.append(key)
        elif shared.isdisjoint(extent.first for extent in record.extents):
            continue
        elif all(_is_free(extent, taken) for extent in record.extents):
            for extent in record.extents:
                taken.insert(bisect(taken, extent), extent)
        else:
            lost.append(key)
    return lost


def _is_free(extent: Extent, taken: list[Extent]) -> bool:
    at = bisect(taken, extent)
    behind = at == len(taken) or taken[at].first >= extent.first + extent.blocks
    return behind and (not at or taken[at - 1].first + taken[at - 1].blocks <= extent.first)
