"""Shared memory for clients on this machine: who may have it, and the buffers that they lend for puts.

Only over a Unix socket, only for the daemon's own user and those configured (SO_PEERCRED), and only after the token.
"""

import asyncio
import fcntl
import logging
import mmap
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kvstore.api.copying import COPIERS, Copying, Job
from kvstore.api.wire.channel import Channel
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.same_host import host_id
from kvstore.errors import BadRequest, Busy, NotFound
from kvstore.memfds import map_memfd
from kvstore.threads import started_pool

_log = logging.getLogger("kvstore.same_host")

MAX_DESCRIPTORS = 4
"""Descriptors that a client may have sent and the daemon not yet taken."""
_MAX_BUFFERS = 64
"""Of one connection."""
MAX_LENT_BUFFERS = 1024
"""Of all connections together: each is a descriptor, and a mapping."""
_MOST_LENT = 16 << 40
"""Bytes of all buffers together: address space that they may take from the daemon."""
_CREDENTIALS = struct.Struct("3i")
_F_GET_SEALS, _F_SEAL_SHRINK = 1034, 0x2


class SameHost:
    """What a daemon offers to clients on its machine. `endpoint` is that of its Unix socket, empty to offer nothing."""

    def __init__(self, endpoint: str = "", users: frozenset[int] = frozenset()) -> None:
        self.endpoint = endpoint
        self._users = users | {os.geteuid()}
        self._copiers = started_pool(COPIERS, "kvstore-copier", apart=True) if endpoint else None
        self.lent = 0
        """Bytes of all buffers that are lent now, or not let go of yet."""
        self.buffers = 0
        """So many are they."""

    @property
    def copiers(self) -> ThreadPoolExecutor:
        """The threads that copy out of clients' buffers, and let go of them."""
        assert self._copiers is not None, "no shared memory is offered"
        return self._copiers

    def close(self) -> None:
        """End the threads, once they are done. Blocking."""
        if self._copiers is not None:
            self._copiers.shutdown()

    def take_over(self, descriptor: int, nbytes: int) -> "ClientBuffer":
        """A buffer out of a client's descriptor. Raises BadRequest or Busy; the descriptor is closed then."""
        refused: Busy | None = None
        if self.buffers >= MAX_LENT_BUFFERS:
            refused = Busy(f"{MAX_LENT_BUFFERS} buffers are lent to this daemon", retry_after_ms=1000)
        elif self.lent + nbytes > _MOST_LENT:
            refused = Busy(f"more than {_MOST_LENT} bytes would be lent to this daemon", retry_after_ms=1000)
        try:
            if refused is not None:
                raise refused
            buffer = ClientBuffer(descriptor, nbytes)
        except BaseException:
            self.refuse(descriptor)
            raise
        self.lent += nbytes
        self.buffers += 1
        return buffer

    def refuse(self, descriptor: int) -> None:
        """Close a descriptor that a client sent. It may be the last one of much memory: so not in the loop's thread."""
        self._in_thread(partial(os.close, descriptor))

    def let_go(self, buffer: "ClientBuffer") -> None:
        """Close a buffer, with the last copy that is under way. If its client is gone, that frees its memory, which takes long."""
        buffer.when_unused(lambda: self._in_thread(buffer.close).add_done_callback(partial(self._gone, buffer.nbytes)))

    def _gone(self, nbytes: int, closed: "asyncio.Future[None]") -> None:
        self.lent -= nbytes
        self.buffers -= 1
        if (error := closed.exception()) is not None:
            _log.error("a buffer was not closed: %s", error)

    def _in_thread(self, close: Callable[[], None]) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().run_in_executor(self.copiers, close)

    def admits(self, sock: socket.socket) -> bool:
        """Whether a connection may come in at all: over a Unix socket only the users that it is for, and root."""
        return sock.family != socket.AF_UNIX or _peer_uid(sock) in self._users | {0}

    def channel(self, sock: socket.socket) -> Channel:
        """A channel for a connection over the Unix socket: one that takes descriptors, where they are offered."""
        return DescriptorChannel(sock, MAX_DESCRIPTORS) if self.endpoint else Channel(sock)

    def peer(self, channel: Channel) -> "SameHostPeer | None":
        """What is kept for a connection that may have shared memory; None if it may not."""
        if not isinstance(channel, DescriptorChannel) or _peer_uid(channel.sock) not in self._users:
            return None
        return SameHostPeer(channel, self)

    def hint(self, sock: socket.socket) -> tuple[str, str]:
        """What a client is told of it: endpoint and host id; empty to who is seen to be elsewhere."""
        if not self.endpoint:
            return "", ""
        if sock.family != socket.AF_UNIX and sock.getpeername()[0] != sock.getsockname()[0]:
            return "", ""
        return self.endpoint, host_id()


def _peer_uid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


class SameHostPeer:
    """A connection's buffers, and the way to take descriptors from it."""

    def __init__(self, channel: DescriptorChannel, host: SameHost) -> None:
        self.channel = channel
        self.host = host
        self._buffers: dict[int, ClientBuffer] = {}
        self._next = 1

    def close(self) -> None:
        """The connection is over, and no copy is under way."""
        for number in list(self._buffers):
            self.drop_buffer(number)

    def add_buffer(self, nbytes: int) -> int:
        """Take in the buffer whose descriptor came with the frame. Returns its number. Raises BadRequest or Busy."""
        if len(self._buffers) >= _MAX_BUFFERS:
            self.host.refuse(self.channel.take(1)[0])
            raise Busy(f"{_MAX_BUFFERS} buffers are lent over this connection: give some up", retry_after_ms=100)
        self._buffers[self._next] = self.host.take_over(self.channel.take(1)[0], nbytes)
        self._next += 1
        return self._next - 1

    def buffer(self, number: int) -> "ClientBuffer":
        """A buffer of this connection. Raises NotFound."""
        found = self._buffers.get(number)
        if found is None:
            raise NotFound(f"buffer {number} was not lent over this connection")
        return found

    def drop_buffer(self, number: int) -> None:
        """Give a buffer up, with the last copy from it."""
        buffer = self.buffer(number)
        del self._buffers[number]
        self.host.let_go(buffer)


class ClientBuffer:
    """A client's memfd. It is mapped only if nobody can make it smaller: reading what was cut off would kill the daemon (SIGBUS).

    Without that seal it is read with preadv, at less than half the speed.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        try:
            found = os.fstat(descriptor)
            seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
        except OSError:
            raise BadRequest("a buffer is a memfd: this descriptor is something else") from None
        if not stat.S_ISREG(found.st_mode) or found.st_dev != _memfd_device():
            raise BadRequest("a buffer is a memfd of ordinary pages: this descriptor is something else")
        if not 0 < nbytes <= found.st_size:
            raise BadRequest(f"a buffer of {nbytes} bytes in a memfd of {found.st_size}")
        self.nbytes = nbytes
        self._users = 0
        self._unused: Callable[[], None] | None = None
        self._descriptor: int | None = descriptor
        self._memory: mmap.mmap | None = None
        self._bytes = memoryview(b"")
        if seals & _F_SEAL_SHRINK:
            try:
                self._memory, self._bytes = map_memfd(descriptor, nbytes, mmap.PROT_READ)
            except OSError as error:  # not open for reading, say
                raise BadRequest(f"the buffer can't be mapped: {error}") from None
            self._descriptor = None
            os.close(descriptor)  # the mapping has its own

    @property
    def mapped(self) -> bool:
        """Whether it is read as memory."""
        return self._memory is not None

    def when_unused(self, then: Callable[[], None]) -> None:
        """Call `then` once no copy is under way. No other may begin."""
        if self._users:
            self._unused = then
        else:
            then()

    def close(self) -> None:
        """Unmap and close it. Blocking, and only when it is unused."""
        if self._memory is not None:
            self._bytes.release()
            self._memory.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def copy(self, copiers: ThreadPoolExecutor, jobs: Sequence[Job]) -> "asyncio.Future[list[list[bytes]]]":
        """Start to copy slices out of it, in threads. The future gives the digests of what was copied, computed from the copy.

        It may raise BadRequest. Wait for it in any case: until it is done, they write.
        """
        for view, _, offset in jobs:
            if offset + len(view) > self.nbytes:
                raise BadRequest(f"bytes {offset} to {offset + len(view)} of a buffer of {self.nbytes}")
        self._users += 1
        future = Copying(self._read, jobs).start(copiers)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: object) -> None:
        self._users -= 1
        if self._unused is not None and not self._users:
            self._unused()

    def _read(self, target: memoryview, offset: int) -> None:
        if self._memory is not None:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self._bytes, np.uint8, len(target), offset))
            return
        assert self._descriptor is not None
        filled = 0
        while filled < len(target):
            count = os.preadv(self._descriptor, [target[filled:]], offset + filled)
            if not count:
                raise BadRequest("the buffer was made smaller while it was read")
            filled += count


def _memfd_device() -> int:
    """The device number that memfds of ordinary pages have, in contrast to files, huge pages and what others serve."""
    descriptor = os.memfd_create("kvstore-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)
