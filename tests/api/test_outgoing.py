"""Writing to a socket that takes no more: all goes out in order, within the bound, and a close ends it and leaves nothing in the loop."""

import asyncio
import contextlib
import os
import socket

import pytest

from kvstore.api.wire import Channel
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.errors import ConnectionLost
from tests.descriptors import descriptors


def full(channel: Channel) -> bytes:
    """Something that the socket does not take at once."""
    return os.urandom(4 * channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))


async def test_all_goes_out_as_it_is_taken(ends: tuple[Channel, socket.socket]) -> None:
    data = full(ends[0])
    sending = asyncio.create_task(ends[0].send([data[:10], data[10:]]))
    got = b""
    while len(got) < len(data):
        got += await asyncio.to_thread(ends[1].recv, 100_000)
    await sending
    assert got == data


async def test_a_bound(ends: tuple[Channel, socket.socket]) -> None:
    ends[0].bound_writes(0.05)
    with pytest.raises((TimeoutError, ConnectionLost)):
        await ends[0].send([full(ends[0])])


async def test_a_close_ends_a_write_and_a_read(ends: tuple[Channel, socket.socket]) -> None:
    tasks = [asyncio.create_task(ends[0].send([full(ends[0])])), asyncio.create_task(ends[0].read(10))]
    await asyncio.sleep(0.01)
    number = ends[0].sock.fileno()
    ends[0].close()
    for task in tasks:
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(task, 5)
    ours, theirs = socket.socketpair()  # one of them has the number that was freed, and is heard
    assert number in (ours.fileno(), theirs.fileno())
    again, other = (Channel(ours), theirs) if ours.fileno() == number else (Channel(theirs), ours)
    data = full(again)
    sending = asyncio.create_task(again.send([data]))
    got = 0
    while got < len(data):
        got += len(await asyncio.to_thread(other.recv, 1 << 20))
    await asyncio.wait_for(sending, 5)
    again.close()
    other.close()


async def test_descriptors_wait_no_longer_than_other_frames() -> None:
    ours, theirs = socket.socketpair()
    channel = DescriptorChannel(ours, 4)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    channel.bound_writes(0.05)
    with pytest.raises((TimeoutError, ConnectionLost)):
        await asyncio.wait_for(channel.send_with([b"x"], [0]), 5)
    channel.close()
    theirs.close()


async def test_descriptors_that_come_as_a_reader_is_cancelled_are_closed() -> None:
    ours, theirs = socket.socketpair()
    channel, sender = DescriptorChannel(ours, 4), DescriptorChannel(theirs, 4)
    before = descriptors()
    own = {each for each in before if each[0] in (ours.fileno(), theirs.fileno())}
    reading = asyncio.create_task(channel.read_header())
    await asyncio.sleep(0.01)
    await sender.send_with([b"x"], [ours.fileno(), theirs.fileno()])
    asyncio.get_running_loop().call_later(0, reading.cancel)  # in the turn in which they arrive
    await asyncio.gather(reading, return_exceptions=True)
    channel.close()
    sender.close()
    assert descriptors() <= before - own
