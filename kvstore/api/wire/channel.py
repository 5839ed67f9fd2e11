"""One connection's socket: exact reads, straight into their destination, and gathered writes. No protocol logic.

Works on a non-blocking TCP or Unix socket under any asyncio event loop. Reads are for one task; writes are serialised by
the caller, frame by frame.
"""

import socket
from typing import Protocol

from kvstore.api.wire.congestion import unpace
from kvstore.api.wire.incoming import Incoming
from kvstore.api.wire.outgoing import Outgoing
from kvstore.api.wire.reading import ReadingEnd, ReadingHalf
from kvstore.api.wire.writing import WritingEnd, WritingHalf


class Ends(ReadingEnd, WritingEnd, Protocol):
    """Both sides of a socket, where they are not those of an event loop (see `Incoming` and `Outgoing`)."""


class Channel(ReadingHalf, WritingHalf):
    """Frames over a socket. Raises ConnectionLost when the peer is gone."""

    def __init__(self, sock: socket.socket, ends: Ends | None = None) -> None:
        sock.setblocking(False)
        self.local = sock.family == socket.AF_UNIX
        """Whether the peer is on this machine."""
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.local = unpace(sock)
        ReadingHalf.__init__(self, sock, ends or Incoming(sock))
        WritingHalf.__init__(self, sock, ends or Outgoing(sock))

    async def shake_hands(self) -> None:
        """What comes before the first frame: nothing on a plain socket."""

    def close(self) -> None:
        """Close the socket; a read or a write under way ends with ConnectionLost."""
        ReadingHalf.close(self)
        WritingHalf.close(self)
        self.sock.close()
