"""Puts out of memory that the daemon can read: it copies the slices itself, and verifies its copy.

The bytes are hashed here while the daemon copies them: it hears the digests with the COMMIT, and nothing can be read before they agree.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.api.wire import BadRequest, Busy, Forbidden, FrameType, NotFound, slice_digest
from kvstore.api.wire.messages import Empty
from kvstore.api.wire.put_messages import Committed, PutStart
from kvstore.api.wire.same_host import CopiedPart, Copy, pack_copies
from kvstore_client.buffers import STAGE_BYTES, Place
from kvstore_client.connection import Connection, Request
from kvstore_client.put_layout import SliceFrame
from kvstore_client.transfer import Progress
from kvstore_client.whole import Closing

if TYPE_CHECKING:
    from kvstore_client.client import AsyncClient

NEAR_AT_ONCE_BYTES = 16 << 20
"""Up to here it is not asked first what is wanted: no more is lost than the time to hash it."""
_LEAST_BYTES = 1 << 20
"""Smaller puts are sent: asking for a copy costs more than that."""
LENT_BATCH_BYTES = 16 << 20
"""Copied by one request out of a buffer of the caller's."""
_TURN_BYTES = 4 << 20
"""Hashed before others on the loop have a turn."""
_MOST_PARTS = 1024


async def near_connection(client: "AsyncClient", nbytes: int) -> Connection | None:
    """The connection to put so many bytes over without sending them; None if they are to be sent."""
    if nbytes < _LEAST_BYTES or client.same_host.hopeless:
        return None
    return await client.same_host.connection()


def near_frame_bytes(client: "AsyncClient", data: memoryview) -> int:
    """The most bytes of a frame of a put that the daemon copies out of these: what it takes from a stage lies on one."""
    return STAGE_BYTES if client.buffers.find(np.frombuffer(data, np.uint8)) is None else LENT_BATCH_BYTES


async def put_near(
    client: "AsyncClient", connection: Connection, closing: Closing, frames: Sequence[SliceFrame], data: memoryview, durable: bool,
    progress: Progress | None,
) -> Committed | None:  # fmt: skip
    """Have the daemon copy the slices of a put, and commit it. None, and nothing has happened, if it takes no buffer of ours.

    Once this returns, nothing of `data` is used any more.
    """
    near = _NearPut(client, connection, closing, data, durable, sum(frame.nbytes for frame in frames), progress)
    try:
        return await near.run(frames)
    except (Busy, BadRequest, Forbidden, OSError):  # also if no stage can be made here: no descriptors, no memory
        if near.begun:
            raise
        return None


async def put_near_at_once(
    client: "AsyncClient", connection: Connection, start: PutStart, payload: bytes | memoryview, frames: Sequence[SliceFrame],
    data: memoryview, closing: Closing, progress: Progress | None,
) -> Committed:  # fmt: skip
    """Put without asking what is wanted of it: one journey to the daemon and back."""
    near = _NearPut(client, connection, closing, data, start.ack == "durable", sum(frame.nbytes for frame in frames), progress)
    try:
        return await near.run(frames, (FrameType.PUT, start, payload))
    except (Busy, BadRequest, Forbidden, OSError) as error:
        if near.begun:
            raise
        raise Busy("the daemon takes no buffer now: it is to be sent", retry_after_ms=1) from error


class _NearPut:
    """One put. `begun` says whether the daemon was asked to copy any of it."""

    def __init__(
        self, client: "AsyncClient", connection: Connection, closing: Closing, data: memoryview, durable: bool, total: int,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self.begun = False
        self._buffers = client.buffers
        self._connection = connection
        self._closing = closing
        self._waits = durable or closing.waits
        """Whether its COMMIT waits, for a disk or for other shards: others need its places meanwhile, so every COPY is answered."""
        self._data = np.frombuffer(data, np.uint8)
        self._total = total
        self._done = 0
        self._digests: list[bytes] = []
        """Of all frames so far, which come by page, part and slice."""
        self._progress = progress

    async def run(self, frames: Sequence[SliceFrame], start: Request | None = None) -> Committed:
        """Copy all, and commit without waiting to hear of it: the commit waits for what is under way, and says what went wrong.

        `start` is the PUT, if that is not sent yet. It is not waited for either.
        """
        lent = self._buffers.find(self._data)
        try:
            return await self._run(frames, lent, start)
        except NotFound:
            if lent is not None:
                self._buffers.check(lent.memory)  # the daemon has let go of it
            raise

    async def _run(self, frames: Sequence[SliceFrame], lent: Place | None, start: Request | None) -> Committed:
        batches = list(_batches(frames, STAGE_BYTES if lent is None else LENT_BATCH_BYTES))
        if not batches:
            return await self._ask_to_commit()
        if len(batches) == 1 and not self._waits:
            return await self._copy_last(batches[0], lent, start)
        if start is None:
            return await self._copy_all(batches, lent)
        async with self._connection.unanswered(*start):
            return await self._copy_all(batches, lent)

    async def _copy_all(self, batches: list[list[SliceFrame]], lent: Place | None) -> Committed:
        tasks: list[asyncio.Task[None]] = []
        try:
            for batch in batches if self._waits else batches[:-1]:
                place, number = await self._place(batch, lent)
                tasks.append(asyncio.create_task(self._copy(batch, place, number)))
                await asyncio.sleep(0)  # the request leaves before its bytes are hashed
                await self._hash(batch)
                for task in tasks:
                    if task.done():
                        task.result()
            committed = await (self._ask_to_commit() if self._waits else self._copy_last(batches[-1], lent))
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return committed

    async def _place(self, batch: list[SliceFrame], lent: Place | None) -> tuple[Place, int]:
        """Where a batch is copied from, and the number of that buffer: it is put on the stage if it is not in a buffer already."""
        place = await self._buffers.stage(sum(frame.nbytes for frame in batch), within=lent)
        try:
            number = await self._buffers.number(self._connection, place.memory)
            if place.stage is not None:
                at = place.offset
                for frame in batch:
                    start = frame.slices[0][0]
                    np.copyto(place.stage[at : at + frame.nbytes], self._data[start : start + frame.nbytes])
                    at += frame.nbytes
        except BaseException:
            self._buffers.unstage(place)
            raise
        self.begun = True
        return place, number

    async def _hash(self, batch: list[SliceFrame]) -> None:
        """The digests of the caller's bytes."""
        turn = 0
        for frame in batch:
            for start, size in frame.slices:
                if turn + size > _TURN_BYTES:
                    await asyncio.sleep(0)
                    turn = 0
                self._digests.append(slice_digest(self._data[start : start + size].data))
                turn += size

    async def _copy(self, batch: list[SliceFrame], place: Place, number: int) -> None:
        try:
            message, parts = self._request(batch, place, number)
            await self._connection.call(FrameType.COPY, message, Empty, parts)
        finally:
            self._buffers.unstage(place)
        self._tell(batch)

    async def _copy_last(self, batch: list[SliceFrame], lent: Place | None, before: Request | None = None) -> Committed:
        """What answers its COPY is the answer to the COMMIT."""
        place, number = await self._place(batch, lent)
        try:
            message, parts = self._request(batch, place, number)
            message.quiet = True
            async with self._connection.unanswered(FrameType.COPY, message, parts, before=before):
                await self._hash(batch)
                committed = await self._ask_to_commit()
        finally:
            self._buffers.unstage(place)
        self._tell(batch)
        return committed

    async def _ask_to_commit(self) -> Committed:
        committed, _ = await self._connection.call(FrameType.COMMIT, self._closing.commit(), Committed, b"".join(self._digests))
        return committed

    def _request(self, batch: list[SliceFrame], place: Place, number: int) -> tuple[Copy, bytes]:
        parts, at = [], place.offset
        for frame in batch:
            offset = at if place.stage is not None else place.offset + frame.slices[0][0]
            parts.append(CopiedPart(frame.page, frame.part, frame.first_slice, offset))
            at += frame.nbytes
        return Copy(handle=self._closing.handle, buffer=number, slices=[len(frame.slices) for frame in batch]), pack_copies(parts)

    def _tell(self, batch: list[SliceFrame]) -> None:
        self._done += sum(frame.nbytes for frame in batch)
        if self._progress is not None:
            self._progress(self._done, self._total)


def _batches(frames: Sequence[SliceFrame], most: int) -> Iterator[list[SliceFrame]]:
    batch: list[SliceFrame] = []
    nbytes = 0
    for frame in frames:
        if batch and (nbytes + frame.nbytes > most or len(batch) == _MOST_PARTS):
            yield batch
            batch, nbytes = [], 0
        batch.append(frame)
        nbytes += frame.nbytes
    if batch:
        yield batch
