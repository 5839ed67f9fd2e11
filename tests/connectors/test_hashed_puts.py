"""Pages that stand alone, many to a put: what fails is left out, and the rest gets there."""

from pathlib import Path

import numpy as np
import pytest

from kvstore_client import AsyncClient, KVSpec, NoSpace
from kvstore_client.namespace import Namespace
from kvstore_connectors.hashed_pages import rows_component, scattered
from kvstore_connectors.hashed_puts import batches, put_pages
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat

MIB = 1 << 20


def spec_of(nbytes: int) -> KVSpec:
    return KVSpec(1, (rows_component("full", 1, nbytes, 1),), hash_bytes=32, flat=True)


def names(numbers: list[int] | range) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def filled(pages: int, nbytes: int) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    return np.random.default_rng(pages).integers(0, 256, (pages, nbytes), dtype=np.uint8)


async def fetched(namespace: Namespace, which: list[bytes]) -> bytes:
    async with await namespace.match(b"".join(which)) as match:
        assert match.pages == len(which)
        out = np.zeros(match.pages * namespace.spec.page_bytes, np.uint8)
        await namespace.fetch(match, out)
    return out.tobytes()


@pytest.mark.parametrize("nbytes", [1, 4096, 256 << 10, 5 * MIB, 64 * MIB])
@pytest.mark.parametrize("pages", [1, 7, 256, 257, 1000])
def test_batches_hold_all_pages_once_within_bounds(pages: int, nbytes: int) -> None:
    found = list(batches(pages, nbytes))
    assert [page for run in found for page in range(pages)[run]] == list(range(pages))
    sizes = [run.stop - run.start for run in found]
    assert max(sizes) <= 256
    assert all(size == 1 or size * nbytes <= 16 * MIB for size in sizes)


async def test_which_are_new_is_told_and_a_name_given_twice_is_put_once(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("new", "rev new", spec_of(4096))
        data = filled(6, 4096)
        rows = [[data.ctypes.data + page * 4096] for page in range(6)]
        before = stat(daemon.http)["totals"]["puts"]
        first = await put_pages(namespace, names([4, 2]), scattered(rows[:2], 4096), durable=False)
        assert (first.new, first.error) == ([True, True], None)
        given = names([1, 2, 1, 3, 2, 5])
        assert (await put_pages(namespace, given, scattered(rows, 4096), durable=True)).new == [True, False, False, True, False, True]
        assert stat(daemon.http)["totals"]["puts"] == before + 2
        assert await fetched(namespace, names([1, 2, 3, 4, 5])) == b"".join(data[page].tobytes() for page in (0, 1, 3, 0, 5))


async def test_pages_that_do_not_fit_together_are_put_apart(tmp_path: Path) -> None:
    """A tier of 12 MiB takes no 16 MiB at once, but eight and eight."""
    with DaemonProcess(tmp_path / "data", "--dram", "12MiB", "--ssd", "64MiB") as own:
        async with AsyncClient(own.endpoint, timeout=20) as client:
            namespace = await client.namespace("apart", "rev apart", spec_of(MIB))
            data = filled(16, MIB)
            rows = [[data.ctypes.data + page * MIB] for page in range(16)]
            done = await put_pages(namespace, names(range(16)), scattered(rows, MIB), durable=False)
            assert (done.new, done.error) == ([True] * 16, None)
            assert await fetched(namespace, names(range(16))) == data.tobytes()


async def test_what_the_store_has_no_room_for_is_left_out(tmp_path: Path) -> None:
    """SSD takes some of what is to be kept, and no more."""
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "16MiB") as own:
        async with AsyncClient(own.endpoint, timeout=20) as client:
            namespace = await client.namespace("full", "rev full", spec_of(MIB))
            data = filled(20, MIB)
            rows = [[data.ctypes.data + page * MIB] for page in range(20)]
            done = await put_pages(namespace, names(range(16)), scattered(rows[:16], MIB), durable=True)
            kept = [page for page in range(16) if done.new[page] is not None]
            assert 0 < len(kept) < 16
            assert isinstance(done.error, NoSpace)
            for page in kept:
                assert await fetched(namespace, names([page])) == data[page].tobytes()
            with pytest.raises(NoSpace):
                await put_pages(namespace, names(range(16, 20)), scattered(rows[16:], MIB), durable=True)
