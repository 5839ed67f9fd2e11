"""Bytes out of shared memory: what was found where, copied and verified. No sockets here.

A copy counts only if, after it was made, every whole slice in it has the digest that the blob's id vouches for, and the slot
still has the generation that came with its place: then nobody wrote there meanwhile. Parts of slices are verified as slices
where they lie, before they are copied; for them the generation says that what was verified is what was copied.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvstore.api.wire import DIGEST_BYTES, NotFound, Piece, SliceLayout, blob_id, slice_digest
from kvstore.api.wire.same_host import Place
from kvstore_client.blocks import Item
from kvstore_client.direct import current
from kvstore_client.same_host import MappedSegment

_UNIT = 1 << 20
"""Bytes copied and then hashed at a time: they are still in the cache, and the C library copies less than this far slower."""
_BREATH_BYTES = 4 << 20
"""So much is copied before others on the loop get a turn."""

_FENCE = threading.Lock()

Bytes = npt.NDArray[np.uint8]


class NearBlob:
    """The stored form of a blob in a mapped segment."""

    __slots__ = ("_named", "_seen", "blob", "layout", "place", "segment", "stored")

    def __init__(self, blob: bytes, layout: SliceLayout, place: Place, segment: MappedSegment) -> None:
        self.blob = blob
        self.layout = layout
        self.place = place
        self.segment = segment
        end = place.offset + layout.payload_bytes + DIGEST_BYTES * layout.count
        self.stored: Bytes = segment.data[place.offset : end]
        self._named = b""
        self._seen: set[int] = set()

    @property
    def there(self) -> bool:
        """Whether the slot still is the blob's."""
        return self.segment.holds(self.place)

    def digests(self) -> bytes:
        """The digest table, which the blob's id vouches for. Raises NotFound if it does not."""
        if not self._named:
            table = self.stored[self.layout.payload_bytes :].tobytes()
            if blob_id(table) != self.blob:
                raise self.gone()
            self._named = table
        return self._named

    def gone(self) -> NotFound:
        """What there is to say when it is not what it should be."""
        return NotFound(f"blob {self.blob.hex()} is not in shared memory any more, where the match said")

    def check_slice(self, index: int) -> None:
        """Verify a slice where it lies. Raises NotFound."""
        if index not in self._seen:
            whole = self.stored[self.layout.offsets[index] : self.layout.offsets[index + 1]]
            self.check(index, whole)
            self._seen.add(index)

    def check(self, index: int, data: Bytes) -> None:
        """Raise NotFound unless these are the bytes of a slice."""
        if slice_digest(data.data) != self.digests()[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            raise self.gone()

    def copy(self, item: Item, target: Bytes) -> None:
        """Copy an item into its place in the caller's buffer, verified. Raises NotFound."""
        for _ in self.steps(item, target):
            pass

    def steps(self, item: Item, target: Bytes) -> Iterator[int]:
        """As `copy`, in steps, each of some bytes. Nothing counts before the last one is done."""
        self.digests()
        run = item.run
        if run.segments > 1:
            for index in dict.fromkeys(piece.slice for piece in item.pieces):
                self.check_slice(index)
            last = run.offset + (run.segments - 1) * run.stride + run.length
            shape = (run.segments, run.length)
            source = as_strided(self.stored[run.offset : last], shape, (run.stride, 1), writeable=False)
            end = item.target + (run.segments - 1) * item.target_stride + run.length
            np.copyto(as_strided(target[item.target : end], shape, (item.target_stride, 1)), source)
            yield run.segments * run.length
        else:
            yield from self._copy_pieces(item.pieces, item.target - run.offset, target)
        with _FENCE:  # what was copied is read before the generation is, on processors that reorder reads too
            pass
        if not self.there:
            raise self.gone()

    def _copy_pieces(self, pieces: Sequence[Piece], shift: int, target: Bytes) -> Iterator[int]:
        """Adjacent pieces, which go to where they lie in the blob and `shift` further."""
        first = 0
        for index, piece in enumerate(pieces):
            start, end = pieces[first].offset, piece.offset + piece.size
            if end - start < _UNIT and index + 1 < len(pieces):
                continue
            for part in pieces[first : index + 1]:
                if not part.whole:
                    self.check_slice(part.slice)
            np.copyto(target[start + shift : end + shift], self.stored[start:end])
            for part in pieces[first : index + 1]:
                if part.whole:
                    at = part.offset + shift
                    self.check(part.slice, target[at : at + part.size])
            first = index + 1
            yield end - start


async def copy_near(blobs: dict[bytes, NearBlob], items: Sequence[Item], target: memoryview, arrived: Callable[[Item], None]) -> list[Item]:
    """Copy what of the items is near. Returns the others, in order: what is not there, and what turned out to have gone."""
    out, left, breath = np.frombuffer(target, np.uint8), list[Item](), 0
    for item in items:
        near = blobs.get(item.blob)
        if near is None:
            left.append(item)
            continue
        try:
            for nbytes in near.steps(item, out):
                breath += nbytes
                if breath >= _BREATH_BYTES and current() is None:
                    breath = 0
                    await asyncio.sleep(0)
        except NotFound:
            del blobs[item.blob]
            left.append(item)
            continue
        arrived(item)
    return left
