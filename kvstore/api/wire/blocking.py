"""A channel for a thread that waits by itself: its coroutines wait for nothing but the socket, in the system call (see `eager.at_once`)."""

import select
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvstore.api.wire.channel import Channel
from kvstore.api.wire.spin import Spin

T = TypeVar("T")

_SLACK = 1.05
"""A bound is told to the kernel anew only if the last one was longer by so much: it takes a system call."""
_TIMEVAL = struct.Struct("@ll")


class BlockingEnds:
    """Both sides of a blocking socket. `until` is when the waits of either end with TimeoutError, by time.monotonic."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._told: dict[int, float] = {}
        self._spin = Spin()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.until = 0.0

    def bound(self, seconds: float | None) -> None:
        """Nothing: `until` is the bound."""

    def look(self) -> None:
        """Nothing: nobody waits while somebody else could look."""

    async def receive(self, read: Callable[[], T]) -> T:
        """What `read`, a call on the socket, returns. Raises TimeoutError."""
        left = self._left()
        if not self._spin.worth() or not self._spin.look(partial(self._poll.poll, 0)):
            self._tell(socket.SO_RCVTIMEO, left)
        try:
            return read()
        except BlockingIOError:
            raise TimeoutError from None

    async def send(self, write: Callable[[], bool]) -> None:
        """Call `write`, which writes something, until it says that all is out. Raises TimeoutError, and what it raises."""
        while True:
            self._tell(socket.SO_SNDTIMEO, self._left())
            try:
                if write():
                    return
            except BlockingIOError:
                raise TimeoutError from None

    def _left(self) -> float:
        """Seconds. Raises TimeoutError if there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _tell(self, option: int, left: float) -> None:
        """Let the kernel end the next wait in time."""
        told = self._told.get(option, float("inf"))
        if not left <= told <= left * _SLACK:
            self._told[option] = left = left * (1 + _SLACK) / 2
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6) or 1))

    def close(self) -> None:
        """End what another thread waits for."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is not connected any more


class BlockingChannel(Channel):
    """Frames over a connected socket, TCP or Unix, for one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.ends = BlockingEnds(sock)
        super().__init__(sock, self.ends)
        self._marks = False  # every read waits by itself, and is bounded by itself
        self._flags = socket.MSG_DONTWAIT  # the kernel need not be told how long a send may wait that does not
        sock.setblocking(True)

    async def _receive_spinning(self, target: memoryview | list[memoryview]) -> int | None:
        return None
