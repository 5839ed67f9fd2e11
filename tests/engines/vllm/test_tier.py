"""The secondary tier under vLLM's own tiering manager and primary tier, against a real daemon. Copies to a device are not run."""

import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvstore_client import Client
from kvstore_connectors.vllm_tier import KVStoreTier
from kvstore_workers.daemon_process import DaemonProcess

CHUNK, CHUNKS = 3 * 65536, 6
KEYS = [make_offload_key(bytes([n]) * 32, 0) for n in range(1, 5)]


def offloading_config(model: str) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),), worker_kv_bytes_per_block=CHUNK, enable_kv_cache_events=False,
        extra_config={}, engine_id=uuid.uuid4().hex, model=OffloadingModelConfig(model, "bfloat16"), cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )  # fmt: skip


class Tiers:
    """vLLM's tiering manager over a primary tier of a few chunks and the store."""

    def __init__(self, daemon: DaemonProcess, model: str) -> None:
        config = offloading_config(model)
        region = SharedOffloadRegion(
            engine_id=config.engine_id, num_chunks=CHUNKS, rank=None, kv_bytes_per_chunk=CHUNK, cpu_page_size=CHUNK
        )
        self.primary = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=region)
        self.view = self.primary.get_kv_memoryview()
        chosen = {"type": "KVStoreTier", "module_path": "kvstore_connectors.vllm_tier", "revision": "v1", "endpoint": daemon.endpoint}
        self.tier = SecondaryTierFactory.create_secondary_tier(chosen, self.view, SimpleNamespace(config=config))
        assert isinstance(self.tier, KVStoreTier)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def looked_up(self, key: Any, request: ReqContext) -> LookupResult:
        """What a look-up comes to, over some steps."""
        end = time.monotonic() + 30
        while (found := self.manager.lookup(key, request)) in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            assert time.monotonic() < end
            self.end_step()
            time.sleep(0.01)
        return found

    def close(self) -> None:
        self.manager.shutdown()


@pytest.fixture
def tiers(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Tiers]:
    made = Tiers(daemon, request.node.name)
    yield made
    made.close()


def store(tiers: Tiers, keys: list[Any], seed: int) -> np.ndarray[Any, Any]:
    """Chunks come from the device, as it were, and go on to the store."""
    request = ReqContext(f"store-{seed}")
    tiers.manager.on_new_request(request)
    prepared = tiers.manager.prepare_store(keys, request)
    assert prepared is not None
    data = np.random.default_rng(seed).integers(0, 256, (len(keys), CHUNK), np.uint8)
    for row, chunk in zip(data, prepared.store_spec.chunk_ids, strict=True):
        np.asarray(tiers.view)[int(chunk)] = row.view(np.int8)
    tiers.manager.complete_store(keys, request)
    tiers.tier.drain_jobs()
    tiers.end_step()
    tiers.manager.on_request_finished(request)
    return data


def test_chunks_come_back_in_another_engine(daemon: DaemonProcess, tiers: Tiers, request: pytest.FixtureRequest) -> None:
    data = store(tiers, KEYS[:3], 1)
    other = Tiers(daemon, request.node.name)
    asked = ReqContext("load")
    other.manager.on_new_request(asked)
    found = [other.looked_up(key, asked) for key in KEYS]
    assert found == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    spec = other.manager.prepare_load(KEYS[:3], asked)
    for row, chunk in zip(data, spec.chunk_ids, strict=True):
        assert np.asarray(other.view)[int(chunk)].tobytes() == row.tobytes()
    other.manager.complete_load(KEYS[:3], asked)
    other.close()


def test_what_is_gone_after_the_look_up_is_a_miss(daemon: DaemonProcess, tiers: Tiers, request: pytest.FixtureRequest) -> None:
    store(tiers, KEYS[:1], 2)
    other = Tiers(daemon, request.node.name)
    asked = ReqContext("load")
    other.manager.on_new_request(asked)
    end = time.monotonic() + 30
    while other.tier.lookup(KEYS[0], asked) is not LookupResult.HIT:
        assert time.monotonic() < end
        other.tier.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.01)
    with Client(daemon.endpoint, shared_memory=False) as client:
        for namespace in client.namespaces():
            namespace.drop()
    assert other.looked_up(KEYS[0], asked) is LookupResult.MISS
    other.close()


def test_other_weights_share_nothing(daemon: DaemonProcess, tiers: Tiers) -> None:
    store(tiers, KEYS[:1], 3)
    other = Tiers(daemon, "another model")
    asked = ReqContext("load")
    other.manager.on_new_request(asked)
    assert other.looked_up(KEYS[0], asked) is LookupResult.MISS
    other.close()


def test_a_tier_without_a_revision_is_refused(daemon: DaemonProcess) -> None:
    view = memoryview(bytearray(2 * 4096)).cast("B", (2, 4096))
    with pytest.raises(ValueError, match="revision"):
        KVStoreTier(SimpleNamespace(config=offloading_config("m")), view, "kvstore", endpoint=daemon.endpoint)
