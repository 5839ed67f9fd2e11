"""Coroutines that are begun where they are made, and frames that are dealt with as they come."""

import asyncio
import socket

import pytest

from kvstore.api.wire import Channel, FrameType, Header, encode
from kvstore.api.wire.eager import at_once, begin
from kvstore.errors import ConnectionLost, ProtocolError
from tests.waiting import until


async def double(value: int, wait: asyncio.Event | None = None) -> int:
    if wait is not None:
        await wait.wait()
    return 2 * value


async def test_what_waits_for_nothing_is_done_at_once() -> None:
    assert at_once(double(4)) == 8
    assert begin(double(4)) is None
    with pytest.raises(RuntimeError):
        at_once(double(4, asyncio.Event()))


async def test_the_rest_of_what_waits_is_awaited() -> None:
    event = asyncio.Event()
    begun = begin(double(4, event))
    assert begun is not None
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await begun == 8


@pytest.mark.parametrize("awaited", [True, False])
async def test_one_that_is_given_up_cleans_up_behind_itself(awaited: bool) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        finally:
            ended.append("end")

    begun = begin(work())
    assert begun is not None
    if awaited:

        async def rest() -> None:
            await begun

        task = asyncio.create_task(rest())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        begun.abandon()
    assert ended == ["cancelled", "end"]


def frame(number: int, payload: bytes = b"") -> bytes:
    return b"".join(encode(FrameType.PING, number, b"meta", payload))


class Reader:
    """Reads frames, and notes which of them came by which way."""

    def __init__(self, channel: Channel, wait: asyncio.Event | None = None) -> None:
        self.seen: list[tuple[int, bytes, str]] = []
        self._channel = channel
        self._wait = wait

    async def deal(self, header: Header, meta: bytes, payload: bytes) -> None:
        task = asyncio.current_task()
        if self._wait is not None:
            await self._wait.wait()
        self.seen.append((header.request, payload, "task" if task is not None else "at once"))

    async def run(self) -> None:
        self._channel.offer_frames(self.deal)
        while (found := await self._channel.read_header()) is not None:
            header, raw = found
            await self.deal(header, *await self._channel.read_body(header, raw))


async def reading(reader: Reader) -> "asyncio.Task[None]":
    task = asyncio.create_task(reader.run())
    await asyncio.sleep(0.01)
    return task


async def test_whole_frames_are_dealt_with_as_they_come(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    reader = Reader(channel)
    task = await reading(reader)
    peer.send(frame(1) + frame(2, b"payload"))
    await until(lambda: len(reader.seen) == 2)
    assert reader.seen == [(1, b"", "at once"), (2, b"payload", "at once")]
    both = frame(3) + frame(4, bytes(100))
    peer.send(both[:-50])  # one that is not all there is read by the task
    await until(lambda: len(reader.seen) == 3)
    await asyncio.sleep(0.01)
    peer.send(both[-50:] + frame(5))
    await until(lambda: len(reader.seen) == 5)
    assert [(number, how) for number, _, how in reader.seen[2:]] == [(3, "at once"), (4, "task"), (5, "task")]
    peer.send(b"".join(frame(number) for number in range(6, 40)))  # others on the loop get a turn in between
    await until(lambda: len(reader.seen) == 39)
    assert [number for number, _, _ in reader.seen] == list(range(1, 40))
    assert {how for number, _, how in reader.seen if number > 20} == {"task"}
    peer.close()
    await task


async def test_who_looks_has_frames_dealt_with_at_once(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    reader = Reader(channel)
    channel.look()  # nobody reads yet
    task = await reading(reader)
    channel.look()
    assert not reader.seen
    both = frame(1) + frame(2, bytes(100))
    peer.send(both[:-50])
    channel.look()
    assert [number for number, _, _ in reader.seen] == [1]
    peer.send(both[-50:])
    channel.look()
    await until(lambda: len(reader.seen) == 2)
    peer.close()
    channel.look()  # the end is for who reads
    await task


async def test_what_a_frame_waits_for_holds_up_the_next(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    event = asyncio.Event()
    reader = Reader(channel, event)
    task = await reading(reader)
    peer.send(frame(1) + frame(2))
    await asyncio.sleep(0.01)
    assert not reader.seen
    event.set()
    await until(lambda: len(reader.seen) == 2)
    assert [number for number, _, _ in reader.seen] == [1, 2]
    event.clear()
    peer.send(frame(3))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(reader.seen) == 2


async def test_a_wrong_frame_is_the_reader_s(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    task = await reading(Reader(channel))
    wrong = bytearray(frame(1, b"payload"))
    wrong[-1] ^= 1
    peer.send(wrong)
    with pytest.raises(ProtocolError):
        await task


async def test_the_end_and_a_close(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    reader = Reader(channel)
    task = await reading(reader)
    peer.send(frame(1))
    await until(lambda: reader.seen)
    channel.close()
    with pytest.raises(ConnectionLost):
        await task
    assert [number for number, _, _ in reader.seen] == [1]
