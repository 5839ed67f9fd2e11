"""One who follows a daemon's KV events as a router would: a SUB socket, a DEALER for what it missed, and structs that mirror vLLM's."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvstore.digests import NO_EXTRA, page_key_chain
from kvstore.kvspec import namespace_digest
from tests.integration.pages import SPEC, Tokens

WAIT_S = 30.0
_IDLE_READS = 10
END = b"\xff" * 8


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM 0.32's fields, in its order."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


Message = tuple[str, int, KVEventBatch]
View = dict[str, set[bytes | int]]


def parse(frames: list[bytes]) -> Message:
    topic, number, payload = frames
    return topic.decode(), int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)


def hashes(tokens: Tokens, *, tenant: str = "default", whole: bool = False) -> list[bytes | int]:
    """The block hashes of a prompt's pages, computed as docs/events.md says."""
    root = namespace_digest(tenant, "rev-1", SPEC)
    width = SPEC.page_tokens
    labels = [tokens[at : at + width].tobytes() + NO_EXTRA for at in range(0, len(tokens), width)]
    keys = list(page_key_chain(root, labels))
    return list(keys) if whole else [int.from_bytes(key[-8:], "big") for key in keys]


class Follower:
    """What is where, by topic and medium. `messages` are those that were applied, in the order of their numbers."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "kv@", high_water: int = 0) -> None:
        self.view: dict[str, View] = {}
        self.messages: list[Message] = []
        self.number = -1
        self.replayed = 0
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._context.setsockopt(zmq.IPV6, 1)
        self.sub = self._context.socket(zmq.SUB)
        self.sub.set_hwm(high_water)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(endpoint)
        self._replay = replay

    def apply(self, message: Message) -> None:
        topic, self.number, batch = message
        self.messages.append(message)
        view = self.view.setdefault(topic, defaultdict(set))
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                for known in [view] if topic != "kv@" else list(self.view.values()):
                    known.clear()
            elif isinstance(event, BlockStored):
                view[event.medium or ""].update(event.block_hashes)
            else:
                view[event.medium or ""].difference_update(event.block_hashes)

    def ask(self, first: int, topics: str = "") -> list[Message]:
        """What the daemon still has from a number on."""
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.connect(self._replay)
            dealer.send_multipart([b"", first.to_bytes(8, "big"), *([topics.encode()] if topics else [])])
            found: list[Message] = []
            while True:
                assert dealer.poll(int(WAIT_S * 1000)), "the replay does not end"
                empty, *frames = dealer.recv_multipart()
                assert empty == b""
                if frames[1] == END:
                    assert frames == [b"", END, b""]
                    return found
                found.append(parse(frames))
        finally:
            dealer.close(linger=0)

    def catch_up(self) -> None:
        """Ask for everything that was not heard yet."""
        for message in self.ask(self.number + 1):
            self.apply(message)
            self.replayed += 1

    def read(self, wait_s: float = 0.05) -> bool:
        """Take one message, if one comes; after a hole, first what is in it."""
        if not self.sub.poll(int(wait_s * 1000)):
            return False
        message = parse(self.sub.recv_multipart())
        if message[1] > self.number + 1 and self._replay:
            self.catch_up()
        if message[1] > self.number:
            self.apply(message)
        return True

    def until(self, condition: "Callable[[Follower], bool]") -> None:
        """Go on until something is so; fail if it does not become so."""
        deadline, idle = time.monotonic() + WAIT_S, 0
        while not condition(self):
            assert time.monotonic() < deadline, f"it does not come to be so: {self.view}"
            idle = 0 if self.read() else idle + 1
            if idle % _IDLE_READS == _IDLE_READS - 1 and self._replay:
                self.catch_up()  # the last ones may have come before the subscription was heard of

    def where(self, namespace: str = "pages", tenant: str = "default") -> View:
        """What is where in a namespace; media with nothing left out."""
        view = self.view.get(f"kv@{tenant}@{namespace}", {})
        return defaultdict(set, {medium: blocks for medium, blocks in view.items() if blocks})

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
