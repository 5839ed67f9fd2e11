"""The blobs of a data directory of format 1: extents in LMDB, read by `pread` of its file. Blocking.

An entry an extent, of the key namespace number, blob id, number of the extent. All values of a file have one size; the last of a blob is
padded with zeros. How long a blob is, only the journal knows.
"""

import os
from pathlib import Path

from kvstore.errors import NotFound
from kvstore.kvspec import SliceLayout
from kvstore.lmdb_files import DATA_FILE
from kvstore.lmdb_find import Damaged, Overtaken, find_entries
from kvstore.lmdb_walk import Meta, read_meta
from kvstore.tiers.blobs import stored_bytes
from kvstore.tiers.extent_record import blob_key
from kvstore.tiers.stored import verify_stored

_AT_ONCE = 256
"""Extents read by one walk down from the root."""
_MOST_EXTENTS = 1 << 16


class OldBlobs:
    """The file in a folder, or nothing if it is not there. Nobody writes to it meanwhile, and nothing of it is changed."""

    def __init__(self, folder: Path) -> None:
        file = folder / DATA_FILE
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC) if file.exists() else -1
        self._meta = read_meta(file) if self._fd >= 0 else None

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, number: int, blob: bytes, layout: SliceLayout) -> memoryview:
        """A blob's stored form, verified. Raises NotFound, Corrupt, Damaged if LMDB's structure is, OSError if the disk gives an error."""
        if self._fd < 0:
            raise NotFound(f"blob {blob.hex()} is not on SSD: there is no {DATA_FILE}")
        if self._meta is None:
            raise Damaged("no meta page can be read")
        stored = memoryview(bytearray(stored_bytes(layout)))
        self._fill(blob_key(number, blob), self._meta, stored)
        verify_stored(blob, layout, stored)
        return stored

    def _fill(self, key: bytes, meta: Meta, out: memoryview) -> None:
        at = extent = 0
        while at < len(out):
            start = key + extent.to_bytes(2, "big")
            try:
                entries = find_entries(self._fd, meta.transaction, key, meta.page_size, start=start, most=_AT_ONCE)
            except Overtaken as error:
                raise Damaged("its meta pages can't be read any more") from error
            for entry in entries:
                if entry.key != key + extent.to_bytes(2, "big"):
                    raise NotFound(f"blob {key[4:].hex()}: extent {extent} is not on SSD")
                piece = entry.value[: len(out) - at]
                out[at : at + len(piece)] = piece
                at, extent = at + len(piece), extent + 1
            if at < len(out) and (not entries or extent >= _MOST_EXTENTS):
                raise NotFound(f"blob {key[4:].hex()}: of its {len(out)} bytes {at} are on SSD")
