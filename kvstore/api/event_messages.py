"""KV events as vLLM publishes them: what is in a message, and how changes become events. No sockets.

The structs are those of vLLM 0.32 (`vllm/distributed/kv_events.py`): a batch is an array, an event a map with its type, and what is at its
default is left out. Fields that say nothing here (LoRA names, cache groups) are None.
"""

from typing import Any

import msgspec
import numpy as np

from kvstore.api.event_settings import HashForm
from kvstore.digests import KEY_BYTES
from kvstore.store.tier_events import DRAM, SSD, Came, Changes

MEDIA = {DRAM: "CPU", SSD: "STORAGE"}
"""vLLM's words for the tiers."""
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number after the last batch of a replay."""
Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks, each the child of the one before, came to a medium."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks left a medium."""

    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Nothing is anywhere."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message tells. Some readers take exactly three fields, so the rank is always there."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def events_of(changes: Changes, form: HashForm) -> list[Event]:
    """The events that tell of changes, in their order."""
    removed = [BlockRemoved(_hashes(left.keys, form), MEDIA[left.tier]) for left in changes.left]
    page_tokens = changes.settings.spec.page_tokens
    return [*removed, *(_stored(came, page_tokens, form) for came in changes.came)]


def _stored(came: Came, page_tokens: int, form: HashForm) -> BlockStored:
    parent = _hashes(came.parent, form)[0] if came.parent else None
    tokens = np.frombuffer(came.tokens, "<u4").tolist()
    extra_keys = [(extra.hex(),) if extra else None for extra in came.extras] if any(came.extras) else None
    return BlockStored(_hashes(came.keys, form), parent, tokens, page_tokens, None, MEDIA[came.tier], None, extra_keys)


def _hashes(keys: bytes, form: HashForm) -> list[Hash]:
    """Page keys in a row as block hashes; the number is what vLLM makes of its own: the last 8 bytes, big-endian."""
    if form == "bytes":
        return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    numbers: list[Hash] = np.frombuffer(keys, ">u8").reshape(-1, KEY_BYTES // 8)[:, -1].tolist()
    return numbers
