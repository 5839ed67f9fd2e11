"""The writing twin of `kvstore.api.wire.incoming`: what does not go out at once goes when the socket takes more, and ends with a close.

asyncio's own `sock_sendall` knows nothing of a close: the socket's number stays registered, and the next one that gets it is not heard.
"""

import asyncio
import socket
from collections.abc import Callable

from kvstore.api.wire.incoming import late
from kvstore.errors import ConnectionLost


class Outgoing:
    """The writing side of a non-blocking socket, for one task at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] | None = None
        self._limit: float | None = None
        self._until: float | None = None

    def bound(self, seconds: float) -> None:
        """Let what is waited for from now on take so long in all. The clock starts with the first wait."""
        self._limit, self._until = seconds, None

    async def send(self, write: Callable[[], bool]) -> None:
        """Call `write`, which writes something, until it says that all is out. Raises TimeoutError, ConnectionLost and what it raises."""
        if _written(write):
            return
        if self._sock.fileno() < 0:
            raise ConnectionLost("the connection was closed")
        done = self._done = self._loop.create_future()
        timer = None
        if self._limit is not None:
            if self._until is None:
                self._until = self._loop.time() + self._limit
            timer = self._loop.call_at(self._until, late, done)
        self._loop.add_writer(self._sock.fileno(), _go_on, done, write)
        try:
            await done
        finally:
            if timer is not None:
                timer.cancel()
            self._stop()

    def _stop(self) -> None:
        if self._done is not None:
            self._done = None
            self._loop.remove_writer(self._sock.fileno())

    def close(self) -> None:
        """End what is waited for. Before the socket is closed."""
        done = self._done
        self._stop()
        if done is not None and not done.done():
            done.set_exception(ConnectionLost("the connection was closed"))


def _written(write: Callable[[], bool]) -> bool:
    try:
        return write()
    except BlockingIOError:
        return False


def _go_on(done: "asyncio.Future[None]", write: Callable[[], bool]) -> None:
    if done.done():
        return
    try:
        if _written(write):
            done.set_result(None)
    except BaseException as error:  # noqa: BLE001 - it is the waiting task's
        done.set_exception(error)
