"""The model that the factory serves, in small: its KV spec, and pages as accelerators hold them.

Each accelerator of a worker holds its share of the KV heads of all layers. Bytes are those of `PageGenerator`, so every page
can be checked wherever it is.
"""

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import BadRequest, Component, KVSpec, PartRange
from kvstore_workers.generator import PageGenerator
from kvstore_workers.trace import BLOCK_TOKENS

LAYERS, GROUP_LAYERS, KV_HEADS = 8, 2, 2
GROUPS = LAYERS // GROUP_LAYERS
_UNIT = LAYERS * KV_HEADS * 2 * 2
Bytes = npt.NDArray[np.uint8]


def factory_spec(bytes_per_token: int) -> KVSpec:
    """Pages of 512 tokens, 8 layers in 4 groups, 2 KV heads, bf16."""
    if bytes_per_token < _UNIT or bytes_per_token % _UNIT:
        raise BadRequest(f"--bytes-per-token is a multiple of {_UNIT}, not {bytes_per_token}")
    return KVSpec(BLOCK_TOKENS, (Component("full", LAYERS, KV_HEADS, bytes_per_token // _UNIT),), group_layers=GROUP_LAYERS)


class Shards:
    """How a page is shared out over accelerators."""

    def __init__(self, spec: KVSpec, accelerators: int) -> None:
        heads = spec.components[0].kv_heads
        if accelerators < 1 or heads % accelerators:
            raise BadRequest(f"{accelerators} accelerators can't share {heads} KV heads evenly")
        each = heads // accelerators
        self.spec = spec
        self.parts = tuple(PartRange(0, 0, LAYERS, d * each, (d + 1) * each) for d in range(accelerators))
        self.page_bytes = spec.part_bytes(self.parts[0])
        self._generator = PageGenerator(spec.page_bytes, spec.page_tokens)
        self._page = np.empty(spec.page_bytes // 8, np.uint64)

    def seeds(self, tokens: npt.NDArray[np.uint32]) -> list[bytes]:
        """One seed a whole page of a prompt."""
        return self._generator.seeds(tokens)

    def produce(self, seeds: list[bytes], rooms: list[Bytes]) -> None:
        """Write new pages as they are sent: in each accelerator's room, layer group by layer group, all pages of a group together."""
        for index, seed in enumerate(seeds):
            page = self._whole(seed)
            for part, room in zip(self.parts, rooms, strict=True):
                mine = page[:, :, part.head_lo : part.head_hi].reshape(GROUPS, -1)
                room.reshape(GROUPS, len(seeds), -1)[:, index] = mine

    def wrong_bytes(self, seeds: list[bytes], shards: list[Bytes]) -> int:
        """How many bytes of pages are not what they should be; each accelerator has them page after page."""
        wrong = 0
        for index, seed in enumerate(seeds):
            page = self._whole(seed)
            for part, shard in zip(self.parts, shards, strict=True):
                due = page[:, :, part.head_lo : part.head_hi]
                found = shard[index * self.page_bytes : (index + 1) * self.page_bytes].reshape(due.shape)
                if not np.array_equal(due, found):
                    wrong += int((due != found).sum())
        return wrong

    def whole_pages(self, seeds: list[bytes], out: Bytes) -> None:
        """Write whole pages, one after the other."""
        for seed, page in zip(seeds, out, strict=True):
            page[:] = self._whole(seed).reshape(-1)

    def _whole(self, seed: bytes) -> Bytes:
        """A page as (layer, plane, head, bytes)."""
        page = np.empty_like(self._page)
        self._generator.fill(seed, page)
        return page.view(np.uint8).reshape(LAYERS, 2, KV_HEADS, -1)


def output_tokens(turn: int, count: int) -> npt.NDArray[np.uint32]:
    """The tokens that a turn makes."""
    return np.random.Generator(np.random.Philox(key=[turn, 77])).integers(0, 128_000, count, dtype=np.uint32)
