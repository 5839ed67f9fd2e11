"""Puts out of a client's memory."""

import asyncio
import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import AsyncClient, Client, PartRange
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.near import sent_bytes
from tests.integration.near_memory.pages import SPEC, copied, fetched, random_pages, tokens
from tests.integration.raw import stat


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


async def test_shards_of_one_client_do_not_wait_for_each_other_with_the_places_that_the_others_need(namespace: Namespace) -> None:
    layers = [PartRange(0, n, n + 1, 0, 2) for n in range(6)]
    data = random_pages(20, 4)
    by_page = data.reshape(4, 6, -1)
    results = await asyncio.gather(
        *(
            namespace.put(tokens(20, 4), np.ascontiguousarray(by_page[:, n]), parts=(layer,), put_id=b"layers".ljust(16), whole_s=5)
            for n, layer in enumerate(layers)
        )
    )
    assert [result.pending_pages for result in results] == [0] * 6
    assert np.array_equal(await fetched(namespace, 20, 4), data)


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
