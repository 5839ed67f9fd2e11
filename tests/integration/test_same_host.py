"""Shared memory with a daemon on the same machine: who gets it, what can be done with it, and that it is never wrong."""

import asyncio
import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api.wire import FrameType, encode, pack
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.messages import Empty
from kvstore.api.wire.same_host import SegmentList, SegmentMeta, SegmentsRequest
from kvstore_client import AsyncClient, Busy, Client, Component, Forbidden, KVSpec, NotFound, PartRange, Unauthenticated
from kvstore_client.opening import open_connection
from kvstore_client.same_host import MappedSegment
from kvstore_workers.daemon_process import DaemonProcess
from tests.descriptors import descriptors
from tests.integration.near import is_near, segments_of, sent_bytes
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import stat, wait_for_baseline
from tests.integration.secured import ALICE, ALICE_READS, BOB, write_tokens
from tests.waiting import until

BIG = KVSpec(4, (Component("full", 6, 2, 16384),), max_slice_bytes=1 << 20)
"""Pages of 3 MiB in 3 slices."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("near"), "--dram", "64MiB", "--ssd", "256MiB") as running:
        yield running


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("secured")
    tokens = write_tokens(folder / "tokens.toml")
    with DaemonProcess(folder / "data", "--dram", "64MiB", "--ssd", "64MiB", "--tokens-file", str(tokens)) as running:
        yield running


# --- which way -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unix", [False, True])
def test_a_client_on_the_same_machine_takes_it_by_itself(daemon: DaemonProcess, unix: bool) -> None:
    tokens = context(100 + unix, pages=20)
    with Client(daemon.unix_endpoint if unix else daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(tokens, content(tokens))
        before = sent_bytes(daemon)
        copied = stat(daemon.http)["totals"]["near_fetch_bytes"]
        assert fetch_checked(namespace, tokens) == 20
        assert sent_bytes(daemon) == before, "bytes were sent over a socket"
        assert stat(daemon.http)["totals"]["near_fetch_bytes"] == copied + 20 * SPEC.page_bytes, "it was not told what was copied"
    with Client(daemon.endpoint, shared_memory=False) as client:
        assert fetch_checked(open_namespace(client), tokens) == 20
        assert sent_bytes(daemon) == before + 20 * SPEC.page_bytes


async def test_no_shared_memory_where_it_is_switched_off(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "16MiB", environment={"KVSTORE_SHARED_MEMORY": "off"}) as off:
        async with AsyncClient(off.unix_endpoint) as client:
            assert not await is_near(client)
            with pytest.raises(Forbidden):
                await client.call(FrameType.SEGMENTS, SegmentsRequest(numbers=[0], dropped=[]), SegmentList)
        with Client(off.endpoint) as blocking:
            namespace = open_namespace(blocking)
            namespace.put(context(1), content(context(1)))
            assert fetch_checked(namespace, context(1)) == 4
        assert sent_bytes(off) == 4 * SPEC.page_bytes


async def test_without_the_socket_it_goes_over_tcp(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "16MiB") as alone:
        Path(alone.unix_endpoint.removeprefix("unix:")).rename(tmp_path / "elsewhere")
        with Client(alone.endpoint) as client:
            namespace = open_namespace(client)
            for seed, sent in ((1, 4), (2, 8)):
                namespace.put(context(seed), content(context(seed)))
                assert fetch_checked(namespace, context(seed)) == 4
                assert sent_bytes(alone) == sent * SPEC.page_bytes
        async with AsyncClient(f"unix:{tmp_path / 'elsewhere'}") as moved:
            assert await is_near(moved), "who was told another path keeps to it"


async def test_a_lost_connection_for_descriptors_is_no_loss(daemon: DaemonProcess) -> None:
    tokens = context(130, pages=20)
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        out = np.zeros(20 * SPEC.page_bytes, np.uint8)
        for turn in range(3):
            await namespace.put(tokens + np.uint32(turn), content(tokens + np.uint32(turn)))
            match = await namespace.match(tokens + np.uint32(turn))
            connection = await client.same_host.connection()
            assert connection is not None, "it comes back by itself"
            connection._channel.sock.shutdown(2)
            await namespace.fetch(match, out)
            assert np.array_equal(out, content(tokens + np.uint32(turn)))
            assert match.valid, "the session lives on"
            await match.release()


async def test_what_is_on_ssd_comes_over_a_socket(tmp_path: Path) -> None:
    data = tmp_path / "data"
    tokens = context(1, pages=8)
    with DaemonProcess(data, "--dram", "16MiB", "--ssd", "64MiB") as first, Client(first.endpoint) as client:
        open_namespace(client).put(tokens[:16], content(tokens[:16]), durable=True)
    with DaemonProcess(data, "--dram", "16MiB", "--ssd", "64MiB") as second, Client(second.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(tokens, content(tokens, 4), first_page=4)
        assert fetch_checked(namespace, tokens) == 8
        assert sent_bytes(second) == 4 * SPEC.page_bytes
        assert fetch_checked(namespace, tokens) == 8
        assert sent_bytes(second) == 4 * SPEC.page_bytes, "what was brought up is in shared memory"


async def test_descriptors_that_the_system_does_not_carry_now_make_one_request_busy() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX)

    class Full(socket.socket):
        full = True

        def sendmsg(self, *arguments: Any) -> int:
            if self.full:
                raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
            return super().sendmsg(*arguments)

    sock = Full(fileno=theirs.detach())
    sock.setblocking(False)
    ours.setblocking(False)
    sender, receiver = DescriptorChannel(sock, 1), DescriptorChannel(ours, 1)
    frame = encode(FrameType.PING, 7, pack(Empty()))
    with pytest.raises(Busy):
        await sender.send_with(frame, [0])
    sock.full = False
    await sender.send_with(frame, [0])
    found = await receiver.read_header()
    assert found is not None
    assert found[0].request == 7
    os.close(receiver.take(1)[0])
    sender.close()
    receiver.close()


async def test_ranges_and_layer_groups(daemon: DaemonProcess) -> None:
    rng = np.random.default_rng(5)
    page = rng.integers(0, 256, (3, 6, 2, 2, 4 * 16384 * 2), dtype=np.uint8)  # page, layer, plane, head, rest
    tokens = np.arange(700, 712, dtype=np.uint32)
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("near ranges".replace(" ", "-"), "rev-1", BIG)
        await namespace.put(tokens, page.ravel())
        before = sent_bytes(daemon)
        async with await namespace.match(tokens) as match:
            for wanted in (PartRange(0, 0, 6, 0, 2), PartRange(0, 1, 4, 0, 2), PartRange(0, 2, 5, 1, 2), PartRange(0, 0, 6, 0, 1)):
                part = page[:, wanted.layer_lo : wanted.layer_hi, :, wanted.head_lo : wanted.head_hi]
                out = np.zeros(part.size, np.uint8)
                await namespace.fetch(match, out, wanted=wanted)
                assert np.array_equal(out, np.ascontiguousarray(part).ravel()), wanted
            whole, told, counted = np.zeros(page.size, np.uint8), list[tuple[int, int]](), list[tuple[int, int]]()

            def ready(low: int, high: int) -> None:
                told.append((low, high))
                assert np.array_equal(whole.reshape(page.shape)[:, low:high], page[:, low:high]), "a group was announced too early"

            await namespace.fetch(match, whole, group_layers=4, on_group=ready, progress=lambda *at: counted.append(at))
            assert told == [(0, 4), (4, 6)]
            assert counted[-1] == (page.size, page.size)
        assert sent_bytes(daemon) == before
        await namespace.drop()


# --- who gets it ---------------------------------------------------------------------------------------------------------


async def shared_with(endpoint: str, token: str, numbers: list[int]) -> list[int]:
    """The segments that a client gets of those it asks for."""
    connection = await open_connection(endpoint, token=token, descriptors=True)
    found: list[int] = []

    def take(items: list[SegmentMeta], descriptors: list[int]) -> None:
        assert len(items) == len(descriptors)
        found.extend(item.number for item in items)
        for descriptor in descriptors:
            os.close(descriptor)

    connection.on_segments = take
    try:
        await connection.call(FrameType.SEGMENTS, SegmentsRequest(numbers=numbers, dropped=[]), SegmentList)
    finally:
        await connection.close()
    return found


async def test_only_the_own_tenant_gets_segments(secured: DaemonProcess) -> None:
    async with AsyncClient(secured.endpoint, token=ALICE) as alice, AsyncClient(secured.endpoint, token=BOB) as bob:
        for client in (alice, bob):
            namespace = await client.namespace("pages", "rev-1", SPEC)
            await namespace.put(context(1), content(context(1)))
        matches = [await (await client.namespace("pages")).match(context(1)) for client in (alice, bob)]
        hers, his = (sorted(segments_of(match)) for match in matches)
        assert min(len(hers), len(his)) > 0
        assert not set(hers) & set(his), "a segment holds bytes of two tenants"
        every = list(range(max(hers + his) + 10))
        assert set(hers) <= set(await shared_with(secured.unix_endpoint, ALICE, every))
        assert set(his) <= set(await shared_with(secured.unix_endpoint, BOB, every))
        assert not set(await shared_with(secured.unix_endpoint, ALICE, every)) & set(await shared_with(secured.unix_endpoint, BOB, every))
        assert set(hers) <= set(await shared_with(secured.unix_endpoint, ALICE_READS, every)), "who may only read gets them too"
        with pytest.raises(Unauthenticated):
            await shared_with(secured.unix_endpoint, "wrong-0123456789abcdef", every)
        connection = await open_connection(secured.endpoint, token=ALICE)  # TCP: it can't carry descriptors, and shows no credentials
        with pytest.raises(Forbidden):
            await connection.call(FrameType.SEGMENTS, SegmentsRequest(numbers=hers, dropped=[]), SegmentList)
        await connection.close()


async def test_a_mapped_segment_can_only_be_read(daemon: DaemonProcess) -> None:
    got: list[tuple[SegmentMeta, int]] = []
    async with AsyncClient(daemon.unix_endpoint) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        await namespace.put(context(50), content(context(50)))
        match = await namespace.match(context(50))
        connection = await client.same_host.connection()
        assert connection is not None
        connection.on_segments = lambda items, descriptors: got.extend(zip(items, descriptors, strict=True))
        wanted = SegmentsRequest(numbers=sorted(segments_of(match)), dropped=[])
        await connection.call(FrameType.SEGMENTS, wanted, SegmentList)
        assert got
        for meta, descriptor in got:
            refusals: list[Callable[[], object]] = [
                partial(mmap.mmap, descriptor, meta.nbytes),
                partial(os.pwrite, descriptor, b"x", 0),
                partial(os.ftruncate, descriptor, 0),
                partial(os.ftruncate, descriptor, meta.nbytes + 4096),
                partial(os.posix_fallocate, descriptor, 0, meta.nbytes + 4096),
            ]
            for refused in refusals:
                with pytest.raises(PermissionError):
                    refused()
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # its own user may open it anew, and still not write
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(again, meta.nbytes)
            os.close(again)
            assert _mprotect(descriptor, meta.nbytes) == errno.EACCES, "a mapping for reading was made writable"
            os.close(descriptor)
        assert await client.call(FrameType.PING, Empty(), Empty)
        await namespace.put(context(51), content(context(51)))  # the daemon itself goes on writing there
        out = np.zeros(4 * SPEC.page_bytes, np.uint8)
        await namespace.fetch(await namespace.match(context(51)), out)
        assert np.array_equal(out, content(context(51)))


def _mprotect(descriptor: int, nbytes: int) -> int:
    """Map for reading, then ask for more. Returns the error number, 0 if it was allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    failed = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE)
    error = ctypes.get_errno() if failed else 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    return error


# --- never wrong ---------------------------------------------------------------------------------------------------------


async def test_a_place_written_anew_is_noticed(tmp_path: Path) -> None:
    """Evicted, and other bytes in its place: fetched anew, or a miss, never the other bytes."""
    with DaemonProcess(tmp_path / "data", "--dram", "4MiB", "--ssd", "1MiB", environment={"KVSTORE_SHARED_MEMORY": "on"}) as small:
        async with AsyncClient(small.endpoint, timeout=20) as client:
            namespace = await client.namespace("pages", "rev-1", SPEC)
            await namespace.put(context(1), content(context(1)))
            match = await namespace.match(context(1), lease_s=60)
            out = np.zeros(4 * SPEC.page_bytes, np.uint8)
            await namespace.fetch(match, out)
            assert np.array_equal(out, content(context(1)))
            segments = [client.same_host.segment(place.segment, match.epoch) for place in match.places().values() if place]
            await match.release()
            assert not match.valid
            held = [(s, p) for s, p in zip(segments, match.places().values(), strict=True) if s is not None and p is not None]
            assert held
            assert all(segment.holds(place) for segment, place in held), "nothing has happened to it yet"
            for seed in range(10, 600):
                await namespace.put(context(seed, 2), content(context(seed, 2)))
                if not any(segment.holds(place) for segment, place in held):
                    break
            assert not any(segment.holds(place) for segment, place in held), "it was never evicted"
            out[:] = 0
            try:
                await namespace.fetch(match, out)
            except NotFound:
                pass
            else:
                assert np.array_equal(out, content(context(1))), "wrong bytes"


async def test_a_segment_given_back_is_unmapped_and_never_used_again(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", "--dram", "4MiB", "--ssd", "8MiB") as small:
        async with AsyncClient(small.endpoint, timeout=20) as client:
            namespace = await client.namespace("pages", "rev-1", SPEC)
            tokens = context(1, pages=64)
            await namespace.put(tokens, content(tokens))
            match = await namespace.match(tokens)
            out = np.zeros(64 * SPEC.page_bytes, np.uint8)
            await namespace.fetch(match, out)
            mapped = [s for n in segments_of(match) if (s := client.same_host.segment(n, match.epoch)) is not None]
            assert mapped
            kept = {segment.number: segment.data[:4096] for segment in mapped}
            copies = {number: data.copy() for number, data in kept.items()}
            await match.release()
            await namespace.drop()
            other = await client.namespace("other", "rev-2", BIG)
            await other.put(np.arange(4, dtype=np.uint32), np.full(BIG.page_bytes, 7, np.uint8))  # the room is wanted
            await until(lambda: any(segment.retired for segment in mapped))  # any: they were not emptied in an order that is sure
            gone = next(segment for segment in mapped if segment.retired)
            assert np.array_equal(kept[gone.number], copies[gone.number]), "the memory of a given-back segment was used again"
            place = next(p for p in match.places().values() if p is not None and p.segment == gone.number)
            assert not gone.holds(place)
            await until(lambda: client.same_host.segment(gone.number, match.epoch) is None, "the client keeps what was given back")
            del kept


def test_a_mapped_segment_is_let_go_only_when_nobody_looks() -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096 + 16)
    segment = MappedSegment(SegmentMeta(number=1, nbytes=4096 + 16, slots=1), descriptor)
    os.close(descriptor)
    view = segment.data[:10]
    assert not segment.unmap()
    assert segment.retired
    assert bytes(view) == bytes(10)
    del view
    assert segment.unmap()


async def test_nothing_is_left_of_a_client(daemon: DaemonProcess) -> None:
    before = descriptors()
    for _ in range(3):
        async with AsyncClient(daemon.endpoint) as client:
            namespace = await client.namespace("pages", "rev-1", SPEC)
            await namespace.put(context(60), content(context(60)))
            out = np.zeros(4 * SPEC.page_bytes, np.uint8)
            await namespace.fetch(await namespace.match(context(60)), out)
    assert descriptors() <= before, "the client leaks descriptors"
    await asyncio.to_thread(wait_for_baseline, daemon.http)
