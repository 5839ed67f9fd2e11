"""SGLang's host pools as the store sees them: rows of bytes in memory, and what goes into the fingerprint of their namespace.

Nothing here imports SGLang: pools are asked what they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from kvstore_client import KVSpec, fingerprint_revision
from kvstore_connectors.hashed_pages import LABEL_BYTES, label, namespace_name, page_tokens_for, rows_component, settings_digest

ENGINE = "sglang"
_GEOMETRY = (
    "layout", "dtype", "page_size", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim",
    "start_layer", "end_layer", "size_per_token", "head_group_num", "num_mamba_layers", "conv_state_shapes", "temporal_state_shape",
    "conv_dtype", "temporal_dtype",
)  # fmt: skip
"""What a pool may say of the bytes of its pages; dtype and layout in any case."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model the pages of a rank are. Pages that are the same on several ranks belong to one shard."""

    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    dcp: tuple[int, int]

    @classmethod
    def of(cls, config: Any, *, replicated: bool) -> "Shard":
        """Of a rank, by SGLang's storage config; `replicated` over tensor-parallel ranks, as latent attention is."""
        tp = (0, 1) if replicated else (config.tp_rank, config.tp_size)
        return cls(
            tp, (config.pp_rank, config.pp_size), (config.attn_cp_rank, config.attn_cp_size),
            (getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)),
        )  # fmt: skip


@dataclass(frozen=True)
class PageSpace:
    """A namespace of pages: its name, fingerprint and KV spec."""

    name: str
    fingerprint: str
    spec: KVSpec


@dataclass(frozen=True, slots=True)
class PageForm:
    """How a page's bytes lie: in so many rows of one size, or in one piece that the pool packs (`packed`)."""

    rows: int
    row_bytes: int
    packed: bool

    def space(self, model: str, revision: str, page_tokens: int, settings: Mapping[str, object], *, chain: bool) -> PageSpace:
        """The namespace of such pages. Raises BadRequest for a page that the store can't describe."""
        tokens = page_tokens_for(self.row_bytes, page_tokens)
        part = rows_component("full", self.rows, self.row_bytes, tokens)
        spec = KVSpec(tokens, (part,), hash_bytes=LABEL_BYTES, flat=not chain, group_layers=1 if self.rows > 1 else 0)
        described = settings_digest({"engine": ENGINE, "packed": self.packed, **settings})
        fingerprint = fingerprint_revision(model, revision, settings=described)
        return PageSpace(namespace_name(ENGINE, model, "chain" if chain else "flat", fingerprint, spec), fingerprint, spec)


class HostPool:
    """One host pool of SGLang."""

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self.form = self._form()
        geometry = {field: _plain(getattr(pool, field)) for field in _GEOMETRY if hasattr(pool, field)}
        self.settings = {"pool": name, "kind": type(pool).__name__, "geometry": geometry}

    def _form(self) -> PageForm:
        """Rows where the pool gives their addresses, and they are of one size; else in one piece."""
        try:
            addresses, sizes = self.pool.get_page_buffer_meta(torch.zeros(self.page_size, dtype=torch.int64))
        except (AttributeError, AssertionError, NotImplementedError, TypeError, ValueError):
            sizes = []
        if len(sizes) and len(set(sizes)) == 1:
            return PageForm(len(addresses), int(sizes[0]), packed=False)
        return PageForm(1, self.packed_kind[1], packed=True)

    @cached_property
    def packed_kind(self) -> tuple[str, int]:
        """Dtype and size of its pages in one piece."""
        return tensor_kind(self.pool.get_dummy_flat_data_page())

    def addresses(self, host_indices: Any, first: int, pages: int) -> list[list[int]]:
        """Of the rows of some pages."""
        rows = self.form.rows
        chosen = host_indices[first * self.page_size : (first + pages) * self.page_size]
        flat, _ = self.pool.get_page_buffer_meta(chosen)
        return [list(flat[at : at + rows]) for at in range(0, len(flat), rows)]

    def packed(self, host_indices: Any, first: int, pages: int) -> list[torch.Tensor]:
        """Copies of some pages, each in one piece."""
        starts = host_indices[:: self.page_size].tolist()[first : first + pages]
        return [self.pool.get_data_page(start, flat=True).contiguous() for start in starts]

    def room(self, pages: int) -> list[torch.Tensor]:
        """Room for pages in one piece."""
        return [self.pool.get_dummy_flat_data_page() for _ in range(pages)]

    def unpack(self, host_indices: Any, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Put pages in one piece where they belong."""
        starts = host_indices[:: self.page_size].tolist()[first : first + len(tensors)]
        for start, tensor in zip(starts, tensors, strict=True):
            self.pool.set_from_flat_data_page(start, tensor)


def tensor_kind(tensor: torch.Tensor) -> tuple[str, int]:
    """Its dtype, and its size in bytes."""
    return str(tensor.dtype), int(tensor.nbytes)


def tensor_rows(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The addresses of pages in one piece."""
    return [[tensor.data_ptr()] for tensor in tensors]


@lru_cache(maxsize=65_536)
def key_label(key: str) -> bytes:
    """The label of a key: the digest that it writes in hex, or a digest of any other."""
    if len(key) == 2 * LABEL_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return label(key.encode())


def _plain(value: object) -> object:
    """A setting as JSON takes it."""
    if isinstance(value, int | str) or value is None:
        return value
    if isinstance(value, Sequence | torch.Size):
        return [_plain(one) for one in value]
    return str(value)
