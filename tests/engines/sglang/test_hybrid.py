"""Several pools: windows and states beside the KV pages, and which lengths of prefix they can restore, beside HiCacheFile."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer

from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.sglang.pools import chain, fill, indices, mha_pool, ours, page_bytes, reference, state_pool, wipe

WINDOW = 3
SIDE = {PoolName.SWA: WINDOW, PoolName.MAMBA: 1}


def side_pools(layout: str) -> dict[Any, Any]:
    return {
        PoolName.SWA: mha_pool(layout, label="swa", heads=1),
        PoolName.MAMBA: state_pool("page_first" if layout == "layer_first" else layout),
    }


def register(backend: Any, pools: dict[Any, Any], kv: Any) -> None:
    backend.register_mem_host_pool_v2(kv, PoolName.KV)
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()


def transfer(name: Any, pool: Any, keys: list[str], pages: list[int]) -> Any:
    return PoolTransfer(name=name, keys=keys, host_indices=indices(pool, pages), hit_policy=PoolHitPolicy.TRAILING_PAGES)


def asked(names: list[Any], count: int, policy: Any = PoolHitPolicy.TRAILING_PAGES) -> list[Any]:
    return [PoolTransfer(name=name, keys=["any"] * min(SIDE[name], count), hit_policy=policy) for name in names]


def both_exist(backend: Any, files: Any, keys: list[str], transfers: list[Any], prefix: list[str] | None) -> tuple[Any, Any]:
    mine = backend.batch_exists_v2(keys, transfers, HiCacheStorageExtraInfo(prefix_keys=prefix))
    theirs = files.batch_exists_v2(keys, transfers)
    return mine, theirs


@pytest.mark.parametrize("passed", [True, False], ids=["chain", "flat"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_windows_and_states_come_back_and_say_what_can_be_restored(
    either_daemon: DaemonProcess, tmp_path: Path, layout: str, passed: bool
) -> None:
    random = Random(f"{layout} {passed}")
    kv, pools = mha_pool(layout), side_pools(layout)
    fill(kv, 1)
    for number, pool in enumerate(pools.values()):
        fill(pool, 10 + number)
    backend = ours(either_daemon.endpoint, f"hybrid-{layout}-{passed}", kv)
    files = reference(str(tmp_path), kv)
    register(backend, pools, kv)
    register(files, pools, kv)
    try:
        for turn in range(4):
            keys = chain(f"{layout} {passed} {turn}", 8)
            root: list[str] | None = [] if passed else None
            there = random.randrange(4, 9)
            for name, pool in pools.items():  # as SGLang does: the other pools first, of some spans
                for _ in range(2):
                    end = random.randrange(1, there + 1)
                    span = list(range(max(0, end - SIDE[name]), end))
                    moves = [transfer(name, pool, [keys[page] for page in span], span)]
                    info = HiCacheStorageExtraInfo(prefix_keys=keys[: span[0]] if passed else None)
                    assert backend.batch_set_v2(moves, info) == files.batch_set_v2(moves) == {name: [True] * len(span)}
            pages = list(range(there))
            assert all(backend.batch_set_v1(keys[:there], indices(kv, pages), HiCacheStorageExtraInfo(prefix_keys=root)))
            files.batch_set(keys[:there], [kv.get_data_page(page * kv.page_size) for page in pages])
            for names in ([], [PoolName.SWA], [PoolName.MAMBA], [PoolName.SWA, PoolName.MAMBA]):
                for policy in (PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES):
                    mine, theirs = both_exist(backend, files, keys, asked(names, len(keys), policy), None if turn % 2 else root)
                    assert mine.restorable_prefix_pages == theirs.restorable_prefix_pages
                    assert mine.kv_hit_pages == theirs.kv_hit_pages
                    if mine.restorable_prefix_pages:
                        assert mine.extra_pool_hit_pages == theirs.extra_pool_hit_pages
            read_back(backend, files, pools, keys)
    finally:
        backend.close()


def read_back(backend: Any, files: Any, pools: dict[Any, Any], keys: list[str]) -> None:
    """What is there of each pool comes back as from the reference, and nothing else does."""
    for name, pool in pools.items():
        before = {page: page_bytes(pool, page) for page in range(len(keys))}
        target = [page + 8 for page in range(len(keys))]
        for page in target:
            pool.set_from_flat_data_page(page * pool.page_size, pool.get_dummy_flat_data_page())
        moves = [transfer(name, pool, keys, target)]
        mine = backend.batch_get_v2(moves, HiCacheStorageExtraInfo(prefix_keys=[]))[name]
        got = {page: page_bytes(pool, page) for page in target}
        assert mine == files.batch_get_v2(moves)[name]
        for page, hit in enumerate(mine):
            assert got[page + 8] == page_bytes(pool, page + 8)
            assert (got[page + 8] == before[page]) == hit


def test_a_window_that_reaches_back_before_the_list_needs_its_pages_there(daemon: DaemonProcess) -> None:
    """Where keys are passed. HiCacheFile takes the start of the list for the root, wherever it is."""
    kv, pools = mha_pool("page_first"), side_pools("page_first")
    backend = ours(daemon.endpoint, "reach-1", kv)
    register(backend, pools, kv)
    keys, swa = chain("reach", 8), pools[PoolName.SWA]
    try:
        assert all(backend.batch_set_v1(keys, indices(kv, list(range(8))), HiCacheStorageExtraInfo(prefix_keys=[])))
        backend.batch_set_v2([transfer(PoolName.SWA, swa, keys[3:6], [3, 4, 5])])

        def lengths(first: int, prefix: list[str] | None) -> list[int]:
            info = HiCacheStorageExtraInfo(prefix_keys=prefix)
            return list(backend.batch_exists_v2(keys[first:], asked([PoolName.SWA], 8), info).restorable_prefix_pages)

        assert lengths(0, []) == [6]
        assert lengths(4, keys[:4]) == [2]  # pages 3, 4 and 5 are there
        assert lengths(4, None) == []  # where keys are passed, none means the root: these do not begin there
        backend.batch_set_v2([transfer(PoolName.SWA, swa, keys[6:7], [6])])
        assert lengths(5, keys[:5]) == [1, 2]
        assert lengths(6, keys[:6]) == [1]
    finally:
        backend.close()


def test_pools_that_nobody_registered(daemon: DaemonProcess) -> None:
    kv = mha_pool("page_first")
    backend = ours(daemon.endpoint, "unknown-1", kv)
    keys = chain("unknown", 3)
    try:
        backend.batch_set_v1(keys, indices(kv, [0, 1, 2]), None)
        moves = [PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=indices(kv, [0, 1, 2]))]
        assert backend.batch_set_v2(moves) == backend.batch_get_v2(moves) == {PoolName.SWA: [False] * 3}
        found = backend.batch_exists_v2(keys, asked([PoolName.SWA], 3))
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
        wipe(kv)
    finally:
        backend.close()
