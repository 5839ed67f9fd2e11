"""Views: the bytes of a leased prefix where they lie in the daemon's memory, without a copy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import FrameType, NotFound, PartRange, Unsupported
from kvstore.api.wire.same_host import MAX_LOCATED, Locate, Place, Places, unpack_places
from kvstore_client.arguments import writable
from kvstore_client.blocks import Block, Item, PageBlobs, PageShape
from kvstore_client.direct import current
from kvstore_client.near import NearBlob
from kvstore_client.plan import page_parts

if TYPE_CHECKING:
    from kvstore_client.match import Match


@dataclass(frozen=True, slots=True)
class PartView:
    """One part of one page: `range` says which layers and heads. `data` can only be read, and only as long as the view is valid."""

    page: int
    range: PartRange
    data: npt.NDArray[np.uint8]


class LocalView:
    """Parts of a leased prefix in place. They were verified when they were put (and are again by the scrubber), not when they are viewed.

    While the lease lasts they stay as they are, unless a copy is found to be bad, or the namespace is dropped. After that other
    bytes may take their place. `valid` says whether that can have happened: ask it after you have used the bytes, and throw away
    what you made of them if it says no. Keep no view for longer than its lease: it keeps the daemon's memory from going back.
    """

    def __init__(self, match: "Match", blobs: list[NearBlob], parts: tuple[PartView, ...]) -> None:
        self.match = match
        self.parts = parts
        self._blobs = blobs

    def __repr__(self) -> str:
        nbytes = sum(part.data.nbytes for part in self.parts)
        valid = "valid" if self.valid else "not valid"
        return f"<LocalView of {len(self.parts)} parts ({nbytes:,} bytes) in {self.match.namespace.name!r}, {valid}>"

    @property
    def intact(self) -> bool:
        """Whether all bytes are still those that were asked for, lease or not."""
        return all(blob.there for blob in self._blobs)

    @property
    def valid(self) -> bool:
        """Whether the lease holds, and all bytes are still those that were asked for."""
        return self.match.valid and self.intact

    def check(self) -> None:
        """Raise NotFound unless the view is valid."""
        if not self.match.valid:
            raise NotFound("the lease of this view is over: match again")
        if not self.intact:
            raise NotFound("what this view shows is not there any more: match again")

    def copy_into(self, out: Any) -> int:
        """Copy all parts, one after the other, verified slice by slice. Returns the bytes. Raises NotFound if they are not intact."""
        size = sum(len(part.data) for part in self.parts)
        target = writable(out, size)
        array, at = np.frombuffer(target, np.uint8), 0
        for blob, part in zip(self._blobs, self.parts, strict=True):
            blob.copy(_whole(self.match, blob, part, at), array)
            at += len(part.data)
        return size


def _whole(match: "Match", blob: NearBlob, part: PartView, target: int) -> Item:
    shape = PageShape(page_parts(match.namespace.spec, (part.range,), part.range))
    return next(Block(shape, PageBlobs(blob.blob), 0, (target,)).items())


Found = list[tuple[int, PartRange, bytes]]


def view_now(match: "Match", component: int, pages: tuple[int, int] | None) -> LocalView | None:
    """The parts of a component on some pages, if all of them lie in memory that is mapped; None if the daemon has to be asked."""
    found = _parts(match, component, pages)
    if match.namespace.client.same_host.now is None and found:
        return None
    return _view(match, found, _resolve(match, found, match.places()))


async def view_parts(match: "Match", component: int, pages: tuple[int, int] | None) -> LocalView:
    """As `view_now`, mapped and brought up from SSD if need be.

    Raises Unsupported without shared memory, NotFound for what is not there (any more), BadRequest for a component that does not exist.
    """
    found = _parts(match, component, pages)
    same_host, places = match.namespace.client.same_host, match.places()
    if same_host.now is None:
        raise Unsupported("there is no shared memory with this daemon: use fetch")
    await same_host.map((place.segment for place in places.values() if place is not None), match.epoch)
    near = _resolve(match, found, places)
    if absent := [blob for (_, _, blob), one in zip(found, near, strict=True) if one is None]:
        places = places | await _locate(match, absent)
        await same_host.map((place.segment for place in places.values() if place is not None), match.epoch)
        near = _resolve(match, found, places)
    view = _view(match, found, near)
    if view is None:
        raise NotFound("not all of it is in shared memory: use fetch, or match again")
    return view


def _parts(match: "Match", component: int, pages: tuple[int, int] | None) -> Found:
    match.namespace.spec.check_component(component)
    if not match.lease:
        raise NotFound("there is no lease: what it shows could be replaced at any moment")
    first, last = pages or match.pages_of(component)
    match.check_pages(first, last)
    return [(page, part, blob) for page, part, blob in match.parts() if part.component == component and first <= page < last]


def _view(match: "Match", found: Found, near: list[NearBlob | None]) -> LocalView | None:
    blobs = [one for one in near if one is not None]
    if len(blobs) != len(found):
        return None
    parts = [PartView(page, part, one.stored[: one.layout.payload_bytes]) for (page, part, _), one in zip(found, blobs, strict=True)]
    return LocalView(match, blobs, tuple(parts))


def _resolve(match: "Match", found: Found, places: dict[bytes, Place | None]) -> list[NearBlob | None]:
    same_host, spec = match.namespace.client.same_host, match.namespace.spec
    near: list[NearBlob | None] = []
    for _, part, blob in found:
        place = places.get(blob)
        segment = None if place is None else same_host.segment(place.segment, match.epoch)
        there = place is not None and segment is not None and segment.holds(place)
        near.append(NearBlob(blob, spec.slice_layout(part), place, segment) if there and place and segment else None)
    return near


async def _locate(match: "Match", blobs: list[bytes]) -> dict[bytes, Place | None]:
    names = list(dict.fromkeys(blobs))
    found: dict[bytes, Place | None] = {}
    connection = current() or match.namespace.client.same_host.now
    for first in range(0, len(names), MAX_LOCATED):
        chunk = names[first : first + MAX_LOCATED]
        if connection is None:
            break
        _, places = await connection.call(FrameType.LOCATE, Locate(namespace=match.namespace.id, blobs=len(chunk)), Places, b"".join(chunk))
        found |= dict(zip(chunk, unpack_places(places), strict=True))
    return found
