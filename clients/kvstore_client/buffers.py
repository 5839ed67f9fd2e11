"""Memory that a daemon on the same machine can read: what lies in it is put without being sent."""

import asyncio
import fcntl
import itertools
import os
from dataclasses import dataclass
from operator import index

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import BadRequest, FrameType, KVStoreError, NoSpace
from kvstore.api.wire.messages import Empty
from kvstore.api.wire.same_host import Buffer, Buffered
from kvstore.memfds import make_huge, map_memfd
from kvstore_client.connection import Connection

_F_ADD_SEALS, _SHRINK, _GROW = 1033, 0x2, 0x4
_STAGES = 4
STAGE_BYTES = 4 << 20
_numbers = itertools.count(1)


class SharedBuffer:
    """A memfd of `nbytes`, mapped as `array`. It can't change its size, or the daemon would not map it.

    From 2 MiB on its memory is made at once, on huge pages (0.1 s a GiB), where the system gives them.

    Puts whose data lie in `array`, in any view of it, go this way by themselves. Leave the bytes alone until the put has
    returned: what changes meanwhile does not verify, and the put fails.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            nbytes = index(nbytes)
        except TypeError:
            nbytes = 0
        if nbytes <= 0:
            raise BadRequest("a buffer has a whole number of bytes, at least one")
        self.number = next(_numbers)
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("kvstore-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, nbytes)
            fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SHRINK | _GROW)
            self._memory, view = map_memfd(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        make_huge(view)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8)
        self._start = int(self.array.ctypes.data)

    def offset_of(self, data: npt.NDArray[np.uint8]) -> int | None:
        """Where in the buffer some bytes lie; None if they lie elsewhere."""
        at = int(data.ctypes.data) - self._start
        return at if self._start and 0 <= at <= self.nbytes - len(data) else None

    def close(self) -> None:
        """Give the memory back, as soon as nobody has a view of it."""
        if self._start:
            self._start = 0
            os.close(self.descriptor)
            self.array = np.zeros(0, np.uint8)
            try:
                self._memory.close()
            except BufferError:
                pass  # it goes with the last view


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a buffer. `staged` says that they are only lent until they were copied."""

    buffer: SharedBuffer
    offset: int
    staged: bool


class Buffers:
    """The buffers of a client: its users', and a few stages of its own that other memory is put through."""

    def __init__(self) -> None:
        self._mine: list[SharedBuffer] = []
        self._known: dict[int, tuple[Connection, asyncio.Task[int]]] = {}
        self._staging: SharedBuffer | None = None
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._depth = asyncio.Semaphore(_STAGES)

    def make(self, nbytes: int) -> SharedBuffer:
        """A buffer to put from. Raises NoSpace if the system has no room for it."""
        try:
            buffer = SharedBuffer(nbytes)
        except (OSError, OverflowError) as error:
            raise NoSpace(f"there is no memory for a buffer of {nbytes} bytes: {error}") from None
        self._mine.append(buffer)
        return buffer

    async def drop(self, buffer: SharedBuffer) -> None:
        """Give a buffer up, here and in the daemon."""
        if buffer in self._mine:
            self._mine.remove(buffer)
        connection, asked = self._known.pop(buffer.number, (None, None))
        buffer.close()
        if connection is not None and asked is not None:
            try:
                await connection.call(FrameType.DROP_BUFFER, Buffered(buffer=await asked), Empty)
            except KVStoreError:
                pass  # it went with the connection

    def close(self) -> None:
        """Give all of them up. The connection that they were lent over is closed."""
        for buffer in (*self._mine, *([self._staging] if self._staging is not None else [])):
            buffer.close()
        self._mine.clear()
        self._known.clear()
        self._staging = None

    def find(self, data: npt.NDArray[np.uint8]) -> Place | None:
        """Where in the user's buffers some bytes lie; None if they lie elsewhere."""
        for buffer in self._mine:
            if (offset := buffer.offset_of(data)) is not None:
                return Place(buffer, offset, staged=False)
        return None

    async def stage(self, nbytes: int, *, within: Place | None) -> Place:
        """Room for the next batch, when there is some: in what the data lie in, or on a stage. Follow with `unstage`.

        Raises OSError if no stage can be made.
        """
        await self._depth.acquire()
        if within is not None:
            return within
        if self._staging is None:
            try:
                self._staging = SharedBuffer(_STAGES * STAGE_BYTES)
            except BaseException:
                self._depth.release()
                raise
            for stage in range(_STAGES):
                self._free.put_nowait(stage)
        assert nbytes <= STAGE_BYTES
        return Place(self._staging, self._free.get_nowait() * STAGE_BYTES, staged=True)

    def unstage(self, place: Place) -> None:
        """The batch is copied, or given up."""
        if place.staged:
            self._free.put_nowait(place.offset // STAGE_BYTES)
        self._depth.release()

    async def number(self, connection: Connection, buffer: SharedBuffer) -> int:
        """What the daemon calls a buffer on a connection; lent to it if that has not happened. Raises Busy if it takes no more."""
        known = self._known.get(buffer.number)
        if known is None or known[0] is not connection or (known[1].done() and (known[1].cancelled() or known[1].exception())):
            asked = asyncio.create_task(_lend(connection, buffer))
            known = self._known[buffer.number] = connection, asked
        return await asyncio.shield(known[1])


async def _lend(connection: Connection, buffer: SharedBuffer) -> int:
    reply = await connection.call_with(FrameType.BUFFER, Buffer(nbytes=buffer.nbytes), Buffered, buffer.descriptor)
    return reply.buffer
