"""Views of the daemon's memory."""

import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.api.wire import FrameType
from kvstore.api.wire.same_host import MAX_LOCATED, Locate, Places, unpack_places
from kvstore_client import AsyncClient, BadRequest, Client, Conflict, KVStoreError, NotFound, Unsupported
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.near_memory.pages import SPEC, random_pages, tokens


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
    asked = time.monotonic()
    short = await namespace.match(tokens(80, 3), lease_s=30)
    assert asked <= short._ends - 30 <= time.monotonic()
    view = await namespace.view(short)
    assert view.valid
    short._ends = time.monotonic()
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
