"""One put: parts of pages being received into DRAM slots, and what becomes of them.

They are invisible until the put is committed; a put that ends in any other way leaves nothing behind. Others may follow a
put under way and read what has arrived, provisionally.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable

import numpy as np

from kvstore.digests import DIGEST_BYTES, KEY_BYTES, blob_id
from kvstore.errors import BadRequest, Busy
from kvstore.kvspec import PartRange
from kvstore.radix.pages import Slots
from kvstore.store.puts.pending import Pending
from kvstore.store.puts.receiving import Receiving
from kvstore.store.puts.request import PutRequest
from kvstore.store.space import Space
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.dram import Arena

_log = logging.getLogger("kvstore.store")

_NAMED_AT_ONCE = 512
_WRITTEN_MS = 100
"""After so long, who commits too early may try again."""


class Put(Receiving):
    """A put under way. Pages are counted from the root, parts and slices from 0."""

    def __init__(self, handle: int, owner: int, space: Space, request: PutRequest, arena: Arena, base_pages: int = 0) -> None:
        super().__init__(handle, space, request, arena, base_pages)
        self.owner = owner
        self.first_needed = self.total_pages
        self.keys = b""
        self.parent = b""
        self.committed = False
        self.ready = False
        """Whether it has its slots, so that it can be sent to and followed."""
        self.begun = asyncio.Event()
        """Set once it is ready, or has ended."""
        self.own_name = 0
        """What its owner calls it, if it does."""
        self.at_once = False
        """Whether it is sent without waiting to hear the handle, and what is wanted: what is not is dropped."""
        self.still_coming = False
        """Whether slices came while a COMMIT waited for all of them in vain: the rest is on its way."""
        self.last_used = time.monotonic()
        self._anchors: list[bytes] = []
        self._names: list[bytes] = []
        self.bad_copies: dict[int, int] = {}
        """Blobs whose copy in DRAM, in that slot, does not verify, while what was received of them does: it takes that one's place."""
        self.at_end: list[Callable[[], None]] = []
        """Called once each when the put ends, however it does."""

    @property
    def anchors(self) -> list[bytes]:
        """The boundaries that the put pins, by key: the last page before its new ones that is in the tree, none at the root.

        In a flat namespace, each of its pages that was there when it began.
        """
        return self._anchors

    def key(self, page: int) -> bytes:
        """The key of a page of the put."""
        return self.keys[(page - self.first_page) * KEY_BYTES : (page - self.first_page + 1) * KEY_BYTES]

    def page_keys(self) -> set[bytes]:
        """The keys of all pages of the put."""
        return {self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)}

    def announced(self) -> list[tuple[PartRange, int, int]]:
        """Each part, and the pages [first, last) that carry it."""
        spans = self.request.spans or ((self.first_page, self.total_pages),) * len(self.request.ranges)
        return [(part, first, last) for part, (first, last) in zip(self.request.ranges, spans, strict=True)]

    def last_keys(self) -> list[bytes]:
        """The boundaries that all pages of the put are on the way to: its last page, or, in a flat namespace, each."""
        first = self.first_page if self.space.spec.flat else self.total_pages - 1
        return [self.key(page) for page in range(first, self.total_pages)]

    def hold(self, anchors: list[bytes], first_needed: int) -> None:
        """Take over the pins of pages that are there; `first_needed` is the first page that is not."""
        self._anchors, self.first_needed = anchors, first_needed

    # --- ending --------------------------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raise what stands against a commit: Busy while slices are still being copied or received."""
        if self._error is not None or self.closed:
            raise self.why_ended
        if self._missing:
            row, index = divmod(self._received.index(0), self._slices)
            if self._writers or self.still_coming:
                raise Busy(f"{self._missing} slices are not there yet, and some of them are just coming", retry_after_ms=_WRITTEN_MS)
            raise BadRequest(f"{self._missing} slices have not arrived, the first is slice {index} of page {self.first_page + row}")

    @property
    def whole(self) -> bool:
        """Whether all that was wanted of it has arrived, and nothing has spoilt it."""
        return self.ready and self._whole

    def in_dram_already(self) -> list[int]:
        """The blobs in DRAM that have the content of what was received; none as long as not all of it was."""
        if not self._whole:
            return []
        blobs = self.space.blobs
        if not blobs.count:
            return []
        there = [row for row in blobs.find_each(self._blob_ids()) if row >= 0]
        return [row for row in there if blobs.slot[row] != NO_SLOT]

    async def name_blobs(self) -> None:
        """Compute the blob ids of what was received, giving way to others in between; nothing as long as not all of it was."""
        cells = self.wanted_cells()
        while self._whole and len(self._names) + _NAMED_AT_ONCE < len(cells):
            self._name(cells[len(self._names) : len(self._names) + _NAMED_AT_ONCE])
            await asyncio.sleep(0)

    def _blob_ids(self) -> list[bytes]:
        """Of all that was wanted, in the order of `wanted_cells`; all of it was received."""
        if len(cells := self.wanted_cells()) > len(self._names):
            self._name(cells[len(self._names) :])
        return self._names

    def _name(self, cells: list[tuple[int, int]]) -> None:
        for page, part in cells:
            stored, payload = self._view(page - self.first_page, part), self._layouts[part].payload_bytes
            self._names.append(blob_id(stored[payload : payload + DIGEST_BYTES * self._layouts[part].count]))

    def hand_over(self) -> Pending:
        """What was received, as blob rows, each pinned once for the caller. Bytes that the namespace has already are dropped."""
        rows = np.full(self._wanted.shape, -1, np.int32)
        try:
            names = self._blob_ids()
            found = self.space.blobs.find_each(names)
            if names and max(found) < 0 and not self._followers and len(set(names)) == len(names):
                self._hand_over_new(rows, names)
                names, found = [], []
            for (page, part), name, blob in zip(self.wanted_cells() if names else (), names, found, strict=True):
                if blob < 0:
                    blob = self.space.blobs.find(name)  # another part of this put may be the same
                rows[page - self.first_page, part] = self._row_of(page - self.first_page, part, name, blob)
        except BaseException:
            for row in rows[rows >= 0].tolist():
                self.space.unpin(row)
            raise
        width = self.space.tree.pages.token_bytes
        labels = self.request.tokens[(self.first_page - self.base_pages) * width :]
        extras = {page + self.base_pages: extra for page, extra in self.request.extras.items() if page + self.base_pages >= self.first_page}
        return Pending(self.first_page, self.parent, self.keys, labels, self.request.ranges, rows, extras)

    def _hand_over_new(self, rows: Slots, names: list[bytes]) -> None:
        """What nearly all puts bring: blobs that the namespace has not, all different, and nobody follows."""
        layouts, slots = self._layouts * len(rows), self._slots.tolist()
        if not self._wants_all:
            wanted = [cell for cell, slot in enumerate(slots) if slot != NO_SLOT]
            layouts, slots = tuple(layouts[cell] for cell in wanted), [slots[cell] for cell in wanted]
        rows[self._wanted] = self.space.take_new(names, layouts, slots)  # in the order of `wanted_cells`
        self._slots = array("q")

    def _row_of(self, row: int, part: int, name: bytes, blob: int) -> int:
        """The blob row of a received part, pinned; `blob` is that of its name, if there is one."""
        space, slot = self.space, self._slots[self._cell(row, part)]
        if blob < 0:
            blob = space.blobs.add(name, self._layouts[part])
        else:
            space.stats.dedup_blobs += 1
        space.pin(blob)
        there = int(space.blobs.slot[blob])
        if there == NO_SLOT:
            space.set_slot(blob, slot)
        elif blob in space.spoiled or self.bad_copies.get(blob) == there:
            _log.error("a DRAM copy of blob %s did not verify: what was just put takes its place", name.hex())
            space.stats.corrupt_blobs += blob not in space.spoiled  # else it is counted
            space.replace_slot(blob, slot)
        else:
            return blob
        if self._followers:
            space.pin(blob)
            self._followed_rows.append(blob)
        else:
            self._slots[self._cell(row, part)] = NO_SLOT
        return blob

    def close(self, *, committed: bool = False) -> None:
        """End the put: whatever it still holds goes back. Safe to call again."""
        if self.closed:
            return
        self.closed, self.committed = True, committed
        self.begun.set()
        self.settled.set()
        for call in self.at_end:
            call()
        self._tell_followers()
        for anchor in () if self.space.dropped else self._anchors:
            self.space.tree.let_go(anchor)
        self._free_if_idle()
