"""Rebuild jobs in a whole store, without sockets: what workers are given, and how waiting ends."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster

from kvstore.digests import slice_digest
from kvstore.drift import Drift
from kvstore.errors import BadRequest, Busy, Cancelled, Conflict, NotFound, RebuildFailed, UnknownNamespace
from kvstore.prefill import Prefill
from kvstore.store import Ack, NamespaceSettings, PutRequest, Space, Store
from kvstore.store.checking.check import check
from kvstore.store.puts.put import Put
from kvstore.store.rebuilding import rebuilding, waits
from kvstore.store.rebuilding import work as rebuild_work
from kvstore.store.rebuilding.work import Work
from kvstore.tiers.recipe import Recipe
from tests.store.test_store import PARTS, SPEC, Prefix, config, put, read, settings_named, tokens_of

WORKER = 7


async def text_only(store: Store, prefix: Prefix, first: int = 0) -> Space:
    """A namespace with a prefix whose pages from `first` on are dropped to text."""
    space = await store.create_namespace(settings_named(recipes=True))
    await put(store, space, prefix, b"v" * 16)
    await store.prefixes.drop_to_text(space, tokens_of(prefix), {}, first)
    return space


def send(upload: Put) -> None:
    """All that a put wants: zeros."""
    for page, part in upload.wanted_cells():
        for index, size in enumerate(SPEC.slice_layout(PARTS[part]).sizes):
            view, _ = upload.locate(page, part, index, size, 1)
            view[:] = bytes(size)
            upload.received(page, part, index, [slice_digest(view)], slice_digest(view))


async def claimed(store: Store, owner: int = WORKER, wait_s: float = 5.0) -> Work:
    work = await store.rebuilding.claim(owner, "default", None, wait_s, 30.0)
    assert work is not None
    return work


async def test_what_a_worker_is_given(tmp_path: Path, never_blocks: BlockBuster) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await text_only(store, (1, 2, 3, 4), 2)
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens_of((1, 2, 3, 4)), {}, 20))
        work = await claimed(store)
        assert (work.job.first, work.job.last, work.tokens, work.extras, work.bodies) == (2, 4, tokens_of((1, 2, 3, 4)), {}, ())
        assert [(run.first, run.last, len(run.parts)) for run in work.runs] == [(2, 4, 3)]
        assert await store.rebuilding.claim(WORKER, "default", None, 0, 1) is None
        assert await store.rebuilding.claim(WORKER, "another tenant", None, 0, 1) is None
        with pytest.raises(NotFound):
            store.rebuilding.renew(WORKER + 1, work.job.id, 1)
        store.rebuilding.renew(WORKER, work.job.id, 1)
        await put(store, space, (1, 2, 3, 4), b"v" * 16, first=2)  # the bytes of a page follow from its put id here
        progress = await waiting
        assert (progress.pages, progress.wanted_pages) == (4, 4)
        with pytest.raises(NotFound):
            store.rebuilding.end(WORKER, work.job.id, "", [])
        assert await read(store, space, (1, 2, 3, 4)) == 4
        await store.recipes.flush(5)
        assert store.rebuilding.report(space).same_pages == 2
        await store.settle()
        check(store)


async def test_no_worker_waits_where_no_work_can_come(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=False))
        with pytest.raises(Conflict, match="keeps no recipes"):
            await store.rebuilding.claim(WORKER, "default", space, 20, 1)


async def test_a_new_version_is_counted(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await text_only(store, (1, 2, 3), 1)
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens_of((1, 2)), {}, 20))
        work = await claimed(store)
        await put(store, space, (1, 2), work.job.put_id, first=1)
        await waiting
        await store.recipes.flush(5)
        assert store.rebuilding.report(space).new_version_pages == store.stats.rebuild_new_versions == 1
        assert store.match(space, tokens_of((1, 2, 3)), {}).pages == 2
        assert await store.rebuildable_pages(space, tokens_of((1, 2, 3)), {}) == 1


async def test_done_means_that_the_pages_are_there(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await text_only(store, (1, 2))
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens_of((1, 2)), {}, 20))
        for attempt in range(3):
            work = await claimed(store, attempt)
            if attempt == 1:
                store.release_owner(attempt)  # its client is gone
            else:
                store.rebuilding.end(attempt, work.job.id, "", [])
        with pytest.raises(RebuildFailed, match=r"3 attempts; the last: the worker said that it was done"):
            await waiting
        assert store.rebuilding.report(space).failed_attempts == 3
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens_of((1, 2)), {}, 20))
        store.rebuilding.give_up((await claimed(store)).job, "it does not fit")
        with pytest.raises(RebuildFailed, match="it does not fit"):
            await waiting


async def test_waiting_ends_with_the_namespace_and_with_the_store(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await text_only(store, (1, 2))
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens_of((1, 2)), {}, 20))
        await asyncio.sleep(0.05)
        await store.drop_namespace(space)
        with pytest.raises(UnknownNamespace):
            await waiting
        space = await text_only(store, (1, 2))
        claim = asyncio.create_task(store.rebuilding.claim(WORKER, "default", await store.create_namespace(
            NamespaceSettings("default", "idle", "idle", SPEC, recipes=True)), 600, 1))  # fmt: skip
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens_of((1, 2)), {}, 600))
        await asyncio.sleep(0.05)
    for task in (claim, waiting):
        with pytest.raises(Cancelled):
            await asyncio.wait_for(task, 5)


async def test_a_claim_that_ends_while_its_recipes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker gets nothing: the job is another's by then, whose put id must not be used for two computations."""
    async with Store(config(tmp_path / "d")) as store:
        space = await text_only(store, (1, 2, 3), 1)
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens_of((1, 2, 3)), {}, 20))
        begun, go_on, read_now = asyncio.Event(), asyncio.Event(), store.recipes.read

        async def slow_read(space: Space, keys: list[bytes]) -> list[Recipe | None]:
            if not begun.is_set():  # a slow disk, once
                begun.set()
                await go_on.wait()
            return await read_now(space, keys)

        monkeypatch.setattr(store.recipes, "read", slow_read)
        while not len(store.rebuilding.queue):
            await asyncio.sleep(0.01)
        for lost in ("cancelled", "found"):
            begun.clear()
            go_on.clear()
            late = asyncio.create_task(store.rebuilding.claim(WORKER + 1, "default", None, 0, 5))
            await begun.wait()
            store.rebuilding.sweep(time.monotonic() + 6)
            work = await claimed(store)
            attempts = work.job.attempts
            late.cancel() if lost == "cancelled" else go_on.set()
            (outcome,) = await asyncio.gather(late, return_exceptions=True)
            assert not isinstance(outcome, Work)
            assert (work.job.owner, work.job.put_id, work.job.attempts) == (WORKER, work.put_id, attempts)
            if lost == "cancelled":
                store.rebuilding.queue.put_back(work.job)
        await put(store, space, (1, 2, 3), work.put_id, first=1)
        await waiting


async def test_a_long_prefix_that_went_is_read_in_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not page by page, each time from the start."""
    async with Store(config(tmp_path / "d", dram_bytes=4 << 20, ssd_bytes=4 << 20)) as store:
        prefix = tuple(range(1, 101))
        space = await text_only(store, prefix, 99)
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens_of(prefix), {}, 20))
        while not len(store.rebuilding.queue):
            await asyncio.sleep(0.01)
        await store.prefixes.drop_to_text(space, tokens_of(prefix), {}, 0)
        reads, look_now = 0, store.recipes._threads.read

        async def counted(call: Any, *arguments: Any) -> Any:
            nonlocal reads
            reads += 1
            return await look_now(call, *arguments)

        monkeypatch.setattr(store.recipes._threads, "read", counted)
        work = await claimed(store)
        assert (work.job.first, work.job.last, work.tokens) == (0, 100, tokens_of(prefix))
        assert reads == 3, "the 64 before the last, then the rest, then the last"
        store.rebuilding.give_up(work.job, "enough")
        with pytest.raises(RebuildFailed, match="enough"):
            await waiting


async def test_what_a_worker_is_given_is_made_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a long prefix it takes long; the extra digests of stored pages and of those to come are in it."""
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        tokens, extras = tokens_of((1, 2, 3, 4)), {1: b"e" * 32, 3: b"f" * 32}
        upload = await store.begin_put(1, space, PutRequest(b"v" * 16, tokens, extras, 0, PARTS, Ack.MEMORY))
        send(upload)
        await store.commit_put(upload)
        await store.recipes.flush(5)
        await store.prefixes.drop_to_text(space, tokens, extras, 2)
        threads, geometry_now = set(), rebuild_work._geometry

        def seen(*arguments: Any) -> Any:
            threads.add(threading.get_ident())
            return geometry_now(*arguments)

        monkeypatch.setattr(rebuild_work, "_geometry", seen)
        waiting = asyncio.create_task(store.rebuilding.bring(space, tokens, extras, 20))
        work = await claimed(store)
        assert (work.job.first, work.tokens, work.extras) == (2, tokens, extras)
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        store.rebuilding.give_up(work.job, "enough")
        with pytest.raises(RebuildFailed, match="enough"):
            await waiting


async def test_checks(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await text_only(store, (9,))
        await put(store, space, (1, 2, 3), b"v" * 16)
        await store.recipes.flush(5)
        with pytest.raises(NotFound, match="page 3"):
            await store.rebuilding.check(space, tokens_of((1, 2, 3)), {}, 3, 1)
        waiting = asyncio.create_task(store.rebuilding.check(space, tokens_of((1, 2, 3)), {}, 1, 20))
        work = await claimed(store)
        assert (work.job.check, work.job.first, work.job.last, work.tokens) == (True, 1, 3, tokens_of((1, 2, 3)))
        for wrong in (Drift(10, 11), Drift(10, 5, 0, float("nan"), 1.0), Drift(-1)):
            with pytest.raises(BadRequest):
                store.rebuilding.end(WORKER, work.job.id, "", [("bf16", wrong)])
        with pytest.raises(BadRequest):
            store.rebuilding.end(WORKER, work.job.id, "", [("f12", Drift(10))])
        store.rebuilding.end(WORKER, work.job.id, "", [("bf16", Drift(10, 5, 0, 0.5, 1.0))])
        assert (await waiting).pages == 3
        report = store.rebuilding.report(space)
        assert (report.checked_pages, report.checks_that_differed, report.drift["bf16"].max_abs) == (2, 1, 0.5)
        assert store.stats.rebuild_new_versions == 0
        waiting = asyncio.create_task(store.rebuilding.check(space, tokens_of((1, 2, 3)), {}, 0, 20))
        await asyncio.sleep(0.05)
        await store.prefixes.drop_to_text(space, tokens_of((1, 2, 3)), {}, 0)
        assert await store.rebuilding.claim(WORKER, "default", None, 0, 1) is None
        with pytest.raises(RebuildFailed, match="gone"):
            await waiting
        plain = await store.create_namespace(NamespaceSettings("default", "plain", "plain", SPEC))
        with pytest.raises(Conflict):
            await store.rebuilding.check(plain, tokens_of((1,)), {}, 0, 1)


async def test_checks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Store(config(tmp_path / "d")) as store:
        space = await store.create_namespace(settings_named(recipes=True))
        await put(store, space, (1, 2, 3), b"v" * 16)
        await store.recipes.flush(5)
        tokens = tokens_of((1, 2, 3))
        monkeypatch.setattr(rebuilding, "MAX_JOB_PAGES", 2)
        with pytest.raises(BadRequest, match="a check of 3 pages: at most 2"):
            await store.rebuilding.check(space, tokens, {}, 0, 1)
        monkeypatch.setattr(waits, "MAX_WAITING_BYTES", len(tokens))
        waiting = asyncio.create_task(store.rebuilding.check(space, tokens, {}, 1, 20))
        work = await claimed(store)
        for request in (store.rebuilding.check(space, tokens, {}, 2, 1), store.rebuilding.bring(space, tokens, {}, 1)):
            with pytest.raises(Busy, match="too much memory"):
                await request
        store.rebuilding.end(WORKER, work.job.id, "", [])
        await waiting
        assert (await store.rebuilding.bring(space, tokens, {}, 1)).pages == 3


async def test_ahead_of_need_only_if_it_pays(tmp_path: Path) -> None:
    async with Store(config(tmp_path / "d")) as store:
        plain = await store.create_namespace(NamespaceSettings("default", "plain", "plain", SPEC))
        assert await store.rebuilding.ahead(plain, tokens_of((1,)), {}) == (0, "the namespace keeps no recipes")
        space = await store.create_namespace(settings_named(recipes=True, prefill=Prefill(0.5)))
        await put(store, space, (1, 2, 3), b"v" * 16)
        assert await store.rebuilding.ahead(space, tokens_of((1, 2, 3)), {}) == (0, "")
        await store.prefixes.drop_to_text(space, tokens_of((1, 2, 3)), {}, 1)
        assert await store.rebuilding.ahead(space, tokens_of((1, 2, 3)), {}) == (0, "no rebuild worker has asked for work of late")
        assert await store.rebuilding.claim(WORKER, "default", None, 0, 1) is None
        # Two pages of four tokens, half a second each by what the namespace says; nothing was computed yet.
        assert await store.rebuilding.ahead(space, tokens_of((1, 2, 3)), {}, 3.9) == (0, "it would take about 4.0 s")
        assert await store.rebuilding.ahead(space, tokens_of((1, 2, 3)), {}, 4.1) == (2, "")
        assert (await claimed(store)).job.keys
