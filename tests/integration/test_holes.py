"""Look-ups in a flat namespace that go on after what is missing."""

import numpy as np
import pytest

from kvstore_client import AsyncClient, BadRequest, Component, Costs, KVSpec, NotFound
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess

SPEC = KVSpec(4, (Component("full", 2, 1, 8),), hash_bytes=16, flat=True)
DIGESTS = [bytes([number]) * 16 for number in range(7)]
DATA = np.random.default_rng(3).integers(0, 256, (len(DIGESTS), SPEC.page_bytes), dtype=np.uint8)


async def filled(client: AsyncClient, name: str, pages: list[int]) -> Namespace:
    namespace = await client.namespace(name, f"rev-1 of {name}", SPEC)
    for page in pages:
        await namespace.put(DIGESTS[page], DATA[page])
    return namespace


@pytest.mark.parametrize("pages", [[], [0], [6], [1, 2, 5], [0, 2, 4, 6], list(range(7))], ids=str)
async def test_all_that_is_there_is_found_and_can_be_fetched(either_daemon: DaemonProcess, pages: list[int]) -> None:
    async with AsyncClient(either_daemon.endpoint, timeout=20) as client:
        namespace = await filled(client, "holes", pages)
        async with await namespace.match(b"".join(DIGESTS), holes=True) as match:
            assert match.there() == pages
            assert match.pages == (pages[-1] + 1 if pages else 0)
            assert bool(match.lease) == bool(pages)
            for page in pages:
                out = np.zeros(SPEC.page_bytes, np.uint8)
                await namespace.fetch(match, out, pages=(page, page + 1))
                assert np.array_equal(out, DATA[page])
            if match.pages > len(pages):
                with pytest.raises(NotFound, match="holes"):
                    await namespace.fetch(match, np.zeros(match.pages * SPEC.page_bytes, np.uint8))
        await namespace.drop()


async def test_what_was_found_behind_a_hole_is_leased(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await filled(client, "leased-behind-a-hole", [0, 3])
        match = await namespace.match(b"".join(DIGESTS), holes=True)
        with pytest.raises(Exception, match="leased"):
            await namespace.delete(DIGESTS[3])
        await match.release()
        await namespace.delete(DIGESTS[3])
        assert (await namespace.match(b"".join(DIGESTS), holes=True, lease_s=0)).there() == [0]


async def test_holes_are_for_the_parts_of_flat_namespaces_of_full_pages(daemon: DaemonProcess) -> None:
    full, state = Component("full", 2, 1, 8), Component("state", 1, 1, 8)
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        tree = await client.namespace("a-tree", "rev-1", KVSpec(4, (full,), hash_bytes=16))
        hybrid = await client.namespace("hybrid", "rev-1", KVSpec(4, (full, state), hash_bytes=16, flat=True))
        flat = await filled(client, "flat", [1])
        for namespace in (tree, hybrid):
            with pytest.raises(BadRequest, match="holes"):
                await namespace.match(DIGESTS[0], holes=True)
        with pytest.raises(BadRequest, match="holes"):
            await flat.match(DIGESTS[0], holes=True, parts=False)
        with pytest.raises(BadRequest, match="holes"):
            await flat.match(DIGESTS[0], holes=True, estimate=Costs(prefill_us=1))
