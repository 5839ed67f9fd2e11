"""A fetch that is cancelled in the middle of a frame: nothing more may reach the caller's buffer, however impatient the caller is."""

import asyncio

import pytest

from kvstore.api.wire import DATA_META, FrameType, Piece, Run, SliceLayout, decode_header, encode, pack
from kvstore.api.wire.frames import HEADER_BYTES, encode_bulk
from kvstore.api.wire.messages import Welcome
from kvstore_client.blocks import Item, blocks_of
from kvstore_client.opening import open_connection
from kvstore_client.plan import FetchPlan

SIZE = 1 << 20


class HalfADaemon:
    """Sends half of a frame of data, and the other half when it is told to."""

    def __init__(self) -> None:
        self.half = asyncio.Event()
        self.go_on = asyncio.Event()
        self.sent = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._frame(reader)
        writer.writelines(encode(FrameType.WELCOME, 0, pack(Welcome(version=1, epoch=1, session=bytes(16), server="", endpoint=""))))
        number = await self._frame(reader)
        writer.write(encode_bulk(FrameType.DATA, number, DATA_META.pack(0), SIZE, 1) + b"x" * (SIZE // 2))
        await writer.drain()
        self.half.set()
        await self.go_on.wait()
        writer.write(b"y" * (SIZE // 2) + bytes(16))
        self.sent.set()
        await reader.read()
        writer.close()

    @staticmethod
    async def _frame(reader: asyncio.StreamReader) -> int:
        header = decode_header(await reader.readexactly(HEADER_BYTES))
        await reader.readexactly(header.meta_bytes + header.payload_bytes)
        return header.request


@pytest.mark.parametrize(
    ("quiet_s", "again"), [(0, False), (60, True), (60, False)], ids=["out of patience", "cancelled twice", "it stalls"]
)
async def test_nothing_more_is_written(quiet_s: float, again: bool) -> None:
    daemon = HalfADaemon()
    async with await asyncio.start_server(daemon.serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        connection = await open_connection(f"{host}:{port}")
        layout = SliceLayout((SIZE,))
        item = Item(bytes(16), layout, Run(0, 0, SIZE), (Piece(0, SIZE, 0, True),), 0, 0)
        plan, buffer = FetchPlan(blocks_of([item]), 1), bytearray(SIZE)
        fetch = asyncio.create_task(connection.fetch("ns", plan.stripes[0], memoryview(buffer), plan, quiet_s=quiet_s))
        await daemon.half.wait()
        while buffer[SIZE // 8] != ord("x"):  # the socket may keep what is less than it is waited for
            await asyncio.sleep(0.001)
        fetch.cancel()
        if again:
            await asyncio.sleep(0.01)  # it waits for the rest of the frame
            fetch.cancel()
        _, still = await asyncio.wait([fetch], timeout=20)
        assert not still, "it waits for a frame of which nothing comes"
        daemon.go_on.set()
        await daemon.sent.wait()
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert bytes(buffer[SIZE // 2 :]) == bytes(SIZE // 2)
        assert connection.lost is not None
        await connection.close()
