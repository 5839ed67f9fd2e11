"""Blocks of the engine as rows of bytes, whatever order its memory has; heads of ranks; what can't be kept is refused."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore_connectors.vllm_layout import GroupLayout, LayerBlocks, layout_of

BLOCKS, HEADS, TOKENS, CONTENT = 7, 3, 4, 10


def logical(order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[block, head, token, content] whose memory has the axes in another order."""
    shape = (BLOCKS, HEADS, TOKENS, CONTENT)
    stored = torch.zeros([shape[axis] for axis in order], dtype=dtype)
    return stored.permute([order.index(axis) for axis in range(4)])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)], ids=["LBHNC", "LBNHC", "LHBNC"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_rows_are_blocks_in_logical_order(order: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = logical(order, dtype)
    tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 250)
    nbytes = HEADS * TOKENS * CONTENT * dtype.itemsize
    blocks, ids = LayerBlocks(tensor, BLOCKS, nbytes), np.array([5, 0, 2])
    wide = np.zeros((3, 2, nbytes), np.uint8)
    blocks.gather(ids, wide[:, 1])
    assert not wide[:, 0].any()
    assert np.array_equal(wide[:, 1], tensor[ids].contiguous().view(torch.uint8).reshape(3, -1).numpy())
    before = tensor.clone()
    blocks.scatter(np.array([1, 3, 4]), wide[:, 1])
    assert torch.equal(tensor[[1, 3, 4]], before[[5, 0, 2]])
    assert torch.equal(tensor[[0, 2, 5, 6]], before[[0, 2, 5, 6]])


def test_kernel_blocks_are_one_page() -> None:
    tensor = torch.arange(2 * BLOCKS * HEADS * TOKENS * CONTENT, dtype=torch.float32).reshape(2 * BLOCKS, HEADS, TOKENS, CONTENT)
    blocks = LayerBlocks(tensor, BLOCKS, 2 * HEADS * TOKENS * CONTENT * 4)
    out = np.zeros((1, 2 * HEADS * TOKENS * CONTENT * 4), np.uint8)
    blocks.gather(np.array([3]), out)
    assert np.array_equal(out.view(np.float32).reshape(HEADS, 2 * TOKENS, CONTENT), np.concatenate(list(tensor[6:8].numpy()), axis=1))


@pytest.mark.parametrize(
    ("heads", "total", "ranks", "wanted"),
    [
        (1, 3, 3, [(0, 1, True), (1, 2, True), (2, 3, True)]),
        (4, 8, 2, [(0, 4, True), (4, 8, True)]),
        (1, 2, 4, [(0, 1, True), (0, 1, False), (1, 2, True), (1, 2, False)]),
        (1, 1, 2, [(0, 1, True), (0, 1, False)]),
    ],
)
def test_heads_of_ranks(heads: int, total: int, ranks: int, wanted: list[tuple[int, int, bool]]) -> None:
    group = GroupLayout(0, 0, ("a", "b"), heads, total, 64, False)
    found = [group.part(rank, ranks) for rank in range(ranks)]
    assert [(part.head_lo, part.head_hi, writes) for part, writes in found] == wanted


@dataclass
class FullAttentionSpec:
    """As vLLM's, as far as the layout looks."""

    block_size: int = 16
    num_kv_heads: int = 4
    num_heads: int = 4
    head_size: int = 8
    dtype: torch.dtype = torch.bfloat16
    num_head_slots: int | None = None
    tokens_per_state: int = 1
    state_content_size_bytes: int = 32


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 100


@dataclass
class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class Parallel:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


def config(*specs: Any, **parallel: int) -> tuple[Any, Any]:
    groups = [
        SimpleNamespace(layer_names=[f"model.layers.{10 - n}.attn", f"model.layers.{n}.attn"], kv_cache_spec=s) for n, s in enumerate(specs)
    ]
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
    return (
        SimpleNamespace(parallel_config=Parallel(**parallel), model_config=model, speculative_config=None),
        SimpleNamespace(kv_cache_groups=groups),
    )


def test_groups_become_components() -> None:
    layout = layout_of(*config(FullAttentionSpec(), SlidingWindowSpec()))
    assert [(c.kind, c.window, c.layers, c.kv_heads, c.head_dim, c.planes) for c in layout.spec.components] == [
        ("full", 0, 2, 4, 16, 1), ("window", 100, 2, 4, 16, 1),
    ]  # fmt: skip
    assert layout.groups[0].layers == ("model.layers.0.attn", "model.layers.10.attn")


@pytest.mark.parametrize(
    ("specs", "parallel", "why"),
    [
        ((MambaSpec(),), {}, "MambaSpec"),
        ((FullAttentionSpec(), SlidingWindowSpec(block_size=32)), {}, "one block size"),
        ((SlidingWindowSpec(),), {}, "no layer"),
        ((FullAttentionSpec(num_head_slots=2),), {}, "packs"),
        ((FullAttentionSpec(dtype=torch.complex64),), {}, "complex64"),
        ((FullAttentionSpec(),), {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_what_can_not_be_kept_is_refused(specs: tuple[Any, ...], parallel: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        layout_of(*config(*specs, **parallel))
