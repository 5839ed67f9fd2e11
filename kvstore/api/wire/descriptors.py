"""A channel over a Unix socket that passes file descriptors beside its frames (SCM_RIGHTS)."""

import array
import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from kvstore.api.wire.channel import Channel
from kvstore.errors import Busy, ConnectionLost, ProtocolError

_INT = array.array("i").itemsize


class DescriptorChannel(Channel):
    """Descriptors are sent with the first byte of a frame, so whoever has read the frame's header has them: `take` gives them out.

    At most `most` may wait to be taken; more end the connection. None is left open when the channel is closed.
    """

    def __init__(self, sock: socket.socket, most: int) -> None:
        super().__init__(sock)
        self._most = most
        self._waiting: deque[int] = deque()
        self._space = socket.CMSG_SPACE(most * _INT)

    def close(self) -> None:
        """Close the socket, and the descriptors that nobody took."""
        super().close()
        while self._waiting:
            os.close(self._waiting.popleft())

    def take(self, count: int) -> list[int]:
        """The next descriptors, which are the caller's from then on. Raises ProtocolError if the peer sent fewer."""
        if count > len(self._waiting):
            raise ProtocolError(f"a frame of {count} descriptors came with {len(self._waiting)}")
        return [self._waiting.popleft() for _ in range(count)]

    async def send_with(self, buffers: Sequence[bytes | memoryview], descriptors: Sequence[int]) -> None:
        """Send buffers with descriptors, which stay the caller's. Raises Busy, with nothing sent, if too many are under way."""
        views = [memoryview(b) for b in buffers if len(b)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        sent = 0

        def write() -> bool:
            nonlocal sent
            sent = self.sock.sendmsg(views[:1], rights)
            return True

        try:
            await self._writer.send(write)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # of this user, in all sockets: until somebody takes some
                raise Busy("too many descriptors are under way: others don't take theirs", retry_after_ms=1000) from error
            raise ConnectionLost(f"the connection broke: {error}") from error
        await self.send([views[0][sent:], *views[1:]])

    async def _fill(self, *, or_end: bool = False) -> bool:
        """As the channel's, for what may be the beginning of a frame: the only reads that may meet descriptors."""
        self._start = self._end = 0
        try:
            while self._spins:  # as in ReadingHalf._receive_spinning
                try:
                    self._end = self._read_start()
                    break
                except BlockingIOError:
                    self._spins -= 1
                    await asyncio.sleep(0)
            else:
                if or_end and self._handler is not None:
                    return await self._reader.receive(self._read_frames) > 0
                self._end = await self._reader.receive(self._read_start)
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error
        if not self._end and not or_end:
            raise ConnectionLost("the peer closed the connection in the middle of a frame")
        return self._end > 0

    def _read_start(self) -> int:
        """Takes over descriptors in the moment they come: a task that is cancelled then would lose them."""
        count, ancillary, _, _ = self.sock.recvmsg_into([self._buffer], self._space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._waiting.extend(array.array("i", data[: len(data) - len(data) % _INT]))
        if len(self._waiting) > self._most:
            raise ProtocolError(f"more than {self._most} descriptors wait to be taken")
        return count
