"""Striping over several links: real ones (network namespaces with limited speed), and addresses of loopback."""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.api.wire import FrameType
from kvstore.api.wire.messages import Close, Empty
from kvstore_client import AsyncClient, BadRequest, Client, Component, Conflict, ConnectionLost, KVSpec, PartRange
from kvstore_client.match import Match
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.linked_hosts import LinkedHosts

MIB = 1 << 20
PAGES = 4
PAGE_MIB = 8
SPEC = KVSpec(16, (Component("full", PAGE_MIB, 1, MIB // 16 // 4),))
TOKENS = np.arange(16 * PAGES, dtype=np.uint32)
DATA = np.random.default_rng(3).integers(0, 256, PAGES * PAGE_MIB * MIB, dtype=np.uint8)
MBITS = 400
SMALL = ("--dram", "128MiB", "--ssd", "256MiB")

Linked = tuple[LinkedHosts, DaemonProcess]


@pytest.fixture(scope="module")
def linked() -> Iterator[Linked]:
    """A daemon on a host that four limited links lead to."""
    try:
        hosts = LinkedHosts([MBITS] * 4)
    except OSError as error:
        pytest.skip(f"no network namespaces with limited links can be made here (it takes root): {error}")
    with hosts, tempfile.TemporaryDirectory(prefix="kvstore-test-") as folder:
        first, *more = hosts.far_addresses
        with DaemonProcess(
            Path(folder) / "data", "--host", first, "--listen", ",".join(more), "--insecure", "--dram", "128MiB", "--ssd", "256MiB",
            within=hosts.on("far"),
        ) as daemon:  # fmt: skip
            yield hosts, daemon


@pytest.fixture
def all_mended(linked: Linked) -> Iterator[Linked]:
    """The same, with the links as they were."""
    yield linked
    for link in range(4):
        linked[0].limit(link, MBITS)
        linked[0].mend(link)


def on_near(linked: Linked, work: Callable[[AsyncClient, Namespace], Coroutine[Any, Any, None]]) -> None:
    """Run a client on the other host."""

    async def run() -> None:
        async with AsyncClient(linked[1].endpoints, shared_memory=False) as client:
            await work(client, await client.namespace("links", "model", SPEC))

    with linked[0].near():
        asyncio.run(run())


async def put_again(namespace: Namespace) -> None:
    await namespace.delete(TOKENS)
    await namespace.put(TOKENS, DATA)


async def fetched(namespace: Namespace, match: Match, meanwhile: Callable[[int], None] | None = None) -> npt.NDArray[np.uint8]:
    out = np.zeros_like(DATA)
    tell = None if meanwhile is None else lambda nbytes, total: meanwhile(nbytes)
    await namespace.fetch(match, out, progress=tell)
    return out


def test_all_links_carry(all_mended: Linked) -> None:
    async def work(client: AsyncClient, namespace: Namespace) -> None:
        await put_again(namespace)
        async with await namespace.match(TOKENS) as match:
            assert np.array_equal(await fetched(namespace, match), DATA)
        assert sum(link.put_bytes for link in client.links) == len(DATA)
        assert sum(link.fetched_bytes for link in client.links) >= len(DATA)
        assert all(link.put_bytes and link.fetched_bytes for link in client.links)

    on_near(all_mended, work)


def test_a_slow_link_carries_less(all_mended: Linked) -> None:
    all_mended[0].limit(2, MBITS / 8)

    async def work(client: AsyncClient, namespace: Namespace) -> None:
        await put_again(namespace)
        async with await namespace.match(TOKENS) as match:
            assert np.array_equal(await fetched(namespace, match), DATA)
        shares = [link.put_bytes + link.fetched_bytes for link in client.links]
        assert min(shares) == shares[2]

    on_near(all_mended, work)


def test_a_link_that_is_cut_in_a_fetch_loses_its_stripes_to_the_others(all_mended: Linked) -> None:
    async def work(client: AsyncClient, namespace: Namespace) -> None:
        await put_again(namespace)
        cut: list[int] = []

        def when_it_is_under_way(nbytes: int) -> None:
            if nbytes > len(DATA) // 4 and not cut:
                all_mended[0].cut(1)
                cut.append(nbytes)

        async with await namespace.match(TOKENS) as match:
            assert np.array_equal(await fetched(namespace, match, when_it_is_under_way), DATA)
            assert cut
            assert client.links[1].given_up
            assert np.array_equal(await fetched(namespace, match), DATA)
            all_mended[0].mend(1)
            for _ in range(20):  # until it was tried again
                before = client.links[1].fetched_bytes
                assert np.array_equal(await fetched(namespace, match), DATA)
                if client.links[1].fetched_bytes > before:
                    break
            else:
                pytest.fail("the link works again, and nothing goes over it")

    on_near(all_mended, work)


def test_a_link_that_is_cut_in_a_put_loses_its_slices_to_the_others(all_mended: Linked) -> None:
    async def work(client: AsyncClient, namespace: Namespace) -> None:
        cut: list[int] = []

        def when_it_is_under_way(nbytes: int, total: int) -> None:
            if nbytes > total // 4 and not cut:
                all_mended[0].cut(0)  # the one that PUT and COMMIT go over, too
                cut.append(nbytes)

        await namespace.delete(TOKENS)
        done = await namespace.put(TOKENS, DATA, progress=when_it_is_under_way)
        assert cut
        assert done.new_pages == PAGES
        assert client.links[0].given_up
        async with await namespace.match(TOKENS) as match:
            assert match.pages == PAGES
            assert np.array_equal(await fetched(namespace, match), DATA)

    on_near(all_mended, work)


# --- addresses of loopback: no privilege needed ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that listens on two addresses."""
    folder = tmp_path_factory.mktemp("daemon")
    with DaemonProcess(folder, "--dram", "128MiB", "--ssd", "256MiB", "--listen", "127.0.0.2") as daemon:
        yield daemon


def test_the_blocking_client_takes_several_endpoints(two_addresses: DaemonProcess) -> None:
    assert [endpoint.rpartition(":")[0] for endpoint in two_addresses.endpoints] == ["127.0.0.1", "127.0.0.2"]
    with Client(two_addresses.endpoints, shared_memory=False) as client:
        namespace = client.namespace("blocking", "blocking", SPEC)
        namespace.put(TOKENS, DATA)
        out = np.zeros_like(DATA)
        with namespace.match(TOKENS) as match:
            namespace.fetch(match, out)
        assert np.array_equal(out, DATA)


def test_local_addresses_are_links(two_addresses: DaemonProcess) -> None:
    async def work() -> None:
        async with AsyncClient(two_addresses.endpoint, local_addresses=["127.0.0.1", "127.0.0.3"], shared_memory=False) as client:
            namespace = await client.namespace("local", "local", SPEC)
            await namespace.put(TOKENS, DATA)
            async with await namespace.match(TOKENS) as match:
                assert np.array_equal(await fetched(namespace, match), DATA)
            assert [link.local for link in client.links] == ["127.0.0.1", "127.0.0.3"]
            assert all(link.put_bytes for link in client.links)

    asyncio.run(work())


def test_addresses_of_different_daemons_are_refused(two_addresses: DaemonProcess, daemon: DaemonProcess) -> None:
    async def work() -> None:
        with pytest.raises(Conflict, match="another daemon"):
            async with AsyncClient([two_addresses.endpoint, daemon.endpoint]):
                pytest.fail("it was taken for one daemon")

    asyncio.run(work())


def test_another_daemon_is_refused_while_the_right_one_is_away(data_dir: Path, daemon: DaemonProcess) -> None:
    async def work() -> None:
        async with AsyncClient([right.endpoint, f"127.0.0.2:{port}"], shared_memory=False) as client:
            namespace = await client.namespace("there", "there", SPEC)
            await namespace.put(TOKENS, DATA)
            right.kill()
            wrong = DaemonProcess(data_dir / "wrong", "--host", "127.0.0.2", "--port", port)
            with wrong, pytest.raises(Conflict, match="another daemon"):
                await asyncio.wait_for(ask_on(client), 20)

    async def ask_on(client: AsyncClient) -> None:
        while True:
            await client.namespace("there", "there", SPEC)

    port = daemon.endpoint.rpartition(":")[2]  # on another address it is free
    with DaemonProcess(data_dir / "right", *SMALL) as right:
        asyncio.run(work())


def test_a_daemon_that_comes_back_with_nothing_is_still_the_right_one(data_dir: Path) -> None:
    async def work() -> None:
        async with AsyncClient(["127.0.0.1:1", old.endpoint], shared_memory=False) as client:
            await (await client.namespace("there", "there", SPEC)).put(TOKENS, DATA)
            old.kill()
            with DaemonProcess(data_dir / "new", *SMALL, "--port", old.endpoint.rpartition(":")[2]):
                namespace = await client.namespace("there", "there", SPEC)
                async with await namespace.match(TOKENS) as match:
                    assert match.pages == 0

    with DaemonProcess(data_dir / "old", *SMALL) as old:
        asyncio.run(work())


def test_a_link_that_leads_nowhere_is_left_out(two_addresses: DaemonProcess) -> None:
    async def work() -> None:
        async with AsyncClient(["127.0.0.9:9", two_addresses.endpoint], shared_memory=False) as client:
            namespace = await client.namespace("nowhere", "nowhere", SPEC)
            await namespace.put(TOKENS, DATA)
            async with await namespace.match(TOKENS) as match:
                assert np.array_equal(await fetched(namespace, match), DATA)
            assert [bool(link.fetched_bytes) for link in client.links] == [False, True]
            assert [link.trouble for link in client.links] == ["Connection refused", ""]
        async with AsyncClient(two_addresses.endpoint, local_addresses=["127.0.0.1", "192.0.2.7"], shared_memory=False) as client:
            await client.namespace("nowhere", "nowhere", SPEC)
            assert client.links[1].trouble == "Cannot assign requested address"
        with pytest.raises(ConnectionLost, match=r"127\.0\.0\.9:"):
            async with AsyncClient(["127.0.0.9:9", "127.0.0.9:11"]):
                pytest.fail("nobody is there")

    asyncio.run(work())


def test_a_connection_is_closed_over_another(two_addresses: DaemonProcess) -> None:
    async def work() -> None:
        async with AsyncClient(two_addresses.endpoint, connections=2, shared_memory=False) as client:
            first, second = await client.pool.connection(0), await client.pool.connection(1)
            with pytest.raises(BadRequest, match="hang up"):
                await first.call(FrameType.CLOSE, Close(connection=first.welcome.connection), Empty)
            for _ in range(2):  # the second time it is gone
                await first.call(FrameType.CLOSE, Close(connection=second.welcome.connection), Empty)
            with pytest.raises(ConnectionLost):
                await second.call(FrameType.PING, Empty(), Empty)
            await first.call(FrameType.PING, Empty(), Empty)

    asyncio.run(work())


def test_slices_that_have_arrived_may_come_again(two_addresses: DaemonProcess) -> None:
    async def work() -> None:
        async with AsyncClient(two_addresses.endpoints, shared_memory=False) as client:
            namespace = await client.namespace("again", "again", SPEC)
            async with namespace.stream_put(TOKENS) as stream:
                await stream.send(0, PAGE_MIB, DATA)
                await stream.send(0, PAGE_MIB, DATA)  # dropped: it has arrived
                assert (await stream.commit()).new_pages == PAGES
            async with await namespace.match(TOKENS) as match:
                assert np.array_equal(await fetched(namespace, match), DATA)

    asyncio.run(work())


# --- priorities ------------------------------------------------------------------------------------------------------------


def test_what_is_interactive_goes_before_bulk(all_mended: Linked) -> None:
    """Judged by bytes: while 8 MiB come that are interactive, less comes of what four connections pull as bulk over the same link."""

    async def run() -> None:
        endpoint = all_mended[1].endpoint
        async with (
            AsyncClient(endpoint, connections=4, shared_memory=False) as puller,
            AsyncClient(endpoint, connections=1, shared_memory=False) as asker,
        ):
            namespace = await puller.namespace("links", "model", SPEC)
            await namespace.put(TOKENS, DATA)
            arrived = 0
            begun = asyncio.Event()

            def progress(nbytes: int, total: int) -> None:
                nonlocal arrived
                arrived = nbytes
                if nbytes > total // 4:
                    begun.set()

            async def ask(out: npt.NDArray[np.uint8]) -> int:
                before = arrived
                await theirs.fetch(small, out, pages=(0, 1), priority="interactive")
                return arrived - before

            theirs = await asker.namespace("links")
            small = await theirs.match(TOKENS)
            first, second = (np.zeros(8 * MIB, np.uint8) for _ in range(2))
            await ask(first)  # from now on the daemon keeps bulk short
            beside: list[int] = []
            while not beside or (beside[-1] >= 8 * MIB and len(beside) < 5):  # who stood still meanwhile has found the sockets of bulk full
                begun.clear()
                async with await namespace.match(TOKENS) as match:
                    out = np.zeros_like(DATA)
                    pulling = asyncio.create_task(namespace.fetch(match, out, progress=progress))
                    await begun.wait()
                    beside.append(await ask(second))
                    await pulling
                assert np.array_equal(out, DATA)
            assert np.array_equal(first, DATA[: 8 * MIB])
            assert np.array_equal(second, DATA[: 8 * MIB])
            assert beside[-1] < 8 * MIB, beside

    with all_mended[0].near():
        asyncio.run(run())


def test_what_is_interactive_has_a_connection_of_its_own_beside_bulk(two_addresses: DaemonProcess) -> None:
    async def work() -> None:
        async with AsyncClient(two_addresses.endpoint, shared_memory=False) as client:
            namespace = await client.namespace("express", "express", SPEC)
            await namespace.put(TOKENS, DATA)
            match = await namespace.match(TOKENS)
            assert max(await client.pool.ready_express()) < client.pool.size
            seen: list[int] = []

            async def look() -> None:
                seen.extend(await client.pool.ready_express())
                part = np.zeros(MIB, np.uint8)
                await namespace.fetch(match, part, pages=(0, 1), wanted=PartRange(0, 0, 1, 0, 1))
                assert np.array_equal(part, DATA[:MIB])

            looking: list[asyncio.Task[None]] = []

            def progress(nbytes: int, total: int) -> None:
                if not looking:
                    looking.append(asyncio.create_task(look()))

            out = np.zeros_like(DATA)
            await namespace.fetch(match, out, progress=progress)
            await looking[0]
            assert np.array_equal(out, DATA)
            assert min(seen) >= client.pool.size

    asyncio.run(work())
