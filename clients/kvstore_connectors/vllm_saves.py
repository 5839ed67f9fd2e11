"""Saves: blocks are copied layer by layer while the forward pass runs, and put in the background."""

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvstore_client import Busy, DeadlineExceeded, KVStoreError, MissingParent, Namespace, NoSpace, PartRange, SharedBuffer
from kvstore_connectors.vllm_layout import Bytes, GroupLayout, LayerBlocks, Layout
from kvstore_connectors.vllm_link import StoreLink, Unavailable
from kvstore_connectors.vllm_metadata import Save

log = logging.getLogger("vllm.kvstore_connectors")


@dataclass(slots=True)
class GroupJob:
    """Pages [first, last) of one cache group: `data` is (pages, layers, bytes of a block), to be filled layer by layer."""

    group: GroupLayout
    first: int
    last: int
    ids: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    data: Bytes
    missing: set[str]


@dataclass(slots=True)
class Job:
    """Pages [first, last) of a save, in one buffer."""

    save: Save
    first: int
    last: int
    buffer: SharedBuffer
    groups: list[GroupJob] = field(default_factory=list)


class Saver:
    """`begin`, `layer` and `end` are for the engine's thread, once a step each; puts run on the link's loop, one after the other."""

    def __init__(self, link: StoreLink, layout: Layout, parts: dict[int, PartRange], layers: dict[str, LayerBlocks]) -> None:
        self._link = link
        self._layout = layout
        self._parts = parts
        self._layers = layers
        self._page_bytes = sum(len(group.layers) * group.block_bytes for group in layout.groups)
        if self._page_bytes > link.settings.save_buffer_bytes:
            raise ValueError(f"kvstore: a page has {self._page_bytes} bytes, more than save_buffer_bytes")
        self._lock = threading.Lock()
        self._free: list[SharedBuffer] = []
        self._made = 0
        self._jobs: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._putting: asyncio.Task[None] | None = None
        self._not_saved: dict[str, int] = {}

    # --- the engine's thread -------------------------------------------------------------------------------------------

    def begin(self, saves: list[Save]) -> None:
        """What is to be saved of the step that begins. What finds no room is not saved."""
        for save in saves:
            if self._link.resting:
                self._give_up(save, save.first)
                continue
            step = self._link.settings.save_buffer_bytes // self._page_bytes
            for first in range(save.first, save.last, step):
                buffer = self._take_buffer()
                if buffer is None:
                    self._link.full("the puts of earlier ones are not done")
                    self._give_up(save, first)
                    break
                self._jobs.append(self._job(save, first, min(first + step, save.last), buffer))

    def _job(self, save: Save, first: int, last: int, buffer: SharedBuffer) -> Job:
        job, at = Job(save, first, last, buffer), 0
        for group in self._layout.groups:
            ids = save.blocks[group.group][first - save.first : last - save.first]
            there = _present(ids) if group.window else 0
            ids = ids[there:]
            nbytes = len(ids) * len(group.layers) * group.block_bytes
            data = buffer.array[at : at + nbytes].reshape(len(ids), len(group.layers), group.block_bytes)
            if nbytes:
                job.groups.append(GroupJob(group, first + there, last, ids, data, set(group.layers)))
            at += nbytes
        return job

    def layer(self, name: str) -> None:
        """The layer's KV of this step is in the blocks: copy it."""
        for job in self._jobs:
            for part in job.groups:
                if name in part.missing:
                    part.missing.discard(name)
                    self._layers[name].gather(part.ids, part.data[:, part.group.layers.index(name)])

    def end(self, *, tainted: bool) -> None:
        """The forward pass is over: put what was copied. Nothing of a `tainted` step, which computed with what was not loaded."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            if tainted:
                self._give_up(job.save, job.first)
                self._give_back(job.buffer)
                continue
            for part in job.groups:
                for name in sorted(part.missing):  # layers whose forward pass ran without hooks, in a CUDA graph
                    self._layers[name].gather(part.ids, part.data[:, part.group.layers.index(name)])
            self._link.soon(self._enqueue, job)

    def take_not_saved(self) -> dict[str, int]:
        """Requests whose pages from one on were not put, since it was last asked."""
        with self._lock:
            taken, self._not_saved = self._not_saved, {}
        return taken

    def _give_up(self, save: Save, page: int) -> None:
        with self._lock:
            self._not_saved[save.request] = min(page, self._not_saved.get(save.request, page))

    def _take_buffer(self) -> SharedBuffer | None:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made >= self._link.settings.save_buffers:
                return None
            self._made += 1
        try:
            buffer = self._link.client.buffer(self._link.settings.save_buffer_bytes)
        except KVStoreError as error:  # no memory, or no descriptor: the engine goes on without
            self._link.full(error)
            with self._lock:
                self._made -= 1
            return None
        buffer.populate()
        return buffer

    def _give_back(self, buffer: SharedBuffer) -> None:
        with self._lock:
            self._free.append(buffer)

    # --- the link's loop -----------------------------------------------------------------------------------------------

    def _enqueue(self, job: Job) -> None:
        self._waiting.append(job)
        if self._putting is None or self._putting.done():
            self._putting = self._link.keep(self._put_all())

    async def _put_all(self) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            try:
                await self._put(job)
            except Exception:
                log.exception("kvstore: a save failed")
                self._give_up(job.save, job.first)
            finally:
                self._give_back(job.buffer)

    async def _put(self, job: Job) -> None:
        try:
            await self._link.call(lambda namespace: self._put_groups(namespace, job), patient=True)
        except MissingParent:
            self._give_up(job.save, await self._known_pages(job))
        except (Busy, NoSpace, DeadlineExceeded) as error:
            self._link.full(error)
            self._give_up(job.save, job.first)
        except (KVStoreError, Unavailable):
            self._give_up(job.save, job.first)

    async def _put_groups(self, namespace: Namespace, job: Job) -> None:
        """Windows first: a page is in the tree once its full attention is there, and then takes nothing more."""
        s, save = self._link.settings, job.save
        ids = np.frombuffer(save.tokens, np.uint32, job.last * self._layout.page_tokens)
        for part in sorted(job.groups, key=lambda one: not one.group.window):
            await namespace.put(
                ids, part.data.reshape(-1), first_page=part.first, parts=(self._parts[part.group.component],),
                durable=s.durable, extras={p: e for p, e in save.extras.items() if p < job.last} or None, put_id=save.put_id,
                timeout=s.save_timeout_s,
            )  # fmt: skip

    async def _known_pages(self, job: Job) -> int:
        """How many pages of the prefix the store has after all."""
        save = job.save
        ids = np.frombuffer(save.tokens, np.uint32, job.first * self._layout.page_tokens)
        extras = {p: e for p, e in save.extras.items() if p < job.first} or None

        async def look(namespace: Namespace) -> int:
            return (await namespace.match(ids, extras=extras, lease_s=0, parts=False)).known_pages

        try:
            return await self._link.call(look)
        except (KVStoreError, Unavailable):
            return 0

    async def drain(self) -> None:
        """Wait until all is put."""
        while self._putting is not None and not self._putting.done():
            await asyncio.wait([self._putting])


def _present(ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> int:
    """Where the blocks begin that are there: before them are null blocks, of tokens outside the window."""
    gone = np.flatnonzero(ids == 0)
    return int(gone[-1]) + 1 if len(gone) else 0
