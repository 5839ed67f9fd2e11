"""Parts of pages being received into DRAM slots, slice by slice, and read there while they come. What becomes of them is for `put.py`."""

import asyncio
from array import array
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import BadDigest, BadRequest, Cancelled, KVStoreError, NotFound
from kvstore.kvspec import SliceLayout
from kvstore.store.puts.late_digests import LateDigests
from kvstore.store.puts.parts import parts_of
from kvstore.store.puts.request import PutRequest
from kvstore.store.space import Space
from kvstore.tiers.blobs import NO_SLOT
from kvstore.tiers.dram import Arena

_NONE_YET = np.zeros((0, 0), np.bool_)


class Receiving:
    """What of a put is wanted, and has arrived. Pages are counted from the root, parts and slices from 0."""

    def __init__(self, handle: int, space: Space, request: PutRequest, arena: Arena, base_pages: int) -> None:
        self.handle = handle
        self.space = space
        self.request = request
        self.base_pages = base_pages
        self.first_page = request.first_page
        self.total_pages = base_pages + len(request.tokens) // space.tree.pages.token_bytes
        self.payload_bytes = 0
        """Payload bytes wanted."""
        self.closed = False
        self.settled = asyncio.Event()
        """Set once all that is wanted has arrived, or the put has failed or ended."""
        self.parts = parts_of(space.spec, request.ranges)
        self._arena = arena
        self._layouts = self.parts.layouts
        self._slices = self.parts.slice_base[-1]
        """Of a page."""
        self._wanted = _NONE_YET
        self._wants_all = False
        """Whether every part is wanted on every page, as of most puts: what follows from that needs no look at each, nor any of numpy."""
        self._slots = array("q")
        """Of each part of each page, NO_SLOT where there is none; nothing once it holds none of them any more."""
        self._received = bytearray()
        """A byte for each slice of each page: whether it is there, or not wanted."""
        self._claimed = bytearray()
        """Likewise, whether it is there, not wanted, or just coming."""
        self._missing = 0
        self._late = LateDigests()
        self._writers = 0
        self._followers = 0
        self._followed_rows: list[int] = []
        """Blobs that have slots of the put which followers may still read, each pinned for that."""
        self._progress = asyncio.Event()
        self._error: KVStoreError | None = None

    def in_spans(self) -> npt.NDArray[np.bool_]:
        """Which parts (pages, parts) the request announces."""
        if not self.request.spans:
            return np.ones((self.total_pages - self.first_page, len(self._layouts)), np.bool_)
        pages = np.arange(self.first_page, self.total_pages)[:, np.newaxis]
        spans = np.array(self.request.spans)
        return np.asarray((pages >= spans[:, 0]) & (pages < spans[:, 1]))

    def want(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Fix which parts (pages, parts) are to be sent."""
        self._wanted, self._wants_all = wanted, 0 not in wanted.tobytes()
        self._slots = array("q", (NO_SLOT,)) * wanted.size
        if self._wants_all:
            self._received = bytearray(len(wanted) * self._slices)
            self.payload_bytes = len(wanted) * sum(layout.payload_bytes for layout in self._layouts)
        else:
            self._received = bytearray(~np.repeat(wanted, [layout.count for layout in self._layouts], axis=1))
            cells = zip(wanted.sum(axis=0).tolist(), self._layouts, strict=True)
            self.payload_bytes = sum(count * layout.payload_bytes for count, layout in cells)
        self._claimed = self._received[:]
        self._missing = self._received.count(0)
        if not self._missing:
            self.settled.set()

    def wanted_cells(self) -> list[tuple[int, int]]:
        """(page, part) of all that is to be sent, in order."""
        if self._wants_all:
            return [(page, part) for page in range(self.first_page, self.total_pages) for part in range(len(self._layouts))]
        rows, parts = np.nonzero(self._wanted)
        return list(zip((rows + self.first_page).tolist(), parts.tolist(), strict=True))

    def wanted_runs(self) -> list[tuple[int, int, int]]:
        """(part, first page, last page) of all that is to be sent; pages half-open."""
        if self._wants_all:
            return [(part, self.first_page, self.total_pages) for part in range(self._wanted.shape[1])]
        runs = []
        for part in range(self._wanted.shape[1]):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], self._wanted[:, part].astype(np.int8), [0]])))
            runs += [(part, int(a) + self.first_page, int(b) + self.first_page) for a, b in edges.reshape(-1, 2)]
        return runs

    @property
    def all_wanted(self) -> bool:
        """Whether all that is announced is to be sent."""
        return self._wants_all or bool(np.array_equal(self._wanted, self.in_spans()))

    def wants(self, page: int, part: int) -> bool:
        """Whether a part is to be sent."""
        row = page - self.first_page
        return 0 <= row < len(self._wanted) and 0 <= part < len(self._layouts) and bool(self._wanted[row, part])

    @property
    def shape(self) -> tuple[int, int]:
        """How many pages it is of, and how many parts they have in all."""
        return self._wanted.shape[0], self._wanted.size

    @property
    def brings_all(self) -> bool:
        """Whether every part is wanted on every page."""
        return self._wants_all

    def add_slot(self, page: int, part: int, slot: int) -> None:
        """Take over a DRAM slot. Raises why the put ended (and frees the slot) if it did while it was being allocated."""
        if self.closed:
            self._arena.free(slot)
            raise self.why_ended
        self._slots[self._cell(page - self.first_page, part)] = slot

    def _cell(self, row: int, part: int) -> int:
        return row * len(self._layouts) + part

    def _run(self, page: int, part: int, first_slice: int, last_slice: int) -> slice:
        """Where some slices are among all."""
        base = (page - self.first_page) * self._slices + self.parts.slice_base[part]
        return slice(base + first_slice, base + last_slice)

    # --- receiving -----------------------------------------------------------------------------------------------------

    def has(self, page: int, part: int, first_slice: int, slices: int) -> bool:
        """Whether these slices have all arrived: what a client sends again, because it can't know, is dropped then."""
        if self.closed or not slices > 0 or not self.wants(page, part) or not first_slice + slices <= self._layouts[part].count:
            return False
        return 0 not in self._received[self._run(page, part, first_slice, first_slice + slices)]

    def check_again(self, page: int, part: int, first_slice: int, claimed: bytes) -> None:
        """Slices that have arrived came once more, with these digests. If they are others, the put is spoilt."""
        table = self._layouts[part].payload_bytes + first_slice * DIGEST_BYTES
        if not self.closed and claimed != self._view(page - self.first_page, part)[table : table + len(claimed)]:
            self.fail(BadRequest(f"slices of page {page}, part {part} were sent twice, and differ"))

    def locate(self, page: int, part: int, first_slice: int, nbytes: int, slices: int) -> tuple[memoryview, tuple[int, ...]]:
        """Where `slices` consecutive slices of one part, `nbytes` in all, go, and the slices' sizes.

        Raises BadRequest if they are not whole slices that are wanted. Every call must be followed by `received` or
        `release_writer`.
        """
        if self.closed:
            raise self.why_ended
        row = page - self.first_page
        if not 0 <= part < len(self._layouts):
            raise BadRequest(f"part {part} does not exist: this put has {len(self._layouts)} a page")
        if not 0 <= row < len(self._wanted) or not self._wanted[row, part]:
            raise BadRequest(f"page {page}, part {part} is not wanted in this put: send what the reply to PUT names")
        layout = self._layouts[part]
        if not 0 <= first_slice < layout.count:
            raise BadRequest(f"slice {first_slice} does not exist: part {part} has {layout.count}")
        start = layout.offsets[first_slice]
        end = start + nbytes
        last = bisect_left(layout.offsets, end)
        if nbytes <= 0 or last >= len(layout.offsets) or layout.offsets[last] != end:
            raise BadRequest(f"{nbytes} bytes from slice {first_slice} on do not end at a slice of sizes {layout.sizes[:8]}")
        if last - first_slice != slices:
            raise BadRequest(f"{slices} digests for {last - first_slice} slices")
        run = self._run(page, part, first_slice, last)
        if 1 in self._claimed[run]:
            raise BadRequest(f"slices of page {page}, part {part} were sent twice")
        self._claimed[run] = b"\1" * slices
        self._writers += 1
        return self._view(row, part)[start:end], layout.sizes[first_slice:last]

    def expect(self, page: int, part: int, first_slice: int, slices: int) -> None:
        """Slices come whose digests are said later, wanted or not. Raises BadRequest if the put can have no such slices."""
        there = self.first_page <= page < self.total_pages and part < len(self._layouts)
        if not there or not first_slice + slices <= self._layouts[part].count:
            raise BadRequest(f"slices {first_slice} to {first_slice + slices} of page {page}, part {part}: this put has none such")
        self._late.expect((page, part, first_slice), slices)

    def received(self, page: int, part: int, first_slice: int, digests: list[bytes], claimed: bytes | None) -> None:
        """Slices have arrived with these digests; `claimed` are the ones the client computed, None if it says them later. Raises BadDigest.

        They count once both are known.
        """
        self._writers -= 1
        if self.closed:
            self._free_if_idle()
            raise self.why_ended
        if claimed is None:
            claimed = self._late.found((page, part, first_slice), digests)
        if claimed is not None:
            self._verify(page, part, first_slice, digests, claimed)

    def say(self, digests: bytes) -> None:
        """The client says the digests of all that was expected without, by page, part and slice. What is wrong with them spoils the put."""
        try:
            for (page, part, first_slice), found, said in self._late.said(digests):
                if self.closed:
                    break  # its commit says so
                self._verify(page, part, first_slice, found, said)
        except (BadRequest, BadDigest) as error:
            self.fail(error)

    def _verify(self, page: int, part: int, first_slice: int, digests: list[bytes], claimed: bytes) -> None:
        row, layout = page - self.first_page, self._layouts[part]
        for index, digest in enumerate(digests):
            if digest != claimed[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
                where = f"page {page}, part {part}, slice {first_slice + index}"
                raise BadDigest(f"{where}: what came is not what its digest is of: it changed on the way, or while it was put")
        table = layout.payload_bytes + first_slice * DIGEST_BYTES
        self._view(row, part)[table : table + len(claimed)] = claimed
        run = self._run(page, part, first_slice, first_slice + len(digests))
        self._received[run] = b"\1" * len(digests)  # none of them was there: `locate` gives out each once
        self._missing -= len(digests)
        if not self._missing:
            self.settled.set()
        self._tell_followers()

    def release_writer(self, page: int, part: int, first_slice: int, slices: int) -> None:
        """What `locate` announced did not arrive; it may be sent again."""
        self._claimed[self._run(page, part, first_slice, first_slice + slices)] = bytes(slices)
        self._writers -= 1
        self._free_if_idle()

    @property
    def missing(self) -> int:
        """Slices that are wanted, and not there yet."""
        return self._missing

    @property
    def _whole(self) -> bool:
        """Whether all that was wanted was received, and verified."""
        return not (self.closed or self._missing or self._error is not None)

    @property
    def error(self) -> KVStoreError | None:
        """What spoilt it."""
        return self._error

    @property
    def why_ended(self) -> KVStoreError:
        """What a request of its client hears that finds it ended: what spoilt it, or Cancelled if it was given up."""
        return self._error or Cancelled(f"put {self.handle} has ended")

    def fail(self, error: KVStoreError) -> None:
        """Spoil the put: its commit, and whatever else comes too late for it, will raise the first such error."""
        self._error = self._error or error
        self.settled.set()

    def _view(self, row: int, part: int) -> memoryview:
        return self._arena.view(self._slots[self._cell(row, part)])

    def _free_if_idle(self) -> None:
        """A connection may still be receiving into a slot, or a follower sending from one; the last one out frees them."""
        if not self.closed or self._writers or self._followers:
            return
        given = {int(self.space.blobs.slot[blob]) for blob in self._followed_rows}
        for slot in self._slots:
            if slot != NO_SLOT and slot not in given:
                self._arena.free(slot)
        self._slots = array("q")
        followed, self._followed_rows = self._followed_rows, []
        for blob in followed:
            self.space.unpin(blob)

    # --- following -----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Keep what has arrived where it is, whatever becomes of the put, until `unfollow`."""
        self._followers += 1

    def unfollow(self) -> None:
        """Undo one `follow`."""
        self._followers -= 1
        self._free_if_idle()

    def _tell_followers(self) -> None:
        if self._followers:
            self._progress.set()
            self._progress = asyncio.Event()

    async def progress(self) -> None:
        """Wait until more has arrived, or the put has ended."""
        await self._progress.wait()

    def layout_of(self, page: int, part: int) -> SliceLayout:
        """How a part that is being sent is cut into slices. Raises BadRequest if it is not."""
        if not self.wants(page, part):
            raise BadRequest(f"page {page}, part {part} is not being sent in this put")
        return self._layouts[part]

    def arrived(self, page: int, part: int, first_slice: int, last_slice: int) -> memoryview | None:
        """The stored form of a part once its slices [first, last) are there and verified; None as long as they are not.

        Raises NotFound if they never will be.
        """
        row = page - self.first_page
        here = 0 not in self._received[self._run(page, part, first_slice, last_slice)]
        if here and self._slots and self._slots[self._cell(row, part)] != NO_SLOT:
            return self._view(row, part)
        if self.closed:
            raise NotFound(f"put {self.handle} ended before all of it was there: what was read of it is void")
        return None
