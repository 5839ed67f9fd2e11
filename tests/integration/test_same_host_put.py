"""Puts out of a client's memory, and views of the daemon's."""

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.api.same_host import SameHost, SameHostPeer
from kvstore.api.wire import FrameType, encode, pack, slice_digest
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.messages import Commit, Committed, Empty, PutReady, PutStart
from kvstore.api.wire.same_host import MAX_LOCATED, Buffer, Buffered, CopiedPart, Copy, Locate, Places, pack_copies, unpack_places
from kvstore_client import (
    AsyncClient,
    BadDigest,
    BadRequest,
    Busy,
    Client,
    Component,
    Conflict,
    ConnectionLost,
    KVSpec,
    KVStoreError,
    NotFound,
    PartRange,
    Unsupported,
)
from kvstore_client.buffers import SharedBuffer
from kvstore_client.connection import Connection
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import Held, wait_for_baseline
from tests.integration.near import sent_bytes
from tests.integration.raw import stat

SPEC = KVSpec(4, (Component("full", 6, 2, 16384),), max_slice_bytes=1 << 20)
"""Pages of 3 MiB in 3 slices."""
SLICE = 1 << 20

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("near"), "--dram", "128MiB", "--ssd", "256MiB") as running:
        yield running


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.endpoint, timeout=20) as one:
        assert await one.same_host.connection() is not None
        yield one


@pytest.fixture
async def namespace(client: AsyncClient) -> AsyncIterator[Namespace]:
    found = await client.namespace("near", "rev-1", SPEC)
    yield found
    await found.drop()


def copied(daemon: DaemonProcess) -> int:
    return int(stat(daemon.http)["totals"]["copied_put_bytes"])


def random_pages(seed: int, pages: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, pages * SPEC.page_bytes, dtype=np.uint8)


def tokens(seed: int, pages: int) -> npt.NDArray[np.uint32]:
    return np.arange(seed * 1000, seed * 1000 + 4 * pages, dtype=np.uint32)


async def fetched(namespace: Namespace, seed: int, pages: int) -> Bytes:
    async with await namespace.match(tokens(seed, pages)) as match:
        out = np.zeros(match.pages * SPEC.page_bytes, np.uint8)
        await namespace.fetch(match, out)
        return out


# --- puts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lent", [True, False])
async def test_a_put_is_copied_by_the_daemon(daemon: DaemonProcess, client: AsyncClient, namespace: Namespace, lent: bool) -> None:
    data = random_pages(1, 7)
    before = copied(daemon)
    if lent:
        buffer = client.buffer(len(data) + 4096)
        buffer.array[4096:] = data
        source = buffer.array[4096:]
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.descriptor, 0)
    else:
        source = data
    counted: list[tuple[int, int]] = []
    result = await namespace.put(tokens(1, 7), source, progress=lambda *at: counted.append(at))
    assert result.new_pages == 7
    assert copied(daemon) == before + len(data), "bytes were sent over a socket"
    assert counted[-1] == (len(data), len(data))
    assert np.array_equal(await fetched(namespace, 1, 7), data)
    if lent:
        before = copied(daemon)
        buffer.array[4096:] = random_pages(2, 7)
        await namespace.put(tokens(2, 7), source)
        await client.drop_buffer(buffer)
        assert copied(daemon) == before + len(data)
        assert np.array_equal(await fetched(namespace, 2, 7), random_pages(2, 7))
        await namespace.put(tokens(3, 1), random_pages(3, 1))
        assert np.array_equal(await fetched(namespace, 3, 1), random_pages(3, 1))


async def test_shards_and_several_puts_at_once(daemon: DaemonProcess, client: AsyncClient, namespace: Namespace) -> None:
    before = copied(daemon)
    halves = [PartRange(0, 0, 3, 0, 2), PartRange(0, 3, 6, 0, 2)]
    data = random_pages(4, 5)
    by_page = data.reshape(5, 2, -1)
    results = await asyncio.gather(
        *(
            namespace.put(tokens(4, 5), np.ascontiguousarray(by_page[:, n]), parts=(half,), put_id=b"halves".ljust(16), whole_s=10)
            for n, half in enumerate(halves)
        ),
        *(namespace.put(tokens(10 + n, 2), random_pages(10 + n, 2)) for n in range(4)),
    )
    assert [r.pending_pages for r in results] == [0] * 6
    assert copied(daemon) == before + len(data) + 8 * SPEC.page_bytes
    assert np.array_equal(await fetched(namespace, 4, 5), data)
    for n in range(4):
        assert np.array_equal(await fetched(namespace, 10 + n, 2), random_pages(10 + n, 2))


def test_the_blocking_client(daemon: DaemonProcess) -> None:
    before, sent = copied(daemon), sent_bytes(daemon)
    with Client(daemon.unix_endpoint) as client:
        namespace = client.namespace("blocking", "rev-2", SPEC)
        buffer = client.buffer(2 * SPEC.page_bytes)
        buffer.array[:] = random_pages(5, 2)
        assert namespace.put(tokens(5, 2), buffer.array).new_pages == 2
        with namespace.match(tokens(5, 2)) as match:
            assert match.valid
            view = namespace.view(match)
            assert np.array_equal(np.concatenate([part.data for part in view.parts]), buffer.array)
            assert view.valid
            match.renew(60)
        assert not view.valid
        client.drop_buffer(buffer)
        namespace.drop()
    assert copied(daemon) == before + 2 * SPEC.page_bytes
    assert sent_bytes(daemon) == sent


async def test_a_put_that_is_given_up_before_the_daemon_has_read_of_it_is_not_left_open(tmp_path: Path) -> None:
    """Its PUT and its ABORT lie in sockets when the daemon goes on: it reads them in order only if that is the same one."""
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "64MiB") as stopped:
        async with AsyncClient(stopped.endpoint, timeout=20) as client:
            namespace = await client.namespace("near", "rev-1", SPEC)
            await namespace.put(tokens(1, 1), random_pages(1, 1))
            assert client.same_host.now is not None
            for seed in range(2, 8):
                stopped.send_signal(signal.SIGSTOP)
                try:
                    put = asyncio.create_task(namespace.put(tokens(seed, 1), random_pages(seed, 1)))
                    await asyncio.sleep(0.1)
                    put.cancel()
                    await asyncio.sleep(0.1)
                finally:
                    stopped.send_signal(signal.SIGCONT)
                with pytest.raises(asyncio.CancelledError):
                    await put
                await client.ping()
            async with asyncio.timeout(5):
                while (await asyncio.to_thread(stat, stopped.http))["puts_open"]:
                    await asyncio.sleep(0.05)


async def test_without_memory_for_a_stage_puts_are_sent(
    daemon: DaemonProcess, client: AsyncClient, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = copied(daemon)

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", none_left)
        for seed in range(500, 506):  # more often than there are stages
            await namespace.put(tokens(seed, 1), random_pages(seed, 1))
    assert copied(daemon) == before
    await namespace.put(tokens(506, 1), random_pages(506, 1))
    assert copied(daemon) == before + SPEC.page_bytes, "it is tried again"
    assert stat(daemon.http)["puts_open"] == 0
    assert np.array_equal(await fetched(namespace, 500, 1), random_pages(500, 1))


# --- puts that lie -------------------------------------------------------------------------------------------------------


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

    async def copy(self, buffer: int, data: Bytes, offset: int = 0, page: int = 0, part: int = 0, first: int = 0, count: int = 3) -> None:
        digests = [slice_digest(data[n * SLICE : (n + 1) * SLICE].data) for n in range(count)]
        payload = pack_copies([CopiedPart(page, part, first, offset)]) + b"".join(digests)
        await self.connection.call(FrameType.COPY, Copy(handle=self.handle, buffer=buffer, slices=[count]), Empty, payload)

    async def commit(self) -> Committed:
        done, _ = await self.connection.call(FrameType.COMMIT, Commit(handle=self.handle), Committed)
        return done


def memfd(data: Bytes) -> int:
    """A memfd that its owner can make smaller."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data.data)
    return descriptor


async def by_hand(daemon: DaemonProcess, namespace: Namespace, seed: int) -> ByHand:
    put = ByHand(await Connection.open(daemon.unix_endpoint, descriptors=True), namespace, seed)
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
    connections = [await Connection.open(daemon.unix_endpoint, descriptors=True) for _ in range(17)]
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
    sender, channel, host = DescriptorChannel(theirs, 1), DescriptorChannel(ours, 1), SameHost()
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
    connection = await Connection.open(daemon.unix_endpoint, descriptors=True)
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


# --- views ---------------------------------------------------------------------------------------------------------------


async def test_a_view_shows_what_was_put(client: AsyncClient, namespace: Namespace) -> None:
    data = random_pages(80, 3)
    await namespace.put(tokens(80, 3), data)
    match = await namespace.match(tokens(80, 3))
    view = await namespace.view(match)
    assert [part.page for part in view.parts] == [0, 1, 2]
    assert all(not part.data.flags.writeable for part in view.parts)
    assert np.array_equal(np.concatenate([part.data for part in view.parts]), data)
    out = np.zeros(len(data), np.uint8)
    assert view.copy_into(out) == len(data)
    assert np.array_equal(out, data)
    one = await namespace.view(match, pages=(1, 2))
    assert np.array_equal(one.parts[0].data, data[SPEC.page_bytes : 2 * SPEC.page_bytes])
    assert view.valid
    view.check()
    await match.release()
    assert not view.valid
    with pytest.raises(NotFound):
        view.check()
    assert view.intact, "nothing has taken its place"
    with pytest.raises(NotFound):
        await namespace.view(match)
    short = await namespace.match(tokens(80, 3), lease_s=0.2)
    view = await namespace.view(short)
    assert view.valid
    await asyncio.sleep(0.3)
    assert not view.valid, "a lease that is over by the clock"


async def test_only_so_many_blobs_are_located_at_once(client: AsyncClient, namespace: Namespace) -> None:
    await namespace.put(tokens(85, 1), random_pages(85, 1))
    async with await namespace.match(tokens(85, 1)) as match:
        connection, (_, _, blob) = client.same_host.now, next(match.parts())
        assert connection is not None
        _, places = await connection.call(FrameType.LOCATE, Locate(namespace=namespace.id, blobs=MAX_LOCATED), Places, blob * MAX_LOCATED)
        assert unpack_places(places) == [match.places()[blob]] * MAX_LOCATED
        with pytest.raises(BadRequest, match="at once"):
            await connection.call(FrameType.LOCATE, Locate(namespace=namespace.id, blobs=MAX_LOCATED + 1), Places, blob * (MAX_LOCATED + 1))


async def test_a_view_of_what_is_dropped_is_not_valid(client: AsyncClient) -> None:
    namespace = await client.namespace("doomed", "rev-3", SPEC)
    await namespace.put(tokens(90, 1), random_pages(90, 1))
    match = await namespace.match(tokens(90, 1), lease_s=60)
    view = await namespace.view(match)
    assert view.valid
    await namespace.drop()
    assert not view.valid
    with pytest.raises(NotFound):
        view.copy_into(np.zeros(SPEC.page_bytes, np.uint8))
    with pytest.raises((NotFound, KVStoreError)):
        await namespace.fetch(match, np.zeros(SPEC.page_bytes, np.uint8))


async def test_a_view_brings_up_what_is_on_ssd(tmp_path: Path) -> None:
    data = random_pages(3, 2)
    with DaemonProcess(tmp_path / "data", "--dram", "32MiB", "--ssd", "64MiB") as first, Client(first.endpoint) as writer:
        writer.namespace("near", "rev-1", SPEC).put(tokens(3, 2), data, durable=True)
    with DaemonProcess(tmp_path / "data", "--dram", "32MiB", "--ssd", "64MiB") as second:
        async with AsyncClient(second.endpoint) as client:
            namespace = await client.namespace("near")
            async with await namespace.match(tokens(3, 2)) as match:
                assert match.dram_pages == 0
                view = await namespace.view(match)
                assert np.array_equal(np.concatenate([part.data for part in view.parts]), data)
        async with AsyncClient(second.endpoint, shared_memory=False) as client:
            namespace = await client.namespace("near")
            async with await namespace.match(tokens(3, 2)) as match:
                with pytest.raises(Unsupported):
                    await namespace.view(match)


async def test_pages_that_are_looked_at_stay(tmp_path: Path) -> None:
    """Under pressure nothing leased moves or goes; afterwards it may."""
    with DaemonProcess(tmp_path / "data", "--dram", "32MiB", "--ssd", "1MiB") as small:
        async with AsyncClient(small.endpoint, timeout=20) as client:
            namespace = await client.namespace("near", "rev-1", SPEC)
            data = random_pages(1, 2)
            await namespace.put(tokens(1, 2), data)
            match = await namespace.match(tokens(1, 2), lease_s=60)
            view = await namespace.view(match)
            for seed in range(2, 30):
                await namespace.put(tokens(seed, 1), random_pages(seed, 1))
            assert view.valid
            assert np.array_equal(np.concatenate([part.data for part in view.parts]), data)
            with pytest.raises(Conflict):
                await namespace.delete(tokens(1, 2))
            await match.release()
            for seed in range(30, 60):
                await namespace.put(tokens(seed, 1), random_pages(seed, 1))
            assert not view.intact, "it was never evicted"
            with pytest.raises(NotFound):
                view.copy_into(np.zeros(len(data), np.uint8))
