"""What has arrived of blobs that are fetched whole: the digests of their slices, and whether they make the blob. Pure."""

import numpy as np

from kvstore.api.wire import DIGEST_BYTES, blob_id
from kvstore_client.blocks import PageBlobs
from kvstore_client.stripes import Stretch


class Ledger:
    """The digests of whole slices, by blob."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], _Table] = {}

    def note(self, stretch: Stretch, digests: bytes) -> None:
        """Pieces arrived, with these digests."""
        block, first, last, low, high = stretch
        for part, layout, start, end, number in block.shape.wholes:
            if start < low:
                start, number = low, number + low - start
            end = min(end, high)
            if start >= end:
                continue
            table = self._tables.get((id(block.blobs), part))
            if table is None:
                table = self._tables[id(block.blobs), part] = _Table(block.blobs, part, layout.count)
            table.note(block.first + first, block.first + last, number, end - start, digests, (start - low) * DIGEST_BYTES)

    def wrong(self) -> bytes | None:
        """The id of a blob of which all has arrived, but which is another; None if there is none."""
        for table in self._tables.values():
            if (found := table.wrong()) is not None:
                return found
        return None


class _Table:
    """The digest tables of one part of pages in a row, one after the other."""

    __slots__ = ("_blobs", "_count", "_digests", "_pages", "_part", "_seen")

    def __init__(self, blobs: PageBlobs, part: int, count: int) -> None:
        self._blobs = blobs
        self._part = part
        self._count = count
        self._pages = blobs.pages
        self._digests = bytearray(DIGEST_BYTES * self._pages * count)
        self._seen = bytearray(self._pages * count)

    def note(self, first: int, last: int, number: int, count: int, digests: bytes, at: int) -> None:
        """Slices [number, number + count) of each of the pages [first, last): their digests begin at byte `at` of those of their page."""
        pages, width = last - first, DIGEST_BYTES * count
        if len(digests) == pages * width and (pages == 1 or count == self._count):
            start = first * self._count + number
            self._digests[DIGEST_BYTES * start : DIGEST_BYTES * start + len(digests)] = digests
            self._seen[start : start + pages * count] = b"\1" * (pages * count)
            return
        table = np.frombuffer(self._digests, np.uint8).reshape(self._pages, -1)
        table[first:last, DIGEST_BYTES * number : DIGEST_BYTES * number + width] = np.frombuffer(digests, np.uint8).reshape(pages, -1)[
            :, at : at + width
        ]
        np.frombuffer(self._seen, np.uint8).reshape(self._pages, -1)[first:last, number : number + count] = 1

    def wrong(self) -> bytes | None:
        """The id of a blob of which all has arrived, but which is another; None if there is none."""
        size, count, digests = DIGEST_BYTES * self._count, self._count, memoryview(self._digests)
        ids = self._blobs.of_part(self._part, 0, self._pages)
        if 0 not in self._seen and b"".join([blob_id(digests[at : at + size]) for at in range(0, len(digests), size)]) == ids:
            return None
        for page in range(self._pages):
            name = ids[DIGEST_BYTES * page : DIGEST_BYTES * (page + 1)]
            if 0 not in self._seen[count * page : count * (page + 1)] and blob_id(digests[size * page : size * (page + 1)]) != name:
                return name
        return None
