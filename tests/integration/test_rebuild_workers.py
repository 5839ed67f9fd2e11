"""Rebuild workers: what functions are given and may return, those that fail or are stopped, and who goes on then."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from kvstore_client import (
    AsyncClient,
    AsyncRebuildWorker,
    BadRequest,
    Client,
    Component,
    KVSpec,
    OpenAIRebuilder,
    RebuildFailed,
    RebuildWorker,
    Rebuilt,
    Wanted,
)
from kvstore_client.blocking import Namespace
from kvstore_client.text import Given
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.rebuild_worker import SimulatedModel
from tests.forked_daemon import Fork
from tests.integration.rebuilds import SPEC, Tokens, dropped, fetched, settled, state, tokens, totals, worker
from tests.waiting import wait_until


@pytest.mark.parametrize(("fault", "why"), [("shape", "wanted are 3 pages of 8192 bytes"), ("raise", "RuntimeError: out of memory")])
def test_a_worker_that_returns_nonsense(daemon: DaemonProcess, space: Callable[..., Namespace], fault: str, why: str) -> None:
    namespace, ids = space(), tokens(3)
    dropped(namespace, ids)
    with worker(daemon, namespace, "--fault", fault):
        with pytest.raises(RebuildFailed, match="3 attempts") as failed:
            fetched(namespace, ids)
        assert why in failed.value.message
        assert namespace.match(ids, lease_s=0, rebuildable=True).rebuildable_pages == 3
        found = state(daemon, namespace)
        assert (found["failed_attempts"], found["failed_jobs"], found["waiting_jobs"], found["claimed_jobs"]) == (3, 1, 0, 0)


@pytest.mark.parametrize(("fault", "lease"), [("die", "60"), ("hang", "2")])
def test_another_worker_takes_over(daemon: DaemonProcess, space: Callable[..., Namespace], fault: str, lease: str) -> None:
    """One is killed with SIGKILL in the middle; one does not get on. A process that hangs in its function still renews: it is stopped."""
    namespace, ids = space(), tokens(3, seed=1)
    before = dropped(namespace, ids)
    with worker(daemon, namespace, "--fault", fault, "--lease-s", lease) as bad:
        assert namespace.rebuild(ids, wait_s=0.2).pages == 0
        failed = 0
        if fault == "die":
            assert bad.wait(10) == -signal.SIGKILL
        else:
            failed = stopped_in_the_middle(daemon, namespace, bad)
        with worker(daemon, namespace):
            assert np.array_equal(fetched(namespace, ids), before)
        assert state(daemon, namespace)["failed_attempts"] == failed + 1


def stopped_in_the_middle(daemon: DaemonProcess, namespace: Namespace, worker: Fork) -> int:
    """Let a worker neither answer nor leave while it has a claim. Attempts that had failed by then: it may have been too slow to renew."""
    while True:
        wait_until(lambda: state(daemon, namespace)["claimed_jobs"])
        worker.send_signal(signal.SIGSTOP)
        found = state(daemon, namespace)
        if found["claimed_jobs"]:
            return int(found["failed_attempts"])
        worker.send_signal(signal.SIGCONT)


async def test_a_storm_is_one_rebuild(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    """A thousand clients' fetches wait for one root that was dropped: it is computed once."""
    namespace, ids = space(), tokens(3, seed=7)
    before = await asyncio.to_thread(dropped, namespace, ids)
    jobs, started = totals(daemon)["rebuild_jobs"], asyncio.Event()
    async with AsyncClient(daemon.endpoint, connections=20, timeout=60) as many, AsyncClient(daemon.endpoint) as own:
        there = await many.namespace(namespace.id)
        calls = 0
        slow = AsyncRebuildWorker(own, namespace.id)

        async def compute(ids: Tokens, prefix: Any, wanted: Wanted) -> Any:
            nonlocal calls
            calls += 1
            await started.wait()
            return SimulatedModel(SPEC, "generator").pages(ids, wanted.first_page, wanted.last_page)

        slow.rebuild(compute)

        async def fetch() -> bool:
            async with await there.match(ids, rebuild_s=30) as match:
                out = np.empty((match.pages, SPEC.page_bytes), np.uint8)
                await there.fetch(match, out)
            return np.array_equal(out, before)

        working = asyncio.create_task(slow.run())
        fetches = [asyncio.create_task(fetch()) for _ in range(1000)]
        while not calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not any(one.done() for one in fetches)
        started.set()
        assert all(await asyncio.gather(*fetches))
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert calls == 1
        assert totals(daemon)["rebuild_jobs"] == jobs + 1


async def test_functions_of_both_kinds_and_what_they_are_given(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    """A hybrid model, put by two ranks: the function gets and gives whole components, and the pages come back in the parts they had."""
    spec = KVSpec(
        4, (Component("full", 4, 2, 8, "bf16"), Component("window", 2, 2, 8, "f32", window=6), Component("state", 2, 1, 16, "f16"))
    )
    namespace = space("exact", spec)
    ids, sizes = tokens(5), [spec.part_bytes(spec.whole(c)) for c in range(3)]
    full, window, held = (
        np.random.default_rng(c).integers(0, 120, (5, size), dtype=np.uint8) for c, size in enumerate(sizes)
    )  # fmt: skip
    ranks = [spec.whole(0).__class__(0, 0, 4, head, head + 1) for head in range(2)]
    cut = full.reshape(5, 4, 2, 2, -1)
    parts = (*ranks, spec.whole(1), spec.whole(2))
    rows = []
    for page in range(5):
        rows += [np.ascontiguousarray(cut[page, :, :, head]).tobytes() for head in range(2)] + [window[page].tobytes()]
        rows += [held[page].tobytes()] if page in (2, 4) else []
    spans = ((0, 5), (0, 5), (0, 5), (4, 5))
    del rows[9]  # the state of page 2
    namespace.put(ids, b"".join(rows), parts=parts, spans=spans)
    namespace.put(ids[:12], held[2].tobytes(), first_page=2, parts=(spec.whole(2),), put_id=b"another".ljust(16))
    namespace.drop_to_text(ids, from_page=3)
    seen: list[Any] = []

    async def compute(given: Tokens, prefix: Any, wanted: Wanted) -> Any:
        seen.append((given, {c: array.copy() for c, array in prefix.items()}, wanted))
        first, last = wanted.first_page, wanted.last_page
        return {c: array[slice(*wanted.pages_of(c))] for c, array in enumerate((full, window, held)) if first < last}

    async with AsyncClient(daemon.endpoint) as own:
        async_worker = AsyncRebuildWorker(own, namespace.id)
        async_worker.rebuild(compute)
        working = asyncio.create_task(async_worker.run())
        there = await own.namespace(namespace.id)
        async with await there.match(ids, rebuild_s=20) as match:
            assert match.pages == 5
            for component, array in enumerate((full, window, held)):
                first, last = match.pages_of(component)
                out = np.empty((last - first, sizes[component]), np.uint8)
                await there.fetch(match, out, wanted=spec.whole(component))
                assert np.array_equal(out, array[first:last])
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    ((given, prefix, wanted),) = seen
    assert np.array_equal(given, ids)
    assert (wanted.first_page, wanted.last_page, wanted.pages_of(1), wanted.pages_of(2)) == (3, 5, (3, 5), (4, 5))
    assert np.array_equal(prefix[0], full[:3])
    assert np.array_equal(prefix[1], window[1:3])
    assert np.array_equal(prefix[2], held[2:3])
    found = await asyncio.to_thread(settled, daemon, namespace, 2)
    assert (found["same_pages"], found["new_version_pages"]) == (2, 0)


def test_a_blocking_worker_and_given_text(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(3)
    pages = SimulatedModel(SPEC, "generator").pages(ids, 0, 3)
    namespace.put(ids, pages, recipe=Given.text(["once", "upon", "a time"]))
    namespace.drop_to_text(ids)
    with Client(daemon.endpoint) as own:
        blocking = RebuildWorker(own, namespace.id)
        with pytest.raises(BadRequest, match="has no function"):
            blocking.run_once(0)

        @blocking.rebuild
        def compute(given: Tokens, prefix: Any, wanted: Wanted) -> Any:
            assert not given.any()
            assert [wanted.bodies[page] for page in range(3)] == [("text", b"once"), ("text", b"upon"), ("text", b"a time")]
            return Rebuilt(pages, ids)

        assert not blocking.run_once(0)
        assert namespace.rebuild(ids, wait_s=0).waiting_jobs == 1
        assert blocking.run_once(5)
        assert blocking.inner.done == 1
    assert np.array_equal(fetched(namespace, ids, 0), pages)
    with pytest.raises(BadRequest, match="keeps no recipes"), Client(daemon.endpoint) as own:
        own.namespace("plain", "rev-1", SPEC).put(ids, pages, recipe=Given.reference(b"somewhere"))


async def test_a_worker_that_is_stopped_hands_its_job_back(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(3)
    before = await asyncio.to_thread(dropped, namespace, ids)
    async with AsyncClient(daemon.endpoint) as own:
        stuck, started = AsyncRebuildWorker(own, namespace.id, lease_s=600), asyncio.Event()

        async def compute(ids: Tokens, prefix: Any, wanted: Wanted) -> Any:
            started.set()
            await asyncio.sleep(600)

        stuck.rebuild(compute)
        working = asyncio.create_task(stuck.run())
        waiting = asyncio.create_task(asyncio.to_thread(fetched, namespace, ids))
        await started.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        other = AsyncRebuildWorker(own, namespace.id)
        other.rebuild(lambda given, prefix, wanted: before)
        assert await other.run_once(10)
        assert np.array_equal(await waiting, before)


async def test_what_is_logged_of_a_function_that_fails_names_the_error(
    daemon: DaemonProcess, space: Callable[..., Namespace], caplog: pytest.LogCaptureFixture
) -> None:
    """A whole prompt has no prefix: who takes one for granted is told more than a zero."""
    namespace, ids = space(), tokens(3)
    await asyncio.to_thread(dropped, namespace, ids)
    async with AsyncClient(daemon.endpoint) as own:
        hasty = AsyncRebuildWorker(own, namespace.id)
        hasty.rebuild(lambda given, prefix, wanted: prefix[0])
        waiting = asyncio.create_task(asyncio.to_thread(namespace.rebuild, ids, wait_s=2))
        assert await hasty.run_once(10)
        await asyncio.gather(waiting, return_exceptions=True)
    assert "can't be computed again: KeyError: 0" in caplog.text


async def test_a_function_that_returns_nothing_has_failed(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    """At once, and not when its lease is over: another worker may have the job."""
    namespace, ids = space(), tokens(3)
    before = await asyncio.to_thread(dropped, namespace, ids)
    async with AsyncClient(daemon.endpoint) as own:
        forgetful, other = AsyncRebuildWorker(own, namespace.id, lease_s=600), AsyncRebuildWorker(own, namespace.id)
        forgetful.rebuild(lambda given, prefix, wanted: None)
        other.rebuild(lambda given, prefix, wanted: before)
        waiting = asyncio.create_task(asyncio.to_thread(fetched, namespace, ids))
        assert await forgetful.run_once(10)
        assert forgetful.failed == 1
        assert state(daemon, namespace)["failed_attempts"] == 1
        assert await other.run_once(10)
        assert np.array_equal(await waiting, before)


async def test_an_engine_rebuilds_by_being_asked(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    """A server with an OpenAI-compatible endpoint, whose connector writes what it computes to the store under put ids of its own."""
    namespace, ids = space(), tokens(4, seed=3)
    before = await asyncio.to_thread(dropped, namespace, ids)
    asked: list[dict[str, Any]] = []
    async with AsyncClient(daemon.endpoint) as connector, AsyncClient(daemon.endpoint) as own:
        engine = await connector.namespace(namespace.id)

        async def completions(request: web.Request) -> web.Response:
            body = await request.json()
            asked.append(body)
            if len(asked) == 1:
                return web.json_response({"error": {"message": "the engine is warming up"}}, status=503)
            prompt = np.array(body["prompt"], np.uint32)
            pages = SimulatedModel(SPEC, "generator").pages(prompt, 0, len(prompt) // SPEC.page_tokens)
            await engine.put(prompt, pages)
            return web.json_response({"object": "text_completion", "choices": [{"text": "x", "finish_reason": "length"}]})

        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        rebuilder = AsyncRebuildWorker(own, namespace.id, fetch_prefix=False)
        rebuilder.rebuild(OpenAIRebuilder(f"http://127.0.0.1:{port}/v1", "m", api_key="secret"))
        working = asyncio.create_task(rebuilder.run())
        try:
            assert np.array_equal(await asyncio.to_thread(fetched, namespace, ids), before)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await runner.cleanup()
    assert len(asked) == 2
    assert (asked[1]["prompt"], asked[1]["max_tokens"], asked[1]["model"]) == (ids.tolist(), 1, "m")
    found = await asyncio.to_thread(settled, daemon, namespace, 4)
    assert (found["same_pages"], found["failed_attempts"]) == (4, 1)
