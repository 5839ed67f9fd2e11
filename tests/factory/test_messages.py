"""The channel between orchestrator and workers, pages as accelerators hold them, and journals cut short."""

import asyncio
import socket
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import BadRequest, ConnectionLost, ProtocolError
from kvstore_workers.factory.journal import Begun, Event, Journal, read_journal
from kvstore_workers.factory.messages import Ack, Cancel, Channel, Hello
from kvstore_workers.factory.model import GROUPS, LAYERS, Shards, factory_spec
from kvstore_workers.generator import PageGenerator, block_tokens


async def connected(raw: bytes) -> Channel:
    """A channel on which these bytes come, and then the end."""
    mine, theirs = socket.socketpair()
    theirs.sendall(raw)
    theirs.close()
    return Channel(*await asyncio.open_unix_connection(sock=mine))


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", ConnectionLost), (b"\x05\0", ConnectionLost), (b"\x05\0\0\0abc", ConnectionLost), (b"\xff\xff\xff\xff", ProtocolError),
        (b"\x03\0\0\0abc", ProtocolError), (b"\x01\0\0\0\x80", ProtocolError), (b"\x00\0\0\0", ProtocolError),
    ],
)  # fmt: skip
async def test_what_is_no_message_ends_the_connection(raw: bytes, error: type[Exception]) -> None:
    channel = await connected(raw)
    async with asyncio.timeout(10):
        with pytest.raises(error):
            await channel.order()
    await channel.close()


async def test_messages_come_as_they_were_sent(tmp_path: Path) -> None:
    got: asyncio.Queue[object] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        got.put_nowait(await channel.word())
        await channel.send(Ack(7))
        await channel.send(Cancel(3))
        await channel.close()

    server = await asyncio.start_unix_server(serve, str(tmp_path / "s"))
    async with server, asyncio.timeout(10):
        channel = Channel(*await asyncio.open_unix_connection(str(tmp_path / "s")))
        hello = Hello("w", "decode", 8, [(1, 0)], [])
        await channel.send(hello)
        assert await channel.order() == Ack(7)
        assert await channel.order() == Cancel(3)
        assert await got.get() == hello
        await channel.close()


def test_shards_are_the_heads_of_a_page_and_every_wrong_byte_is_seen() -> None:
    spec = factory_spec(64)
    shards, generator = Shards(spec, 2), PageGenerator(spec.page_bytes, spec.page_tokens)
    tokens = np.concatenate([block_tokens(n) for n in range(3)])
    seeds = shards.seeds(tokens)
    pages = np.empty((3, spec.page_bytes // 8), np.uint64)
    for seed, page in zip(seeds, pages, strict=True):
        generator.fill(seed, page)
    whole = pages.view(np.uint8).reshape(3, LAYERS, 2, 2, -1)
    held = [np.ascontiguousarray(whole[:, :, :, head]).reshape(-1) for head in range(2)]
    assert shards.wrong_bytes(seeds, held) == 0
    held[1][1234] ^= 1
    held[0][-1] ^= 1
    assert shards.wrong_bytes(seeds, held) == 2
    assert shards.wrong_bytes(seeds[::-1], held) > spec.page_bytes
    rooms = [np.empty(3 * shards.page_bytes, np.uint8) for _ in range(2)]
    shards.produce(seeds, rooms)
    for head, room in enumerate(rooms):
        by_group = room.reshape(GROUPS, 3, -1)
        for number in range(3):
            assert np.array_equal(by_group[:, number].reshape(-1), whole[number, :, :, head].reshape(-1))
    for wrong in (lambda: factory_spec(65), lambda: Shards(spec, 3)):
        with pytest.raises(BadRequest):
            wrong()


def test_a_journal_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.add(Begun(1.0))
    journal.add(Event(2.0, "x"))
    journal.close()
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-5])
    again = Journal(tmp_path / "j")
    again.add(Event(3.0, "y"))
    again.close()
    assert list(read_journal(tmp_path / "j")) == [Begun(1.0), Event(3.0, "y")]
    assert list(read_journal(tmp_path / "none")) == []
