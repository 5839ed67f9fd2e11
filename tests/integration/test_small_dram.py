"""Puts about as large as DRAM, and larger: the client cuts them so that each commit has room beside the one before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import AsyncClient, Client, Component, KVSpec, MissingParent, NoSpace
from kvstore_client.put import put_once
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat

MIB = 1 << 20
CHAIN = KVSpec(4, (Component("full", 4, 2, 32768),), max_slice_bytes=1 << 20)
SMALL = KVSpec(4, (Component("full", 1, 1, 20), Component("full", 1, 1, 20)))
FLAT = KVSpec(1, (Component("full", 8, 1, MIB // 32),), hash_bytes=16, flat=True)


@pytest.mark.parametrize("near", [True, False], ids=["shared_memory", "connections"])
async def test_a_put_of_64_mib_goes_into_as_much_dram(tmp_path: Path, near: bool) -> None:
    assert CHAIN.page_bytes == 4 * MIB
    data = np.random.default_rng(1).integers(0, 256, 24 * CHAIN.page_bytes, dtype=np.uint8)
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "256MiB") as daemon:
        async with AsyncClient(daemon.endpoint, shared_memory=near) as client:
            namespace = await client.namespace("small", "rev-1", CHAIN)
            assert (await namespace.put(np.arange(64, dtype=np.uint32), data[: 64 * MIB])).new_pages == 16
            assert (await namespace.put(np.arange(96, dtype=np.uint32) + 500, data)).new_pages == 24
            assert stat(daemon.http)["totals"]["puts_no_space"] == 0
            async with await namespace.match(np.arange(96, dtype=np.uint32) + 500) as match:
                out = np.zeros(match.pages * CHAIN.page_bytes, np.uint8)
                await namespace.fetch(match, out)
            assert match.pages == 24
            assert np.array_equal(out, data)


def test_small_parts_take_more_room_than_their_bytes(tmp_path: Path) -> None:
    pages, parts = 1300, (SMALL.whole(0), SMALL.whole(1))
    data = np.random.default_rng(2).integers(0, 256, pages * SMALL.page_bytes, dtype=np.uint8)
    with DaemonProcess(tmp_path / "data", "--dram", "1MiB", "--ssd", "256MiB") as daemon, Client(daemon.endpoint) as client:
        namespace = client.namespace("parts", "rev-1", SMALL)
        assert namespace.put(np.arange(4 * pages, dtype=np.uint32), data, parts=parts).new_pages == pages
        assert stat(daemon.http)["totals"]["puts_no_space"] == 0


def test_flat_pages_are_put_in_commits_that_fit(tmp_path: Path) -> None:
    data = np.random.default_rng(3).integers(0, 256, 40 * FLAT.page_bytes, dtype=np.uint8)
    labels = b"".join(number.to_bytes(16, "big") for number in range(40))
    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "128MiB") as daemon, Client(daemon.endpoint) as client:
        namespace = client.namespace("flat", "rev-1", FLAT)
        assert namespace.put(labels, data).new_pages == 40
        assert stat(daemon.http)["totals"]["puts_no_space"] == 0


async def test_a_put_whose_beginning_goes_before_it_is_whole_says_that_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(4).integers(0, 256, 8 * CHAIN.page_bytes, dtype=np.uint8)
    tokens, commits = np.arange(32, dtype=np.uint32), 0
    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "128MiB") as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            namespace = await client.namespace("gone", "rev-1", CHAIN)

            async def and_then_the_front_goes(*given: Any, **options: Any) -> Any:
                nonlocal commits
                commits += 1
                if commits == 2:
                    await namespace.delete(tokens)  # as when others need the room
                return await put_once(*given, **options)

            monkeypatch.setattr("kvstore_client.put_prefix.put_once", and_then_the_front_goes)
            with pytest.raises(NoSpace, match=r"the first [0-9] pages of this put are gone again before it was whole") as caught:
                await namespace.put(tokens, data)
            assert isinstance(caught.value.__cause__, MissingParent)
            monkeypatch.undo()
            with pytest.raises(MissingParent, match="but the store has 0 pages"):
                await namespace.put(tokens, data[CHAIN.page_bytes :], first_page=1)
            assert (await namespace.put(tokens, data)).new_pages == 8


def test_a_put_to_a_tree_that_stops_says_how_far_it_got(tmp_path: Path) -> None:
    data = np.random.default_rng(6).integers(0, 256, 12 * CHAIN.page_bytes, dtype=np.uint8)
    tokens = np.arange(48, dtype=np.uint32)
    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "32MiB") as daemon, Client(daemon.endpoint, timeout=20) as client:
        namespace = client.namespace("too-much", "rev-1", CHAIN)
        with pytest.raises(NoSpace, match=r"\(of the prefix the first \d+ pages are durable\)") as refused:
            namespace.put(tokens, data, durable=True)
        assert namespace.match(tokens, lease_s=0).pages >= refused.value.done_pages > 0
        again = namespace.put(tokens[: 4 * refused.value.done_pages], data[: refused.value.done_pages * CHAIN.page_bytes], durable=True)
        assert (again.new_pages, again.existing_pages) == (0, refused.value.done_pages)
