"""Whether a peer still sends: by what the kernel counts, since what is received lies in buffers of others."""

import socket
import struct

_RECEIVED = struct.Struct("@Q")
_RECEIVED_AT = 128
"""Of tcpi_bytes_received in Linux's struct tcp_info, since 4.1."""


def bytes_received(sock: socket.socket) -> int:
    """Bytes that have come over a TCP connection; 0 if that can't be known, as of a Unix socket."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
    except OSError:
        return 0
    return int(_RECEIVED.unpack_from(found, _RECEIVED_AT)[0]) if len(found) == _RECEIVED_AT + _RECEIVED.size else 0
