"""What the policies are still to be told of: no flood of uses may keep others waiting, and none is told of in one go for long."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from kvstore.digests import slice_digest
from kvstore.kvspec import Component, KVSpec
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.dram import untold
from kvstore.store.dram.replacement import DRAM, SSD, Replacement
from kvstore.tiers.policies import Columns, Values
from kvstore.tiers.policies import Use as PolicyUse
from tests.store.test_store import OWNER, SPEC, Prefix, config, put, settings_named, tokens_of

_HASH = 16
FLAT = KVSpec(SPEC.page_tokens, (Component("full", 1, 1, 16, "u8", planes=1),), hash_bytes=_HASH, flat=True)
LABELS = np.random.default_rng(5).bytes(6000 * _HASH)
_AT_ONCE = 200
"""Pages in a put."""
_FLOOD = 24
"""Uses in a turn of the loop: more than are told of in one."""


def _match(store: Store, space: Space, labels: bytes) -> int:
    match = store.match(space, labels, {}, owner=OWNER, lease_s=60)
    assert match.lease is not None
    store.release_lease(OWNER, match.lease.id)
    return match.pages


async def _turns_under_flood(store: Store, space: Space, prefix: Prefix, work: asyncio.Task[int] | asyncio.Task[None]) -> int:
    """How many turns of the loop, in each of which more is used than is told of, it takes for something to be done; 100 at most."""
    for turn in range(100):
        if work.done():
            return turn
        for _ in range(_FLOOD):
            _match(store, space, tokens_of(prefix))
        await asyncio.sleep(0)
    return 100


async def test_what_waits_for_uses_to_be_told_goes_on_where_requests_never_pause(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (0, 1, 2), b"v" * 16)
        work = asyncio.create_task(store.replacement.catch_up())
        assert await _turns_under_flood(store, space, (0, 1, 2), work) < 100
        await work


@pytest.mark.parametrize(("within_s", "turns"), [(0.0, 1), (3600.0, 4)])
async def test_who_waits_gives_way_to_others_for_a_bounded_time(tmp_path: Path, within_s: float, turns: int) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named())
        await put(store, space, (0, 1, 2), b"v" * 16)
        await store.replacement.catch_up()
        for _ in range(160):
            _match(store, space, tokens_of((0, 1, 2)))
        work = asyncio.create_task(store.replacement.catch_up(within_s))
        taken = 0
        while store.replacement._notes:
            await asyncio.sleep(0)
            taken += 1
        assert (taken == turns) if turns == 1 else (taken >= turns)
        await work


async def test_dram_is_freed_where_requests_never_pause(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        for prefix in ((0, 1, 2), (5, 6)):
            await put(store, space, prefix, b"v" * 16, Ack.DURABLE)
        work = asyncio.create_task(store._residency.reclaim(1))
        assert await _turns_under_flood(store, space, (0, 1, 2), work) < 100
        assert await work > 0
        check(store)


def _uses_told(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[int]:
    """The pages of each use that the policy of DRAM is told of from now on."""
    told: list[int] = []
    policy = store.replacement.policies[DRAM]
    inner = policy.used

    def used(columns: Columns, use: PolicyUse) -> None:
        told.append(len(use.slots))
        inner(columns, use)

    monkeypatch.setattr(policy, "used", used)
    return told


@pytest.mark.parametrize("pages", [1, 60])
async def test_what_is_told_of_in_one_go_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    async with Store(config(tmp_path / "d", dram_bytes=400 * 5000, ssd_bytes=400 * 5000)) as store:
        space = await store.create_namespace(settings_named())
        prefix = tuple(range(pages))
        await put(store, space, prefix, b"v" * 16)
        for _ in range(1000):
            _match(store, space, tokens_of(prefix))
        told = _uses_told(monkeypatch, store)
        assert store.replacement.explain(space, space.tree.live_slots()[:1])
        assert 0 < len(told) <= untold.MOST // untold.A_USE


async def test_ssd_chooses_who_goes_without_having_to_tell_of_uses_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group commit waits for that, in turns of the loop, before it makes room."""
    waiting: list[int] = []
    inner = Replacement.values

    def values(self: Replacement, tier: int, *arguments: object, **more: object) -> list[Values]:
        if tier == SSD:
            waiting.append(len(self._notes))
        return inner(self, tier, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Replacement, "values", values)
    async with Store(config(tmp_path / "d", policy="arc", dram_bytes=200 * 5000, ssd_bytes=12 * 5000)) as store:
        space = await store.create_namespace(settings_named(retention_s=0))
        await put(store, space, (0,), b"v" * 16, Ack.DURABLE)
        for page in range(1, 40):
            for _ in range(5):
                _match(store, space, tokens_of((0,)))
            await put(store, space, (page,), b"v" * 16, Ack.DURABLE)
        assert waiting, "SSD never got full: this test shows nothing"
        assert max(waiting) == 0
        check(store)


# --- pages that stand alone ---------------------------------------------------------------------------------------------


async def _flat(store: Store, pages: int) -> Space:
    """A flat namespace with pages of no more than a blob in all."""
    space = await store.create_namespace(NamespaceSettings("default", "flat", "m", FLAT, retention_s=0))
    part = FLAT.whole(0)
    for first in range(0, pages, _AT_ONCE):
        labels = LABELS[first * _HASH : min(first + _AT_ONCE, pages) * _HASH]
        under_way = await store.begin_put(OWNER, space, PutRequest(first.to_bytes(16, "little"), labels, {}, 0, (part,), Ack.MEMORY))
        data = bytes(FLAT.part_bytes(part))
        for cell, number in under_way.wanted_cells():
            view, _ = under_way.locate(cell, number, 0, len(data), 1)
            view[:] = data
            digest = slice_digest(view)
            under_way.received(cell, number, 0, [digest], digest)
        await store.commit_put(under_way)
    await store.replacement.catch_up()
    return space


async def test_a_match_of_pages_that_stand_alone_tells_of_nothing_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Store(config(tmp_path / "d", max_pages=50_000, dram_bytes=4 << 20, ssd_bytes=4 << 20)) as store:
        space = await _flat(store, 4200)
        told = _uses_told(monkeypatch, store)
        assert _match(store, space, LABELS[: 4200 * _HASH]) == 4200
        assert told == []
        await store.replacement.catch_up()
        assert sum(told) == 4200
        assert max(told) <= untold.APART_AT_A_TIME
        check(store)


@pytest.mark.parametrize("policy", ["classifier", "arc", "s3fifo"])
async def test_pages_that_stand_alone_are_told_of_as_far_as_they_are_there(tmp_path: Path, policy: str) -> None:
    async with Store(config(tmp_path / "d", policy=policy)) as store:
        space = await _flat(store, 8)
        labels = LABELS[: 8 * _HASH]
        _match(store, space, labels + labels[:_HASH])  # one is named twice
        for page, ghosts in ((2, True), (5, False)):
            slot = int(space.tree.path_slots(space.tree.match(labels[page * _HASH : (page + 1) * _HASH]))[0])
            space.remove_page(slot, ghosts=ghosts)
        await store.replacement.catch_up()
        uses = [
            page.explanation.uses
            for at in range(8)
            for page in store.why(space, labels[at * _HASH : (at + 1) * _HASH], {}).found
            if page.explanation is not None
        ]
        assert uses == ([2, 2, 1, 2, 2, 2, 2] if policy == "classifier" else [])
        check(store)
        _match(store, space, labels[: 2 * _HASH])
        await store.drop_namespace(space)
        await store.replacement.catch_up()
