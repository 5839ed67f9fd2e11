"""Pages whose rows lie anywhere: put from there, fetched to there."""

import numpy as np
import pytest

from kvstore_client import AsyncClient, BadRequest, Component, KVSpec, PartRange, Scattered
from kvstore_workers.daemon_process import DaemonProcess

PAGES = 3


def tree_spec(heads: int, group_layers: int, head_dim: int = 8) -> KVSpec:
    return KVSpec(4, (Component("full", 6, heads, head_dim),), group_layers=group_layers)


def lay_out(spec: KVSpec, rows: int, seed: int) -> tuple[np.ndarray, list[list[int]], int]:
    """A memory with room, and places in it in a random order, with gaps."""
    size = spec.page_bytes // rows
    order = np.random.default_rng(seed).permutation(PAGES * rows)
    places = [[int(order[page * rows + row]) * (size + 3) + 1 for row in range(rows)] for page in range(PAGES)]
    return np.zeros(PAGES * rows * (size + 3) + 1, np.uint8), places, size


@pytest.mark.parametrize(("rows", "head_dim"), [(1, 8), (2, 8), (6, 8), (1, 20_000), (6, 50_000)])
async def test_rows_go_and_come_back_wherever_they_lie(either_daemon: DaemonProcess, rows: int, head_dim: int) -> None:
    spec = tree_spec(2, 6 // rows, head_dim)
    pages = np.random.default_rng(head_dim + rows).integers(0, 256, (PAGES, spec.page_bytes), dtype=np.uint8)
    source, places, size = lay_out(spec, rows, 1)
    for page in range(PAGES):
        for row in range(rows):
            source[places[page][row] :][:size] = pages[page, row * size : (row + 1) * size]
    target, elsewhere, _ = lay_out(spec, rows, 2)
    tokens = np.arange(4 * PAGES, dtype=np.uint32)
    async with AsyncClient(either_daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace(f"scattered-{rows}-{head_dim}", f"rev {rows} {head_dim}", spec)
        assert (await namespace.put(tokens, Scattered(source.data, places))).new_pages == PAGES
        async with await namespace.match(tokens) as match:
            whole = np.zeros_like(pages)
            await namespace.fetch(match, whole)
            assert np.array_equal(whole, pages)
            assert await namespace.fetch(match, Scattered(target.data, elsewhere)) == pages.nbytes
        for page in range(PAGES):
            for row in range(rows):
                got = target[elsewhere[page][row] :][:size]
                assert np.array_equal(got, pages[page, row * size : (row + 1) * size])
                target[elsewhere[page][row] :][:size] = 0
        assert not target.any()  # nothing beside the rows was touched
        await namespace.drop()


async def test_a_head_of_each_page_into_rows(either_daemon: DaemonProcess) -> None:
    spec = tree_spec(2, 1)
    pages = np.random.default_rng(5).integers(0, 256, (PAGES, spec.page_bytes), dtype=np.uint8)
    tokens = np.arange(4 * PAGES, dtype=np.uint32)
    async with AsyncClient(either_daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("scattered-heads", "rev heads", spec)
        await namespace.put(tokens, pages)
        wanted = PartRange(0, 0, 6, 1, 2)
        row = spec.part_bytes(wanted) // 6
        target = np.zeros(PAGES * 6 * row, np.uint8)
        places = [[(layer * PAGES + page) * row for layer in range(6)] for page in range(PAGES)]
        async with await namespace.match(tokens) as match:
            plain = np.zeros(PAGES * spec.part_bytes(wanted), np.uint8)
            await namespace.fetch(match, plain, wanted=wanted)
            await namespace.fetch(match, Scattered(target.data, places), wanted=wanted)
        layers_first = plain.reshape(PAGES, 6, row).transpose(1, 0, 2)
        assert np.array_equal(target.reshape(6, PAGES, row), layers_first)


async def test_flat_pages_are_put_from_where_they_lie(either_daemon: DaemonProcess) -> None:
    spec = KVSpec(4, (Component("full", 2, 1, 8),), hash_bytes=16, flat=True, group_layers=1)
    digests = b"".join(bytes([number]) * 16 for number in range(PAGES))
    source, places, size = lay_out(spec, 2, 4)
    source[:] = np.random.default_rng(6).integers(0, 256, len(source), dtype=np.uint8)
    async with AsyncClient(either_daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("scattered-flat", "rev flat", spec)
        await namespace.put(digests, Scattered(source.data, places))
        out = np.zeros((PAGES, 2, size), np.uint8)
        async with await namespace.match(digests) as match:
            await namespace.fetch(match, out)
        assert all(np.array_equal(out[p, r], source[places[p][r] :][:size]) for p in range(PAGES) for r in range(2))


async def test_places_that_make_no_sense_are_refused(daemon: DaemonProcess) -> None:
    spec, tokens = tree_spec(2, 3), np.arange(4 * PAGES, dtype=np.uint32)
    memory = np.zeros(PAGES * spec.page_bytes, np.uint8)
    row = spec.page_bytes // 2
    good = [[2 * page * row, (2 * page + 1) * row] for page in range(PAGES)]
    async with AsyncClient(daemon.endpoint, timeout=20) as client:
        namespace = await client.namespace("scattered-nonsense", "rev nonsense", spec)
        for places, words in (
            (good[:2], "rows"), ([[0] * 4] * PAGES, "rows"), ([*good[:2], [0]], "rows"), ([*good[:2], []], "rows"),
            ([*good[:2], [0, len(memory) - row + 1]], "outside"), ([*good[:2], [-1, 0]], "outside"),
            ([[0, 8, 16]] * PAGES, "across rows"), ([[0] * 6] * PAGES, "across rows"),
        ):  # fmt: skip
            with pytest.raises(BadRequest, match=words):
                await namespace.put(tokens, Scattered(memory.data, places))
