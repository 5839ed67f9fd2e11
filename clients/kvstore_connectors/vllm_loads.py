"""Loads: from the store into the blocks of the engine, layer group after layer group, through a few bounded buffers."""

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvstore_client import KVStoreError, Match, Namespace, NotFound, PartRange
from kvstore_client.job import Bell
from kvstore_connectors.vllm_layout import Bytes, GroupLayout, LayerBlocks, Layout
from kvstore_connectors.vllm_link import StoreLink, Unavailable
from kvstore_connectors.vllm_metadata import Load

log = logging.getLogger("vllm.kvstore_connectors")

_LOOK_S = 1.0
_STEP_BYTES = 8 << 20
"""Out of shared memory so much is copied at a time: it goes into its blocks while the next is copied."""
_TRIES = 3
"""A page that is lost under a load makes it begin again with those before it."""


@dataclass(slots=True)
class LoadState:
    """How far a load is. `layers` of the first group are in their blocks; once it is `over`, the pages [first, good) are.

    Whoever finds it `over` may use the blocks for something else: once it has `begun`, only what runs it says that.
    """

    load: Load
    good: int
    layers: int = 0
    begun: bool = False
    over: bool = False
    reason: str = ""

    @property
    def whole(self) -> bool:
        """Whether all that was wanted is there."""
        return self.good == self.load.last


@dataclass(slots=True)
class Finished:
    """Loads between steps that are over, and the blocks that did not get what they should have."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    lost: dict[str, int] = field(default_factory=dict)
    """Requests with the first page that the store did not give."""
    reasons: list[str] = field(default_factory=list)


class Loader:
    """`start`, `wait_layer` and `take_finished` are for the engine's thread; the rest runs on the link's loop."""

    def __init__(self, link: StoreLink, layout: Layout, parts: dict[int, PartRange], layers: dict[str, LayerBlocks]) -> None:
        self._link = link
        self._layout = layout
        self._parts = parts
        self._layers = layers
        self._order = {name: index for index, name in enumerate(layout.groups[0].layers)}
        self._changed = Bell()
        self._states: list[LoadState] = []
        self._pool: asyncio.Queue[Bytes] = asyncio.Queue()
        self._made = 0
        self._scatter = ThreadPoolExecutor(1, "kvstore-scatter")
        largest = max(group.block_bytes for group in layout.groups)
        self._buffer_bytes = max(link.settings.load_buffer_bytes, largest)
        link.soon(lambda: link.keep(self._prepare()))

    # --- the engine's thread -------------------------------------------------------------------------------------------

    def start(self, load: Load) -> None:
        """Begin a load."""
        state = LoadState(load, load.first)
        try:
            self._states.append(state)
            self._link.submit(self._run(state))
        except BaseException:  # interrupted: nobody may wait for it, unless it runs all the same
            self._link.soon(self._give_up, state)
            raise

    def wait_layer(self, name: str) -> None:
        """Wait until the layer is loaded for all requests whose forward pass is under way."""
        index = self._order.get(name)
        for state in [s for s in self._states if s.load.layerwise]:
            while not state.over and (index is None or state.layers <= index):
                self._wait(_LOOK_S)

    def wait_layerwise(self) -> None:
        """Wait until all loads of this step's own requests are over."""
        while any(s.load.layerwise and not s.over for s in self._states):
            self._wait(_LOOK_S)

    def _wait(self, seconds: float) -> None:
        """Wait for a change, that long at most. Loads are bounded by themselves; without the link's loop they will not go on."""
        self._changed.wait(seconds)
        if not self._link.alive:
            for state in self._states:
                state.over, state.reason = True, state.reason or "the connector was shut down"

    def any_short(self) -> bool:
        """Whether a load of this step's own requests ended without all of its pages."""
        return any(s.load.layerwise and not s.whole for s in self._states)

    def take_finished(self, wait_s: float) -> Finished:
        """What has ended since it was last asked; with `wait_s`, wait that long for something if a load is under way."""
        until = time.monotonic() + wait_s
        while self._states and not any(s.over for s in self._states) and (left := until - time.monotonic()) > 0:
            self._wait(left)
        over: list[LoadState] = []
        under_way: list[LoadState] = []
        for state in self._states:
            (over if state.over else under_way).append(state)
        self._states = under_way
        finished = Finished()
        for state in over:
            load = state.load
            if not load.layerwise:
                finished.requests.add(load.request)
            if state.whole:
                continue
            log.warning(
                "kvstore: of the %d pages to load for request %s, %d came (%s); the rest is computed",
                load.last - load.first, load.request, state.good - load.first, state.reason,
            )  # fmt: skip
            finished.lost[load.request] = state.good
            finished.reasons.append(state.reason)
            if len(load.blocks) > 1:
                finished.failed.add(load.request)  # block numbers mean nothing across cache groups: all of it is computed
            else:
                finished.blocks.update(load.blocks[0][state.good - load.first :].tolist())
        return finished

    def close(self) -> None:
        """Load nothing any more."""
        self._scatter.shutdown(wait=False, cancel_futures=True)

    # --- the link's loop -----------------------------------------------------------------------------------------------

    def _give_up(self, state: LoadState) -> None:
        """A load was interrupted as it was begun: it is over, unless it runs and ends by itself."""
        if not state.begun:
            state.over, state.reason = True, "it was interrupted"
            self._changed.ring()

    async def _run(self, state: LoadState) -> None:
        if state.over:
            return
        state.begun = True
        try:
            async with asyncio.timeout(self._link.settings.load_timeout_s):
                await self._link.call(lambda namespace: self._load(namespace, state))
        except Unavailable:
            state.reason = "the store is left alone"
        except KVStoreError as error:
            state.reason = f"{type(error).__name__}: {error}"
        except TimeoutError:
            state.reason = f"it took more than {self._link.settings.load_timeout_s:g} s"
        except Exception as error:
            state.reason = repr(error)
            log.exception("kvstore: a load failed")
        finally:
            state.over = True
            self._changed.ring()

    async def _load(self, namespace: Namespace, state: LoadState) -> None:
        load, s = state.load, self._link.settings
        last, started = load.last, time.monotonic()
        for _ in range(_TRIES):
            ids = np.frombuffer(load.tokens, np.uint32, last * self._layout.page_tokens)
            extras = {p: e for p, e in load.extras.items() if p < last} or None
            match = await namespace.match(ids, extras=extras, lease_s=s.lease_s, timeout=s.call_timeout_s)
            try:
                last = min(match.pages, last)
                if last < load.last:
                    state.reason = state.reason or "they are not in the store any more"
                if last > load.first and (last == load.last or len(self._layout.groups) == 1):
                    await self._fetch(namespace, match, state, last)
                    state.good = last
                    log.debug("kvstore: %d pages loaded in %.1f ms", last - load.first, 1e3 * (time.monotonic() - started))
                return
            except NotFound as error:
                state.reason = f"{type(error).__name__}: {error}"
            finally:
                self._link.release(match)

    async def _fetch(self, namespace: Namespace, match: Match, state: LoadState, last: int) -> None:
        """Bring the pages [first, last) into their blocks, as much at a time as fits in a buffer."""
        scattering: list[asyncio.Future[None]] = []
        try:
            for group, first, upto, low, high in self._steps(match, state.load, last):
                scattering = [one for one in scattering if not one.done() or one.exception() is not None]
                await self._fetch_step(namespace, match, state, group, (first, upto), (low, high), scattering)
            await asyncio.gather(*scattering)
        finally:  # whatever happens: nothing may be written into the blocks once it is said that the load is over
            if scattering:
                await asyncio.shield(asyncio.wait(scattering))

    def _steps(self, match: Match, load: Load, last: int) -> Iterator[tuple[GroupLayout, int, int, int, int]]:
        """What is fetched at a time: of a cache group the pages [first, upto), of those the layers [low, high).

        Some pages with all layers: so every slice is whole, and verified once. If the forward pass is waiting for its layers, the
        first layers of all pages come first.
        """
        for group in self._layout.groups:
            first = max(load.first, match.pages_of(group.component)[0])
            while first < last and group.window and not load.blocks[group.group][first - load.first]:
                first += 1  # before the window: the engine has no block there
            if first >= last:
                continue
            part = self._parts[group.component]
            layers, room = part.layer_hi - part.layer_lo, self._buffer_bytes
            step = max(min(layers, room // group.block_bytes), 1)
            if load.layerwise:
                sizes = self._layout.spec.slice_layout(part).sizes
                step = max(min(sizes[0] // group.block_bytes, room // (group.block_bytes * (last - first))), 1)
            elif match.places():
                room = min(room, _STEP_BYTES)
            pages = max(room // (group.block_bytes * step), 1)
            for low in range(0, layers, step):
                for at in range(first, last, pages):
                    yield group, at, min(at + pages, last), low, min(low + step, layers)

    async def _fetch_step(
        self, namespace: Namespace, match: Match, state: LoadState, group: GroupLayout, pages: tuple[int, int], layers: tuple[int, int],
        scattering: list["asyncio.Future[None]"],
    ) -> None:  # fmt: skip
        part, (first, upto), (low, high) = self._parts[group.component], pages, layers
        buffer = await self._buffer()
        try:
            data = buffer[: (upto - first) * (high - low) * group.block_bytes]
            wanted = PartRange(group.component, low, high, part.head_lo, part.head_hi)
            await namespace.fetch(match, data, pages=pages, wanted=wanted, timeout=self._link.settings.call_timeout_s)
        except BaseException:
            self._pool.put_nowait(buffer)
            raise
        ids = state.load.blocks[group.group][first - state.load.first : upto - state.load.first]
        shaped = data.reshape(upto - first, high - low, group.block_bytes)
        ready = high if group.component == 0 and upto == state.load.last else 0
        job = asyncio.get_running_loop().run_in_executor(
            self._scatter, self._put_in_blocks, group.layers[low:high], ids, shaped, state, ready
        )
        job.add_done_callback(lambda _: self._pool.put_nowait(buffer))
        scattering.append(job)

    def _put_in_blocks(
        self, names: tuple[str, ...], ids: "np.ndarray[tuple[int], np.dtype[np.int64]]", data: Bytes, state: LoadState, ready: int
    ) -> None:
        for index, name in enumerate(names):
            self._layers[name].scatter(ids, data[:, index])
        if ready:
            state.layers = ready
            self._changed.ring()

    async def _prepare(self) -> None:
        """Have buffers before the first load: the system's zeroing of new memory takes as long as a copy."""
        while self._made < self._link.settings.load_buffers:
            self._made += 1
            self._pool.put_nowait(await asyncio.to_thread(np.ones, self._buffer_bytes, np.uint8))

    async def _buffer(self) -> Bytes:
        if self._pool.empty() and self._made < self._link.settings.load_buffers:
            self._made += 1
            return np.empty(self._buffer_bytes, np.uint8)
        return await self._pool.get()
