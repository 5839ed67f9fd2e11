"""Layer streaming: a put whose layers are sent as they are computed, and reading along while a put is under way."""

import asyncio
import time
from collections.abc import Callable
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import (
    STREAM_PAYLOAD,
    BadRequest,
    Busy,
    FrameType,
    KVStoreError,
    NotFound,
    PartRange,
    pack_provisional,
)
from kvstore.api.wire.messages import Empty, HintsMeta
from kvstore.api.wire.put_messages import Committed, Follow, FollowedPut, FollowedPuts, Outcome, PutReady, PutStart
from kvstore_client.arguments import checked, readable, writable
from kvstore_client.blocks import Block, PageBlobs, PageShape
from kvstore_client.plan import FetchPlan, layer_groups, page_parts
from kvstore_client.put import PutResult, in_all
from kvstore_client.put_layout import SliceFrame
from kvstore_client.tokens import Extras, with_extras
from kvstore_client.transfer import Progress, begin_put, fetch_striped, give_up_put, send_striped
from kvstore_client.waiting import Patience
from kvstore_client.whole import Closing, Whole

if TYPE_CHECKING:
    from kvstore_client.namespace import Namespace

_POLL_MS = 1000
_ANSWER_S = 0.25
"""So much later than it was told to answer the daemon may do so."""


class PutStream:
    """One part of the pages of a prefix, put layer group after layer group. Use as an async context manager.

    Nothing of it counts before `commit`; leaving without one gives it up. Others can follow it by its `put_id` meanwhile.
    The layers of a slice are sent together: `group_layers` in the KV spec makes slices as small as the groups.
    """

    def __init__(
        self, namespace: "Namespace", tokens: memoryview, first_page: int, part: PartRange, durable: bool, whole_s: float,
        extras: Extras | None, put_id: bytes, hints: HintsMeta | None = None, timeout: float | None = None,
    ) -> None:  # fmt: skip
        namespace.spec.check_range(part)
        self.put_id = put_id
        self._namespace = namespace
        self._tokens = tokens
        self._part = part
        self._whole = Whole(whole_s)
        self._timeout = timeout
        self._layout = namespace.spec.slice_layout(part)
        extra_pages, self._payload = with_extras(tokens, extras)
        self._message = PutStart(
            namespace=namespace.id, put_id=put_id, first_page=first_page, extra_pages=extra_pages, ack="durable" if durable else "memory",
            parts=[(part.component, part.layer_lo, part.layer_hi, part.head_lo, part.head_hi)], hints=hints,
        )  # fmt: skip
        self._ready: PutReady | None = None
        self._unsent = set(range(self._layout.count))
        self._ended = False

    async def __aenter__(self) -> "PutStream":
        client = self._namespace.client
        async with client.deadline(self._timeout):
            with Patience() as patience:
                while self._ready is None:
                    connection = await client.pool.first()
                    try:
                        self._ready = await begin_put(client.pool, connection, self._message, self._payload)
                    except Busy as busy:
                        await patience.wait(busy)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ready is not None and not self._ended:
            self._ended = True
            await give_up_put(self._namespace.client.pool, self._ready.handle, error)

    @property
    def pages(self) -> tuple[int, int]:
        """The pages [first, last) of the put."""
        return self._message.first_page, self._entered().total_pages

    @checked()
    async def send(self, layer_lo: int, layer_hi: int, data: Any, *, timeout: float | None = None) -> None:
        """Send the layers [lo, hi) of all pages of the put; `data` holds them page after page.

        Raises BadRequest if slices do not begin and end there.
        """
        ready = self._entered()
        self._raise_if_ended()
        first_page, last_page = self.pages
        layer = self._namespace.spec.layer_bytes(self._part)
        low, high = ((at - self._part.layer_lo) * layer for at in (layer_lo, layer_hi))
        offsets = self._layout.offsets
        if not 0 <= low < high or low not in offsets or high not in offsets:
            raise BadRequest(
                f"layers [{layer_lo}, {layer_hi}) do not begin and end with slices, which are of {self._layout.sizes[0]} bytes: "
                "a KVSpec with group_layers=n has slices of n layers"
            )
        source = readable(data)
        if len(source) != (last_page - first_page) * (high - low):
            raise BadRequest(f"{len(source)} bytes of data for {last_page - first_page} pages of {high - low}")
        first_slice, last_slice = offsets.index(low), offsets.index(high)
        frames = [
            frame
            for _, first, last in ready.wanted
            for page in range(first, last)
            for frame in self._frames(page, first_slice, last_slice, (page - first_page) * (high - low) - low)
        ]
        client = self._namespace.client
        self._unsent -= set(range(first_slice, last_slice))
        async with client.deadline(timeout):
            await send_striped(client.pool, ready.handle, frames, source)

    def _entered(self) -> PutReady:
        if self._ready is None:
            raise BadRequest("this put has not begun: enter it by `with`, or `async with`")
        return self._ready

    def _raise_if_ended(self) -> None:
        if self._ended:
            raise BadRequest("this put has ended: it was committed, or given up")

    def _layers_of(self, index: int) -> tuple[int, int]:
        """The layers that a slice is of."""
        layer, low = self._namespace.spec.layer_bytes(self._part), self._layout.offsets[index]
        first = self._part.layer_lo + low // layer
        return first, max(first + 1, self._part.layer_lo + self._layout.offsets[index + 1] // layer)

    def _frames(self, page: int, first_slice: int, last_slice: int, base: int) -> list[SliceFrame]:
        frames: list[SliceFrame] = []
        group: list[tuple[int, int]] = []
        first, size = first_slice, 0
        for index in range(first_slice, last_slice):
            slice_bytes = self._layout.sizes[index]
            if group and size + slice_bytes > STREAM_PAYLOAD:
                frames.append(SliceFrame(page, 0, first, tuple(group)))
                first, group, size = index, [], 0
            group.append((base + self._layout.offsets[index], slice_bytes))
            size += slice_bytes
        frames.append(SliceFrame(page, 0, first, tuple(group)))
        return frames

    @checked()
    async def commit(self, *, timeout: float | None = None) -> PutResult:
        """Make the pages count: new, existing and pending ones (other shards are still to come). Raises what went wrong.

        Raises BadRequest, and the put goes on, if layers have not been sent yet.
        """
        ready = self._entered()
        self._raise_if_ended()
        if self._unsent and ready.wanted:
            low, high = self._layers_of(min(self._unsent))
            raise BadRequest(
                f"commit before all layers were sent: [{low}, {high}) are the first that are missing ({len(self._unsent)} of "
                f"{self._layout.count} slices a page). Send them and commit then; leaving the stream gives the put up"
            )
        client = self._namespace.client
        async with client.deadline(timeout):
            connection = await client.pool.first()
            committed, _ = await connection.call(FrameType.COMMIT, Closing(ready.handle, self._whole).commit(), Committed)
        self._ended = True
        return in_all([committed])


class Follower:
    """Reads along a computation that is being put, by one shard or several. Use as an async context manager.

    Entering waits until puts are under way that together bring all of `wanted`; `pages` are those that they bring it for.
    What is read is provisional until `committed` has returned.
    """

    def __init__(self, namespace: "Namespace", put_id: bytes, wanted: PartRange, timeout: float | None) -> None:
        namespace.spec.check_range(wanted)
        self.pages = (0, 0)
        self._namespace = namespace
        self._put_id = put_id
        self._wanted = wanted
        self._timeout = namespace.client.timeout if timeout is None else timeout
        self._puts: list[FollowedPut] = []
        self._open = True

    async def __aenter__(self) -> "Follower":
        deadline = time.monotonic() + self._timeout
        client = self._namespace.client
        while True:
            left = min(_POLL_MS / 1000, max(deadline - time.monotonic(), 0.0))
            message = Follow(namespace=self._namespace.id, put_id=self._put_id, beyond=len(self._puts), wait_ms=int(left * 1000))
            found, _ = await client.call(FrameType.FOLLOW, message, FollowedPuts, timeout=left + _ANSWER_S)
            self._puts = found.items
            self.pages = self._covered()
            if self.pages[0] < self.pages[1]:
                return self
            if time.monotonic() >= deadline:
                await self._leave()
                raise NotFound(f"no put under way with this put id brings all of {self._wanted} ({len(self._puts)} are followed)")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.shield(self._leave())

    async def _leave(self) -> None:
        """Stop following, whatever becomes of the puts."""
        if not self._open:
            return
        self._open = False
        for put in self._puts:
            try:
                await self._namespace.client.call(FrameType.OUTCOME, Outcome(handle=put.handle), Empty, timeout=1.0)
            except KVStoreError:
                pass  # it is not asked how it ended, only that the daemon may let go of it

    def _raise_if_not_entered(self) -> None:
        if self.pages == (0, 0):
            raise BadRequest("nothing is followed yet: enter it by `with`, or `async with`")

    def _sources(self, page: int) -> list[tuple[PartRange, bytes]]:
        """The parts that are being sent of a page, each with its provisional name."""
        return [
            (PartRange(*put.parts[part]), pack_provisional(put.handle, page, part))
            for put in self._puts
            for part, first, last in put.wanted
            if first <= page < last
        ]

    def _covered(self) -> tuple[int, int]:
        """The last stretch of pages for which all of what is wanted is being sent."""
        c = self._wanted
        last = max((put.total_pages for put in self._puts), default=0)
        first = last
        while first > 0:
            seen: npt.NDArray[np.bool_] = np.zeros((c.layer_hi - c.layer_lo, c.head_hi - c.head_lo), np.bool_)
            for part, _ in self._sources(first - 1):
                if part.component == c.component:
                    layers = slice(max(part.layer_lo - c.layer_lo, 0), max(part.layer_hi - c.layer_lo, 0))
                    seen[layers, max(part.head_lo - c.head_lo, 0) : max(part.head_hi - c.head_lo, 0)] = True
            if not seen.all():
                break
            first -= 1
        return first, last

    @checked()
    async def fetch(
        self, out: Any, *, pages: tuple[int, int] | None = None, wanted: PartRange | None = None, group_layers: int = 0,
        on_group: Callable[[int, int], None] | None = None, progress: Progress | None = None, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Fetch what is wanted of the pages [first, last) while it arrives, as Namespace.fetch does. Returns the bytes.

        `wanted` is a range inside that of the follower (by default all of it): several accelerators each fetch their own with
        one follower. Raises NotFound as soon as it is known that the rest will not come.
        """
        self._raise_if_not_entered()
        first, last = pages or self.pages
        if not self.pages[0] <= first < last <= self.pages[1]:
            raise BadRequest(f"pages [{first}, {last}) of a stream of the pages [{self.pages[0]}, {self.pages[1]})")
        spec, wanted, client = self._namespace.spec, wanted or self._wanted, self._namespace.client
        spec.check_range(wanted)
        size = spec.part_bytes(wanted)
        target = writable(out, (last - first) * size)
        groups = layer_groups(wanted, group_layers)
        layer = size // (wanted.layer_hi - wanted.layer_lo)
        sources = {page: self._sources(page) for page in range(first, last)}
        runs: list[tuple[tuple[PartRange, ...], PageBlobs, int, int]] = []
        for ranges, alike in groupby(sources, lambda page: tuple(part for part, _ in sources[page])):
            run = list(alike)
            blobs = PageBlobs(b"".join([name for page in run for _, name in sources[page]]), len(ranges))
            runs.append((ranges, blobs, run[0] - first, run[-1] + 1 - first))
        blocks: list[Block] = []
        for number, group in enumerate(groups):
            shift = (group.layer_lo - wanted.layer_lo) * layer
            for ranges, blobs, low, high in runs:
                targets = range(low * size + shift, high * size + shift, size)
                blocks.append(Block(PageShape(page_parts(spec, ranges, group)), blobs, 0, targets, number))
        plan = FetchPlan(
            blocks, client.pool.spread, progress=progress, provisional=True,
            on_group=None if on_group is None else lambda number: on_group(groups[number].layer_lo, groups[number].layer_hi),
        )  # fmt: skip
        async with client.deadline(timeout):
            await fetch_striped(client.pool, self._namespace.id, plan, target)
        plan.verify()
        return plan.nbytes

    @checked()
    async def committed(self, *, timeout: float | None = None) -> None:
        """Wait until all puts that were followed are committed. Raises NotFound if one is not: what was read is void then."""
        self._raise_if_not_entered()
        end = time.monotonic() + (self._timeout if timeout is None else timeout)
        while self._puts:
            left = max(end - time.monotonic(), 0.0)
            message = Outcome(handle=self._puts[0].handle, wait_ms=int(left * 1000))
            await self._namespace.client.call(FrameType.OUTCOME, message, Empty, timeout=left + _ANSWER_S)
            del self._puts[0]
