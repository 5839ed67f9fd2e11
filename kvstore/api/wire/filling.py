"""A bulk payload on its way into its destinations, read and hashed where the event loop hears of the socket.

A task that is woken for every piece costs as much as copying it: a future, a turn of the loop, and the way back up a chain of coroutines.
Here the task sleeps until all is there; in between, the loop calls `read` and nothing else.
"""

import socket
from collections.abc import Callable, Sequence

from kvstore.api.wire.pieces import PieceHasher
from kvstore.errors import ConnectionLost

_AT_ONCE = 1 << 20
"""Read by one system call, and hashed while it is in the cache."""
_SHARE = 4 << 20
"""Read in one turn of the loop: a millisecond or so. Then others have theirs."""
_GATHER = 64


class Filling:
    """Fills buffers, none of them empty, one after the other, each with a hasher that is told of progress.

    `wake_for` is told how many bytes are still missing, before the loop waits for the socket. What has come `behind` them is read by the
    same system call, as far as there is room.
    """

    def __init__(
        self, sock: socket.socket, targets: Sequence[memoryview], hashers: Sequence[PieceHasher | None], wake_for: Callable[[int], None],
        behind: memoryview,
    ) -> None:  # fmt: skip
        self._sock = sock
        self._targets = targets
        self._hashers = hashers
        self._wake_for = wake_for
        self._at = self._filled = 0
        self._left = sum(map(len, targets))
        self._behind = behind
        self.beyond = 0
        """Bytes that were read into what is `behind`."""

    @property
    def left(self) -> int:
        """Bytes that are missing."""
        return self._left

    def take(self, there: memoryview) -> None:
        """Bytes that were received already, at most as many as are missing."""
        while there:
            target = self._targets[self._at]
            count = min(len(there), len(target) - self._filled)
            target[self._filled : self._filled + count] = there[:count]
            self._came(count)
            there = there[count:]

    def read(self) -> None:
        """Read what is there. Raises BlockingIOError as long as something is missing, and ConnectionLost at the peer's end."""
        share = _SHARE
        try:
            while self._left:
                if share <= 0:
                    raise BlockingIOError
                count = self._receive()
                if not count:
                    raise ConnectionLost("the peer closed the connection in the middle of a frame")
                if count > self._left:
                    self.beyond, count = count - self._left, self._left
                self._came(count)
                share -= count
        except BlockingIOError:
            self._wake_for(self._left)
            raise

    def _receive(self) -> int:
        target = self._targets[self._at][self._filled :]
        if len(target) >= _AT_ONCE:
            return self._sock.recv_into(target, _AT_ONCE)
        more = self._targets[self._at + 1 : self._at + _GATHER]
        if self._at + 1 + len(more) == len(self._targets):
            more = [*more, self._behind]
        return self._sock.recvmsg_into([target, *more])[0]

    def _came(self, count: int) -> None:
        self._left -= count
        while count:
            room = len(self._targets[self._at]) - self._filled
            taken = min(count, room)
            self._filled += taken
            count -= taken
            hasher = self._hashers[self._at]
            if hasher is not None:
                hasher.advance(self._filled)
            if taken == room:
                self._at, self._filled = self._at + 1, 0
