"""Waiting for a socket to be readable, without registering it with the event loop again for every wait.

asyncio's own `sock_recv_into` adds the socket to the selector and takes it out again each time it has to wait, and a bound on a wait is a
timer each time: together more than what a small request costs otherwise.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvstore.errors import ConnectionLost

T = TypeVar("T")


class Incoming:
    """The reading side of a non-blocking socket, for one task at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._read: Callable[[], Any] | None = None
        self._done: asyncio.Future[Any] | None = None
        self._watched = False
        self._limit: float | None = None
        self._until: float | None = None

    def bound(self, seconds: float | None) -> None:
        """Let what is waited for from now on take so long in all. The clock starts with the first wait."""
        self._limit, self._until = seconds, None

    async def receive(self, read: Callable[[], T]) -> T:
        """What `read`, a call on the socket, returns once there is something. Raises TimeoutError."""
        try:
            return read()
        except BlockingIOError:
            pass
        if not self._watched:
            if self._sock.fileno() < 0:
                raise ConnectionLost("the connection was closed")
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._watched = True
        done = self._loop.create_future()
        timer = None
        if self._limit is not None:
            if self._until is None:
                self._until = self._loop.time() + self._limit
            timer = self._loop.call_at(self._until, late, done)
        self._read, self._done = read, done
        try:
            return cast(T, await done)
        finally:
            self._read = self._done = None
            if timer is not None:
                timer.cancel()

    def look(self) -> None:
        """Read now what somebody waits for, if it is there. For who would else only give the loop a turn to find it."""
        if self._done is not None:
            self._readable()

    def _readable(self) -> None:
        done, read = self._done, self._read
        if done is None or read is None:  # more has come than anybody asks for yet: the next wait registers again
            self._stop()
            return
        if done.done():
            return
        try:
            done.set_result(read())
        except BlockingIOError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is the waiting task's
            done.set_exception(error)

    def close(self) -> None:
        """End what is waited for. Before the socket is closed."""
        done = self._done
        self._stop()
        if done is not None and not done.done():
            done.set_exception(ConnectionLost("the connection was closed"))

    def _stop(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._sock.fileno())


def late(done: "asyncio.Future[Any]") -> None:
    """It took too long."""
    if not done.done():
        done.set_exception(TimeoutError())
