"""Bulk over TCP: whatever sizes it is cut into, the bytes land in their places, and both ends compute the same digests."""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from functools import partial
from itertools import accumulate, pairwise

import pytest
import pytest_asyncio

from kvstore.api.wire import Channel, FrameType, Header, encode
from kvstore.api.wire.writing import SEND, WritingHalf
from kvstore.digests import DIGEST_BYTES, slice_digest
from kvstore.errors import ConnectionLost

MIB = 1 << 20


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


def pieces(*sizes: int) -> list[memoryview]:
    rng = random.Random(repr(sizes))
    return [memoryview(rng.randbytes(size)) for size in sizes]


async def header_of(channel: Channel) -> Header:
    found = await channel.read_header()
    assert found is not None
    await channel.read_body(*found)
    return found[0]


@pytest.mark.parametrize(
    "sizes", [(100,), (SEND,), (SEND + 1,), (MIB, MIB, MIB, 5), (MIB + 9, 70_000, 2 * MIB), (4000,) * 300, (4000,) * 1024]
)
async def test_bytes_and_digests(ends: tuple[Channel, Channel], sizes: tuple[int, ...]) -> None:
    sent = pieces(*sizes)
    sending = asyncio.create_task(ends[0].send_pieces(FrameType.DATA, 7, b"m" * 8, sent, [None] * len(sent)))
    header = await header_of(ends[1])
    target = bytearray(sum(sizes))
    digests, claimed = await ends[1].read_pieces(header, [(memoryview(target), sizes)])
    assert target == b"".join(sent)
    assert digests == await sending == [slice_digest(piece) for piece in sent]
    assert claimed == b"".join(digests)


@pytest.mark.parametrize("step", [100_000, SEND])
async def test_what_comes_behind_the_frame_is_made_when_its_digests_are_there(ends: tuple[Channel, Channel], step: int) -> None:
    sizes, turns = (MIB, 50_000, MIB, 300_000), 0
    sent, told = pieces(*sizes), []

    def turn(channel: WritingHalf) -> None:
        nonlocal turns
        turns += 1

    def then(digests: list[bytes]) -> list[bytes]:
        told.append(list(digests))
        return [bytes(part) for part in encode(FrameType.FETCHED, 8, b"done")]

    sending = asyncio.create_task(ends[0].send_pieces(FrameType.DATA, 7, b"m" * 8, sent, [None] * 4, turn, step, then))
    header = await header_of(ends[1])
    target = bytearray(sum(sizes))
    digests, claimed = await ends[1].read_pieces(header, [(memoryview(target), sizes)])
    assert target == b"".join(sent)
    assert claimed == b"".join(digests) == b"".join(await sending)
    assert told == [digests]
    assert (await header_of(ends[1])).type is FrameType.FETCHED
    assert turns >= sum(sizes) // step


@pytest.mark.parametrize("each", [(4000,), (70_000, 30_000), (MIB, 5), (300_000,) * 3, (MIB, MIB, MIB, MIB)])
async def test_frames_right_behind_each_other(ends: tuple[Channel, Channel], each: tuple[int, ...]) -> None:
    frames = [(b"%8d" % number, pieces(*each)) for number in range(40 if sum(each) < MIB else 5)]
    behind = encode(FrameType.COMMIT, 9, b"done")
    sending = asyncio.create_task(ends[0].send_frames(FrameType.SLICES, 7, frames, behind))
    for meta, sent in frames:
        found = await ends[1].read_header()
        assert found is not None
        header, raw = found
        assert (header.type, header.request, header.pieces) == (FrameType.SLICES, 7, len(each))
        assert await ends[1].read_body(header, raw) == (meta, b"")
        target = bytearray(sum(each))
        digests, claimed = await ends[1].read_pieces(header, [(memoryview(target), each)])
        assert target == b"".join(sent)
        assert b"".join(digests) == claimed
    assert (await header_of(ends[1])).type is FrameType.COMMIT
    await sending


async def test_places_apart(ends: tuple[Channel, Channel]) -> None:
    sizes = (MIB, 3, 70_000, 1, 2 * MIB, 4000)
    sent, targets = pieces(*sizes), [bytearray(size) for size in sizes]
    for turn in range(3):  # frame after frame: the beginning of one comes with the end of another
        sending = asyncio.create_task(ends[0].send_pieces(FrameType.DATA, turn, b"m" * 8, sent, [None] * len(sent)))
        header = await header_of(ends[1])
        spans = [(memoryview(target), (size,)) for target, size in zip(targets, sizes, strict=True)]
        digests, claimed = await ends[1].read_pieces(header, spans)
        assert targets == sent
        assert b"".join(digests) == claimed == b"".join(await sending)


async def test_a_digest_on_record_is_sent_as_it_is(ends: tuple[Channel, Channel]) -> None:
    """What was changed in memory arrives with the digest that it ought to have, however far it is on its way when it is hashed."""
    whole = pieces(MIB, 3 * MIB)
    promised: list[bytes | None] = [slice_digest(piece) for piece in whole]
    spoilt = bytearray(whole[1])
    spoilt[100] ^= 1
    sending = asyncio.create_task(ends[0].send_pieces(FrameType.DATA, 1, b"m" * 8, [whole[0], memoryview(spoilt)], promised))
    header = await header_of(ends[1])
    digests, claimed = await ends[1].read_pieces(header, [(memoryview(bytearray(4 * MIB)), (MIB, 3 * MIB))])
    assert claimed == b"".join(digest for digest in promised if digest)
    assert digests[0] == claimed[:DIGEST_BYTES]
    assert digests[1] != claimed[DIGEST_BYTES:]
    assert await sending == digests


async def test_a_peer_that_leaves_in_the_middle(ends: tuple[Channel, Channel]) -> None:
    reading = asyncio.create_task(ends[1].read_into(memoryview(bytearray(MIB))))
    await ends[0].send([os.urandom(1000)])
    await asyncio.sleep(0.01)
    assert not reading.done()
    ends[0].close()
    with pytest.raises(ConnectionLost):
        await reading


async def test_nothing_is_written_once_the_reader_was_stopped(ends: tuple[Channel, Channel]) -> None:
    target = bytearray(MIB)
    reading = asyncio.create_task(ends[1].read_into(memoryview(target)))
    await ends[0].send([b"\1" * 1000])
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    there = bytes(target)
    await ends[0].send([b"\2" * MIB])
    await asyncio.sleep(0.01)
    assert target == there


async def test_others_have_their_turns(ends: tuple[Channel, Channel]) -> None:
    """A peer that never lets the socket run dry does not keep the loop."""
    turns = 0

    async def another() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(another())
    data = memoryview(bytes(MIB))
    sending = asyncio.create_task(ends[0].send([data] * 64))
    await ends[1].read_into(memoryview(bytearray(64 * MIB)))
    await sending
    other.cancel()
    assert turns > 64 * MIB // (4 * MIB)  # a share is 4 MiB


async def test_time_that_is_up(ends: tuple[Channel, Channel]) -> None:
    ends[1].bound_reads(0.02)
    await ends[0].send([bytes(MIB // 2)])
    with pytest.raises(TimeoutError):
        await ends[1].read_into(memoryview(bytearray(MIB)))


async def test_loopback_is_not_paced(ends: tuple[Channel, Channel]) -> None:
    for channel in ends:
        assert channel.local
        name = channel.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        assert name in (b"cubic", b"reno")


async def test_a_socket_that_is_not_connected_keeps_what_it_has() -> None:
    with socket.socket() as sock:
        before = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert not Channel(sock).local
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == before


@pytest.mark.parametrize("seed", range(4))
async def test_what_comes_behind_a_payload_is_kept_for_whoever_reads_next(ends: tuple[Channel, Channel], seed: int) -> None:
    rng = random.Random(seed)
    frames = [pieces(*[rng.choice([5, 900, 4096, 30_000, 200_000]) for _ in range(rng.randrange(1, 40))]) for _ in range(30)]

    def following(behind: list[bytes | memoryview], _: list[bytes]) -> list[bytes | memoryview]:
        return behind

    async def send() -> None:
        for number, sent in enumerate(frames):
            behind = [part for at in range(number % 4) for part in encode(FrameType.OK, number, bytes([at]) * 3000 * at, b"p" * 2000)]
            await ends[0].send_pieces(FrameType.DATA, number, b"m" * 8, sent, [None] * len(sent), then=partial(following, behind))

    sending = asyncio.create_task(send())
    for number, sent in enumerate(frames):
        header = await header_of(ends[1])
        assert header.request == number
        target, sizes, apart = memoryview(bytearray(header.payload_bytes)), [len(piece) for piece in sent], rng.random() < 0.5
        bounds = [0, *accumulate(sizes)]
        spans = [(target[low:high], [high - low]) for low, high in pairwise(bounds)] if apart else [(target, sizes)]
        digests, claimed = await ends[1].read_pieces(header, spans)
        assert target == b"".join(sent)
        assert claimed == b"".join(digests) == b"".join(map(slice_digest, sent))
        for at in range(number % 4):
            found = await ends[1].read_header()
            assert found is not None
            assert await ends[1].read_body(*found) == (bytes([at]) * 3000 * at, b"p" * 2000)
    await sending
