"""One fetch: out of shared memory what is there, over the connections what is not."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.api.wire import MAX_DATA_PAYLOAD
from kvstore_client.blocks import Block, Item, blocks_of
from kvstore_client.linked import LINK_STRIPE
from kvstore_client.near import NearBlob
from kvstore_client.near_copy import copy_near
from kvstore_client.plan import INTERACTIVE_BYTES, FetchPlan, Priority
from kvstore_client.transfer import Progress, fetch_striped

if TYPE_CHECKING:
    from kvstore_client.match import Match

OnGroup = Callable[[int, int], None]
"""Told of layers [lo, hi) once all their bytes are in the buffer, verified."""


class Arrivals:
    """Counts what arrives, by layer group and in all, whichever way it comes, and tells the caller."""

    def __init__(self, blocks: Sequence[Block], on_group: Callable[[int], None] | None, progress: Progress | None) -> None:
        self._on_group = on_group
        self._progress = progress
        self._missing: Counter[int] = Counter()
        for block in blocks:
            self._missing[block.group] += block.nbytes
        self.nbytes = self._missing.total()
        self.near_bytes = 0

    def near(self, item: Item) -> None:
        """An item is there."""
        self.near_bytes += item.nbytes
        self._missing[item.group] -= item.nbytes
        if not self._missing[item.group] and self._on_group is not None:
            self._on_group(item.group)
        if self._progress is not None:
            self._progress(self.near_bytes, self.nbytes)

    def far(self, arrived: int, _: int) -> None:
        """So many bytes of all that was left came over the connections."""
        if self._progress is not None:
            self._progress(self.near_bytes + arrived, self.nbytes)


async def fetch_blocks(
    match: "Match", blocks: list[Block], target: memoryview, on_group: Callable[[int], None] | None, progress: Progress | None,
    priority: Priority | None = None, ahead: bytes = b"",
) -> int:  # fmt: skip
    """Fetch blocks into the caller's buffer; what is `ahead` (ids of 16 bytes) will be asked for next. Returns the bytes.

    Raises NotFound (Corrupt) for what no way brings.
    """
    client, namespace = match.namespace.client, match.namespace.id
    left, nbytes = blocks, sum(block.nbytes for block in blocks)
    if match.places():
        arrivals = Arrivals(blocks, on_group, progress)
        items = [item for block in blocks for item in block.items()]
        blobs = await near_blobs(match, items)
        if blobs:
            started = time.perf_counter()
            left = blocks_of(await copy_near(blobs, items, target, arrivals.near, client.same_host.helper))
            client.same_host.copied.add(arrivals.near_bytes, time.perf_counter() - started)
            progress = arrivals.far
    if left:
        plan = FetchPlan(
            left, client.pool.spread, on_group=on_group, progress=progress,
            stripe_bytes=LINK_STRIPE if client.pool.several else 0,
            priority=priority or ("interactive" if nbytes <= INTERACTIVE_BYTES else "bulk"),
            frame_bytes=MAX_DATA_PAYLOAD if client.pool.local else 0, ahead=ahead,
        )  # fmt: skip
        await fetch_striped(client.pool, namespace, plan, target)
        plan.verify()
    return nbytes


async def near_blobs(match: "Match", items: list[Item]) -> dict[bytes, NearBlob]:
    """Those blobs of the items that are mapped here."""
    places = match.places()
    if not places:
        return {}
    same_host = match.namespace.client.same_host
    wanted = {item.blob: item.layout for item in items}
    found = [(blob, layout, place) for blob, layout in wanted.items() if (place := places.get(blob)) is not None]
    await same_host.map((place.segment for _, _, place in found), match.epoch)
    blobs = {}
    for blob, layout, place in found:
        segment = same_host.segment(place.segment, match.epoch)
        if segment is not None and segment.holds(place):
            blobs[blob] = NearBlob(blob, layout, place, segment)
    return blobs
