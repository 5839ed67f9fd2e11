"""SGLang's fault injector, its several threads, and a store that is away."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, HiCacheStorageFailureInjector, PoolName, PoolTransfer

from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.sglang.pools import chain, fill, indices, mha_pool, ours, page_bytes, state_pool

PAGES = 6


def info(prefix: list[str] | None) -> Any:
    return HiCacheStorageExtraInfo(prefix_keys=prefix)


@pytest.mark.parametrize("passed", [True, False], ids=["chain", "flat"])
def test_threads_and_injected_faults(either_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    """Whatever a call says is there has the right bytes; what fails is a miss, and nothing raises."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.003")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    pool, state = mha_pool("layer_first"), state_pool("page_first")
    fill(pool, 3)
    fill(state, 4)
    original = {page: page_bytes(pool, page) for page in range(PAGES)}
    states = {page: page_bytes(state, page) for page in range(PAGES)}
    backend = ours(either_daemon.endpoint, f"faults-{passed}", pool)
    assert isinstance(backend, HiCacheStorageFailureInjector)
    backend.register_mem_host_pool_v2(state, PoolName.MAMBA)
    names = [f"prompt {number}" for number in range(4)]

    def work(thread: int) -> int:
        random, hits = Random(thread), 0
        room = [PAGES + 2 * thread, PAGES + 2 * thread + 1]
        for _ in range(40):
            keys = chain(random.choice(names) + str(passed), PAGES)
            first = random.randrange(PAGES - 1)
            prefix = keys[:first] if passed else None
            what = random.randrange(4)
            if what == 0:
                backend.batch_set_v1(keys, indices(pool, list(range(PAGES))), info([] if passed else None))
                backend.batch_set_v2([PoolTransfer(name=PoolName.MAMBA, keys=keys, host_indices=indices(state, list(range(PAGES))))])
            elif what == 1:
                assert 0 <= backend.batch_exists(keys[first:], info(prefix)) <= PAGES - first
                backend.batch_exists_v2(keys[first:], [], info(prefix))
            else:
                two = keys[first : first + 2]
                for page, hit in enumerate(backend.batch_get_v1(two, indices(pool, room), info(prefix))):
                    hits += hit
                    assert not hit or page_bytes(pool, room[page]) == original[first + page]
                moves = [PoolTransfer(name=PoolName.MAMBA, keys=two, host_indices=indices(state, room))]
                for page, hit in enumerate(backend.batch_get_v2(moves, info(prefix))[PoolName.MAMBA]):
                    assert not hit or page_bytes(state, room[page]) == states[first + page]
        return hits

    try:
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(work, range(4))) > 0
    finally:
        backend.close()


def test_a_store_that_was_never_there(caplog: pytest.LogCaptureFixture) -> None:
    pool = mha_pool("page_first")
    backend = ours("127.0.0.1:9", "never-1", pool, extra={"lookup_timeout_s": 1})
    backend.register_mem_host_pool_v2(state_pool("page_first"), PoolName.MAMBA)
    keys = chain("never", 3)
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert backend.batch_exists(keys, info([])) == 0
                assert backend.batch_set_v1(keys, indices(pool, [0, 1, 2]), info([])) == [False] * 3
                assert backend.batch_get_v1(keys, indices(pool, [0, 1, 2]), info([])) == [False] * 3
                assert backend.batch_exists_v2(keys, [PoolTransfer(name=PoolName.MAMBA, keys=keys)], info([])).kv_hit_pages == 0
                assert not backend.set(keys[0], pool.get_data_page(0))
                assert backend.get(keys[0], pool.get_dummy_flat_data_page()) is None
        said = [r.getMessage() for r in caplog.records if r.name.startswith("kvstore_connectors")]
        assert len([words for words in said if "away" in words]) == 1
        assert not backend.clear()
    finally:
        backend.close()
        backend.close()  # twice is harmless
    assert backend.batch_exists(keys, info([])) == 0  # and so is a call that comes late


def test_a_store_that_is_killed_and_comes_back_empty(tmp_path: Path) -> None:
    pool = mha_pool("page_first")
    fill(pool, 5)
    keys = chain("killed", 3)
    with DaemonProcess(tmp_path / "one", "--dram", "64MiB", "--ssd", "128MiB") as daemon:
        backend = ours(daemon.endpoint, "killed-1", pool, extra={"lookup_timeout_s": 1, "transfer_timeout_s": 2})
        assert all(backend.batch_set_v1(keys, indices(pool, [0, 1, 2]), info([])))
        daemon.kill()
        assert backend.batch_get_v1(keys, indices(pool, [3, 4, 5]), info([])) == [False] * 3
        assert backend.batch_exists(keys, info([])) == 0
    backend.close()


def test_the_oracle_of_a_page_that_went(daemon: DaemonProcess) -> None:
    """A flat page that was deleted meanwhile is a miss of that page alone."""
    pool = mha_pool("page_first")
    fill(pool, 6)
    keys = chain("went", 4)
    backend = ours(daemon.endpoint, "went-1", pool)
    try:
        assert all(backend.batch_set_v1(keys, indices(pool, [0, 1, 2, 3]), None))
        space = backend._space(backend._anchor, chain=False)

        async def delete() -> None:
            namespace = await backend._open(space)
            await namespace.delete(bytes.fromhex(keys[1]))

        backend._link.submit(delete()).result()
        assert backend.batch_exists(keys, None) == 1
        assert backend.batch_get_v1(keys, indices(pool, [8, 9, 10, 11]), None) == [True, False, True, True]
        assert page_bytes(pool, 11) == page_bytes(pool, 3)
    finally:
        backend.close()
