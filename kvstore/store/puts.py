"""One put: pages being received into DRAM slots, and their atomic commit.

The pages are invisible until `commit`; a put that ends in any other way leaves nothing behind.
"""

import asyncio
import time
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvstore.digests import DIGEST_BYTES, KEY_BYTES, blob_id
from kvstore.errors import BadDigest, BadRequest, Cancelled, KVStoreError
from kvstore.kvspec import KVSpec, PartRange, SliceLayout
from kvstore.radix.tree import Extras, NewPages
from kvstore.store.space import Space
from kvstore.tiers.dram import Arena


class Ack(Enum):
    """When a put is acknowledged: once its pages can be read, or once they would survive a power cut."""

    MEMORY = "memory"
    DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class PutRequest:
    """What a put says about itself. `tokens` is the whole prefix (uint32 bytes); pages from `first_page` on are put."""

    put_id: bytes
    tokens: bytes
    extras: Extras
    first_page: int
    ranges: tuple[PartRange, ...]
    ack: Ack


@dataclass(frozen=True, slots=True)
class PutResult:
    """How a put ended: pages that are new, and pages that had a version already (`exists`), in this put's range."""

    new_pages: int
    existing_pages: int


class Put:
    """A put under way. `first_needed` is the first page whose bytes are wanted; earlier ones of the put exist already."""

    def __init__(self, handle: int, owner: int, space: Space, request: PutRequest, arena: Arena) -> None:
        self.handle = handle
        self.owner = owner
        self.space = space
        self.request = request
        self.total_pages = len(request.tokens) // space.tree.pages.token_bytes
        self.first_needed = self.total_pages
        self.keys = b""
        self.closed = False
        self.last_used = time.monotonic()
        self._arena = arena
        self._layouts: tuple[SliceLayout, ...] = tuple(space.spec.slice_layout(r) for r in request.ranges)
        self._slots: list[list[int]] = []
        self._received = np.zeros((0, 0), np.bool_)
        self._claimed = self._received
        self._missing = 0
        self._slice_base = np.cumsum([0, *(layout.count for layout in self._layouts)]).tolist()
        self._parent: bytes | None = None
        self._writers = 0
        self._error: KVStoreError | None = None
        self.settled = asyncio.Event()

    @property
    def parent(self) -> bytes | None:
        """The key of the page before the put, which it holds; None at the root."""
        return self._parent

    @property
    def page_count(self) -> int:
        """Pages whose bytes are wanted."""
        return self.total_pages - self.first_needed

    @property
    def payload_bytes(self) -> int:
        """Payload bytes wanted."""
        return self.page_count * sum(layout.payload_bytes for layout in self._layouts)

    def needs_from(self, first_needed: int, parent: bytes | None, keys: bytes) -> None:
        """Fix which pages are wanted. `parent` is the pinned boundary before the put, `keys` those of the wanted pages."""
        self.first_needed, self._parent, self.keys = first_needed, parent, keys
        self._received = np.zeros((self.page_count, self._slice_base[-1]), np.bool_)
        self._claimed = self._received.copy()
        self._missing = self._received.size
        if not self._missing:
            self.settled.set()

    @property
    def stored_sizes(self) -> list[int]:
        """Bytes of the stored form of each part of a page."""
        return [layout.payload_bytes + DIGEST_BYTES * layout.count for layout in self._layouts]

    def add_slot(self, part: int, slot: int) -> None:
        """Take over the DRAM slot of the next part; parts come in order, page after page.

        Raises Cancelled (and frees the slot) if the put ended while it was being allocated.
        """
        if self.closed:
            self._arena.free(slot)
            raise Cancelled(f"put {self.handle} has ended")
        if part == 0:
            self._slots.append([])
        self._slots[-1].append(slot)

    # --- receiving -----------------------------------------------------------------------------------------------------

    def locate(self, page: int, part: int, first_slice: int, nbytes: int, slices: int) -> tuple[memoryview, tuple[int, ...]]:
        """Where `slices` consecutive slices of one part, `nbytes` in all, go, and the slices' sizes. `page` is absolute.

        Raises BadRequest if they are not whole slices of a page of this put. Every call must be followed by `received`
        or `release_writer`.
        """
        if self.closed:
            raise Cancelled(f"put {self.handle} has ended")
        row = page - self.first_needed
        if not 0 <= row < self.page_count:
            raise BadRequest(f"page {page} is not one of the pages [{self.first_needed}, {self.total_pages}) of this put")
        if not 0 <= part < len(self._layouts):
            raise BadRequest(f"part {part} does not exist: this put has {len(self._layouts)} a page")
        layout = self._layouts[part]
        if not 0 <= first_slice < layout.count:
            raise BadRequest(f"slice {first_slice} does not exist: part {part} has {layout.count}")
        start = layout.offsets[first_slice]
        end = start + nbytes
        last = np.searchsorted(layout.offsets, end)
        if nbytes <= 0 or last >= len(layout.offsets) or layout.offsets[int(last)] != end:
            raise BadRequest(f"{nbytes} bytes from slice {first_slice} on do not end at a slice of sizes {layout.sizes[:8]}")
        if int(last) - first_slice != slices:
            raise BadRequest(f"{slices} digests for {int(last) - first_slice} slices")
        claimed = self._claimed[row, self._slice_base[part] + first_slice : self._slice_base[part] + int(last)]
        if claimed.any():
            raise BadRequest(f"slices of page {page}, part {part} were sent twice")
        claimed[:] = True
        self._writers += 1
        return self._arena.view(self._slots[row][part])[start:end], layout.sizes[first_slice : int(last)]

    def received(self, page: int, part: int, first_slice: int, digests: list[bytes], claimed: bytes) -> None:
        """Slices have arrived with these digests; `claimed` are the ones the client computed. Raises BadDigest."""
        self._writers -= 1
        if self.closed:
            self._free_if_idle()
            raise Cancelled(f"put {self.handle} has ended")
        row, layout = page - self.first_needed, self._layouts[part]
        for index, digest in enumerate(digests):
            if digest != claimed[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
                raise BadDigest(f"page {page}, part {part}, slice {first_slice + index}: the bytes received do not match their digest")
        table = layout.payload_bytes + first_slice * DIGEST_BYTES
        self._arena.view(self._slots[row][part])[table : table + len(claimed)] = claimed
        base = self._slice_base[part] + first_slice
        arrived = self._received[row, base : base + len(digests)]
        self._missing -= int((~arrived).sum())
        arrived[:] = True
        if not self._missing:
            self.settled.set()

    def release_writer(self, page: int, part: int, first_slice: int, slices: int) -> None:
        """What `locate` announced did not arrive; it may be sent again."""
        base = self._slice_base[part] + first_slice
        self._claimed[page - self.first_needed, base : base + slices] = False
        self._writers -= 1
        self._free_if_idle()

    def fail(self, error: KVStoreError) -> None:
        """Spoil the put: its commit will raise the first such error."""
        self._error = self._error or error
        self.settled.set()

    # --- ending --------------------------------------------------------------------------------------------------------

    def commit(self) -> PutResult:
        """Make the pages visible, all at once. First commit wins: pages that came into being meanwhile stay as they are."""
        if self._error is not None:
            raise self._error
        if self.closed:
            raise Cancelled(f"put {self.handle} has ended")
        if self._missing:
            row, index = (int(i[0]) for i in np.nonzero(~self._received))
            raise BadRequest(f"{self._missing} slices have not arrived, the first is slice {index} of page {self.first_needed + row}")
        space, request = self.space, self.request
        existing = space.tree.match(request.tokens, request.extras).pages
        skip = max(existing - self.first_needed, 0)
        first = self.first_needed + skip
        pinned: list[int] = []
        try:
            rows = self._take_rows(skip, pinned)
            if first < self.total_pages:
                new = NewPages(self.keys[skip * KEY_BYTES :], request.put_id, rows, request.ranges)
                space.tree.insert(request.tokens, request.extras, first, new)
                np.add.at(space.blobs.pages, rows.ravel(), 1)
        finally:
            for row in pinned:
                space.unpin(row)
        self.close()
        return PutResult(self.total_pages - first, first - request.first_page)

    def _take_rows(self, skip: int, pinned: list[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        """Blob rows (pages, parts) for the new pages, each pinned once and noted. Bytes that the namespace has already are dropped."""
        space = self.space
        rows = np.empty((self.page_count - skip, len(self._layouts)), np.int32)
        for (page, part), _ in np.ndenumerate(rows):
            slot, layout = self._slots[skip + page][part], self._layouts[part]
            table = self._arena.view(slot)[layout.payload_bytes : layout.payload_bytes + DIGEST_BYTES * layout.count]
            name = blob_id(table)
            row = space.blobs.find(name)
            if row < 0:
                row = space.blobs.add(name, layout)
            if space.blobs.slot[row] < 0:
                space.set_slot(row, slot)
                self._slots[skip + page][part] = -1
            space.pin(row)
            pinned.append(row)
            rows[page, part] = row
        return rows

    def close(self) -> None:
        """End the put: whatever it still holds goes back. Safe to call again."""
        if self.closed:
            return
        self.closed = True
        self.settled.set()
        if self._parent is not None and not self.space.dropped:
            self.space.tree.unpin(self._parent)
        self._free_if_idle()

    def _free_if_idle(self) -> None:
        """A connection may still be receiving into a slot; the last one out frees them."""
        if not self.closed or self._writers:
            return
        for slot in (slot for slots in self._slots for slot in slots if slot >= 0):
            self._arena.free(slot)
        self._slots.clear()


def check_cover(spec: KVSpec, ranges: tuple[PartRange, ...]) -> None:
    """Raise BadRequest unless the parts of a page cover all layers and heads of every component exactly once."""
    if not 1 <= len(ranges) <= 256:
        raise BadRequest(f"a page has 1 to 256 parts, not {len(ranges)}")
    for part in ranges:
        spec.check_range(part)
    for index, component in enumerate(spec.components):
        seen = np.zeros((component.layers, component.kv_heads), np.uint16)
        for part in ranges:
            if part.component == index:
                seen[part.layer_lo : part.layer_hi, part.head_lo : part.head_hi] += 1
        if (seen > 1).any():
            raise BadRequest(f"two parts of component {index} overlap")
        if not seen.all():
            layer, head = (int(i[0]) for i in np.nonzero(seen == 0))
            raise BadRequest(f"the parts leave out layer {layer}, head {head} of component {index}: a put covers whole pages")
