"""Written by one group of workers, read by another: through the SDK, with every component of a hybrid model."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.api.wire import BadRequest, Component, Conflict, KVSpec, NotFound, PartRange
from kvstore_client import AsyncClient, Namespace, PutResult
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.raw import stat

FULL, WINDOW, STATE = 0, 1, 2
SPEC = KVSpec(4, (Component("full", 8, 8, 16), Component("window", 4, 8, 16, window=10), Component("state", 2, 8, 64, planes=1)))
PAGES = 6
Tokens = npt.NDArray[np.uint32]


def tokens(seed: int, pages: int = PAGES) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1000, pages * SPEC.page_tokens, dtype=np.uint32)


def content(seed: int, component: int, pages: int = PAGES) -> npt.NDArray[np.uint8]:
    """(page, layer, plane, head, bytes)."""
    c = SPEC.components[component]
    one = SPEC.layer_bytes(PartRange(component, 0, 1, 0, 1)) // c.planes
    return np.random.default_rng([seed, component]).integers(0, 256, (pages, c.layers, c.planes, c.kv_heads, one), dtype=np.uint8)


def shard(rank: int, of: int) -> tuple[PartRange, ...]:
    heads = 8 // of
    return tuple(PartRange(i, 0, c.layers, rank * heads, (rank + 1) * heads) for i, c in enumerate(SPEC.components))


def put_data(seed: int, parts: tuple[PartRange, ...], spans: tuple[tuple[int, int], ...], pages: int = PAGES) -> bytes:
    whole = [content(seed, component, pages) for component in range(3)]
    return b"".join(
        whole[p.component][page, p.layer_lo : p.layer_hi, :, p.head_lo : p.head_hi].tobytes()
        for page in range(pages)
        for p, (first, last) in zip(parts, spans, strict=True)
        if first <= page < last
    )


SPANS = ((0, PAGES), (PAGES - 3, PAGES), (PAGES - 1, PAGES))


@pytest.fixture(scope="module")
def daemon(either_daemon: DaemonProcess) -> DaemonProcess:
    return either_daemon


@pytest.fixture
async def namespace(daemon: DaemonProcess) -> AsyncIterator[Namespace]:
    async with AsyncClient(daemon.endpoint, connections=2, timeout=20) as client:
        yield await client.namespace("geometry", "rev-1", SPEC)


async def put_by_ranks(daemon: DaemonProcess, seed: int, of: int, durable: bool = False) -> list[PutResult]:
    """As many worker processes would: a client each."""

    async def one(rank: int) -> PutResult:
        async with AsyncClient(daemon.endpoint, timeout=20) as client:
            mine = await client.namespace("geometry")
            parts = shard(rank, of)
            put_id = f"computation {seed}".encode().ljust(16)
            return await mine.put(
                tokens(seed), put_data(seed, parts, SPANS), parts=parts, spans=SPANS, put_id=put_id, whole_s=10, durable=durable
            )

    return list(await asyncio.gather(*(one(rank) for rank in range(of))))


async def read_all(namespace: Namespace, seed: int, wanted: PartRange) -> None:
    async with await namespace.match(tokens(seed)) as match:
        assert match.pages == PAGES
        first, last = match.pages_of(wanted.component)
        assert (first, last) == SPANS[wanted.component]
        expected = content(seed, wanted.component)[first:last, wanted.layer_lo : wanted.layer_hi, :, wanted.head_lo : wanted.head_hi]
        out = np.zeros(expected.shape, np.uint8)
        await namespace.fetch(match, out, wanted=wanted)
        assert np.array_equal(out, expected)


async def test_written_by_four_ranks_read_by_two_by_eight_and_by_a_pipeline(namespace: Namespace, daemon: DaemonProcess) -> None:
    results = await put_by_ranks(daemon, 1, 4)
    assert all(r.pending_pages == 0 for r in results)
    for of in (1, 2, 8):
        for rank in range(of):
            for wanted in shard(rank, of):
                await read_all(namespace, 1, wanted)
    for stage in range(2):
        await read_all(namespace, 1, PartRange(FULL, 4 * stage, 4 * stage + 4, 0, 8))
        await read_all(namespace, 1, PartRange(WINDOW, 2 * stage, 2 * stage + 2, 0, 8))
        await read_all(namespace, 1, PartRange(STATE, stage, stage + 1, 0, 8))


async def test_one_missing_rank_is_never_a_hit_and_its_pages_expire_with_the_client(namespace: Namespace, daemon: DaemonProcess) -> None:
    before = stat(daemon.http)["pending_pages"]
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        mine = await client.namespace("geometry")
        for rank in (0, 1, 3):
            parts = shard(rank, 4)
            done = await mine.put(tokens(2), put_data(2, parts, SPANS), parts=parts, spans=SPANS, put_id=b"incomplete".ljust(16))
            assert done == PutResult(0, 0, PAGES)
        assert (await namespace.match(tokens(2), lease_s=0)).known_pages == 0
    while stat(daemon.http)["pending_pages"] > before:  # the daemon has yet to see that they are gone
        await asyncio.sleep(0.01)
    parts = shard(2, 4)
    done = await namespace.put(tokens(2), put_data(2, parts, SPANS), parts=parts, spans=SPANS, put_id=b"incomplete".ljust(16))
    assert done.pending_pages == PAGES, "what dead ranks had brought was used"


async def test_a_boundary_without_its_state_is_not_usable(namespace: Namespace) -> None:
    whole = shard(0, 1)
    data = put_data(3, whole[:2], SPANS[:2])
    await namespace.put(tokens(3), data, parts=whole[:2], spans=SPANS[:2])
    found = await namespace.match(tokens(3), lease_s=0, boundaries=True)
    assert (found.pages, found.known_pages, found.usable_boundaries().tolist()) == (0, PAGES, [0])
    state = content(3, STATE)[PAGES - 1].tobytes()
    await namespace.put(tokens(3), state, first_page=PAGES - 1, parts=whole[2:], durable=True)
    found = await namespace.match(tokens(3), lease_s=0, boundaries=True)
    assert (found.pages, found.usable_boundaries().tolist()) == (PAGES, [0, PAGES])
    await read_all(namespace, 3, whole[STATE])


async def test_a_session_sends_only_new_tokens(daemon: DaemonProcess) -> None:
    spec = KVSpec(4, (Component("full", 8, 8, 16),))
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("sessions", "rev-1", spec)
        conversation, data = tokens(5, 12), content(5, FULL, 12)
        async with namespace.session() as session:
            assert await session.extend(conversation[: 5 * 4]) == 0
            assert (await session.put(data[:5])).new_pages == 5
            assert session.pages == 5
            sent = _sent_payloads(client)
            assert await session.extend(conversation[5 * 4 : 8 * 4 + 2]) == 5
            assert (await session.put(data[5:8])).new_pages == 3
            assert max(sent) < 8 * 4 * 4, "the whole context travelled again"
            assert session.pages == 8
            out = np.zeros_like(data[:8])
            await session.fetch(out)
            assert np.array_equal(out, data[:8])
            await client.release(session.match.lease if session.match else 0)
            assert await session.extend(conversation[8 * 4 + 2 :]) == 8, "a lost lease was not made good"
            assert (await session.put(data[8:])).new_pages == 4
            assert await session.abandon(10) == 2
            assert (await namespace.match(conversation, lease_s=0)).pages == 12


def _sent_payloads(client: AsyncClient) -> list[int]:
    """Sizes of control payloads sent from here on."""
    sizes: list[int] = []
    original = client.call

    async def spy(frame_type: object, message: object, reply: object, payload: bytes = b"", *rest: object) -> object:
        sizes.append(len(payload))
        return await original(frame_type, message, reply, payload, *rest)  # type: ignore[arg-type]

    client.call = spy  # type: ignore[assignment,method-assign]
    return sizes


async def test_pin_prefetch_delete(namespace: Namespace, daemon: DaemonProcess) -> None:
    await put_by_ranks(daemon, 7, 2, durable=True)
    async with AsyncClient(daemon.endpoint, timeout=20) as other:
        pin, pages = await (await other.namespace("geometry")).pin(tokens(7), 60)
    assert pages == PAGES
    with pytest.raises(Conflict, match="pinned"):
        await namespace.delete(tokens(7))
    assert await namespace.prefetch(tokens(7)) == 0, "all of it is in DRAM already"
    await namespace.unpin(pin)
    with pytest.raises(NotFound):
        await namespace.unpin(pin)
    assert await namespace.delete(tokens(7), from_page=2) == PAGES - 2
    assert (await namespace.match(tokens(7), lease_s=0)).known_pages == 2
    with pytest.raises(NotFound, match="nothing to pin"):
        await namespace.pin(tokens(99), 60)


async def test_prefetch_brings_up_what_is_on_ssd(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("prefetch")
    with DaemonProcess(folder, "--dram", "64MiB", "--ssd", "256MiB") as daemon:
        async with AsyncClient(daemon.endpoint, timeout=20) as client:
            namespace = await client.namespace("geometry", "rev-1", SPEC)
            await put_by_ranks(daemon, 8, 2, durable=True)
            assert (await namespace.match(tokens(8), lease_s=0)).dram_pages == PAGES
    with DaemonProcess(folder, "--dram", "64MiB", "--ssd", "256MiB") as daemon:
        async with AsyncClient(daemon.endpoint, timeout=20) as client:
            namespace = await client.namespace("geometry")
            assert (await namespace.match(tokens(8), lease_s=0)).dram_pages == 0
            assert await namespace.prefetch(tokens(8), pages=(0, 2)) == 4
            assert (await namespace.match(tokens(8), lease_s=0)).dram_pages == 2
            assert await namespace.prefetch(tokens(8)) == 2 * (PAGES - 2) + 2 * 3 + 2 * 1
            assert (await namespace.match(tokens(8), lease_s=0)).dram_pages == PAGES
            await read_all(namespace, 8, PartRange(FULL, 0, 8, 0, 8))


@pytest.mark.parametrize("flat", [True, False])
async def test_pages_named_by_an_engines_digests(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory, flat: bool) -> None:
    spec = KVSpec(256, (Component("full", 2, 1, 8),), hash_bytes=20, flat=flat)
    digests = [bytes([number]) * 20 for number in range(6)]
    data = np.random.default_rng(9).integers(0, 256, (6, spec.page_bytes), dtype=np.uint8)
    folder = tmp_path_factory.mktemp("digests")
    with DaemonProcess(folder, "--dram", "64MiB", "--ssd", "256MiB") as own:
        async with AsyncClient(own.endpoint, timeout=20) as client:
            namespace = await client.namespace("digests", "rev-1", spec)
            assert (await namespace.put(b"".join(digests[:4]), data[:4], durable=True)).new_pages == 4
            lone = await namespace.put(digests[5], data[5])
            assert lone.new_pages == 1
            if flat:
                assert (await namespace.put(b"".join(digests[2:5]), data[2:5], durable=True)) == PutResult(1, 2, 0)
    with DaemonProcess(folder, "--dram", "64MiB", "--ssd", "256MiB") as own:
        async with AsyncClient(own.endpoint, timeout=20) as client:
            namespace = await client.namespace("digests")
            async with await namespace.match(b"".join(digests)) as match:
                assert (match.pages, match.tokens) == ((6, 6 * 256) if flat else (4, 4 * 256))
                out = np.zeros_like(data[: match.pages])
                await namespace.fetch(match, out)
                assert np.array_equal(out, data[: match.pages])
                with pytest.raises(Conflict):
                    await namespace.delete(digests[0])
            if not flat:
                async with namespace.session() as session:
                    assert await session.extend(digests[:2]) == 2
                    assert (await namespace.match(session.tokens, lease_s=0)).pages == 2, "what a session tells of is what a match takes"
            from_the_third = await namespace.match(b"".join(digests[2:]), lease_s=0)
            assert from_the_third.pages == (4 if flat else 0)
            await namespace.delete(digests[3] if flat else b"".join(digests[:4]), from_page=0 if flat else 3)
            assert (await namespace.match(b"".join(digests), lease_s=0)).pages == 3


async def test_short_digests_and_recipes_of_digests_are_refused(namespace: Namespace) -> None:
    full = (Component("full", 2, 1, 8),)
    with pytest.raises(BadRequest, match="digests have 16"):
        KVSpec(256, full, hash_bytes=8)
    with pytest.raises(BadRequest, match="recipes"):
        await namespace.client.namespace("x", "rev-1", KVSpec(256, full, hash_bytes=16), recipes=True)
    with pytest.raises(BadRequest, match="flat"):
        KVSpec(256, full, flat=True)
