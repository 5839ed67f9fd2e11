"""Layer streaming and following a put under way, between real processes."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.api.wire import BadRequest, Component, KVSpec, NotFound, PartRange
from kvstore_client import AsyncClient, Client, Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat, wait_for_baseline

LAYERS, GROUP, PAGES = 8, 2, 6
SPEC = KVSpec(4, (Component("full", LAYERS, 4, 32),), group_layers=GROUP)
GROUPS = [(low, low + GROUP) for low in range(0, LAYERS, GROUP)]
PUT_ID = b"one computation!"


def tokens(seed: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1000, PAGES * SPEC.page_tokens, dtype=np.uint32)


def content(seed: int) -> npt.NDArray[np.uint8]:
    """(page, layer, bytes of a layer)."""
    layer = SPEC.layer_bytes(SPEC.whole())
    return np.random.default_rng(seed).integers(0, 256, (PAGES, LAYERS, layer), dtype=np.uint8)


@pytest.fixture(scope="module")
def daemon(either_daemon: DaemonProcess) -> DaemonProcess:
    return either_daemon


@pytest.fixture
async def namespace(daemon: DaemonProcess) -> AsyncIterator[Namespace]:
    async with AsyncClient(daemon.endpoint, connections=2, timeout=20) as client:
        yield await client.namespace("streams", "rev-1", SPEC)


async def test_a_fetch_in_layer_order_tells_of_each_group(namespace: Namespace) -> None:
    data = content(1)
    await namespace.put(tokens(1), data)
    told: list[tuple[int, int]] = []
    progress: list[int] = []
    async with await namespace.match(tokens(1)) as match:
        out = np.zeros_like(data)

        def on_group(low: int, high: int) -> None:
            told.append((low, high))
            assert np.array_equal(out[:, low:high], data[:, low:high]), "a group was announced before it was there"

        nbytes = await namespace.fetch(match, out, group_layers=GROUP, on_group=on_group, progress=lambda done, _: progress.append(done))
    assert sorted(told) == GROUPS
    assert nbytes == progress[-1] == data.nbytes
    assert progress == sorted(progress)
    assert np.array_equal(out, data)


async def test_groups_that_cut_through_slices_and_a_range_of_layers(namespace: Namespace) -> None:
    data = content(2)
    await namespace.put(tokens(2), data)
    heads = data.reshape(PAGES, LAYERS, 2, 4, -1)
    async with await namespace.match(tokens(2)) as match:
        wanted = PartRange(0, 1, 6, 1, 3)
        out = np.zeros((PAGES, 5, 2, 2, heads.shape[-1]), np.uint8)
        told: list[tuple[int, int]] = []
        await namespace.fetch(match, out, wanted=wanted, group_layers=3, on_group=lambda low, high: told.append((low, high)))
        assert np.array_equal(out, heads[:, 1:6, :, 1:3])
        assert sorted(told) == [(1, 4), (4, 6)]


async def test_a_put_is_followed_layer_by_layer(namespace: Namespace, daemon: DaemonProcess) -> None:
    data, out = content(3), np.zeros_like(content(3))
    arrived: dict[int, asyncio.Event] = {low: asyncio.Event() for low, _ in GROUPS}
    async with AsyncClient(daemon.unix_endpoint, connections=2, timeout=20) as consumer:
        theirs = await consumer.namespace("streams")

        async def consume() -> None:
            async with theirs.follow(PUT_ID) as follower:
                assert follower.pages == (0, PAGES)
                await follower.fetch(out, group_layers=GROUP, on_group=lambda low, _: arrived[low].set())
                await follower.committed()

        consuming = asyncio.create_task(consume())
        async with namespace.stream_put(tokens(3), put_id=PUT_ID) as put:
            for low, high in GROUPS:
                await put.send(low, high, np.ascontiguousarray(data[:, low:high]))
                async with asyncio.timeout(10):
                    await arrived[low].wait()  # the consumer has it before the next group is computed
                assert np.array_equal(out[:, low:high], data[:, low:high])
                assert not consuming.done()
                assert (await namespace.match(tokens(3), lease_s=0)).pages == 0, "a put under way was matched"
            committed = await put.commit()
        assert committed.new_pages == PAGES
        await consuming
    assert np.array_equal(out, data)
    assert (await namespace.match(tokens(3), lease_s=0)).pages == PAGES


async def test_shards_of_one_computation_are_followed_together(namespace: Namespace) -> None:
    data = content(4)
    heads = data.reshape(PAGES, LAYERS, 2, 4, -1)
    out = np.zeros_like(data)

    async def produce(rank: int) -> None:
        part = PartRange(0, 0, LAYERS, 2 * rank, 2 * rank + 2)
        await asyncio.sleep(0.05 * rank)
        async with namespace.stream_put(tokens(4), put_id=b"two shards".ljust(16), part=part) as put:
            for low, high in GROUPS:
                await put.send(low, high, np.ascontiguousarray(heads[:, low:high, :, part.head_lo : part.head_hi]))
            await put.commit()

    async def consume() -> None:
        async with namespace.follow(b"two shards".ljust(16)) as follower:
            await follower.fetch(out, group_layers=GROUP)
            await follower.committed()

    await asyncio.gather(produce(0), produce(1), consume())
    assert np.array_equal(out, data)
    async with await namespace.match(tokens(4)) as match:
        again = np.zeros_like(data)
        await namespace.fetch(match, again)
        assert np.array_equal(again, data)


async def test_one_follower_fetches_for_several_accelerators(namespace: Namespace) -> None:
    data = content(9)
    heads = data.reshape(PAGES, LAYERS, 2, 4, -1)
    shards = [np.zeros((PAGES, LAYERS, 2, 2, heads.shape[-1]), np.uint8) for _ in range(2)]
    async with namespace.stream_put(tokens(9), put_id=b"for two".ljust(16)) as put, namespace.follow(b"for two".ljust(16)) as follower:
        fetches = [follower.fetch(shard, wanted=PartRange(0, 0, LAYERS, 2 * n, 2 * n + 2)) for n, shard in enumerate(shards)]
        fetching = asyncio.gather(*fetches)
        for low, high in GROUPS:
            await put.send(low, high, np.ascontiguousarray(data[:, low:high]))
        await fetching
        await put.commit()
        await follower.committed()
        with pytest.raises(BadRequest):
            await follower.fetch(shards[0], wanted=PartRange(0, 0, LAYERS, 3, 5))
    for n, shard in enumerate(shards):
        assert np.array_equal(shard, heads[:, :, :, 2 * n : 2 * n + 2])


async def test_a_put_that_is_given_up_fails_its_followers(namespace: Namespace, daemon: DaemonProcess) -> None:
    data = content(5)
    async with AsyncClient(daemon.unix_endpoint, timeout=20) as consumer:
        theirs = await consumer.namespace("streams")
        async with namespace.stream_put(tokens(5), put_id=b"given up".ljust(16)) as put:
            await put.send(0, GROUP, np.ascontiguousarray(data[:, :GROUP]))
            follower = await theirs.follow(b"given up".ljust(16)).__aenter__()
            fetching = asyncio.create_task(follower.fetch(np.zeros_like(data)))
            await asyncio.sleep(0.1)
            assert not fetching.done()
        with pytest.raises(NotFound, match="void"):
            await fetching
        with pytest.raises(NotFound, match="not committed"):
            await follower.committed()


PRODUCER = """
import asyncio, sys
import numpy as np
from kvstore_client import AsyncClient
from tests.integration.test_streams import GROUP, SPEC, content, tokens

async def main() -> None:
    async with AsyncClient(sys.argv[1]) as client:
        namespace = await client.namespace("streams")
        async with namespace.stream_put(tokens(6), put_id=b"will be killed".ljust(16)) as put:
            await put.send(0, GROUP, np.ascontiguousarray(content(6)[:, :GROUP]))
            print("sent", flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_producer_killed_in_the_middle_fails_its_followers_cleanly(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("streams", "rev-1", SPEC)
        used = (await namespace.match(tokens(1), lease_s=0)).pages
        assert used >= 0
    before = wait_for_baseline(daemon.http)
    producer = subprocess.Popen([sys.executable, "-c", PRODUCER, daemon.endpoint], stdout=subprocess.PIPE, text=True)
    try:
        assert producer.stdout is not None
        assert await asyncio.to_thread(producer.stdout.readline) == "sent\n"
        async with AsyncClient(daemon.endpoint, timeout=20) as client:
            namespace = await client.namespace("streams")
            first_group = asyncio.Event()
            async with namespace.follow(b"will be killed".ljust(16)) as follower:
                out = np.zeros_like(content(6))
                fetching = asyncio.create_task(follower.fetch(out, group_layers=GROUP, on_group=lambda *_: first_group.set()))
                async with asyncio.timeout(10):
                    await first_group.wait()
                assert np.array_equal(out[:, :GROUP], content(6)[:, :GROUP])
                producer.send_signal(signal.SIGKILL)
                with pytest.raises(NotFound):
                    await fetching
    finally:
        producer.kill()
        producer.wait()
    wait_for_baseline(daemon.http, before)


async def test_a_cancelled_follower_stops_at_once_and_spoils_nothing(namespace: Namespace, daemon: DaemonProcess) -> None:
    data = content(7)
    async with AsyncClient(daemon.unix_endpoint, connections=1, timeout=20) as consumer:
        theirs = await consumer.namespace("streams")
        async with namespace.stream_put(tokens(7), put_id=b"cancelled".ljust(16)) as put:
            async with theirs.follow(b"cancelled".ljust(16)) as follower:
                fetching = asyncio.create_task(follower.fetch(np.zeros_like(data)))
                await asyncio.sleep(0.05)
                fetching.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
                assert consumer.pool.session, "the connection was given up"
                await theirs.match(tokens(1), lease_s=0)
            for low, high in GROUPS:
                await put.send(low, high, np.ascontiguousarray(data[:, low:high]))
            await put.commit()
    assert (await namespace.match(tokens(7), lease_s=0)).pages == PAGES


async def test_what_a_stream_can_not_do_is_said(namespace: Namespace) -> None:
    async with namespace.stream_put(tokens(8)) as put:
        with pytest.raises(BadRequest, match="begin and end with slices"):
            await put.send(0, 1, bytes(PAGES * SPEC.layer_bytes(SPEC.whole())))
        with pytest.raises(BadRequest, match="bytes of data"):
            await put.send(0, GROUP, bytes(3))
    with pytest.raises(NotFound, match="no put under way"):
        async with namespace.follow(b"nobody".ljust(16), timeout=0.05):
            pass
    with pytest.raises(BadRequest, match="before all layers were sent"):
        async with namespace.stream_put(tokens(8)) as put:
            await put.commit()
    assert (await namespace.match(tokens(8), lease_s=0)).pages == 0


def test_the_blocking_client_streams_too(daemon: DaemonProcess) -> None:
    data = content(20)
    with Client(daemon.endpoint, timeout=20) as producer, Client(daemon.unix_endpoint, timeout=20) as consumer:
        namespace, theirs = producer.namespace("streams", "rev-1", SPEC), consumer.namespace("streams")
        out = np.zeros_like(data)
        with namespace.stream_put(tokens(20)) as put:
            assert put.pages == (0, PAGES)
            with theirs.follow(put.put_id) as follower:
                for low, high in GROUPS:
                    put.send(low, high, np.ascontiguousarray(data[:, low:high]))
                assert follower.fetch(out) == data.nbytes
                assert put.commit().new_pages == PAGES
                follower.committed()
        assert np.array_equal(out, data)
        with theirs.session() as session:
            assert session.extend(tokens(20)) == PAGES
            again = np.zeros_like(data)
            session.fetch(again)
            assert np.array_equal(again, data)
            session.extend(np.arange(SPEC.page_tokens, dtype=np.uint32))
            assert session.put(data[0]).new_pages == 1
            assert session.abandon(PAGES) == 1
        pin, pages = theirs.pin(tokens(20), 60)
        assert pages == PAGES
        theirs.unpin(pin)
        assert theirs.prefetch(tokens(20)) == 0
        assert theirs.abandon(tokens(20)) == 0, "another context goes on from here"
        assert theirs.delete(tokens(20)) == PAGES + 1


async def test_whoever_stops_following_lets_go(namespace: Namespace, daemon: DaemonProcess) -> None:
    """While both clients are there: their end would take what they hold with it."""
    async with AsyncClient(daemon.unix_endpoint, timeout=20) as consumer:
        theirs = await consumer.namespace("streams")
        async with namespace.stream_put(tokens(21), put_id=b"left early".ljust(16)) as put:
            async with theirs.follow(b"left early".ljust(16)):
                pass
            for low, high in GROUPS:
                await put.send(low, high, np.ascontiguousarray(content(21)[:, low:high]))
            await put.commit()
        deadline = time.monotonic() + 20
        while (await asyncio.to_thread(stat, daemon.http))["pinned_blobs"]:  # what is on its way to SSD is pinned, too
            assert time.monotonic() < deadline, "a follower that has left holds blobs"
            await asyncio.sleep(0.02)
