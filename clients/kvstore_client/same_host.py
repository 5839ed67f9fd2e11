"""Shared memory with a daemon on this machine: the connection that descriptors come by, and the segments that are mapped."""

import asyncio
import contextlib
import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import FrameType, KVStoreError
from kvstore.api.wire.same_host import MAX_SEGMENTS, RETIRED, Place, SegmentList, SegmentMeta, SegmentsRequest, host_id
from kvstore.memfds import map_memfd, prefault
from kvstore_client.connection import Connection
from kvstore_client.direct import Elsewhere, current
from kvstore_client.helper import Helper

if TYPE_CHECKING:
    from kvstore_client.pool import Pool

_RETRY_S = 5.0
"""How long it is left alone after it could not be had."""
_SWEEP_S = 1.0
_WORD = 8


class MappedSegment:
    """One of the daemon's segments, mapped for reading. `data` are its bytes."""

    def __init__(self, meta: SegmentMeta, descriptor: int) -> None:
        self.number = meta.number
        self._memory, self._view = map_memfd(descriptor, meta.nbytes, mmap.PROT_READ)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._view, np.uint8)
        self._words: memoryview | None = self._view[meta.nbytes - _WORD * (1 + meta.slots) :].cast("Q")

    @property
    def retired(self) -> bool:
        """Whether the daemon has given it back: nothing in it is anybody's any more."""
        words = self._words  # another thread may be unmapping it
        return words is None or bool(words[0] == RETIRED)

    def holds(self, place: Place) -> bool:
        """Whether what was at a place still is."""
        words = self._words
        return words is not None and bool(words[1 + place.slot] == place.generation)

    def populate(self) -> None:
        """Have all its pages at hand, so that nobody waits for them one by one later. Blocking."""
        with contextlib.suppress(ValueError):  # the client was closed meanwhile, and it is unmapped
            prefault(self._view)

    def unmap(self) -> bool:
        """Unmap it; False as long as somebody holds a view of it."""
        self.data = np.zeros(0, np.uint8)
        self._words = None
        self._view.release()
        try:
            self._memory.close()
        except BufferError:
            return False
        return True


@dataclass(slots=True)
class Copied:
    """What was copied out of shared memory since the daemon was last told: its estimates learn from it."""

    fetches: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """One fetch."""
        self.fetches, self.nbytes, self.seconds = self.fetches + 1, self.nbytes + nbytes, self.seconds + seconds

    def take(self) -> dict[str, int]:
        """As a message carries it; it counts from zero then."""
        told = {"copied_fetches": self.fetches, "copied_bytes": self.nbytes, "copied_us": int(self.seconds * 1e6)}
        self.fetches, self.nbytes, self.seconds = 0, 0, 0.0
        return told


class SameHost:
    """What a client has of a daemon on its own machine. Everything here may fail: then there is nothing, and the sockets do it."""

    def __init__(self, pool: "Pool", *, wanted: bool) -> None:
        self.copied = Copied()
        self.helper = Helper()
        self.endpoint = ""
        """Of the daemon's Unix socket, once it was reached."""
        self._pool = pool
        self._wanted = wanted
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._mapping = asyncio.Lock()
        self._not_before = 0.0
        self._nothing_at = 0
        """The epoch of a daemon that is known to offer nothing."""
        self._epoch = 0
        self._segments: dict[int, MappedSegment] = {}
        self._dying: list[MappedSegment] = []
        self._sweeper: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Close the connection and unmap everything that nobody looks at."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._forget_all()
        self.helper.close()

    def drop(self) -> None:
        """As `close`, where the event loop of the connection does not run any more."""
        if self._connection is not None:
            self._connection.drop()
            self._connection = None
        self._forget_all()
        self.helper.close()

    @property
    def now(self) -> Connection | None:
        """The connection, if it is there at this moment."""
        connection = self._connection
        if connection is None or connection.lost is not None or connection.welcome.session != self._pool.session:
            return None
        return connection

    @property
    def hopeless(self) -> bool:
        """Whether there is nothing to be had, or it is not the time to try again."""
        if not self._wanted or (self._nothing_at and self._nothing_at == self._pool.epoch):
            return True
        return time.monotonic() < self._not_before

    async def connection(self) -> Connection | None:
        """The connection, opened if the daemon offers one to clients here; None if there is none for now."""
        if (connection := self.now) is not None:
            return connection
        async with self._opening:
            return self.now or (None if self.hopeless else await self._open())

    async def _open(self) -> Connection | None:
        first = await self._pool.connection(self._pool.least_busy())
        welcome = first.welcome
        if not welcome.same_host or not host_id() or welcome.host != host_id():
            self._nothing_at = welcome.epoch
            return None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        try:
            connection = await self._pool.open_beside(welcome.same_host)
            self.endpoint = self._pool.beside(welcome.same_host)
        except KVStoreError:
            self._not_before = time.monotonic() + _RETRY_S
            return None
        if connection.welcome.epoch != self._epoch:
            self._forget_all()
            self._epoch = connection.welcome.epoch
        connection.on_segments = self._take
        self._connection = connection
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep_on(), name="kvstore-client-segments")
        return connection

    # --- segments ------------------------------------------------------------------------------------------------------

    def segment(self, number: int, epoch: int) -> MappedSegment | None:
        """A segment of the daemon of an epoch, if it is mapped."""
        return self._segments.get(number) if epoch == self._epoch else None

    async def map(self, numbers: Iterable[int], epoch: int) -> None:
        """Map those segments that are not yet, as far as they are there and it can be done."""
        missing = [number for number in dict.fromkeys(numbers) if number not in self._segments]
        if not missing:
            return
        if current() is not None:
            raise Elsewhere
        async with self._mapping:
            for first in range(0, len(missing), MAX_SEGMENTS):
                chunk = [number for number in missing[first : first + MAX_SEGMENTS] if number not in self._segments]
                connection = self.now
                if connection is None or connection.welcome.epoch != epoch or not chunk:
                    return
                try:
                    await connection.call(FrameType.SEGMENTS, SegmentsRequest(numbers=chunk, dropped=self._unmapped()), SegmentList)
                except KVStoreError:
                    return
                fresh = [self._segments[number] for number in chunk if number in self._segments]
                await asyncio.to_thread(_populate, fresh)

    def _take(self, items: list[SegmentMeta], descriptors: list[int]) -> None:
        for meta, descriptor in zip(items, descriptors, strict=True):
            try:
                if meta.number not in self._segments:
                    self._segments[meta.number] = MappedSegment(meta, descriptor)
            except (OSError, ValueError):
                pass  # no address space, say: then its bytes come over a socket
            finally:
                os.close(descriptor)

    def _unmapped(self) -> list[int]:
        """Unmap what the daemon gave back. Returns the numbers of what is unmapped now."""
        for number in [number for number, segment in self._segments.items() if segment.retired]:
            self._dying.append(self._segments.pop(number))
        gone = [segment for segment in self._dying if segment.unmap()]
        self._dying = [segment for segment in self._dying if segment not in gone]
        return [segment.number for segment in gone]

    def _forget_all(self) -> None:
        for segment in (*self._segments.values(), *self._dying):
            segment.unmap()
        self._segments.clear()
        self._dying.clear()

    async def _sweep_on(self) -> None:
        """Let go of what the daemon gives back, and tell it so: until then the memory is held."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            gone = self._unmapped()
            if gone and (connection := self.now) is not None:
                with contextlib.suppress(KVStoreError):
                    await connection.call(FrameType.SEGMENTS, SegmentsRequest(numbers=[], dropped=gone), SegmentList)


def _populate(segments: list[MappedSegment]) -> None:
    for segment in segments:
        segment.populate()
