"""Where in an LMDB data file the values of some keys lie, found without touching the values.

LMDB's own look-up is as quick, but its binding touches every page of a value that it gives out, and each that is not in the page cache is
then read by itself. Format as in `kvstore.lmdb_walk`. The caller keeps a read transaction open meanwhile: its pages stay what they are.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.lmdb_walk import BIG_DATA, BRANCH, NO_PAGE, NODE, OVERFLOW, page_flags, page_nodes, unpack_meta

_MAX_DEPTH = 32
_MOST_PAGES = 1 << 48


class Overtaken(Exception):
    """The file has no meta page of this transaction any more: later ones have taken both. Begin another."""


class Damaged(Exception):
    """A page on the way is not what it should be."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies."""

    key: bytes
    at: int
    nbytes: int


def find_values(fd: int, transaction: int, prefix: bytes, page_size: int = 4096) -> list[Place]:
    """The values of all keys that begin with `prefix`, in the order of their keys. Blocking. Raises Overtaken, Damaged, OSError."""
    found = []
    for place in _from(fd, _root(fd, transaction, page_size), prefix, page_size):
        if not place.key.startswith(prefix):
            break
        found.append(place)
    return found


def _root(fd: int, transaction: int, page_size: int) -> int:
    for number in (0, 1):
        meta = unpack_meta(os.pread(fd, page_size, number * page_size))
        if meta is not None and meta.transaction == transaction:
            if meta.page_size != page_size:
                raise Damaged(f"pages of {meta.page_size} bytes")
            return meta.root
    raise Overtaken


def _from(fd: int, number: int, low: bytes, page_size: int, depth: int = _MAX_DEPTH) -> Iterator[Place]:
    """The values of a subtree whose keys are `low` or come after it."""
    if number == NO_PAGE:
        return
    if number >= _MOST_PAGES:
        raise Damaged(f"a page names a page {number}")
    page = os.pread(fd, page_size, number * page_size)
    nodes = page_nodes(page, number) if len(page) == page_size else []
    if not nodes or not depth:
        raise Damaged(f"page {number} is not one of a tree")
    if page_flags(page) & BRANCH:
        first = bisect_right(nodes, low, 1, key=lambda at: _key(page, at)) - 1  # the first key of a branch page says nothing
        for at in nodes[first:]:
            lowest, high, upper, _ = NODE.unpack_from(page, at)
            yield from _from(fd, lowest | high << 16 | upper << 32, low, page_size, depth - 1)
        return
    for at in nodes[bisect_left(nodes, low, key=lambda at: _key(page, at)) :]:
        lowest, high, flags, key_bytes = NODE.unpack_from(page, at)
        key_at, value_at, nbytes = at + NODE.size, at + NODE.size + key_bytes, lowest | high << 16
        if flags & BIG_DATA:
            run = int.from_bytes(page[value_at : value_at + 8], "little")
            if run >= _MOST_PAGES:
                raise Damaged(f"page {number} names a page {run}")
            yield Place(page[key_at:value_at], run * page_size + OVERFLOW.size, nbytes)
        else:
            yield Place(page[key_at:value_at], number * page_size + value_at, nbytes)


def _key(page: bytes, at: int) -> bytes:
    return page[at + NODE.size : at + NODE.size + NODE.unpack_from(page, at)[3]]
