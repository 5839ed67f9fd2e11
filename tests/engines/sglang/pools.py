"""SGLang's own host pools, small and on the CPU, and backends made by its own factory."""

from hashlib import sha256
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MambaStateBufferInfo, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE = 4
LAYERS = 3
TOKENS = 64
CPU = torch.device("cpu")
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def _pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha_pool(layout: str, *, dtype: torch.dtype = torch.bfloat16, label: str = "kv", heads: int = 2) -> Any:
    """Keys and values of three layers."""
    k, v = ([torch.zeros(TOKENS, heads, 8, dtype=dtype) for _ in range(LAYERS)] for _ in range(2))
    buffers = KVBuffers(k=tuple(k), v=tuple(v), k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD)
    info = MHABufferInfo(buffers=buffers, page_size=PAGE, head_num=heads, head_dim=8, v_head_dim=8, dtype=dtype, device=CPU)
    return MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=TOKENS, start_layer=0, end_layer=LAYERS, pool_label=label
    )


def mla_pool(layout: str, *, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The compressed latents of three layers."""
    rows = [torch.zeros(TOKENS, 1, 24, dtype=dtype) for _ in range(LAYERS)]
    info = MLABufferInfo(
        buffers=tuple(rows), data_ptrs=_pointers(rows), layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=PAGE,
        kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24, dtype=dtype, device=CPU,
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=TOKENS, start_layer=0, end_layer=LAYERS,
        target_layer_num=LAYERS,
    )  # fmt: skip


def state_pool(layout: str) -> Any:
    """Recurrent states of two layers: a temporal one and a convolution's."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, 32, 3, 5, dtype=torch.float32), conv=(torch.zeros(2, 32, 7, 2, dtype=torch.bfloat16),)
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=32, pin_memory=False, layout=layout)


def buffers(pool: Any) -> list[torch.Tensor]:
    """The memory of a pool."""
    if isinstance(pool, MambaPoolHost):
        return [pool.temporal_buffer, *pool.conv_buffer]
    kv = pool.kv_buffer
    return list(kv) if isinstance(kv, list | tuple) else [kv]


def fill(pool: Any, seed: int) -> None:
    """Random bytes in all of it."""
    random = torch.Generator().manual_seed(seed)
    for tensor in buffers(pool):
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=random))


def wipe(pool: Any) -> None:
    """Zeros in all of it."""
    for tensor in buffers(pool):
        tensor.zero_()


def page_bytes(pool: Any, page: int) -> bytes:
    """The bytes of a page, as the pool packs them."""
    return bytes(pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8).numpy())


def indices(pool: Any, pages: list[int]) -> torch.Tensor:
    """The host indices of some pages."""
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages]) if pages else torch.zeros(0, dtype=torch.int64)


def chain(name: str, count: int) -> list[str]:
    """Keys as SGLang makes them: each a digest in hex of all before it."""
    keys, last = [], sha256(name.encode()).hexdigest()
    for _ in range(count):
        last = sha256(last.encode()).hexdigest()
        keys.append(last)
    return keys


def config(*, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A storage config of one rank."""
    plain = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "org/model", "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**{**plain, **changes})


def ours(endpoint: str, revision: str, pool: Any, *, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Our backend, by SGLang's factory, with its KV pool."""
    given = {
        "backend_name": "kvstore", "module_path": "kvstore_connectors.sglang", "class_name": "HiCacheKVStore", "interface_v1": 1,
        "endpoint": endpoint, "revision": revision, **(extra or {}),
    }  # fmt: skip
    backend = StorageBackendFactory.create_backend("dynamic", config(extra=given, **changes), pool)
    if pool is not None:
        backend.register_mem_pool_host(pool)
    return backend


def reference(folder: str, pool: Any, **changes: Any) -> Any:
    """SGLang's file backend."""
    backend = StorageBackendFactory.create_backend("file", config(extra={"file_storage_path": folder}, **changes), pool)
    backend.register_mem_pool_host(pool)
    return backend
