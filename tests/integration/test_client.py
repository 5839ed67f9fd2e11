"""The SDK against a real daemon: both clients, sub-ranges, striping, cancellation, deadlines, reconnects."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import BadRequest, FrameType, Header, encode, pack
from kvstore.api.wire.messages import Empty
from kvstore_client import (
    AsyncClient,
    Client,
    Component,
    Conflict,
    ConnectionLost,
    DeadlineExceeded,
    KVSpec,
    NotFound,
    PartRange,
    UnknownNamespace,
    extra_digest,
)
from kvstore_client.answers import Answers
from kvstore_client.connection import Connection
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import RawClient, stat, wait_for_baseline
from tests.waiting import until

BIG = KVSpec(4, (Component("full", 8, 2, 16384),), max_slice_bytes=1 << 20)
"""Pages of 4 MiB in 8 slices."""


def test_put_match_fetch_blocking(daemon: DaemonProcess) -> None:
    with Client(daemon.unix_endpoint, connections=3) as client:
        namespace = open_namespace(client)
        tokens = context(7000, pages=20)
        assert namespace.match(tokens).pages == 0
        assert namespace.put(tokens, content(tokens)).new_pages == 20
        assert fetch_checked(namespace, tokens) == 20
        assert fetch_checked(namespace, np.concatenate([tokens, tokens[:3]])) == 20, "a partial page was matched"
        longer = np.concatenate([tokens[: 10 * 4], context(7001)])
        assert namespace.put(longer, content(longer, 10), first_page=10).new_pages == 4
        assert fetch_checked(namespace, longer) == 14
        again = namespace.put(tokens, content(tokens, salt=b"other bytes"))
        assert (again.new_pages, again.existing_pages) == (0, 20)
        assert fetch_checked(namespace, tokens) == 20
        names = [n.name for n in client.namespaces()]
        assert "pages" in names


async def test_the_asynchronous_client_and_its_striping(daemon: DaemonProcess) -> None:
    wait_for_baseline(daemon.http)
    data = np.random.default_rng(1).integers(0, 256, 3 * BIG.page_bytes, dtype=np.uint8)
    tokens = np.arange(12, dtype=np.uint32)
    elsewhere = ["127.0.0.2"]  # from another address: over the same one, a transfer is not spread over connections
    async with AsyncClient(daemon.endpoint, connections=4, shared_memory=False, local_addresses=elsewhere) as client:
        namespace = await client.namespace("big", "rev-1", BIG)
        await namespace.put(tokens, data)
        async with await namespace.match(tokens) as match:
            out = np.zeros(len(data), np.uint8)
            assert await namespace.fetch(match, out) == len(data)
            assert np.array_equal(out, data)
            tail = np.zeros(BIG.page_bytes, np.uint8)
            await namespace.fetch(match, tail, pages=(2, 3))
            assert np.array_equal(tail, data[2 * BIG.page_bytes :])
        assert stat(daemon.http)["connections"] == 4
        await namespace.drop()
        with pytest.raises(UnknownNamespace):
            await client.namespace("big")


async def test_one_transfer_takes_one_connection_on_the_daemons_machine(daemon: DaemonProcess) -> None:
    wait_for_baseline(daemon.http)
    data = np.random.default_rng(1).integers(0, 256, 3 * BIG.page_bytes, dtype=np.uint8)
    tokens = np.arange(12, dtype=np.uint32)
    async with AsyncClient(daemon.endpoint, connections=4, shared_memory=False) as client:
        namespace = await client.namespace("near", "rev-1", BIG)
        await namespace.put(tokens, data)
        async with await namespace.match(tokens) as match:
            outs = [np.zeros(len(data), np.uint8) for _ in range(3)]
            await namespace.fetch(match, outs[0])
            assert stat(daemon.http)["connections"] == 1
            await asyncio.gather(*(namespace.fetch(match, out) for out in outs))
        assert all(np.array_equal(out, data) for out in outs)
        await namespace.drop()


@pytest.mark.parametrize(("elsewhere", "largest"), [([], 12 << 20), (["127.0.0.2"], 4 << 20)])
async def test_frames_are_large_on_the_daemons_machine_only(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, elsewhere: list[str], largest: int
) -> None:
    frames: list[int] = []

    async def counted(self: Connection, header: Header, meta: bytes) -> None:
        frames.append(header.payload_bytes)
        await Answers._receive_data(self, header, meta)

    monkeypatch.setattr(Connection, "_receive_data", counted)
    data = np.random.default_rng(1).integers(0, 256, 3 * BIG.page_bytes, dtype=np.uint8)
    tokens = np.arange(12, dtype=np.uint32)
    async with AsyncClient(daemon.endpoint, connections=1, shared_memory=False, local_addresses=elsewhere) as client:
        namespace = await client.namespace("large-frames", "rev-1", BIG)
        await namespace.put(tokens, data)
        async with await namespace.match(tokens) as match:
            out = np.zeros(len(data), np.uint8)
            await namespace.fetch(match, out)
            assert (max(frames), sum(frames)) == (largest, len(data))
            assert np.array_equal(out, data)
            frames.clear()
            await namespace.fetch(match, out, progress=lambda done, total: None)
            assert max(frames) == 1 << 20, "who is told of what arrives is told soon"
        await namespace.drop()


async def test_written_by_two_ranks_read_by_any_range(daemon: DaemonProcess) -> None:
    halves = (PartRange(0, 0, 8, 0, 1), PartRange(0, 0, 8, 1, 2))
    page = np.random.default_rng(2).integers(0, 256, (3, 8, 2, 2, 4 * 64 * 2), dtype=np.uint8)  # page, layer, plane, head, rest
    data = np.concatenate([np.ascontiguousarray(page[p, :, :, h]).ravel() for p in range(3) for h in range(2)])
    tokens = np.arange(90_000, 90_012, dtype=np.uint32)
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        await namespace.put(tokens, data, parts=halves)
        async with await namespace.match(tokens) as match:
            for wanted in (SPEC.whole(), PartRange(0, 2, 5, 0, 1), PartRange(0, 7, 8, 0, 2), *halves):
                expected = np.ascontiguousarray(page[:, wanted.layer_lo : wanted.layer_hi, :, wanted.head_lo : wanted.head_hi]).ravel()
                out = np.zeros(len(expected), np.uint8)
                await namespace.fetch(match, out, wanted=wanted)
                assert np.array_equal(out, expected), wanted


def test_extra_keys_keep_equal_tokens_apart(daemon: DaemonProcess) -> None:
    tokens = context(7100)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        cat, dog = ({1: extra_digest([("image", name)])} for name in (b"cat", b"dog"))
        namespace.put(tokens, content(tokens), extras=cat)
        assert namespace.match(tokens, extras=cat).pages == 4
        assert namespace.match(tokens, extras=dog).pages == 1
        assert namespace.match(tokens).pages == 1


def test_another_model_or_spec_under_a_name_is_a_conflict(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        open_namespace(client)
        with pytest.raises(Conflict):
            client.namespace("pages", "rev-2", SPEC)
        with pytest.raises(Conflict):
            client.namespace("pages", "rev-1", BIG)


@pytest.mark.parametrize("shared_memory", [False, True])
async def test_cancelling_a_transfer_stops_it(tmp_path: Path, shared_memory: bool) -> None:
    with DaemonProcess(tmp_path / "data", "--dram", "128MiB", "--ssd", "256MiB") as daemon:
        await _cancel_transfers(daemon, shared_memory=shared_memory)
        await asyncio.to_thread(wait_for_baseline, daemon.http, 0)


async def _cancel_transfers(daemon: DaemonProcess, *, shared_memory: bool) -> None:
    tokens = np.arange(40_000, 40_012, dtype=np.uint32)
    data = np.random.default_rng(3).integers(0, 256, 3 * BIG.page_bytes, dtype=np.uint8)
    async with AsyncClient(daemon.endpoint, connections=2, shared_memory=shared_memory) as client:
        namespace = await client.namespace("cancel", "rev-1", BIG)
        await namespace.put(tokens, data)
        match = await namespace.match(tokens)
        out = np.zeros(len(data), np.uint8)
        for delay in (0.0, 0.0005, 0.001, 0.002, 0.004):
            task = asyncio.create_task(namespace.fetch(match, out))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            seen = out.copy()
            await asyncio.sleep(0.02)
            assert np.array_equal(out, seen), "bytes were written into the buffer of a cancelled fetch"
            out[:] = 0
        for delay in (0.0, 0.0005, 0.001, 0.002):
            other = tokens + np.uint32(100 + int(delay * 1e5))
            task2 = asyncio.create_task(namespace.put(other, data))
            await asyncio.sleep(delay)
            task2.cancel()
            await asyncio.gather(task2, return_exceptions=True)
        assert await namespace.fetch(match, out) == len(data)
        assert np.array_equal(out, data), "the connection does not go on after a cancellation"
        await match.release()
        await namespace.drop()


async def test_leases_end_with_their_owner_or_time(daemon: DaemonProcess) -> None:
    wait_for_baseline(daemon.http)
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        await namespace.put(context(7200), content(context(7200)))
        held = await namespace.match(context(7200), lease_s=60)
        await client.renew(held.lease, 120)
        assert stat(daemon.http)["leases"] == 1
        short = await namespace.match(context(7200), lease_s=0.05)
        await until(lambda: stat(daemon.http)["leases"] == 1)
        with pytest.raises(NotFound):
            await client.renew(short.lease, 1)
        await short.release()
        assert stat(daemon.http)["leases"] == 1
    await asyncio.to_thread(wait_for_baseline, daemon.http)


async def test_what_was_released_is_released_for_the_next_request(daemon: DaemonProcess) -> None:
    """A release is not waited for, and what comes next may go over another connection."""
    async with AsyncClient(daemon.endpoint, connections=3, shared_memory=False) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        for salt in range(7210, 7220):
            await namespace.put(context(salt), content(context(salt)))
            match = await namespace.match(context(salt))
            with pytest.raises(Conflict):
                await namespace.delete(context(salt))
            with client.pool.bulk(salt % 2 == 0):  # then small requests go over a connection of their own
                await match.release()
            assert await namespace.delete(context(salt)) == 4


def test_nobody_there() -> None:
    with pytest.raises((ConnectionLost, DeadlineExceeded)):
        Client("127.0.0.1:1", timeout=0.3)


def test_a_deadline_is_kept(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        with pytest.raises(DeadlineExceeded):
            namespace.match(context(1), timeout=1e-9)
        namespace.match(context(1))


def test_the_end_of_a_match_hides_nothing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease can't be given back to a daemon that is gone: what ended the block is told, not that."""
    monkeypatch.setattr("kvstore_client.client._RELEASE_S", 0.2)
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB") as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(1), content(context(1)))
        match = namespace.match(context(1))
        daemon.kill()
        with pytest.raises(ValueError, match="mine"), match:
            raise ValueError("mine")


def test_a_closed_client_says_so(daemon: DaemonProcess) -> None:
    client = Client(daemon.endpoint)
    namespace = open_namespace(client)
    match = namespace.match(context(1))
    client.close()
    client.close()
    for call in (lambda: namespace.match(context(1)), client.namespaces):
        with pytest.raises(BadRequest, match="closed"):
            call()
    match.release()


async def test_a_closed_asynchronous_client_says_so(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint) as client:
        match = await (await client.namespace("pages", "rev-1", SPEC)).match(context(1))
    with pytest.raises(BadRequest, match="closed"):
        await client.ping()
    await match.release()


def test_tokens_that_are_none(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        for tokens in ([1, 2, 3], "text", None, np.zeros(4)):
            with pytest.raises(BadRequest, match="uint32"):
                namespace.match(tokens)  # type: ignore[arg-type]


def test_many_clients_at_once(daemon: DaemonProcess) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Client(daemon.endpoint, connections=2) as client:
                namespace = open_namespace(client)
                for seed in range(20_000 + number % 2, 20_000 + 60, 2):
                    namespace.put(context(seed), content(context(seed)))
                    assert fetch_checked(namespace, context(seed)) == 4
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


async def test_a_fetch_reads_around_dram_that_is_all_leased(data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--dram", "2MiB", "--ssd", "64MiB") as daemon:
        async with AsyncClient(daemon.endpoint, timeout=20) as client:
            namespace = await client.namespace("pages", "rev-1", SPEC)
            cold = context(1, pages=60)
            await namespace.put(cold, content(cold), durable=True)
            leased = []
            for seed in range(100, 400, 10):
                await namespace.put(context(seed), content(context(seed)))
                leased.append(await namespace.match(context(seed), lease_s=60))
            async with await namespace.match(cold) as match:
                out = np.zeros(60 * SPEC.page_bytes, np.uint8)
                await asyncio.gather(namespace.fetch(match, out), namespace.fetch(match, out.copy()))
                assert np.array_equal(out, content(cold))


async def test_a_flood_of_one_client_does_not_starve_the_others(daemon: DaemonProcess) -> None:
    flood = RawClient(daemon.endpoint)
    stop = threading.Event()
    frame = b"".join(bytes(b) for b in encode(FrameType.PING, 1, pack(Empty()))) * 500

    def send() -> None:
        while not stop.is_set():
            flood.send_raw(frame)

    def receive() -> None:
        while not stop.is_set():
            flood.sock.recv(1 << 16)

    threads = [threading.Thread(target=work, daemon=True) for work in (send, receive)]
    for thread in threads:
        thread.start()
    try:
        async with AsyncClient(daemon.endpoint, timeout=10) as client:
            for _ in range(20):
                await client.ping()
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
        flood.sock.close()


async def test_what_makes_no_sense_is_a_typed_error(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("senseless", "rev-1", BIG)
        prompt = np.zeros(2 * BIG.page_tokens, np.uint32)
        for seconds in (float("nan"), float("inf"), 1e30):
            with pytest.raises(BadRequest, match="not a number of seconds"):
                await namespace.match(prompt, lease_s=seconds)
            with pytest.raises(BadRequest, match="more than 0 and up to"):
                await namespace.pin(prompt, seconds)
        with pytest.raises(BadRequest, match="from page -1 on"):
            await namespace.put(prompt, bytes(2 * BIG.page_bytes), first_page=-1)
        async with await namespace.match(prompt) as match:
            assert await namespace.fetch(match, np.empty((0, BIG.page_bytes), np.uint8)) == 0
            with pytest.raises(BadRequest, match="can't be received into"):
                await namespace.fetch(match, np.zeros((4, 4), np.uint8)[:, ::2])
        await namespace.drop()


def test_a_blocking_match_tells_as_much(daemon: DaemonProcess) -> None:
    tokens = context(7_700)
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(tokens, content(tokens))
        found = namespace.match(tokens, lease_s=0, boundaries=True)
        assert found.usable_boundaries().tolist() == [0, 1, 2, 3, 4]
        assert found.boundaries == [(0, 5)]
        assert [page for page, part, _ in found.parts() if part == SPEC.whole()] == [0, 1, 2, 3]
        assert (found.known_pages, found.pages_of(0)) == (4, (0, 4))
