"""Congestion control where there is nothing to congest: both ends of a connection on one machine.

BBR, which is the default of many systems, paces what is sent, by timers; over loopback that costs a third of the throughput
(docs/decisions/0028-loopback-is-not-paced.md). Over a real link the system's choice stays.
"""

import contextlib
import socket

_UNPACED = (b"cubic", b"reno")
"""By loss only. The second is there, and allowed to everybody, on every Linux."""


def unpace(sock: socket.socket) -> bool:
    """Let a connected TCP socket send unpaced if its peer is on this machine. Returns whether it is."""
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:  # not connected, or not any more
        return False
    if here != there:
        return False
    for name in _UNPACED:
        with contextlib.suppress(OSError):  # not known here, or not allowed
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            break
    return True
