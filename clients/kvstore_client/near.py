"""Bytes out of shared memory: what was found where, copied and verified. No sockets and no threads here.

A copy counts only if, after it was made, every whole slice in it has the digest that the blob's id vouches for, and the slot
still has the generation that came with its place: then nobody wrote there meanwhile. Parts of slices are verified as slices
where they lie, before they are copied; for them the generation says that what was verified is what was copied.
"""

import threading

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvstore.api.wire import DIGEST_BYTES, NotFound, SliceLayout, blob_id, slice_digest
from kvstore.api.wire.same_host import Place
from kvstore_client.blocks import Item
from kvstore_client.same_host import MappedSegment

_UNIT = 1 << 20
"""Bytes copied and then hashed at a time: they are still in the cache, and the C library copies less than this far slower."""

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
        self.digests()
        for first, last in portions(item):
            self.copy_portion(item, first, last, target)
        self.confirm()

    def copy_portion(self, item: Item, first: int, last: int, target: Bytes) -> None:
        """Copy the pieces [first, last) of an item. It counts once all of it is copied and `confirm` raises nothing. Raises NotFound."""
        if item.run.segments > 1:
            self._copy_segments(item, target)
            return
        pieces, shift = item.pieces[first:last], item.target - item.run.offset
        for piece in pieces:
            if not piece.whole:
                self.check_slice(piece.slice)
        start, end = pieces[0].offset, pieces[-1].offset + pieces[-1].size
        np.copyto(target[start + shift : end + shift], self.stored[start:end])
        for piece in pieces:
            if piece.whole:
                at = piece.offset + shift
                self.check(piece.slice, target[at : at + piece.size])

    def _copy_segments(self, item: Item, target: Bytes) -> None:
        run = item.run
        for index in dict.fromkeys(piece.slice for piece in item.pieces):
            self.check_slice(index)
        last = run.offset + (run.segments - 1) * run.stride + run.length
        shape = (run.segments, run.length)
        source = as_strided(self.stored[run.offset : last], shape, (run.stride, 1), writeable=False)
        end = item.target + (run.segments - 1) * item.target_stride + run.length
        np.copyto(as_strided(target[item.target : end], shape, (item.target_stride, 1)), source)

    def confirm(self) -> None:
        """Raise NotFound unless the slot still is the blob's, so that it was as long as something was read from it."""
        with _FENCE:  # what was copied is read before the generation is, on processors that reorder reads too
            pass
        if not self.there:
            raise self.gone()


def portions(item: Item) -> list[tuple[int, int]]:
    """The pieces of an item as ranges of about a MiB or more, each to be copied at once; those of a strided run are copied all at once."""
    if item.nbytes <= _UNIT or item.run.segments > 1:
        return [(0, len(item.pieces))]
    found, first, nbytes = [], 0, 0
    for index, piece in enumerate(item.pieces, 1):
        nbytes += piece.size
        if nbytes >= _UNIT or index == len(item.pieces):
            found.append((first, index))
            first, nbytes = index, 0
    return found
