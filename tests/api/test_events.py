"""The publisher of KV events in process: what a slow reader misses, and how much is kept for it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from kvstore.api import events
from kvstore.api.event_messages import BlockStored, events_of
from kvstore.api.event_settings import EventSettings
from kvstore.api.events import EventPublisher
from kvstore.digests import NO_EXTRA
from kvstore.kvspec import Component, KVSpec
from kvstore.store import NamespaceSettings
from kvstore.store.stats import Stats
from kvstore.store.tier_events import DRAM, Came, Changes, Left, TierEvents
from tests.integration.event_follower import Follower

T = TypeVar("T")
SPEC = KVSpec(2, (Component("full", 1, 1, 8),))
SETTINGS = NamespaceSettings("tenant", "name", "model", SPEC)


async def _apart(call: Callable[[], T]) -> T:
    """A follower waits in a thread, while the publisher has this one."""
    return await asyncio.to_thread(call)


@pytest.mark.usefixtures("never_blocks")
async def test_a_slow_reader_misses_some_and_gets_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_HIGH_WATER", 4)
    monkeypatch.setattr(events, "_REPLAY_HIGH_WATER", 4)
    settings = EventSettings(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    publisher = EventPublisher(TierEvents(), settings, Stats(), 1000)
    await publisher.open([SETTINGS], asyncio.Event())
    slow = await _apart(lambda: Follower(settings.endpoint, settings.replay, high_water=1))
    try:
        for _ in range(500):  # until it is heard of
            publisher._publish(b"kv@tenant@name", [BlockStored([1], None, [], 2, None, "CPU", None)])
            if await _apart(lambda: slow.read(0.02)):
                break
        begun = publisher._next
        for number in range(800):
            publisher._publish(b"kv@tenant@name", [BlockStored([number] * 1000, None, [], 2, None, "CPU", None)])
        slow.number, heard = begun - 1, []
        while await _apart(lambda: slow.sub.poll(200)):
            heard.append(int.from_bytes(slow.sub.recv_multipart()[1], "big"))
        assert len(heard) < 800, "it was to be too slow"
        assert heard == sorted(set(heard))
        await _apart(slow.catch_up)
        numbers = [number for _, number, _ in slow.messages if number >= begun]
        assert numbers == list(range(begun, begun + 800))
        assert slow.where("name", "tenant")["CPU"].issuperset(range(800))
    finally:
        slow.close()
        await publisher.close()


async def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches and in bytes; who asks for more gets what there is."""
    monkeypatch.setattr(events, "_BUFFER_BATCHES", 50)
    settings = EventSettings(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    publisher = EventPublisher(TierEvents(), settings, Stats(), 1000)
    await publisher.open([], asyncio.Event())
    follower = await _apart(lambda: Follower(settings.endpoint, settings.replay))
    try:
        for _ in range(200):
            publisher._publish(b"kv@tenant@name", [BlockStored([1], None, [], 2, None, "CPU", None)])
        assert [message[1] for message in await _apart(lambda: follower.ask(0))] == list(range(1151, 1201))
        monkeypatch.setattr(events, "_BUFFER_BYTES", 5_000)
        publisher._publish(b"kv@tenant@name", [BlockStored([1 << 60] * 1000, None, [], 2, None, "CPU", None)])
        assert [message[1] for message in await _apart(lambda: follower.ask(0))] == [1201]
        assert publisher._buffered == len(publisher._buffer[1201][1]) > 9000
    finally:
        follower.close()
        await publisher.close()


def test_extra_keys_go_with_tokens() -> None:
    """A page with an image is not to be taken for the same tokens without one."""
    key, extra = bytes(range(32)), bytes(range(32, 64))
    plain = Came(DRAM, b"", key + key, bytes(16), (b"", b""))
    with_image = Came(DRAM, key, key + extra, bytes(16), (b"", extra))
    first, second = events_of(Changes(SETTINGS, [], [plain, with_image]), "int")
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.extra_keys is None
    assert second.extra_keys == [None, (extra.hex(),)]
    assert second.parent_block_hash == int.from_bytes(key[-8:], "big")
    assert second.token_ids == [0, 0, 0, 0]
    assert NO_EXTRA not in (extra, key)


def test_what_left_comes_first() -> None:
    key = bytes(range(32))
    changes = Changes(SETTINGS, [Left(DRAM, key)], [Came(DRAM, b"", key, b"", ())])
    assert [type(event).__name__ for event in events_of(changes, "bytes")] == ["BlockRemoved", "BlockStored"]
    assert events_of(changes, "bytes")[0].block_hashes == [key]  # type: ignore[union-attr]


def test_an_at_sign_in_a_name_cuts_no_topic() -> None:
    assert EventSettings("").topic_of("a@b", "c") == b"kv@a%40b@c" != EventSettings("").topic_of("a", "b@c")
    assert EventSettings("", topic="x").common_topic == EventSettings("", topic="x").topic_of("t", "n") == b"x"
    assert EventSettings("").common_topic == b"kv@"
