"""Lists of more pages of a flat namespace than one request takes: they go in pieces, and an error says how far they got."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import AsyncClient, BadRequest, Client, Component, Conflict, KVSpec, NoSpace, NotFound
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess

SPEC = KVSpec(4, (Component("full", 2, 2, 8),), hash_bytes=16, flat=True)
PAGES = 600


def digests(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


ALL = digests(*range(PAGES))
DATA = np.random.default_rng(1).integers(0, 256, (PAGES, SPEC.page_bytes), dtype=np.uint8)


def put_all(namespace: Namespace, durable: bool = False) -> None:
    namespace.put(ALL, DATA, durable=durable)


def there(namespace: Namespace) -> list[int]:
    return namespace.match(ALL, holes=True, lease_s=0).there()


@pytest.fixture
def namespace(daemon: DaemonProcess) -> Iterator[Namespace]:
    with Client(daemon.endpoint, timeout=20) as client:
        found = client.namespace("lists", "rev lists", SPEC)
        put_all(found)
        yield found
        found.drop()


def test_a_long_list_is_pinned_in_several_calls(namespace: Namespace) -> None:
    with pytest.raises(BadRequest, match=r"600 pages .* in one pin: give at most 256, and pin the others in further calls"):
        namespace.pin(ALL, 60)
    pins = [namespace.pin(ALL[at : at + 256 * 16], 60) for at in range(0, len(ALL), 256 * 16)]
    assert [pages for _, pages in pins] == [256, 256, 88]
    for page in (0, 299, PAGES - 1):
        with pytest.raises(Conflict):
            namespace.delete(digests(page))
    for number, _ in pins:
        namespace.unpin(number)
    with pytest.raises(NotFound):
        namespace.unpin(pins[0][0])
    with pytest.raises(NotFound, match="nothing of this prefix"):
        namespace.pin(digests(*range(1000, 1256)), 60)
    assert namespace.delete(ALL) == PAGES


def test_all_of_a_long_list_is_brought_up_abandoned_and_deleted(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "128MiB") as daemon, Client(daemon.endpoint, timeout=20) as client:
        put_all(client.namespace("cold", "rev cold", SPEC), durable=True)
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "128MiB") as daemon, Client(daemon.endpoint, timeout=20) as client:
        namespace = client.namespace("cold")
        assert namespace.prefetch(ALL, pages=(590, 595)) == 5
        assert namespace.prefetch(ALL, pages=(250, 520)) == 270
        assert namespace.prefetch(ALL) == PAGES - 275
        assert namespace.abandon(ALL, from_page=100) == PAGES - 100
        assert namespace.delete(ALL, from_page=10) == PAGES - 10
        assert there(namespace) == list(range(10))


async def test_extra_keys_go_with_their_pages(daemon: DaemonProcess) -> None:
    extras = {page: bytes([1 + page % 250]) * 32 for page in range(0, PAGES, 7)}
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("list-extras", "rev", SPEC)
        await namespace.put(ALL, DATA, extras=extras)
        assert await namespace.abandon(ALL, extras=extras) == PAGES
        number, pages = await namespace.pin(ALL[: 256 * 16], 60, extras={page: extra for page, extra in extras.items() if page < 256})
        assert pages == 256
        await namespace.unpin(number)
        assert await namespace.delete(ALL) == PAGES - len(extras)
        assert await namespace.delete(ALL, extras=extras) == len(extras)
        await namespace.drop()


def test_a_delete_that_meets_a_lease_says_how_far_it_got(namespace: Namespace) -> None:
    with namespace.match(digests(300)), pytest.raises(Conflict, match=r"page 44 of this list is leased.*pages 256 to 511") as caught:
        namespace.delete(ALL)
    assert caught.value.done_pages == 256
    assert there(namespace) == list(range(256, PAGES)), "each piece goes as a whole or not at all"
    assert namespace.delete(ALL, from_page=caught.value.done_pages) == PAGES - 256


def test_what_is_wrong_is_found_before_anything_is_sent(namespace: Namespace) -> None:
    with pytest.raises(BadRequest, match="starts at page 0"):
        namespace.delete(ALL, from_page=-1)
    with pytest.raises(BadRequest, match="digests"):
        namespace.delete(ALL[:-1])
    assert len(there(namespace)) == PAGES


def test_a_put_that_stops_says_how_far_it_got(tmp_path: Path) -> None:
    large = KVSpec(4, (Component("full", 2, 2, 16384),), max_slice_bytes=1 << 18, hash_bytes=16, flat=True)
    data = np.random.default_rng(1).integers(0, 256, (96, large.page_bytes), dtype=np.uint8)
    with DaemonProcess(tmp_path / "data", "--dram", "64MiB", "--ssd", "64MiB") as daemon, Client(daemon.endpoint, timeout=20) as client:
        namespace = client.namespace("too-much", "rev", large)
        with pytest.raises(NoSpace) as caught:
            namespace.put(digests(*range(96)), data, durable=True)
        assert namespace.match(digests(*range(96)), lease_s=0).pages >= caught.value.done_pages > 0
