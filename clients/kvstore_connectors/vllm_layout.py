"""How an engine's paged KV cache maps to pages and parts: one page is one block of each cache group.

vLLM shows every layer as [block, head, token, content], content being a token's key and value together. The store's axis order
is layer, plane, head, token, dim: with one plane of the whole content, a page of a layer is a block as it lies in the engine.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore_client import Component, KVSpec, PartRange
from kvstore_connectors.huge_pages import ask_for_huge_pages

_DTYPES = {
    "float32": "f32", "bfloat16": "bf16", "float16": "f16", "uint8": "u8", "int8": "i8", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
}  # fmt: skip

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group of the engine: a component of the namespace. `heads` are those of this rank's share."""

    group: int
    component: int
    layers: tuple[str, ...]
    heads: int
    total_heads: int
    block_bytes: int
    """Of one layer, in this rank."""
    window: bool
    """Whether blocks before the window can be missing."""

    def part(self, rank: int, ranks: int) -> tuple[PartRange, bool]:
        """The heads that a tensor-parallel rank holds, and whether it is the one that puts them: heads can be held by several."""
        if self.heads * ranks == self.total_heads:
            low, writes = rank * self.heads, True
        else:
            copies = ranks * self.heads // self.total_heads
            low, writes = rank // copies * self.heads, rank % copies == 0
        return PartRange(self.component, 0, len(self.layers), low, low + self.heads), writes


@dataclass(frozen=True, slots=True)
class Layout:
    """All cache groups that are kept, and the KV spec that they make."""

    spec: KVSpec
    groups: tuple[GroupLayout, ...]

    @property
    def page_tokens(self) -> int:
        """Tokens of a block, and of a page."""
        return self.spec.page_tokens


def layout_of(vllm_config: Any, kv_cache_config: Any) -> Layout:
    """The layout of an engine. Raises ValueError for what this connector can't keep, saying what."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"kvstore: {name} is {getattr(parallel, name)}; the connector keeps the state of tensor-parallel ranks only")
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "draft_model_config", None) is not None:
        raise ValueError("kvstore: speculative decoding with a draft model has KV that depends on its weights; not supported")
    groups: list[GroupLayout] = []
    components: list[Component] = []
    sizes: set[int] = set()
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _common_spec(group)
        components.append(_component(spec, len(group.layer_names), _total_heads(spec, model, parallel.tensor_parallel_size)))
        sizes.add(spec.block_size)
        groups.append(
            GroupLayout(
                number, len(groups), tuple(_in_order(group.layer_names)), spec.num_heads, components[-1].kv_heads,
                spec.num_heads * spec.block_size * spec.state_content_size_bytes, components[-1].kind == "window",
            )
        )  # fmt: skip
    if len(sizes) != 1:
        raise ValueError(f"kvstore: the KV cache groups have blocks of {sorted(sizes)} tokens; only groups of one block size are supported")
    if not any(component.kind == "full" for component in components):
        raise ValueError("kvstore: no layer of this model attends to all of its context; such models are not supported")
    return Layout(KVSpec(page_tokens=sizes.pop(), components=tuple(components)), tuple(groups))


def _common_spec(group: Any) -> Any:
    """The KV cache spec that all layers of a group have."""
    spec = group.kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]
    if any(one != specs[0] for one in specs):
        raise ValueError("kvstore: a KV cache group has layers of several shapes; not supported")
    return specs[0]


def _component(spec: Any, layers: int, heads: int) -> Component:
    name = type(spec).__name__
    if name not in ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"):
        raise ValueError(f"kvstore: the model has KV of kind {name}; full attention, MLA and sliding windows are supported")
    if spec.num_head_slots not in (None, spec.num_kv_heads) or spec.tokens_per_state != 1:
        raise ValueError(f"kvstore: the attention backend packs its KV in a way of its own ({name}); not supported")
    dtype = _DTYPES.get(str(spec.dtype).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"kvstore: KV of dtype {spec.dtype} is not supported")
    width = spec.state_content_size_bytes // spec.dtype.itemsize
    window = spec.sliding_window if name == "SlidingWindowSpec" else 0
    return Component("window" if window else "full", layers, heads, width, dtype=dtype, planes=1, window=window)


def _total_heads(spec: Any, model: Any, ranks: int) -> int:
    """KV heads over all tensor-parallel ranks."""
    heads = int(spec.num_heads)
    if ranks == 1 or type(spec).__name__ == "MLAAttentionSpec":
        return heads
    total = int(model.get_total_num_kv_heads())
    if heads * ranks != total and (ranks * heads) % total:
        raise ValueError(f"kvstore: {total} KV heads over {ranks} ranks with {heads} each; not supported")
    return total


def _in_order(names: list[str]) -> list[str]:
    """Layer names by the numbers in them."""
    return sorted(names, key=lambda name: [int(word) if word.isdigit() else -1 for word in name.split(".")])


class LayerBlocks:
    """The blocks of one layer of the engine, as rows of bytes. On the CPU the rows are in the engine's memory itself.

    A device's memory is reached through torch, which copies; that path has not been run on a GPU.
    """

    def __init__(self, tensor: torch.Tensor, blocks: int, block_bytes: int) -> None:
        if tensor.shape[0] % blocks:
            raise ValueError(f"kvstore: a layer has {tensor.shape[0]} kernel blocks for {blocks} blocks")
        if tensor.shape[0] != blocks:  # kernel blocks: those of one block, side by side in the token axis
            tensor = tensor.unflatten(0, (blocks, -1)).transpose(1, 2)
        self._bytes = tensor.view(torch.uint8)
        nbytes = self._bytes[0].numel()
        if nbytes != block_bytes:
            raise ValueError(f"kvstore: a block of a layer has {nbytes} bytes, not {block_bytes}")
        self.shape = tuple(self._bytes.shape[1:])
        self._rows = None
        if self._bytes.device.type == "cpu":
            self._rows = _words(self._bytes.numpy())
            ask_for_huge_pages(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())

    def gather(self, ids: npt.NDArray[np.int64], out: Bytes) -> None:
        """Copy blocks into `out`, (blocks, bytes of a block)."""
        if self._rows is not None:
            out.view(self._rows.dtype).reshape(len(ids), *self._rows.shape[1:])[...] = self._rows[ids]
            return
        shaped = out.reshape(len(ids), *self.shape)
        assert np.shares_memory(shaped, out)
        torch.from_numpy(shaped).copy_(self._bytes[torch.from_numpy(ids).to(self._bytes.device)])

    def scatter(self, ids: npt.NDArray[np.int64], data: Bytes) -> None:
        """Copy `data`, (blocks, bytes of a block), into blocks."""
        if self._rows is not None:
            self._rows[ids] = data.view(self._rows.dtype).reshape(len(ids), *self._rows.shape[1:])
            return
        shaped = data.reshape(len(ids), *self.shape)
        self._bytes[torch.from_numpy(ids).to(self._bytes.device)] = torch.from_numpy(np.ascontiguousarray(shaped)).to(self._bytes.device)


def _words(rows: Bytes) -> "npt.NDArray[np.uint8] | npt.NDArray[np.uint64]":
    """The same memory in words of 8 bytes, if that is possible, and a row of it in one piece if it lies so: copied much faster."""
    flat = rows.reshape(len(rows), -1) if rows[0].flags.c_contiguous else rows
    if not np.shares_memory(flat, rows):
        flat = rows
    whole = flat.shape[-1] % 8 == 0 and all(stride % 8 == 0 for stride in flat.strides[:-1]) and flat.ctypes.data % 8 == 0
    return flat.view(np.uint64) if whole else flat
