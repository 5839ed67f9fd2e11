"""A matched prefix as a client sees it: what is there of it, under which lease, and what is to be fetched."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import DIGEST_BYTES, BadRequest, ConnectionLost, NotFound, PartRange
from kvstore.api.wire.same_host import Place, unpack_places
from kvstore_client.ahead import InOrder
from kvstore_client.arguments import checked
from kvstore_client.blocks import Block, PageBlobs
from kvstore_client.direct import Elsewhere
from kvstore_client.estimate import Estimate

if TYPE_CHECKING:
    from kvstore_client.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Lack:
    """A component that keeps a match from going to the end of the pages that are there: it alone would let `pages` be matched.

    Of the pages that the end needs it on, `missing_pages` lack it, in [first_page, last_page).
    """

    component: int
    pages: int
    first_page: int
    last_page: int
    missing_pages: int


@dataclass(slots=True, repr=False)
class Match:
    """A matched prefix, up to the longest usable boundary: `pages` whole pages, `tokens` tokens.

    While its lease lasts, none of it is evicted. The store knows `known_pages` pages, but beyond `pages` a window or state
    is missing: `lacks` says which, and where. `dram_pages` of the pages are in the daemon's DRAM (-1 if parts were not asked for).
    `boundaries` are all usable ones as half-open runs, if asked for. The `estimate`, if asked for and there is a page, says what to load
    of it and what to compute.
    """

    pages: int
    tokens: int
    known_pages: int
    boundaries: list[tuple[int, int]]
    dram_pages: int
    lease: int
    """Its number; 0 if there is none, or it was released. What builds on it asks `as_base` for it: a 0 there would mean the root."""
    endpoint: str
    epoch: int
    namespace: "Namespace"
    _runs: list[tuple[int, int, tuple[PartRange, ...]]]
    _ids: bytes
    estimate: Estimate | None = None
    _cut: "Match | None" = None
    """As far as it is best loaded, where that takes other parts."""
    rebuildable_pages: int = -1
    """Pages after `pages` that are gone, but can be computed again (-1 if that was not asked)."""
    lacks: tuple[Lack, ...] = ()
    _ends: float = 0.0
    """When the lease is over by this client's clock: a little before it is by the daemon's."""
    _released: bool = False
    _session: bytes = b""
    _places: bytes = b""
    _by_blob: dict[bytes, Place | None] | None = None
    in_order: InOrder = field(default_factory=InOrder, compare=False)
    """How its pages have been fetched so far."""

    def __repr__(self) -> str:
        leased = "leased" if self.valid else "not leased"
        return f"<Match of {self.pages} pages ({self.tokens} tokens) in {self.namespace.name!r}, {leased}>"

    @property
    def valid(self) -> bool:
        """Whether the lease still holds, as far as can be known here: neither released nor expired, and the daemon still ours."""
        pool = self.namespace.client.pool
        return self.lease != 0 and time.monotonic() < self._ends and (pool.epoch, pool.session) == (self.epoch, self._session)

    @checked()
    async def renew(self, lease_s: float) -> None:
        """Let the lease last `lease_s` seconds from now. Raises NotFound if it is over."""
        ends = time.monotonic() + lease_s
        await self.namespace.client.renew(self.lease, lease_s)
        self._ends = ends

    @property
    def near(self) -> bool:
        """Whether all of it was in shared memory when it was matched."""
        return bool(self._places) and self.dram_pages == self.pages

    def places(self) -> dict[bytes, Place | None]:
        """Where each blob was in shared memory when it was matched; empty if that is not known."""
        if self._by_blob is None:
            width, ids = DIGEST_BYTES, self._ids
            self._by_blob = dict(
                zip((ids[i : i + width] for i in range(0, len(ids), width)), unpack_places(self._places), strict=True)
                if self._places
                else ()
            )
        return self._by_blob

    async def release(self) -> None:
        """End the lease. Harmless if it is over already."""
        if self.lease:
            lease, self.lease, self._released = self.lease, 0, True
            try:
                await self.namespace.client.release(lease)
            except (Elsewhere, ConnectionLost):  # of a line
                self.lease, self._released = lease, False
                raise

    def as_base(self) -> int:
        """The lease that a request names to go on after this prefix; 0, which means the root, only for a match of nothing.

        Raises NotFound if it was released, and BadRequest if there never was one.
        """
        if self.lease or not self.pages:
            return self.lease
        if self._released:
            raise NotFound("this match was released, and is no base any more: match again")
        raise BadRequest("this match has no lease, and so is no base: match with a lease_s above 0, or give all tokens from the root on")

    async def __aenter__(self) -> "Match":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.release()

    def up_to(self, plan: Estimate) -> "Match":
        """The part of it that is to be loaded by its estimate, under the same lease. Raises BadRequest for that of another match."""
        if plan != self.estimate:
            raise BadRequest("the plan is not the estimate of this match")
        return self if plan.pages == self.pages else self._cut or replace(self, pages=plan.pages, tokens=plan.tokens, lease=0)

    def check_pages(self, first: int, last: int) -> None:
        """Raise BadRequest for pages [first, last) that are not all matched, and say what keeps the match short, if anything does."""
        if 0 <= first <= last <= self.pages:
            return
        why = ""
        if self.lacks:
            components = self.namespace.spec.components
            names = ", ".join(f"{components[lack.component].kind} (component {lack.component})" for lack in self.lacks)
            why = f": {self.known_pages} are there, but {names} on not all of them that it takes; its `lacks` tells where"
        raise BadRequest(f"pages [{first}, {last}) of a match of {self.pages}{why}")

    def there(self) -> list[int]:
        """The pages that there are parts of: all of them, but for a match with holes."""
        return [page for first, pages, _ in self._runs for page in range(first, first + pages)]

    def parts(self) -> Iterator[tuple[int, PartRange, bytes]]:
        """Every part to load, as page, range and blob id."""
        at = 0
        for first, pages, ranges in self._runs:
            for page in range(first, first + pages):
                for part in ranges:
                    yield page, part, self._ids[at : at + DIGEST_BYTES]
                    at += DIGEST_BYTES

    def ids_of(self, first: int, last: int, wanted: PartRange) -> bytes:
        """The blobs that hold something of `wanted` of the pages [first, last), page after page, 16 bytes each."""
        found: list[bytes] = []
        at = 0
        for run_first, pages, ranges in self._runs:
            width = DIGEST_BYTES * len(ranges)
            needed = [DIGEST_BYTES * part for part, its in enumerate(ranges) if its.overlaps(wanted)]
            for page in range(max(run_first, first), min(run_first + pages, last)):
                start = at + (page - run_first) * width
                found += [self._ids[start + part : start + part + DIGEST_BYTES] for part in needed]
            at += width * pages
        return b"".join(found)

    def usable_boundaries(self) -> npt.NDArray[np.int64]:
        """All usable boundaries in pages, rising; what ranks intersect to agree on one."""
        runs = [np.arange(low, high) for low, high in self.boundaries]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def pages_of(self, component: int) -> tuple[int, int]:
        """The pages [first, last) on which a component is needed to go on from this boundary."""
        needed = self.namespace.spec.boundary_pages(component)
        return (max(self.pages - needed, 0) if needed else 0), self.pages

    def blocks(self, first: int, last: int, wanted: PartRange, groups: list[PartRange] | None = None) -> list[Block]:
        """What to fetch for the wanted part of the pages [first, last), laid out page after page; group after group.

        Raises NotFound if some of them are not there, which only happens to a match with holes.
        """
        spec = self.namespace.spec
        size = spec.part_bytes(wanted)
        layer = size // (wanted.layer_hi - wanted.layer_lo)
        runs: list[tuple[tuple[PartRange, ...], PageBlobs, range]] = []
        at, there = 0, 0
        for run_first, pages, ranges in self._runs:
            width = DIGEST_BYTES * len(ranges)
            low, high = max(run_first, first), min(run_first + pages, last)
            if low < high:
                ids = self._ids[at + (low - run_first) * width : at + (high - run_first) * width]
                runs.append((ranges, PageBlobs(ids, len(ranges)), range((low - first) * size, (high - first) * size, size)))
                there += high - low
            at += width * pages
        if there != last - first:
            raise NotFound(f"some of the pages [{first}, {last}) are not there: this match has holes")
        found: list[Block] = []
        for number, group in enumerate(groups or [wanted]):
            shift = (group.layer_lo - wanted.layer_lo) * layer
            for ranges, blobs, targets in runs:
                shifted = range(targets.start + shift, targets.stop + shift, size)
                found.append(Block(self.namespace.shape(ranges, group), blobs, 0, shifted, number))
        return found
