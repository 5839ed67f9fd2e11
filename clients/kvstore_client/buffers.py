"""Memory that a daemon on the same machine can read: what lies in it is put without being sent."""

import asyncio
import errno
import fcntl
import itertools
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import BadRequest, Busy, FrameType, KVStoreError, NoSpace
from kvstore.api.wire.messages import Empty
from kvstore.api.wire.same_host import Buffer, Buffered
from kvstore.machine import read_memory
from kvstore.memfds import make_huge, map_memfd
from kvstore.size_text import size_text
from kvstore_client.arguments import wrong
from kvstore_client.connection import Connection

_F_ADD_SEALS, _SHRINK, _GROW = 1033, 0x2, 0x4
_STAGES = 4
STAGE_BYTES = 4 << 20
AT_ONCE_BYTES = 64 << 20
"""So much of a buffer's memory is made with it: it takes some hundredths of a second."""
_TELL_S = 5.0
"""How long the daemon may take to let go of a buffer."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Lendable:
    """The memory of a buffer, as the daemon is lent it. It is there as long as anybody has the buffer, or a view of it."""

    number: int
    descriptor: int
    start: int
    nbytes: int
    alive: "weakref.ref[Any]"

    def offset_of(self, data: npt.NDArray[np.uint8]) -> int | None:
        """Where in it some bytes lie; None if they lie elsewhere."""
        at = int(data.ctypes.data) - self.start
        return at if 0 <= at <= self.nbytes - len(data) else None


class SharedBuffer:
    """A memfd of `nbytes`, mapped as `array`. It can't change its size, or the daemon would not map it.

    Its first 64 MiB are made at once, on huge pages where the system gives them (from 2 MiB on). What comes after them is made as it is
    touched, page by page, unless `populate` is called, which the blocking client does.

    Puts whose data lie in `array`, in any view of it, go this way by themselves. Leave the bytes alone until the put has
    returned: what changes meanwhile does not verify, and the put fails.

    The memory goes back with the last reference to the buffer and to views of it, or after `drop_buffer`, or the end of its client, with
    the last view; then there is no `array` any more.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes = _checked(nbytes)
        descriptor = os.memfd_create("kvstore-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SHRINK | _GROW)
            self._memory, view = map_memfd(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._release = weakref.finalize(self._memory, os.close, descriptor)
        self._release.atexit = False
        make_huge(view[:AT_ONCE_BYTES])
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(view, np.uint8)
        self.lendable = Lendable(next(_numbers), descriptor, int(self._array.ctypes.data), nbytes, weakref.ref(self._memory))

    def __repr__(self) -> str:
        return f"<SharedBuffer of {self.nbytes:,} bytes{', dropped' if self.dropped else ''}>"

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Its bytes. Raises BadRequest after it was dropped."""
        if self._array is None:
            raise BadRequest("this buffer was dropped, or its client closed: make another with client.buffer")
        return self._array

    @property
    def descriptor(self) -> int:
        """Of the memfd."""
        return self.lendable.descriptor

    @property
    def dropped(self) -> bool:
        """Whether it was given up."""
        return self._array is None

    def populate(self) -> None:
        """Have all its memory made now, on huge pages where the system gives them. What is in it stays.

        Blocking, for 0.1 to 1.6 s a GiB: in asyncio, `await asyncio.to_thread(buffer.populate)`.
        """
        array = self.array
        if self.nbytes > AT_ONCE_BYTES:
            make_huge(array.data)

    def close(self, lent: "asyncio.Task[int] | None" = None) -> None:
        """Give the memory back, as soon as nobody has a view of it, and the descriptor once it was `lent`."""
        if self._array is not None:
            self._array = None
            if lent is None:
                self._release()
            else:
                lent.add_done_callback(lambda _: self._release())
            with suppress(BufferError):  # it goes with the last view
                self._memory.close()


def _checked(nbytes: Any) -> int:
    try:
        found = 0 if isinstance(nbytes, bool) else index(nbytes)
    except TypeError:
        found = 0
    if found <= 0:
        raise BadRequest(f"a buffer has a whole number of bytes, at least one, not {nbytes!r}")
    return found


def _check_room(nbytes: int) -> None:
    """Raise NoSpace for more memory than there is: the system would only find out, or end a process, as it is touched."""
    try:
        memory = read_memory()
    except (OSError, KeyError, ValueError):
        return
    if nbytes > memory.available:
        whose = "its control group leaves" if memory.grouped else "are available on this machine"
        raise NoSpace(f"there is no memory for a buffer of {size_text(nbytes)}: {size_text(memory.available)} {whose}")


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a buffer, from `offset` on. With a `stage` they are only lent until they were copied there."""

    memory: Lendable
    offset: int
    stage: npt.NDArray[np.uint8] | None = None


class Buffers:
    """The buffers of a client: its users', and a few stages of its own that other memory is put through.

    The users' are held weakly: nobody keeps one that its user has let go of.
    """

    def __init__(self) -> None:
        self._mine: dict[int, Lendable] = {}
        self._handles: weakref.WeakValueDictionary[int, SharedBuffer] = weakref.WeakValueDictionary()
        self._known: dict[int, tuple[Connection, asyncio.Task[int]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._process = os.getpid()
        self._staging: SharedBuffer | None = None
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._depth = asyncio.Semaphore(_STAGES)

    def make(self, nbytes: int) -> SharedBuffer:
        """A buffer to put from. Raises NoSpace if the system has no room, or no descriptor, for it."""
        nbytes = _checked(nbytes)
        _check_room(nbytes)
        try:
            buffer = SharedBuffer(nbytes)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoSpace(f"there is no file descriptor for a buffer: {error}; raise `ulimit -n`, or drop some") from None
            raise NoSpace(f"there is no memory for a buffer of {size_text(nbytes)}: {error}") from None
        number = buffer.lendable.number
        self._mine[number] = buffer.lendable
        self._handles[number] = buffer
        weakref.finalize(buffer._memory, _gone, weakref.ref(self), number).atexit = False
        return buffer

    async def drop(self, buffer: SharedBuffer) -> None:
        """Give a buffer up, here and in the daemon. Once is enough. Raises BadRequest for one of another client."""
        if not isinstance(buffer, SharedBuffer):
            raise wrong("buffer", buffer, "a SharedBuffer, as client.buffer makes them")
        if buffer.dropped:
            return
        number = buffer.lendable.number
        if self._mine.pop(number, None) is None:
            raise BadRequest("this buffer is of another client: drop it there")
        known = self._known.pop(number, None)
        if known is None:
            buffer.close()
        else:
            buffer.close(known[1])
            await asyncio.wait([self._end(*known)], timeout=_TELL_S)

    def forget(self, number: int) -> None:
        """Nobody has a buffer any more that was lent: the daemon is told, and not waited for. In the loop that it was lent in."""
        known = self._known.pop(number, None)
        if known is not None and known[0].lost is None:
            self._end(*known)

    def _end(self, connection: Connection, asked: asyncio.Task[int]) -> "asyncio.Task[None]":
        task = asyncio.create_task(_take_back(connection, asked))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def lost(self, number: int) -> None:
        """As `forget`, from any thread, whatever it is in the middle of."""
        self._mine.pop(number, None)
        if number in self._known and self._loop is not None and os.getpid() == self._process:
            with suppress(RuntimeError):  # the loop has ended, and the connections with it
                self._loop.call_soon_threadsafe(self.forget, number)

    def close(self) -> None:
        """Give all of them up. The connection that they were lent over is closed."""
        for buffer in (*self._handles.values(), *([self._staging] if self._staging is not None else [])):
            buffer.close()
        self._mine.clear()
        self._known.clear()
        self._staging = None

    def find(self, data: npt.NDArray[np.uint8]) -> Place | None:
        """Where in the user's buffers some bytes lie; None if they lie elsewhere."""
        for memory in tuple(self._mine.values()):  # others may be let go of meanwhile
            if (offset := memory.offset_of(data)) is not None:
                return Place(memory, offset)
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
        return Place(self._staging.lendable, self._free.get_nowait() * STAGE_BYTES, self._staging.array)

    def unstage(self, place: Place) -> None:
        """The batch is copied, or given up."""
        if place.stage is not None:
            self._free.put_nowait(place.offset // STAGE_BYTES)
        self._depth.release()

    def check(self, memory: Lendable) -> None:
        """Raise Busy if a buffer was dropped."""
        if memory.number not in self._mine and (self._staging is None or memory is not self._staging.lendable):
            raise Busy("the buffer was dropped while it was put", retry_after_ms=1)

    async def number(self, connection: Connection, memory: Lendable) -> int:
        """What the daemon calls a buffer on a connection; lent to it if that has not happened. Raises Busy if it takes no more.

        Also if it was dropped since `find`: its descriptor may be another file's by now, and what is in views of it goes another way.
        """
        self.check(memory)
        known = self._known.get(memory.number)
        if known is None or known[0] is not connection or (known[1].done() and (known[1].cancelled() or known[1].exception())):
            self._loop = asyncio.get_running_loop()
            asked = asyncio.create_task(_lend(connection, memory, memory.alive()))
            asked.add_done_callback(_heard)
            known = self._known[memory.number] = connection, asked
        return await asyncio.shield(known[1])


async def _lend(connection: Connection, memory: Lendable, held: object) -> int:
    """Lend it, and hold it meanwhile: its descriptor must not become another file's."""
    reply = await connection.call_with(FrameType.BUFFER, Buffer(nbytes=memory.nbytes), Buffered, memory.descriptor)
    return reply.buffer


def _heard(asked: asyncio.Task[int]) -> None:
    """Who waited for it may have had no more time: an error in it is none that was missed."""
    if not asked.cancelled():
        asked.exception()


async def _take_back(connection: Connection, asked: asyncio.Task[int]) -> None:
    """Have the daemon let go of what it is lent, or, if it is slow, will have been."""
    await asyncio.wait([asked])
    if asked.cancelled() or asked.exception() is not None:
        return
    with suppress(KVStoreError, TimeoutError):  # it goes with the connection at the latest
        async with asyncio.timeout(_TELL_S):
            await connection.call(FrameType.DROP_BUFFER, Buffered(buffer=asked.result()), Empty)


def _gone(owner: "weakref.ref[Buffers]", number: int) -> None:
    """The memory of a buffer has gone, with its last reference or view."""
    if (buffers := owner()) is not None:
        buffers.lost(number)
