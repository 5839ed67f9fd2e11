"""The oracle: SGLang's UnifiedRadixCache on the CPU, with its own pools and allocators, driven through its public calls.

Only imported in the oracle's own environment. Both of its trees (Python and Rust) are read by the same calls.
"""

from array import array
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tests.oracle.content import STATE, WINDOW, Content, Setting
from tests.oracle.steps import FULL_KIND, STATE_KIND, WINDOW_KIND

POOL_PAGES = 1024
POOL_STATES = 128
_SHAPE: dict[str, Any] = {"dtype": torch.bfloat16, "head_num": 1, "head_dim": 2}
_PLACE: dict[str, Any] = {"device": "cpu", "enable_memory_saver": False}


class OracleCache:
    """One cache of the oracle, big enough that only the steps evict. `reset` empties it for the next sequence."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        args = ServerArgs(model_path="dummy", page_size=setting.page_tokens)
        args._mamba_cache_chunk_size = setting.page_tokens  # it would be read from the config of a model
        set_global_server_args_for_scheduler(args)
        requests = _request_pool(setting)
        self._states: Any = requests.mamba_allocator if setting.state else None
        self._slots: Any = _allocator(setting, requests)
        components = [ComponentType.FULL] + [ComponentType.SWA] * bool(setting.window) + [ComponentType.MAMBA] * setting.state
        self._cache: Any = UnifiedRadixCache(
            params=CacheInitParams(
                disable=False,
                req_to_token_pool=requests,
                token_to_kv_pool_allocator=self._slots,
                page_size=setting.page_tokens,
                sliding_window_size=setting.window or None,
                tree_components=tuple(components),
                enable_mamba_extra_buffer=setting.state,
                tree_core_backend=setting.core,
            )
        )
        self._core: Any = self._cache.tree_core
        got = type(self._core).__name__
        if got != {"python": "UnifiedTreeCore", "rust": "RustUnifiedTreeCore"}[setting.core]:
            raise RuntimeError(f"SGLang built a {got} where its {setting.core} tree was asked for")
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._cache.reset()
        self._slots.clear()
        if self._states is not None:
            self._states.clear()
        self._locks: list[tuple[Any, int]] = []
        self._inserted: set[bytes] = set()
        self._room = self._available()

    def _available(self) -> tuple[int, ...]:
        slots = (
            [self._slots.full_available_size(), self._slots.swa_available_size()] if self.setting.window else [self._slots.available_size()]
        )
        return (*slots, self._states.available_size() if self._states is not None else 0)

    # --- what the steps do ------------------------------------------------------------------------------------------------

    def insert(self, tokens: bytes, first_window: int, *, reuse: bool) -> int:
        """Insert pages, those from `first_window` on with windows, the last with a state.

        Returns the first page that was brought: 0, or the length of what was matched and reused.
        """
        params = InsertParams(key=_key(tokens))
        total, window_from = len(tokens) // 4, first_window * self.setting.page_tokens
        lock, old = None, 0
        if reuse:
            found = self._match(tokens)
            old, lock = found.device_prefix_len, self._cache.lock(found.last_device_node)
            params.prev_prefix_len = old
        new = self._new_slots(total - old, max(window_from - old, 0))
        params.value = torch.cat((self._old_slots(found.last_device_node), new)) if reuse else new
        if self.setting.window:
            params.set_evicted_seqlen(ComponentType.SWA, window_from)
        if self._states is not None:
            params.mamba_value = self._states.alloc(1)
        result = self._cache.insert(params)
        if self._states is not None and result.mamba_exist:
            self._states.free(params.mamba_value)
        self._cache.unlock(lock)
        self._inserted.add(tokens)
        return old // self.setting.page_tokens

    def _new_slots(self, count: int, without_window: int) -> Any:
        if not count:
            return torch.empty(0, dtype=torch.int64)
        if not self.setting.window:
            return self._slots.alloc(count)
        full = self._slots.full_attn_allocator.alloc(count)
        if without_window < count:
            window = self._slots.swa_attn_allocator.alloc(count - without_window)
            self._slots.set_full_to_swa_mapping(full[without_window:], window)
        return full

    def _old_slots(self, node: int) -> Any:
        return self._core.collect_full_device_indices(node, self._core.root_node_handle())

    def _match(self, tokens: bytes) -> Any:
        return self._cache.match_prefix(MatchPrefixParams(key=_key(tokens)))

    def longest(self, tokens: bytes) -> int:
        """The longest usable boundary, in pages. As in an engine, this is a use, and cuts nodes."""
        return int(self._match(tokens).device_prefix_len) // self.setting.page_tokens

    def usable(self, tokens: bytes) -> set[int]:
        """All usable boundaries: those that are the longest of the prompt that ends there."""
        boundaries = range(self.setting.pages(tokens) + 1)
        return {b for b in boundaries if self.longest(tokens[: b * self.setting.page_bytes]) == b}

    def full_pages(self, tokens: bytes) -> int:
        """Whole pages of the prompt that are there, usable or not. Changes nothing."""
        return int(self._core.match_full_device_prefix(_key(tokens))[0]) // self.setting.page_tokens

    def evict(self, kind: str, pages: int) -> None:
        """Have a component give up so many pages or states."""
        tokens = pages * self.setting.page_tokens
        self._cache.evict(
            EvictParams(
                num_tokens=tokens if kind == FULL_KIND else 0,
                swa_num_tokens=tokens if kind == WINDOW_KIND else 0,
                mamba_num=pages if kind == STATE_KIND else 0,
            )
        )

    def lock(self, tokens: bytes) -> int:
        """Match and lock. Returns the boundary locked, in pages; at 0 there is nothing to lock."""
        found = self._match(tokens)
        pages = int(found.device_prefix_len) // self.setting.page_tokens
        if pages:
            self._locks.append((self._cache.lock(found.last_device_node), pages))
        return pages

    def unlock(self, which: int, *, only_window: bool) -> int | None:
        """Undo one of the locks there are, or the window's part of it. Returns its index if it is gone."""
        if not self._locks:
            return None
        which %= len(self._locks)
        if only_window:
            if self.setting.window:
                self._cache.release_swa(self._locks[which][0])
            return None
        self._cache.unlock(self._locks.pop(which)[0])
        return which

    # --- what it holds ----------------------------------------------------------------------------------------------------

    def content(self) -> Content:
        """All pages, and their optional parts, read from its tree. Changes nothing."""
        content: Content = {}
        self._inserted = {tokens for tokens in self._inserted if self._read(tokens, content)}
        return content

    def _read(self, tokens: bytes, content: Content) -> bool:
        size, page_tokens = self.setting.page_bytes, self.setting.page_tokens
        matched, node, _ = self._core.match_full_device_prefix(_key(tokens))
        if not matched:
            return False
        for part in self._core.collect_path_info([node])[0]:
            end = part.path_end // page_tokens
            window = WINDOW * (self.setting.window > 0 and self._has(part.node_id, ComponentType.SWA))
            state = STATE * (self.setting.state and self._has(part.node_id, ComponentType.MAMBA))
            for page in range(part.path_start // page_tokens + 1, min(end, matched // page_tokens) + 1):
                content[tokens[: page * size]] = window | (state if page == end else 0)
        return True

    def _has(self, node: int, component: Any) -> bool:
        return self._core.get_component_device_value(node, component) is not None

    def check(self) -> None:
        """Its own check of its invariants; raises AssertionError."""
        self._cache.sanity_check()

    def drain(self) -> None:
        """Unlock and evict everything, and see that each slot came back: else it was not driven as it must be."""
        while self._locks:
            self.unlock(0, only_window=False)
        self._cache.evict(EvictParams(num_tokens=POOL_PAGES * self.setting.page_tokens))
        if self._available() != self._room:
            raise AssertionError(f"slots leaked: {self._available()} are free of {self._room}")


def _key(tokens: bytes) -> Any:
    return RadixKey(array("q", np.frombuffer(tokens, "<u4").tolist()))


def _request_pool(setting: Setting) -> Any:
    if not setting.state:
        return ReqToTokenPool(size=4, max_context_len=64, **_PLACE)
    shape = Mamba2StateShape.create(tp_world_size=1, intermediate_size=8, n_groups=1, num_heads=1, head_dim=8, state_size=2, conv_kernel=2)
    return HybridReqToTokenPool(
        size=4,
        mamba_size=POOL_STATES,
        mamba_spec_state_size=4,
        max_context_len=64,
        cache_params=Mamba2CacheParams(shape=shape, layers=[1]),
        mamba_layer_ids=[1],
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=1,
        **_PLACE,
    )


def _allocator(setting: Setting, requests: Any) -> Any:
    size = POOL_PAGES * setting.page_tokens
    common: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "need_sort": False}
    if setting.window:
        layers = {"swa_attention_layer_ids": [1], "full_attention_layer_ids": [0]}
        pool: Any = SWAKVPool(size=size, size_swa=size, page_size=setting.page_tokens, device="cpu", **layers, **_SHAPE)
        return SWATokenToKVPoolAllocator(size=size, size_swa=size, page_size=setting.page_tokens, kvcache=pool, **common)
    if setting.state:
        layers = {"full_attention_layer_ids": [0]}
        pool = HybridLinearKVPool(size=size, page_size=setting.page_tokens, mamba_pool=requests.mamba_pool, **layers, **_SHAPE, **_PLACE)
    else:
        pool = MHATokenToKVPool(size=size, page_size=setting.page_tokens, layer_num=1, **_SHAPE, **_PLACE)
    if setting.page_tokens == 1:
        return TokenToKVPoolAllocator(size=size, kvcache=pool, **common)
    return PagedTokenToKVPoolAllocator(size=size, page_size=setting.page_tokens, kvcache=pool, **common)
