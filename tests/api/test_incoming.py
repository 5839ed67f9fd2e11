"""Waiting for a socket: whoever waits gets what comes, whoever does not loses nothing."""

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from kvstore.api.wire.incoming import Incoming
from kvstore.errors import ConnectionLost


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[Incoming, socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    incoming = Incoming(ours)
    yield incoming, ours, theirs
    incoming.close()
    ours.close()
    theirs.close()


async def receive(ends: tuple[Incoming, socket.socket, socket.socket]) -> bytes:
    return await ends[0].receive(partial(ends[1].recv, 100))


async def test_what_is_there_and_what_comes_later(ends: tuple[Incoming, socket.socket, socket.socket]) -> None:
    ends[2].send(b"now")
    assert await receive(ends) == b"now"
    for word in (b"later", b"again"):
        waiting = asyncio.create_task(receive(ends))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        ends[2].send(word)
        assert await waiting == word
    ends[2].close()
    assert await receive(ends) == b""


async def test_who_looks_reads_for_who_waits(ends: tuple[Incoming, socket.socket, socket.socket]) -> None:
    ends[0].look()  # nobody waits
    waiting = asyncio.create_task(receive(ends))
    await asyncio.sleep(0)
    ends[0].look()
    assert not waiting.done()
    ends[2].send(b"one")
    ends[0].look()
    ends[2].send(b"two")
    ends[0].look()  # it has its own already
    assert await waiting == b"one"
    assert await receive(ends) == b"two"


async def test_what_comes_while_nobody_waits(ends: tuple[Incoming, socket.socket, socket.socket]) -> None:
    waiting = asyncio.create_task(receive(ends))
    await asyncio.sleep(0)
    ends[2].send(b"one")
    assert await waiting == b"one"
    ends[2].send(b"two")  # the socket is still watched
    await asyncio.sleep(0.02)
    assert await receive(ends) == b"two"
    waiting = asyncio.create_task(receive(ends))
    await asyncio.sleep(0)
    ends[2].send(b"three")
    assert await waiting == b"three"


async def test_a_wait_that_is_cancelled_takes_nothing(ends: tuple[Incoming, socket.socket, socket.socket]) -> None:
    waiting = asyncio.create_task(receive(ends))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    ends[2].send(b"kept")
    await asyncio.sleep(0.01)
    assert await receive(ends) == b"kept"


async def test_a_bound_is_for_all_waits_until_the_next(ends: tuple[Incoming, socket.socket, socket.socket]) -> None:
    ends[0].bound(0.05)
    loop = asyncio.get_running_loop()
    loop.call_later(0.02, ends[2].send, b"in time")
    assert await receive(ends) == b"in time"
    with pytest.raises(TimeoutError):
        await receive(ends)
    with pytest.raises(TimeoutError):
        await receive(ends)
    ends[0].bound(None)
    loop.call_later(0.02, ends[2].send, b"no bound")
    assert await receive(ends) == b"no bound"


async def test_errors_are_the_reader_s(ends: tuple[Incoming, socket.socket, socket.socket]) -> None:
    waiting = asyncio.create_task(receive(ends))
    await asyncio.sleep(0)
    ends[1].shutdown(socket.SHUT_RD)
    assert await waiting == b""
    ends[0].close()
    ends[1].close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        await receive(ends)


async def test_nothing_is_left_in_the_loop(ends: tuple[Incoming, socket.socket, socket.socket]) -> None:
    """A socket that gets the same number afterwards is heard."""
    waiting = asyncio.create_task(receive(ends))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    number = ends[1].fileno()
    ends[0].close()
    ends[1].close()
    ours, theirs = socket.socketpair()
    assert number in (ours.fileno(), theirs.fileno())
    if theirs.fileno() == number:
        ours, theirs = theirs, ours
    ours.setblocking(False)
    again = Incoming(ours)
    waiting = asyncio.create_task(again.receive(partial(ours.recv, 100)))
    await asyncio.sleep(0)
    theirs.send(b"heard")
    assert await asyncio.wait_for(waiting, 5) == b"heard"
    again.close()
    ours.close()
    theirs.close()


async def test_closed(ends: tuple[Incoming, socket.socket, socket.socket]) -> None:
    ends[1].close()

    def read() -> bytes:
        raise BlockingIOError

    with pytest.raises(ConnectionLost):
        await ends[0].receive(read)
