"""The oracle's other rule: the look-up of SGLang's file backend, which gives the set of boundaries that stored pages can restore.

Only imported in the oracle's own environment. It asks from any page on, as the engine does from the first page that it lacks;
there it takes the start of the list for the root. That is the known fault.
"""

from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer

from tests.oracle.content import STATE, WINDOW, Content, Prefix, Setting


class OracleStorage:
    """A directory of stored pages, one tiny file a page and part."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a great many tiny files
        self._directory = TemporaryDirectory(prefix="kvstore-oracle-", dir=memory)
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name="oracle",
        )
        self._files: Any = HiCacheFile(config, self._directory.name)
        window_pages = -(-setting.window // setting.page_tokens)
        self._transfers = [(PoolName.SWA, window_pages)] * bool(setting.window) + [(PoolName.MAMBA, 1)] * setting.state

    def hold(self, content: Content) -> None:
        """Store these pages and parts, and nothing else."""
        self._files.clear()
        byte = torch.zeros(1, dtype=torch.uint8)
        for prefix, parts in content.items():
            name = _name(prefix)
            there = {PoolName.KV: True, PoolName.SWA: parts & WINDOW, PoolName.MAMBA: parts & STATE}
            for pool in (pool for pool, held in there.items() if held):
                self._files.set(self._files._log_key(pool, name), byte)

    def usable(self, tokens: bytes, first: int) -> set[int]:
        """The boundaries after page `first` that the pages from `first` on can restore, by the look-up."""
        names = [_name(prefix) for prefix in self.setting.prefixes(tokens)][first:]
        transfers = [
            PoolTransfer(name=pool, keys=["any"] * min(pages, len(names)), hit_policy=PoolHitPolicy.TRAILING_PAGES)
            for pool, pages in self._transfers
        ]
        found = self._files.batch_exists_v2(names, transfers)
        return {first + pages for pages in found.restorable_prefix_pages}


def _name(prefix: Prefix) -> str:
    return blake2b(prefix, digest_size=16).hexdigest()
