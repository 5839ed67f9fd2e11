"""Where in an LMDB data file the values of some keys lie, found without touching the values.

LMDB's own look-up is as quick, but its binding touches every page of a value that it gives out, and each that is not in the page cache is
then read by itself. Format as in `kvstore.lmdb_walk`. The caller keeps a read transaction open meanwhile: its pages stay what they are.
"""

import os
import struct
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from kvstore.lmdb_walk import BIG_DATA, BRANCH, NO_PAGE, NODE, OVERFLOW, page_flags, page_nodes, unpack_meta

_MAX_DEPTH = 32
_MOST_PAGES = 1 << 48


class Overtaken(Exception):
    """The file has no meta page of this transaction any more: later ones have taken both. Begin another."""


class Damaged(Exception):
    """A page on the way is not what it should be."""


class Place(NamedTuple):
    """Where a value lies. A tuple, as a blob has hundreds, and a fetch waits for them."""

    key: bytes
    at: int
    nbytes: int


def find_values(
    fd: int, transaction: int, prefix: bytes, page_size: int = 4096, *, start: bytes = b"", most: int = _MOST_PAGES
) -> list[Place]:
    """The values of all keys that begin with `prefix`, in the order of their keys; of those from `start` on, if given, and `most` of them.

    Blocking. Raises Overtaken, Damaged, OSError.
    """
    found: list[Place] = []
    _add_from(found, fd, _root(fd, transaction, page_size), prefix, max(start, prefix), most, page_size)
    return found


def _root(fd: int, transaction: int, page_size: int) -> int:
    for number in (0, 1):
        meta = unpack_meta(os.pread(fd, page_size, number * page_size))
        if meta is not None and meta.transaction == transaction:
            if meta.page_size != page_size:
                raise Damaged(f"pages of {meta.page_size} bytes")
            return meta.root
    raise Overtaken


def _add_from(
    found: list[Place], fd: int, number: int, prefix: bytes, start: bytes, most: int, page_size: int, depth: int = _MAX_DEPTH
) -> bool:  # fmt: skip
    """Add the values of a subtree whose keys begin with `prefix`, from `start` on. Returns whether more behind it are wanted."""
    if number == NO_PAGE:
        return True
    if number >= _MOST_PAGES:
        raise Damaged(f"a page names a page {number}")
    page = os.pread(fd, page_size, number * page_size)
    nodes = page_nodes(page, number) if len(page) == page_size else []
    if not nodes or not depth:
        raise Damaged(f"page {number} is not one of a tree")
    if page_flags(page) & BRANCH:
        first = bisect_right(nodes, start, 1, key=lambda at: _key(page, at)) - 1  # the first key of a branch page says nothing
        for at in nodes[first:]:
            lowest, high, upper, _ = NODE.unpack_from(page, at)
            if not _add_from(found, fd, lowest | high << 16 | upper << 32, prefix, start, most, page_size, depth - 1):
                return False
        return True
    base, size, big = number * page_size, -1, struct.Struct("")
    first = bisect_left(nodes, start, key=lambda at: _key(page, at))
    for at in nodes[first : first + most - len(found)]:
        lowest, high, flags, key_bytes = NODE.unpack_from(page, at)
        at += NODE.size
        if not page.startswith(prefix, at):
            return False
        if flags & BIG_DATA:
            if key_bytes != size:
                size, big = key_bytes, struct.Struct(f"<{key_bytes}sQ")
            if at + big.size > page_size:
                raise Damaged(f"page {number} names no page behind a key")
            key, run = big.unpack_from(page, at)
            if run >= _MOST_PAGES:
                raise Damaged(f"page {number} names a page {run}")
            found.append(Place(key, run * page_size + OVERFLOW.size, lowest | high << 16))
        else:
            found.append(Place(page[at : at + key_bytes], base + at + key_bytes, lowest | high << 16))
    return len(found) < most


def _key(page: bytes, at: int) -> bytes:
    return page[at + NODE.size : at + NODE.size + NODE.unpack_from(page, at)[3]]
