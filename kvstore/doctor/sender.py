"""The sending end of the loopback measurement, a process of its own: `python -m kvstore.doctor.sender PORT`."""

import asyncio
import contextlib
import socket
import sys

from kvstore.api.wire import Channel
from kvstore.errors import ConnectionLost

_CHUNK = 1 << 20
_CONNECT_S = 10.0


async def send_until_closed(port: int) -> None:
    """Send zeros to a loopback port until the other end has enough."""
    channel = Channel(socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S))
    content = memoryview(bytearray(_CHUNK))
    with contextlib.suppress(ConnectionLost):
        while True:
            await channel.send([content])


if __name__ == "__main__":
    asyncio.run(send_until_closed(int(sys.argv[1])))
