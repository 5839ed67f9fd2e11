"""What several tests of the wire begin with."""

import socket
from collections.abc import AsyncIterator

import pytest_asyncio

from kvstore.api.wire import Channel


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[Channel, socket.socket]]:
    """A channel, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()
