"""Buffers of a client: their memory, and when it goes back."""

import asyncio
import gc
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.machine import read_memory
from kvstore_client import AsyncClient, BadRequest, Client, DeadlineExceeded, NoSpace, SharedBuffer, buffers, near_put
from kvstore_client.buffers import AT_ONCE_BYTES
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.near_memory.pages import SPEC, copied, fetched, random_pages, tokens


def mapped(pid: int) -> set[str]:
    """The buffers that a process maps, each perhaps in several stretches, by the numbers of their files."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:kvstore-buffer" in line}


def descriptors() -> set[tuple[str, int]]:
    """Those that this process has open: the descriptor, and the number of its file."""
    entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink() and "memfd:kvstore-buffer" in str(entry.readlink())]
    return {(entry.name, entry.stat().st_ino) for entry in entries}


class Before:
    """What there was when a test began: buffers of tests before it may go while it runs, so only new ones are counted."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.ours, self.theirs, self.open = mapped(os.getpid()), mapped(daemon.pid), descriptors()

    def added(self) -> tuple[int, int]:
        """Buffers that this process has mapped since then, and those that it has open."""
        return len(mapped(os.getpid()) - self.ours), len(descriptors() - self.open)

    def added_in_the_daemon(self) -> int:
        return len(mapped(self.daemon.pid) - self.theirs)

    async def until_the_daemon_has_none(self) -> None:
        async with asyncio.timeout(5):
            while self.added_in_the_daemon():
                await asyncio.sleep(0.02)


async def test_a_buffer_that_nobody_has_any_more_goes_here_and_in_the_daemon(
    daemon: DaemonProcess, client: AsyncClient, namespace: Namespace
) -> None:
    before = Before(daemon)
    data = random_pages(1, 3)
    buffer = client.buffer(len(data))
    view = buffer.array[:]
    view[:] = data
    del buffer
    copies = copied(daemon)
    await namespace.put(tokens(1, 3), view)
    assert copied(daemon) == copies + len(data), "a view of it is not known as a part of it any more"
    assert np.array_equal(await fetched(namespace, 1, 3), data)
    assert (before.added(), before.added_in_the_daemon()) == ((1, 1), 1)
    del view
    gc.collect()
    assert before.added() == (0, 0)
    await before.until_the_daemon_has_none()
    client.buffer(4096)
    assert before.added() == (0, 0), "it was never lent"
    again = client.buffer(len(data))
    again.array[:] = random_pages(2, 3)
    await namespace.put(tokens(2, 3), again.array)
    assert np.array_equal(await fetched(namespace, 2, 3), random_pages(2, 3))


async def test_a_buffer_that_was_dropped_says_so(daemon: DaemonProcess, client: AsyncClient, namespace: Namespace) -> None:
    before = Before(daemon)
    data = random_pages(3, 1)
    buffer = client.buffer(len(data))
    buffer.array[:] = data
    view = buffer.array
    await namespace.put(tokens(3, 1), view)
    assert repr(buffer) == f"<SharedBuffer of {len(data):,} bytes>"
    async with AsyncClient(daemon.endpoint) as other:
        with pytest.raises(BadRequest, match="of another client"):
            await other.drop_buffer(buffer)
    assert not buffer.dropped
    await asyncio.gather(client.drop_buffer(buffer), client.drop_buffer(buffer))
    await client.drop_buffer(buffer)
    assert repr(buffer).endswith("bytes, dropped>")
    assert before.added()[1] == 0
    await before.until_the_daemon_has_none()
    for call in (lambda: buffer.array, buffer.populate):
        with pytest.raises(BadRequest, match="this buffer was dropped"):
            call()
    assert np.array_equal(view, data), "a view keeps its memory"
    await namespace.put(tokens(4, 1), view)
    assert np.array_equal(await fetched(namespace, 4, 1), data)
    for wrong in (None, view):
        with pytest.raises(BadRequest, match=r"^buffer is .*, not a SharedBuffer"):
            await client.drop_buffer(wrong)  # type: ignore[arg-type]


def test_more_than_there_is_is_refused_before_it_is_made(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedBuffer, "__init__", lambda *_: pytest.fail("it was made"))
    with Client(daemon.endpoint) as client, pytest.raises(NoSpace, match=r"no memory for a buffer of [\d.]+ GiB: [\d.]+ [MG]iB (are|its)"):
        client.buffer(2 * read_memory().available)


def test_no_descriptor_is_not_no_memory(daemon: DaemonProcess) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Client(daemon.endpoint) as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())), limits[1]))
        taken: list[SharedBuffer] = []
        try:
            with pytest.raises(NoSpace, match=r"no (file descriptor|memory) for a buffer.*ulimit"):
                taken.extend(client.buffer(1) for _ in range(200))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def huge(buffer: SharedBuffer) -> int:
    return os.fstat(buffer.descriptor).st_blocks * 512


async def test_the_loop_does_not_wait_for_a_large_one(client: AsyncClient) -> None:
    nbytes = AT_ONCE_BYTES + (32 << 20)
    buffer = client.buffer(nbytes)
    made = huge(buffer)
    assert made <= AT_ONCE_BYTES
    buffer.array[-1] = 7
    await asyncio.to_thread(buffer.populate)
    assert huge(buffer) == nbytes
    assert buffer.array[-1] == 7


def test_a_blocking_client_makes_all_of_it_and_refuses_when_it_is_closed_or_forked(daemon: DaemonProcess) -> None:
    client = Client(daemon.endpoint)
    buffer = client.buffer(AT_ONCE_BYTES + (4 << 20))
    assert huge(buffer) == buffer.nbytes
    if not (child := os.fork()):
        try:
            client.buffer(4096)
        except BadRequest as error:
            os._exit("this is a fork" in error.message)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    client.close()
    assert buffer.dropped
    with pytest.raises(BadRequest, match="this client was closed"):
        client.buffer(4096)


async def test_a_closed_client_makes_none(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint) as client:
        pass
    with pytest.raises(BadRequest, match="this client was closed"):
        client.buffer(4096)


def test_a_buffer_that_outlives_its_client_goes_quietly(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    before = Before(daemon)
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("outlived", "rev-1", SPEC)
        view = client.buffer(2 * SPEC.page_bytes).array
        view[:] = random_pages(5, 2)
        namespace.put(tokens(5, 2), view)
        namespace.drop()
    del view
    assert before.added() == (0, 0)
    assert not capsys.readouterr().err


async def test_a_daemon_that_stands_still_does_not_hold_up_who_drops_a_buffer(
    daemon: DaemonProcess, client: AsyncClient, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_TELL_S", 0.1)
    before = Before(daemon)
    buffer = client.buffer(SPEC.page_bytes)
    daemon.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded):
            await namespace.put(tokens(6, 1), buffer.array, timeout=0.2)
        async with asyncio.timeout(10):
            await client.drop_buffer(buffer)
        assert buffer.dropped
    finally:
        daemon.send_signal(signal.SIGCONT)
    async with asyncio.timeout(5):
        while before.added()[1]:
            await asyncio.sleep(0.02)
    await before.until_the_daemon_has_none()


@pytest.mark.parametrize("pages", [1, 12])
async def test_a_buffer_that_is_dropped_while_it_is_put(
    client: AsyncClient, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    monkeypatch.setattr(near_put, "LENT_BATCH_BYTES", SPEC.page_bytes)
    data = random_pages(7, pages)
    buffer = client.buffer(len(data))
    view = buffer.array[:]
    view[:] = data
    lend, lent = buffers.Buffers.number, list[int]()

    async def lend_and_drop(self: buffers.Buffers, *what: Any) -> int:
        lent.append(await lend(self, *what))
        if len(lent) == pages // 2 + 1:  # the daemon has let go of it before it is asked to copy
            await client.drop_buffer(buffer)
        return lent[-1]

    monkeypatch.setattr(buffers.Buffers, "number", lend_and_drop)
    near = client.same_host.now
    put = await namespace.put(tokens(7, pages), view)
    assert (put.new_pages, buffer.dropped) == (pages, True)
    assert near is client.same_host.now
    assert near is not None
    assert near.lost is None, "others use that connection"
    assert np.array_equal(await fetched(namespace, 7, pages), data), "what is in a view of it is put all the same"
