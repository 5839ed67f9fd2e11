"""The text tier in a whole store: recipes come with puts, outlive pages and restarts, and nothing is discarded that lacks one."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blockbuster import BlockBuster

from kvstore.digests import NO_EXTRA, page_key, slice_digest
from kvstore.errors import BadRequest, DiskFailing
from kvstore.kvspec import PartRange
from kvstore.lmdb_walk import LEAF, NODE, page_flags, page_nodes
from kvstore.radix.pages import RECIPE
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.checking.check import check, check_recipes_there
from kvstore.store.checking.running import check_running
from kvstore.store.checking.stopped import check_stopped
from kvstore.store.checking.verify import CheckReport
from kvstore.store.puts.put import Put
from kvstore.tiers.recipe import Recipe, RecipeKind
from kvstore.tiers.text import RecipeBatch
from tests.apart import apart
from tests.store.test_store import PAGE_TOKENS, PARTS, SPEC, Prefix, config, page_bytes, put, read, settings_named, tokens_of


def keys_of(space: Space, prefix: Prefix) -> list[bytes]:
    key, tokens, found = space.digest, tokens_of(prefix), []
    for page in range(len(prefix)):
        key = page_key(key, tokens[page * 4 * PAGE_TOKENS : (page + 1) * 4 * PAGE_TOKENS] + NO_EXTRA)
        found.append(key)
    return found


async def recipes_of(store: Store, space: Space, prefix: Prefix) -> list[Recipe | None]:
    await store.recipes.flush(5)
    return await store.recipes.read(space, keys_of(space, prefix))


def matched(store: Store, space: Space, prefix: Prefix) -> int:
    return store.match(space, tokens_of(prefix), {}).pages


async def rebuildable(store: Store, space: Space, prefix: Prefix) -> int:
    return await store.rebuildable_pages(space, tokens_of(prefix), {})


async def test_recipes_come_with_puts(tmp_path: Path, never_blocks: BlockBuster) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        other = await store.create_namespace(NamespaceSettings("default", "other", "model", SPEC.__class__(8, SPEC.components)))
        await put(store, space, (1, 2, 3), b"v" * 16)
        found = await recipes_of(store, space, (1, 2, 3))
        for depth, (recipe, key) in enumerate(zip(found, keys_of(space, (1, 2, 3)), strict=True)):
            assert recipe is not None
            assert (recipe.key, recipe.depth, recipe.kind, recipe.version) == (key, depth, RecipeKind.TOKENS, b"v" * 16)
            assert recipe.body == tokens_of((depth + 1,))
            assert recipe.parent == (keys_of(space, (1, 2, 3))[depth - 1] if depth else space.digest)
            slot = space.tree.pages.find_key(key)
            assert {p.blob for p in recipe.parts} == {space.blobs.id_of(row) for row in space.rows_of(slot)}
            assert sum(p.size for p in recipe.parts) == SPEC.page_bytes
            assert space.tree.pages.flags[slot] & RECIPE
        assert store.recipes.holding(space).recipes == 3
        assert store.recipes.holding(other).recipes == 0
        assert store.figures.usage()["text"].used < 4000
        check(store)


async def test_dropped_to_text_and_reported(tmp_path: Path, never_blocks: BlockBuster) -> None:
    async with Store(config(tmp_path / "d", max_ghosts=0)) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        await put(store, space, (1, 2, 3, 4), b"v" * 16, Ack.DURABLE)
        await put(store, space, (1, 2, 9), b"v" * 16)
        assert await rebuildable(store, space, (1, 2, 3, 4)) == 0
        assert await store.prefixes.drop_to_text(space, tokens_of((1, 2, 3, 4)), {}, 1) == 4  # with (1, 2, 9), which hangs from it
        assert matched(store, space, (1, 2, 3, 4)) == 1
        assert await rebuildable(store, space, (1, 2, 3, 4)) == 3
        assert await rebuildable(store, space, (1, 2, 9, 7)) == 2
        assert await rebuildable(store, space, (1, 7, 3)) == 0
        await store.settle()
        check(store)
        assert await store.prefixes.drop_to_text(space, tokens_of((1,)), {}, 0) == 1
        assert await rebuildable(store, space, (1, 2, 3, 4)) == 4
        assert await store.prefixes.drop_to_text(space, tokens_of((1,)), {}, 0) == 0
        assert store.figures.usage()["ssd"].used == 0
        # What a delete, or an explicit call, takes is gone for good.
        assert await store.prefixes.delete(space, tokens_of((1, 2, 3)), {}, 2) == 0
        assert await rebuildable(store, space, (1, 2, 3, 4)) == 2
        assert await rebuildable(store, space, (1, 2, 9)) == 3
        assert await store.recipes.delete(space, keys_of(space, (1, 2))[1]) == 2
        assert await rebuildable(store, space, (1, 2, 9)) == 1
        await put(store, space, (5, 6), b"v" * 16)
        await store.recipes.flush(5)
        assert await store.recipes.delete_all(space) == 1
        assert store.recipes.holding(space).recipes == 2  # of the pages that are there


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_was_put_is_there_or_can_be_computed_again(tmp_path: Path, seed: int) -> None:
    """Tiers far too small, drops, deletes and restarts: what was not deleted is matched, or rebuildable, to its last page."""
    rng, kept = np.random.default_rng(seed), set[Prefix]()
    changes = {"dram_bytes": 24 * 8704, "ssd_bytes": 200_000, "max_ghosts": [0, 5, 1000][seed], "put_wait_s": 5.0}
    for _ in range(3):
        async with Store(config(tmp_path / "d", **changes)) as store:
            space = await store.create_namespace(settings_named(recipes=True, retention_s=0))
            for _ in range(60):
                prefix: Prefix = tuple(rng.integers(0, 3, rng.integers(1, 6)).tolist())
                match rng.integers(0, 8):
                    case 0:
                        await store.prefixes.drop_to_text(space, tokens_of(prefix), {}, int(rng.integers(0, len(prefix))))
                    case 1 if rng.integers(0, 3) == 0:
                        first = int(rng.integers(0, len(prefix)))
                        await store.prefixes.delete(space, tokens_of(prefix), {}, first)
                        kept = {one for one in kept if one[: first + 1] != prefix[: first + 1]}
                        assert await rebuildable(store, space, prefix) + matched(store, space, prefix) <= first
                    case _:
                        first = matched(store, space, prefix)
                        if first < len(prefix):
                            await put(store, space, prefix, b"v" * 16, first=first)
                        kept |= {prefix[: end + 1] for end in range(len(prefix))}
            for one in kept:
                assert matched(store, space, one) + await rebuildable(store, space, one) == len(one), f"{one} is lost"
            await store.settle()
            check(store)
            check_recipes_there(store)
            assert store.stats.evicted_ssd_pages + store.stats.dropped_pages > 0


async def test_they_outlive_restarts_and_go_with_their_namespace(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        await put(store, space, (1, 2, 3), b"v" * 16, Ack.DURABLE)
        await put(store, space, (7, 8), b"v" * 16)
        await store.prefixes.drop_to_text(space, tokens_of((1, 2, 3)), {}, 0)
    assert check_stopped(tmp_path / "d", lambda _: None).clean
    async with Store(config(tmp_path / "d")) as store:
        (space,) = store.namespaces("default")
        assert await rebuildable(store, space, (1, 2, 3)) == 3
        assert await read(store, space, (7, 8)) == 2
        await store.recipes.flush(5)
        assert all(space.tree.pages.flags[space.tree.pages.find_key(key)] & RECIPE for key in keys_of(space, (7, 8)))
        await store.drop_namespace(space)
        assert store.figures.usage()["text"].used == 0
        again = await store.create_namespace(settings_named(recipes=True))
        assert await rebuildable(store, again, (1, 2, 3)) == 0


async def test_pages_whose_recipes_were_lost_get_them_again(tmp_path: Path) -> None:
    """The journal of a namespace with recipes has the labels: a start finds what lacks one, and writes it."""
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        await put(store, space, (1, 2, 3), b"v" * 16, Ack.DURABLE)
    for file in (tmp_path / "d" / "recipes").iterdir():
        file.unlink()
    async with Store(config(tmp_path / "d")) as store:
        (space,) = store.namespaces("default")
        assert all(recipe is not None for recipe in await recipes_of(store, space, (1, 2, 3)))
        await store.prefixes.drop_to_text(space, tokens_of((1, 2, 3)), {}, 0)
        assert await rebuildable(store, space, (1, 2, 3)) == 3


async def test_flipped_bits_in_recipes_are_noticed(tmp_path: Path) -> None:
    """Every page is matched with its own bytes, or missed; no recipe is read that was not written.

    In processes of their own: LMDB itself can end one at a damaged page (docs/known-limits.md).
    """
    async with Store(config(tmp_path / "d", ssd_bytes=4 << 20)) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        for number in range(8):
            await put(store, space, (number, 1, 2), b"v" * 16, Ack.DURABLE)
        before = {number: await recipes_of(store, space, (number, 1, 2)) for number in range(8)}
        for number in range(4):
            await store.prefixes.drop_to_text(space, tokens_of((number,)), {}, 0)
    file = tmp_path / "d" / "recipes" / "data.mdb"
    good, found = file.read_bytes(), list[tuple[bool, bool] | None]()
    for trial in range(8):
        rng = np.random.default_rng(trial)
        raw = bytearray(good)
        for at in rng.integers(8192, len(raw), 30).tolist():
            raw[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(raw)
        found.append(await asyncio.to_thread(apart, go_on, tmp_path / "d", before, trial))
    ended = [one for one in found if one is not None]
    assert sum(not clean for clean, _ in ended) > 2, "no flip hit anything: this test shows nothing"
    assert sum(written for _, written in ended) > 4, "it seldom goes on"


def is_clean(data_dir: Path) -> bool:
    return check_stopped(data_dir, lambda _: None).clean


def go_on(data_dir: Path, before: dict[int, list[Recipe | None]], trial: int) -> tuple[bool, bool]:
    """Check, read everything, put something new. Returns whether it was clean, and whether recipes written now are read.

    They are not where LMDB meets keys out of order, which it seldom notices.
    """
    clean = is_clean(data_dir)

    async def run() -> bool:
        async with Store(config(data_dir, ssd_bytes=4 << 20)) as store:
            (space,) = store.namespaces("default")
            for number in range(8):
                for now, then in zip(await recipes_mended(store, space, (number, 1, 2)), before[number], strict=True):
                    assert now is None or then is None or (now.body, now.parts) == (then.body, then.parts)
                assert await read(store, space, (number, 1, 2)) == (0 if number < 4 else 3)
            await put(store, space, (100 + trial, 1), b"v" * 16)
            written = await recipes_mended(store, space, (100 + trial, 1))
            check(store)
            return None not in written

    return clean, asyncio.run(run())


async def recipes_mended(store: Store, space: Space, prefix: Prefix) -> list[Recipe | None]:
    """Damage to the file's structure is an error to whoever meets it, and mended then."""
    for _ in range(3):
        try:
            return await recipes_of(store, space, prefix)
        except DiskFailing as error:
            await asyncio.sleep((error.retry_after_ms or 0) / 1000)
    return await recipes_of(store, space, prefix)


TOO_LONG: list[dict[str, Any]] = [{"of": b"R", "high": 32}]
"""A recipe that says that it is of 2 MiB: LMDB gives up where it looks which namespaces have recipes."""
DATABASE: list[dict[str, Any]] = [{"of": b"A", "flags": 2}, {"of": b"C", "low": 1}]
"""Entries that say that they are databases: LMDB does not delete them, where the indices are made anew."""


@pytest.mark.parametrize("damage", [TOO_LONG, DATABASE], ids=["too_long", "database"])
async def test_a_structure_that_stops_a_start_is_mended(tmp_path: Path, damage: list[dict[str, Any]]) -> None:
    async with Store(config(tmp_path / "d", ssd_bytes=4 << 20)) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        for number in range(8):
            await put(store, space, (number, 1, 2), b"v" * 16, Ack.DURABLE)
    for one in damage:
        spoil(tmp_path / "d" / "recipes" / "data.mdb", **one)
    assert await asyncio.to_thread(apart, is_clean, tmp_path / "d") is not True
    async with Store(config(tmp_path / "d", ssd_bytes=4 << 20)) as store:
        (space,) = store.namespaces("default")
        for number in range(8):
            assert None not in await recipes_mended(store, space, (number, 1, 2))
            assert await read(store, space, (number, 1, 2)) == 3


def spoil(file: Path, of: bytes, low: int = 0, high: int = 0, flags: int = 0) -> None:
    """Flip bits in the head of all entries whose keys begin so: in the size of the value, or its flags."""
    raw, count = bytearray(file.read_bytes()), 0
    for number in range(2, len(raw) // 4096):
        page = bytes(raw[number * 4096 : (number + 1) * 4096])
        for at in page_nodes(page, number) if page_flags(page) & LEAF else []:
            head = NODE.unpack_from(page, at)
            if page.startswith(of, at + NODE.size):
                NODE.pack_into(raw, number * 4096 + at, head[0] ^ low, head[1] ^ high, head[2] ^ flags, head[3])
                count += 1
    assert count
    file.write_bytes(raw)


async def test_a_running_check_covers_recipes(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        await put(store, space, (1, 2, 3), b"v" * 16)
        await store.recipes.flush(5)

        async def report() -> CheckReport:
            steps = [step async for step in check_running(store, [space], lambda: True)]
            assert isinstance(steps[-1], CheckReport)
            return steps[-1]

        assert (await report()).clean
        assert (await report()).namespaces[0].recipes == 3
        space.digest = b"x" * 32  # as if another digest had been over them
        found = await report()
        assert [damage.kind for damage in found.damage] == ["recipe"] * 6  # each does not verify, and so its page has none
        space.digest = space.settings.digest
        await store.recipes.delete_all(space)
        store.recipes.file.commit(RecipeBatch(delete=[(space.number, keys_of(space, (1, 2))[1])]))  # as if it had been lost
        found = await report()
        assert [damage.what[:25] for damage in found.damage] == [f"the recipe of page {keys_of(space, (1, 2))[1].hex()[:6]}"]
        with pytest.raises(AssertionError, match="1 pages count as having a recipe"):
            check_recipes_there(store)


def send(under_way: Put) -> None:
    """All that a put wants: zeros."""
    for page, part in under_way.wanted_cells():
        for index, size in enumerate(SPEC.slice_layout(under_way.request.ranges[part]).sizes):
            view, _ = under_way.locate(page, part, index, size, 1)
            view[:] = bytes(size)
            under_way.received(page, part, index, [slice_digest(view)], slice_digest(view))


async def begun(store: Store, space: Space, prefix: Prefix, put_id: bytes, parts: tuple[PartRange, ...] = PARTS) -> Put:
    return await store.begin_put(1, space, PutRequest(put_id, tokens_of(prefix), {}, 0, parts, Ack.MEMORY))


async def bodies_of(store: Store, space: Space, prefix: Prefix) -> list[tuple[RecipeKind, bytes]]:
    return [(recipe.kind, recipe.body) for recipe in await recipes_of(store, space, prefix) if recipe is not None]


async def test_what_a_client_gives_in_place_of_tokens(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        source, under_way = store.recipes.source, await begun(store, space, (1, 2, 3), b"v" * 16)
        with pytest.raises(BadRequest, match="2 recipes for 3 pages"):
            source.give(under_way, RecipeKind.TEXT, [b"a", b"b"])
        with pytest.raises(BadRequest, match="4096"):
            source.give(under_way, RecipeKind.TEXT, [bytes(5000)])
        source.give(under_way, RecipeKind.TEXT, [b"once", b"upon", b"a time"])
        send(under_way)
        await store.commit_put(under_way)
        text = RecipeKind.TEXT
        assert await bodies_of(store, space, (1, 2, 3)) == [(text, b"once"), (text, b"upon"), (text, b"a time")]
        await put(store, space, (4,), b"v" * 16)
        assert await bodies_of(store, space, (4,)) == [(RecipeKind.TOKENS, tokens_of((4,)))]
        shard = await begun(store, space, (5,), b"s" * 16, PARTS[:1])
        source.give(shard, RecipeKind.TEXT, [b"of one shard"])
        send(shard)
        await store.commit_put(shard)
        send(rest := await begun(store, space, (5,), b"s" * 16, PARTS[1:]))
        await store.commit_put(rest)
        assert await bodies_of(store, space, (5,)) == [(text, b"of one shard")]
        assert source.given_bytes == 0


async def test_what_was_given_is_for_no_other_put(tmp_path: Path) -> None:
    """Neither if its own was aborted, nor if another's page came first, nor if its own never became whole."""
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        source = store.recipes.source
        aborted = await begun(store, space, (1,), b"a" * 16)
        source.give(aborted, RecipeKind.REFERENCE, [b"only a knows"])
        store.abort_put(aborted)
        assert source.given_bytes == 0
        late = await begun(store, space, (2,), b"a" * 16)
        source.give(late, RecipeKind.REFERENCE, [b"only a knows"])
        half = await begun(store, space, (3,), b"a" * 16, PARTS[:1])
        source.give(half, RecipeKind.REFERENCE, [b"only a knows"])
        send(half)
        await store.commit_put(half)
        for number in (1, 2, 3):
            await put(store, space, (number,), b"b" * 16)
            assert await bodies_of(store, space, (number,)) == [(RecipeKind.TOKENS, tokens_of((number,)))]
        send(late)
        await store.commit_put(late)
        assert source.given_bytes == 0


async def test_a_write_whose_caller_is_cancelled_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        await put(store, space, (1, 2, 3), b"v" * 16)
        await store.prefixes.drop_to_text(space, tokens_of((1, 2, 3)), {}, 0)
        begun, go_on, commit_now = asyncio.Event(), threading.Event(), store.recipes.file.commit
        loop = asyncio.get_running_loop()

        def slow(batch: RecipeBatch) -> None:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait(10)
            commit_now(batch)

        monkeypatch.setattr(store.recipes.file, "commit", slow)
        first = asyncio.create_task(store.recipes.delete_all(space))
        await begun.wait()
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(store.recipes.delete_all(space))
        await asyncio.sleep(0.05)
        go_on.set()
        assert await second == 0, "it looked before the first had deleted what it had to"
        assert store.recipes.holding(space).recipes == 0


async def test_samples_are_kept_where_drift_is_told(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True, rebuild="tolerant"))
        await put(store, space, (1,), b"v" * 16)
        (recipe,) = await recipes_of(store, space, (1,))
        assert recipe is not None
        for part, one in enumerate(recipe.parts):
            assert len(one.sample) == 128
            assert one.sample[:2] in page_bytes((1,), b"v" * 16, part)


def test_settings() -> None:
    for changes in ({"rebuild": "sometimes"}, {"rebuild": "never", "recipes": True}, {"rebuild": "never", "lossy": True}):
        with pytest.raises(BadRequest):
            settings_named(**changes)
    plain = settings_named()
    assert {"rebuild", "lossy"}.isdisjoint(plain.to_dict())
    assert NamespaceSettings.from_dict(plain.to_dict()) == plain
    for changes in ({"rebuild": "never"}, {"rebuild": "tolerant", "recipes": True, "lossy": True}):
        changed = settings_named(**changes)
        assert NamespaceSettings.from_dict(changed.to_dict()) == changed
        assert changed.digest == plain.digest
