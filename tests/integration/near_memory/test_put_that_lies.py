"""Puts out of a client's memory that are not what the client says, every frame of them made here."""

import asyncio
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.same_host import SameHost, SameHostPeer
from kvstore.api.wire import FrameType, encode, pack, slice_digest
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.messages import Empty
from kvstore.api.wire.put_messages import Commit, Committed, PutHandle, PutReady, PutStart
from kvstore.api.wire.same_host import Buffer, Buffered, CopiedPart, Copy, pack_copies
from kvstore_client import BadDigest, BadRequest, Busy, ConnectionLost, KVStoreError, NotFound
from kvstore_client.buffers import SharedBuffer
from kvstore_client.connection import Connection
from kvstore_client.namespace import Namespace
from kvstore_client.opening import open_connection
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import Held, wait_for_baseline
from tests.integration.near_memory.pages import SLICE, SPEC, Bytes, copied, fetched, random_pages, tokens
from tests.integration.raw import stat


class ByHand:
    """A put whose every frame is made here."""

    def __init__(self, connection: Connection, namespace: Namespace, seed: int) -> None:
        self.connection = connection
        self._start = PutStart(
            namespace=namespace.id, put_id=os.urandom(16), first_page=0, parts=[(0, 0, 6, 0, 2)], spans=[], ack="memory", extra_pages=[]
        )
        self._tokens = tokens(seed, 1).tobytes()
        self.handle = 0

    async def begin(self) -> None:
        ready, _ = await self.connection.call(FrameType.PUT, self._start, PutReady, self._tokens)
        self.handle = ready.handle

    async def lend(self, descriptor: int, nbytes: int = SPEC.page_bytes) -> int:
        return (await self.connection.call_with(FrameType.BUFFER, Buffer(nbytes=nbytes), Buffered, descriptor)).buffer

    async def copy_unsaid(
        self, buffer: int, *, offset: int = 0, page: int = 0, part: int = 0, first: int = 0, count: int = 3, quiet: int = False
    ) -> None:
        """Without digests: they are to come with the commit. What is quiet is not waited for."""
        message = Copy(handle=self.handle, buffer=buffer, slices=[count], quiet=bool(quiet))
        payload = pack_copies([CopiedPart(page, part, first, offset)])
        if not quiet:
            await self.connection.call(FrameType.COPY, message, Empty, payload)
            return
        async with self.connection.unanswered(FrameType.COPY, message, payload):
            pass

    async def copy(self, buffer: int, data: Bytes, offset: int = 0, page: int = 0, part: int = 0, first: int = 0, count: int = 3) -> None:
        digests = [slice_digest(data[n * SLICE : (n + 1) * SLICE].data) for n in range(count)]
        payload = pack_copies([CopiedPart(page, part, first, offset)]) + b"".join(digests)
        await self.connection.call(FrameType.COPY, Copy(handle=self.handle, buffer=buffer, slices=[count]), Empty, payload)

    async def commit(self, digests: bytes = b"") -> Committed:
        done, _ = await self.connection.call(FrameType.COMMIT, Commit(handle=self.handle, wait_ms=5000), Committed, digests)
        return done

    async def give_up(self) -> None:
        await self.connection.call(FrameType.ABORT, PutHandle(handle=self.handle), Empty)


def memfd(data: Bytes) -> int:
    """A memfd that its owner can make smaller."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data.data)
    return descriptor


async def by_hand(daemon: DaemonProcess, namespace: Namespace, seed: int) -> ByHand:
    put = ByHand(await open_connection(daemon.unix_endpoint, descriptors=True), namespace, seed)
    await put.begin()
    return put


async def test_a_client_that_truncates_its_memory_kills_nobody(daemon: DaemonProcess, namespace: Namespace) -> None:
    data = random_pages(20, 1)
    refused: list[str] = []
    for attempt in range(20):
        put = await by_hand(daemon, namespace, 20 + attempt)
        descriptor = memfd(data)
        buffer = await put.lend(descriptor)

        def truncate(descriptor: int = descriptor, attempt: int = attempt) -> None:
            if attempt % 4:
                threading.Event().wait(attempt / 20_000)
            os.ftruncate(descriptor, 4096 * (attempt % 3))

        thread = threading.Thread(target=truncate)
        thread.start()
        try:
            await put.copy(buffer, data)
        except BadRequest as error:
            refused.append(str(error))
            with pytest.raises(BadRequest):
                await put.commit()
        thread.join()
        os.close(descriptor)
        await put.connection.close()
    assert refused, "no copy met a truncation"
    assert all("made smaller" in why for why in refused), refused
    assert stat(daemon.http)["pid"] == daemon.pid


async def test_what_was_not_said_truly_does_not_count(daemon: DaemonProcess, namespace: Namespace) -> None:
    data = random_pages(50, 1)
    changed = data.copy()
    changed[2 * SLICE + 77] ^= 1
    put = await by_hand(daemon, namespace, 50)
    descriptor = memfd(changed)
    buffer = await put.lend(descriptor)
    with pytest.raises(BadDigest):
        await put.copy(buffer, data)
    with pytest.raises(BadDigest):
        await put.commit()
    async with await namespace.match(tokens(50, 1)) as match:
        assert match.pages == 0
    os.close(descriptor)
    await put.connection.close()


def digests_of(data: Bytes) -> bytes:
    return b"".join(slice_digest(data[at : at + SLICE].data) for at in range(0, len(data), SLICE))


async def pages_of(namespace: Namespace, seed: int) -> int:
    async with await namespace.match(tokens(seed, 1)) as match:
        return match.pages


@pytest.mark.parametrize("quiet", [False, True])
async def test_digests_may_come_with_the_commit(daemon: DaemonProcess, namespace: Namespace, quiet: bool) -> None:
    data = random_pages(51, 1)
    put = await by_hand(daemon, namespace, 51)
    descriptor = memfd(data)
    buffer = await put.lend(descriptor)
    await put.copy_unsaid(buffer, first=1, count=2, offset=SLICE, quiet=quiet)
    await put.copy_unsaid(buffer, count=1, quiet=quiet)
    assert await pages_of(namespace, 51) == 0
    assert (await put.commit(digests_of(data))).new_pages == 1
    assert np.array_equal(await fetched(namespace, 51, 1), data)
    os.close(descriptor)
    await put.connection.close()


@pytest.mark.parametrize("copied_first", [True, False])
async def test_a_late_digest_that_is_wrong_spoils_the_put(daemon: DaemonProcess, namespace: Namespace, copied_first: bool) -> None:
    """The bytes changed between the copy and the hash, say: in either order, and whichever the daemon hears first."""
    data = random_pages(52, 1)
    changed = data.copy()
    changed[SLICE + 5] ^= 1
    before = await asyncio.to_thread(Held.by, daemon)
    put = await by_hand(daemon, namespace, 52)
    descriptor = memfd(changed)
    buffer = await put.lend(descriptor)
    await put.copy_unsaid(buffer, quiet=not copied_first)
    with pytest.raises(BadDigest, match="slice 1"):
        await put.commit(digests_of(data))
    with pytest.raises(NotFound):
        await put.commit(digests_of(changed))  # the first word counts: it ended the put
    assert await pages_of(namespace, 52) == 0
    os.close(descriptor)
    await put.connection.close()
    await asyncio.to_thread(wait_for_baseline, daemon, before)


@pytest.mark.parametrize("slices", [0, 2, 4])
async def test_digests_of_all_or_there_is_no_commit(daemon: DaemonProcess, namespace: Namespace, slices: int) -> None:
    data = random_pages(53, 1)
    put = await by_hand(daemon, namespace, 53)
    descriptor = memfd(data)
    buffer = await put.lend(descriptor)
    await put.copy_unsaid(buffer)
    with pytest.raises(BadRequest, match="digests"):
        await put.commit((2 * digests_of(data))[: slices * 16])
    assert await pages_of(namespace, 53) == 0
    os.close(descriptor)
    await put.connection.close()


async def test_slices_named_twice_spoil_the_put(daemon: DaemonProcess, namespace: Namespace) -> None:
    data = random_pages(54, 1)
    for again in ({"count": 3}, {"first": 1, "count": 1, "offset": SLICE}):
        put = await by_hand(daemon, namespace, 54)
        descriptor = memfd(data)
        buffer = await put.lend(descriptor)
        await put.copy_unsaid(buffer)
        with pytest.raises(BadRequest, match="twice"):
            await put.copy_unsaid(buffer, **again)
        with pytest.raises(BadRequest, match="twice"):
            await put.commit(digests_of(data))
        os.close(descriptor)
        await put.connection.close()
    assert await pages_of(namespace, 54) == 0


@pytest.mark.parametrize("how", ["gone", "given up"])
async def test_without_its_digests_a_copy_leaves_nothing(daemon: DaemonProcess, namespace: Namespace, how: str) -> None:
    """A client that ends between its COPY and its COMMIT, while the daemon copies or after that."""
    data = random_pages(55, 1)
    before = await asyncio.to_thread(Held.by, daemon)
    for copied_first in (True, False):
        put = await by_hand(daemon, namespace, 55)
        descriptor = memfd(data)
        buffer = await put.lend(descriptor)
        await put.copy_unsaid(buffer, quiet=not copied_first)
        if how == "given up":
            await put.give_up()
        await put.connection.close()
        os.close(descriptor)
        await asyncio.to_thread(wait_for_baseline, daemon, before)
    assert await pages_of(namespace, 55) == 0


async def test_a_client_killed_before_its_commit_leaves_nothing(daemon: DaemonProcess, namespace: Namespace) -> None:
    """A real client, whose daemon has copied all of it before it dies with the bytes half hashed."""
    before = await asyncio.to_thread(Held.by, daemon)
    copied_before = copied(daemon)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIES_HASHING, daemon.endpoint, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert client.stdout is not None
    async with asyncio.timeout(20):
        assert await client.stdout.readline() == b"hashing\n"
        while copied(daemon) < copied_before + SPEC.page_bytes:
            await asyncio.sleep(0.01)
    assert stat(daemon.http)["puts_open"] == 1
    client.kill()
    await client.wait()
    await asyncio.to_thread(wait_for_baseline, daemon, before)
    assert stat(daemon.http)["puts_open"] == 0
    assert await pages_of(namespace, 56) == 0


DIES_HASHING = """
import asyncio, sys, time
from kvstore_client import AsyncClient, near_put
from tests.integration.near_memory.pages import SPEC, random_pages, tokens

def hash_for_ever(data):
    print("hashing", flush=True)
    time.sleep(60)

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        assert await client.same_host.connection() is not None
        namespace = await client.namespace("near", "rev-1", SPEC)
        buffer = client.buffer(SPEC.page_bytes)
        buffer.array[:] = random_pages(56, 1)
        near_put.slice_digest = hash_for_ever
        await namespace.put(tokens(56, 1), buffer.array)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "wrong",
    [{"page": 7}, {"part": 3}, {"first": 1}, {"first": 65535}, {"count": 4}],
    ids=str,
)
async def test_places_that_are_not_there_have_no_late_digests(daemon: DaemonProcess, namespace: Namespace, wrong: dict[str, int]) -> None:
    put = await by_hand(daemon, namespace, 57)
    descriptor = memfd(random_pages(57, 1))
    buffer = await put.lend(descriptor)
    with pytest.raises(BadRequest):
        await put.copy_unsaid(buffer, **wrong)
    os.close(descriptor)
    await put.connection.close()


@pytest.mark.parametrize(
    "wrong",
    [{"offset": 1}, {"offset": 2**63}, {"page": 7}, {"part": 3}, {"first": 1}, {"first": 65535}, {"count": 4}, {"buffer": 99}],
    ids=str,
)
async def test_places_that_are_not_there_are_refused(daemon: DaemonProcess, namespace: Namespace, wrong: dict[str, int]) -> None:
    data = random_pages(60, 1)
    put = await by_hand(daemon, namespace, 60)
    descriptor = memfd(data)
    buffer = await put.lend(descriptor)
    with pytest.raises((BadRequest, NotFound)):
        await put.copy(wrong.pop("buffer", buffer), data, **wrong)
    os.close(descriptor)
    await put.connection.close()


async def test_only_memfds_are_taken(daemon: DaemonProcess, namespace: Namespace, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(SPEC.page_bytes))
    pipe, other_end = os.pipe()
    left, right = socket.socketpair()
    short = memfd(np.zeros(100, np.uint8))
    descriptors = [os.open(file, os.O_RDWR), os.open("/dev/zero", os.O_RDWR), os.open(tmp_path, os.O_RDONLY), pipe, left.fileno(), short]
    before = await asyncio.to_thread(Held.by, daemon)
    put = await by_hand(daemon, namespace, 70)
    for descriptor in descriptors:
        with pytest.raises(BadRequest):
            await put.lend(descriptor)
    with pytest.raises(BadRequest):
        await put.lend(short, 0)
    data = random_pages(70, 1)
    good = memfd(data)
    buffer = await put.lend(good)
    await put.copy(buffer, data)
    assert (await put.commit()).new_pages == 1, "the connection goes on after refusals"
    await put.connection.close()
    for descriptor in (*descriptors[:-2], other_end, short, good):
        os.close(descriptor)
    left.close()
    right.close()
    await asyncio.to_thread(wait_for_baseline, daemon, before)


async def test_lent_buffers_are_bounded_and_one_descriptor_each(daemon: DaemonProcess) -> None:
    before = await asyncio.to_thread(Held.by, daemon)
    buffer = SharedBuffer(4096)
    connections = [await open_connection(daemon.unix_endpoint, descriptors=True) for _ in range(17)]
    lent = Buffer(nbytes=4096)
    for connection in connections[:16]:
        for _ in range(64):
            await connection.call_with(FrameType.BUFFER, lent, Buffered, buffer.descriptor)
    with pytest.raises(Busy):
        await connections[16].call_with(FrameType.BUFFER, lent, Buffered, buffer.descriptor)
    held = await asyncio.to_thread(Held.by, daemon)
    assert held.descriptors - before.descriptors <= 1024 + 17 + 1  # the refused one may be still to be closed
    for connection in connections:
        await connection.close()
    buffer.close()
    await asyncio.to_thread(wait_for_baseline, daemon, before)


async def test_buffers_are_let_go_of_in_a_thread() -> None:
    """It takes seconds for gigabytes, if their client is gone."""
    theirs, ours = socket.socketpair(socket.AF_UNIX)
    theirs.setblocking(False)
    ours.setblocking(False)
    sender, channel, host = DescriptorChannel(theirs, 1), DescriptorChannel(ours, 1), SameHost("unix:nowhere")
    peer = SameHostPeer(channel, host)
    buffer = SharedBuffer(4096)
    await sender.send_with(encode(FrameType.PING, 0, pack(Empty())), [buffer.descriptor])
    await channel.read_header()
    peer.add_buffer(4096)
    go_on = threading.Event()
    for _ in range(2):
        host.copiers.submit(go_on.wait)
    peer.close()
    assert host.buffers == 1
    go_on.set()
    async with asyncio.timeout(5):
        while host.buffers:
            await asyncio.sleep(0.01)
    assert host.lent == 0
    host.close()
    buffer.close()
    sender.close()
    channel.close()


async def test_descriptors_that_nobody_asked_for_end_the_connection(daemon: DaemonProcess) -> None:
    before = await asyncio.to_thread(Held.by, daemon)
    zeros = [os.open("/dev/zero", os.O_RDONLY) for _ in range(3)]
    connection = await open_connection(daemon.unix_endpoint, descriptors=True)
    channel = connection._channel
    assert isinstance(channel, DescriptorChannel)
    ping = encode(FrameType.PING, 0, pack(Empty()))
    with suppress(ConnectionLost):
        for _ in range(100):
            await channel.send_with(ping, zeros)
    with pytest.raises(KVStoreError):
        await connection.call(FrameType.PING, Empty(), Empty)
    await connection.close()
    for descriptor in zeros:
        os.close(descriptor)
    await asyncio.to_thread(wait_for_baseline, daemon, before)
