"""Look-ups in a flat namespace that go on after what is missing."""

import numpy as np
import pytest

from kvstore_client import AsyncClient, BadRequest, Component, Costs, KVSpec, NotFound
from kvstore_client.namespace import Namespace
from kvstore_workers.daemon_process import DaemonProcess

SPEC = KVSpec(4, (Component("full", 2, 1, 8),), hash_bytes=16, flat=True)
HYBRID = KVSpec(4, (*SPEC.components, Component("state", 1, 1, 8)), hash_bytes=16, flat=True)
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


async def test_pages_of_a_hybrid_model_are_there_with_all_their_components(daemon: DaemonProcess) -> None:
    full, state = HYBRID.whole(0), HYBRID.whole(1)
    fulls = np.random.default_rng(4).integers(0, 256, (5, HYBRID.part_bytes(full)), dtype=np.uint8)
    states = np.random.default_rng(5).integers(0, 256, (5, HYBRID.part_bytes(state)), dtype=np.uint8)
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("hybrid-holes", "rev-1", HYBRID)
        await namespace.put(DIGESTS[0], fulls[0], parts=(full,))  # without its state
        for page in (1, 2, 4):
            await namespace.put(DIGESTS[page], np.concatenate([fulls[page], states[page]]), parts=(full, state))
        async with await namespace.match(DIGESTS, holes=True) as match:
            assert (match.there(), match.known_pages, match.dram_pages) == ([1, 2, 4], 3, 3)
            for wanted, data in ((full, fulls), (state, states)):
                out = np.zeros((2, HYBRID.part_bytes(wanted)), np.uint8)
                await namespace.fetch(match, out, wanted=wanted, pages=(1, 3))
                assert np.array_equal(out, data[1:3])
                await namespace.fetch(match, out[:1], wanted=wanted, pages=(4, 5))
                assert np.array_equal(out[0], data[4])
        await namespace.drop()


async def test_holes_are_for_the_parts_of_flat_namespaces(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        tree = await client.namespace("a-tree", "rev-1", KVSpec(4, SPEC.components, hash_bytes=16))
        flat = await filled(client, "flat", [1])
        with pytest.raises(BadRequest, match="holes"):
            await tree.match(DIGESTS[0], holes=True)
        with pytest.raises(BadRequest, match="holes"):
            await flat.match(DIGESTS[0], holes=True, parts=False)
        with pytest.raises(BadRequest, match="holes"):
            await flat.match(DIGESTS[0], holes=True, estimate=Costs(prefill_us=1))
