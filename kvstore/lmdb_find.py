"""The entries of an LMDB data file whose keys begin with some bytes, read by `pread` of its pages and not through LMDB's map.

An I/O error is an error then, and not the end of the process. Format as in `kvstore.lmdb_walk`. The caller keeps a read transaction open
meanwhile: its pages stay what they are.
"""

import os
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from kvstore.lmdb_walk import BIG_DATA, BRANCH, NO_PAGE, NODE, OVERFLOW, OVERFLOW_PAGE, page_flags, page_nodes, unpack_meta

_MAX_DEPTH = 32
_MOST_PAGES = 1 << 48
_LARGEST_VALUE = 64 << 20


class Overtaken(Exception):
    """The file has no meta page of this transaction any more: later ones have taken both. Begin another."""


class Damaged(Exception):
    """A page on the way is not what it should be."""


class Entry(NamedTuple):
    """One of the file's. A tuple, as there are many."""

    key: bytes
    value: bytes


def find_entries(
    fd: int, transaction: int, prefix: bytes, page_size: int = 4096, *, start: bytes = b"", most: int = _MOST_PAGES
) -> list[Entry]:
    """All entries whose keys begin with `prefix`, in the order of their keys; of those from `start` on, if given, and `most` of them.

    Blocking. Raises Overtaken, Damaged, OSError.
    """
    found: list[Entry] = []
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
    found: list[Entry], fd: int, number: int, prefix: bytes, start: bytes, most: int, page_size: int, depth: int = _MAX_DEPTH
) -> bool:  # fmt: skip
    """Add the entries of a subtree whose keys begin with `prefix`, from `start` on. Returns whether more behind it are wanted."""
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
    first = bisect_left(nodes, start, key=lambda at: _key(page, at))
    for at in nodes[first : first + most - len(found)]:
        lowest, high, flags, key_bytes = NODE.unpack_from(page, at)
        at += NODE.size
        if not page.startswith(prefix, at):
            return False
        found.append(Entry(page[at : at + key_bytes], _value(fd, page, number, at + key_bytes, lowest | high << 16, flags)))
    return len(found) < most


def _value(fd: int, page: bytes, number: int, at: int, nbytes: int, flags: int) -> bytes:
    """The value behind a key; a large one has pages of its own."""
    if flags & BIG_DATA:
        if at + 8 > len(page):
            raise Damaged(f"page {number} names no page behind a key")
        run = int.from_bytes(page[at : at + 8], "little")
        if run >= _MOST_PAGES or nbytes > _LARGEST_VALUE:
            raise Damaged(f"page {number} names a page {run} with {nbytes} bytes")
        data = os.pread(fd, OVERFLOW.size + nbytes, run * len(page))
        if len(data) < OVERFLOW.size or page_flags(data) != OVERFLOW_PAGE or OVERFLOW.unpack_from(data)[0] != run:
            raise Damaged(f"page {run} is not one of a value")
        value = data[OVERFLOW.size :]
    else:
        value = page[at : at + nbytes]
    if len(value) < nbytes:
        raise Damaged(f"page {number} has an entry that is cut short")
    return value


def _key(page: bytes, at: int) -> bytes:
    return page[at + NODE.size : at + NODE.size + NODE.unpack_from(page, at)[3]]
