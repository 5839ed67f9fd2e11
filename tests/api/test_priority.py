"""Who may send on a link: over real sockets, whose other ends read or don't."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from kvstore.api.priority import BULK, INTERACTIVE, LinkTraffic, Traffic
from kvstore.api.wire import Channel

MIB = 1 << 20
RATE = 100.0 * MIB


class Pair:
    """A channel, and the other end of its socket."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        self.channel = Channel(near)
        self.far.setblocking(False)

    def fill(self) -> None:
        """Give the socket more than its other end takes without reading."""
        while True:
            try:
                self.channel.sock.send(bytes(MIB))
            except BlockingIOError:
                return

    async def drain(self) -> None:
        """Read all that there is."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(0.2):
                    await loop.sock_recv(self.far, MIB)
            except TimeoutError:
                return

    def close(self) -> None:
        self.channel.close()
        self.far.close()


@pytest.fixture
async def pairs() -> AsyncIterator[tuple[Pair, Pair]]:
    found = Pair(), Pair()
    yield found
    for pair in found:
        pair.close()


async def turn(traffic: LinkTraffic, pair: Pair) -> None:
    """Wait until bulk may be sent."""
    if (waiting := traffic.turn(pair.channel)) is not None:
        await waiting


async def soon(work: "asyncio.Task[None]") -> bool:
    """Whether it ends without anybody doing anything."""
    await asyncio.wait([work], timeout=5)
    return work.done()


async def test_bulk_waits_until_what_is_interactive_was_sent_off(pairs: tuple[Pair, Pair]) -> None:
    urgent, bulk = pairs
    traffic = LinkTraffic()
    with traffic.fetching(bulk.channel, BULK, RATE):
        with traffic.fetching(urgent.channel, INTERACTIVE, RATE):
            urgent.fill()
            waiting = asyncio.create_task(turn(traffic, bulk))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not waiting.done()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done(), "the socket still has it"
        await urgent.drain()
        assert await soon(waiting)
        await turn(traffic, bulk)


async def test_a_client_that_reads_nothing_holds_nobody_back_for_long(pairs: tuple[Pair, Pair]) -> None:
    urgent, bulk = pairs
    traffic = LinkTraffic()
    with traffic.fetching(bulk.channel, BULK, RATE), traffic.fetching(urgent.channel, INTERACTIVE, RATE):
        urgent.fill()
        assert await soon(asyncio.create_task(turn(traffic, bulk)))


async def test_bulk_has_its_share_however_much_is_interactive(pairs: tuple[Pair, Pair]) -> None:
    urgent, bulk = pairs
    traffic = LinkTraffic()

    async def flow() -> None:
        loop = asyncio.get_running_loop()
        while True:
            urgent.fill()
            await loop.sock_recv(urgent.far, MIB)
            await asyncio.sleep(0.001)

    with traffic.fetching(bulk.channel, BULK, RATE), traffic.fetching(urgent.channel, INTERACTIVE, RATE):
        flowing = asyncio.create_task(flow())
        try:
            assert await soon(asyncio.create_task(turn(traffic, bulk)))
        finally:
            flowing.cancel()
            await asyncio.gather(flowing, return_exceptions=True)


async def test_a_frame_of_bulk_does_not_wait_for_what_waits_behind_it(pairs: tuple[Pair, Pair]) -> None:
    _, bulk = pairs
    traffic = LinkTraffic()
    with traffic.fetching(bulk.channel, BULK, RATE), traffic.fetching(bulk.channel, INTERACTIVE, RATE):
        bulk.fill()
        taken = asyncio.create_task(turn(traffic, bulk))
        await asyncio.sleep(0)
        assert taken.done()


async def test_sockets_with_bulk_are_kept_short_while_something_is_interactive(pairs: tuple[Pair, Pair]) -> None:
    urgent, bulk = pairs
    traffic = LinkTraffic()

    def lowat() -> int:
        return bulk.channel.sock.getsockopt(socket.IPPROTO_TCP, 25) & 0xFFFFFFFF

    with traffic.fetching(bulk.channel, BULK, RATE):
        before = lowat()
        with traffic.fetching(urgent.channel, INTERACTIVE, RATE):
            assert lowat() == int(RATE * 0.002) < MIB
        assert lowat() < MIB, "it may come again"
    assert lowat() == before


async def test_links_are_told_apart_by_the_address_that_they_end_at(pairs: tuple[Pair, Pair]) -> None:
    traffic = Traffic()
    assert traffic.of(pairs[0].channel.sock) is traffic.of(pairs[1].channel.sock)
    one, other = socket.socketpair()
    with one, other:
        assert traffic.of(one) is None, "nothing queues on a Unix socket"
