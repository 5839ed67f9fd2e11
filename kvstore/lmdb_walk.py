"""Reads the entries of an LMDB data file without LMDB, which gives up at the first damaged page, or ends the process there.

Format 1 of LMDB 0.9, one unnamed database without duplicates. Whatever does not look right is skipped with what hangs from it:
a page of another number or kind, an offset outside its page, a page outside the file.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC, DATA_VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<16xII16xI36xQ32xQQQQ")
"""Of a meta page: magic, version, page size, root of the list of free pages, entries and root of the database, last page, transaction."""
_PAGE = struct.Struct("<QHHHH")
OVERFLOW = struct.Struct("<QHHI")
NODE = struct.Struct("<HHHH")
BRANCH, LEAF, OVERFLOW_PAGE = 1, 2, 4
BIG_DATA = 1
NO_PAGE = (1 << 64) - 1
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Meta:
    """What a meta page says."""

    page_size: int
    free_root: int
    entries: int
    root: int
    last_page: int
    transaction: int


def read_meta(file: Path) -> Meta | None:
    """The newer of the two meta pages, or the one that can be read; None if neither can."""
    return max(read_metas(file), key=lambda meta: meta.transaction, default=None)


def read_metas(file: Path) -> list[Meta]:
    """Those of the two meta pages that can be read; of a file that is well, both."""
    found: list[Meta] = []
    with file.open("rb") as data:
        for at in (0, 4096, 8192, 16_384, 32_768, 65_536):
            data.seek(at)
            meta = unpack_meta(data.read(_META.size))
            if meta is not None and at in (0, meta.page_size):
                found.append(meta)
    return found


def unpack_meta(head: bytes) -> Meta | None:
    """What a meta page says that begins so; None if it is none."""
    if len(head) < _META.size:
        return None
    magic, version, page_size, free_root, entries, root, last_page, transaction = _META.unpack_from(head)
    if magic != MAGIC or version != DATA_VERSION or page_size not in (4096, 8192, 16_384, 32_768, 65_536):
        return None
    return Meta(page_size, free_root, entries, root, last_page, transaction)


class Walk:
    """Iterate over it for (key, value) of every entry that can be reached. `skipped` counts pages that could not be read."""

    def __init__(self, file: Path) -> None:
        self.skipped = 0
        self._meta = read_meta(file)
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._pages = os.fstat(self._fd).st_size

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        try:
            if self._meta is not None and self._meta.root != NO_PAGE:
                yield from self._subtree(self._meta.root, _MAX_DEPTH)
        finally:
            os.close(self._fd)

    def is_whole(self) -> bool:
        """Whether every entry that it counts can be reached, and the list of free pages, too. In place of iterating over it."""
        if self._meta is None:
            os.close(self._fd)
            return False
        try:
            for _ in self._subtree(self._meta.free_root, _MAX_DEPTH) if self._meta.free_root != NO_PAGE else ():
                pass
        except BaseException:
            os.close(self._fd)
            raise
        return sum(1 for _ in self) == self._meta.entries and not self.skipped

    def _subtree(self, number: int, depth: int) -> Iterator[tuple[bytes, bytes]]:
        page = self._read(number, 1)
        nodes = [] if page is None else page_nodes(page, number)
        if page is None or not nodes or not depth:
            self.skipped += 1
            return
        flags = page_flags(page)
        for at in nodes:
            low, high, node_flags, key_size = NODE.unpack_from(page, at)
            if flags & BRANCH:
                yield from self._subtree(low | high << 16 | node_flags << 32, depth - 1)
                continue
            key = page[at + 8 : at + 8 + key_size]
            value = self._value(page, at + 8 + key_size, low | high << 16, node_flags)
            if value is None:
                self.skipped += 1
            elif key:
                yield key, value

    def _value(self, page: bytes, at: int, size: int, flags: int) -> bytes | None:
        if not flags & BIG_DATA:
            return page[at : at + size] if at + size <= len(page) else None
        if at + 8 > len(page):
            return None
        number = int.from_bytes(page[at : at + 8], "little")
        assert self._meta is not None
        run = self._read(number, -(-(size + OVERFLOW.size) // self._meta.page_size))
        if run is None:
            return None
        found, _, kind, _ = OVERFLOW.unpack_from(run)
        return run[OVERFLOW.size : OVERFLOW.size + size] if found == number and kind & OVERFLOW_PAGE else None

    def _read(self, number: int, count: int) -> bytes | None:
        assert self._meta is not None
        size = self._meta.page_size
        if (number + count) * size > self._pages:
            return None
        try:
            data = os.pread(self._fd, count * size, number * size)
        except OSError:
            return None
        return data if len(data) == count * size else None


def page_flags(page: bytes) -> int:
    """What kind of page it is."""
    return int(_PAGE.unpack_from(page)[2])


def page_nodes(page: bytes, number: int) -> list[int]:
    """Offsets of the nodes of a branch or leaf page; empty if it is not one."""
    found, _, flags, lower, upper = _PAGE.unpack_from(page)
    count = (lower - _PAGE.size) // 2
    if found != number or flags & (BRANCH | LEAF) not in (BRANCH, LEAF) or not _PAGE.size <= lower <= upper <= len(page):
        return []
    return [at for at in struct.unpack_from(f"<{count}H", page, _PAGE.size) if lower <= at <= len(page) - NODE.size]
