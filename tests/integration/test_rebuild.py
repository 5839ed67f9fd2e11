"""Pages dropped to text and computed again: a real daemon, rebuild workers in processes of their own, and what goes wrong with them."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from aiohttp import web

from kvstore_client import (
    AsyncClient,
    AsyncRebuildWorker,
    BadRequest,
    Busy,
    Client,
    Component,
    Conflict,
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
from tests.integration.test_cli import kvstore
from tests.integration.test_http import ask

SPEC = KVSpec(4, (Component("full", 4, 2, 32, "f32"),), max_slice_bytes=4096)
Tokens = npt.NDArray[np.uint32]
_names = count()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.endpoint) as connected:
        yield connected


@pytest.fixture
def space(client: Client) -> Iterator[Callable[..., Namespace]]:
    """Makes namespaces with recipes; they are dropped at the end."""
    made: list[Namespace] = []

    def make(rebuild: str = "exact", spec: KVSpec = SPEC, **options: Any) -> Namespace:
        name = f"rebuild-{next(_names)}"
        made.append(client.namespace(name, f"revision of {name}", spec, recipes=True, rebuild=rebuild, **options))
        return made[-1]

    yield make
    for one in made:
        one.drop()


def tokens(pages: int = 4, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 50_000, pages * SPEC.page_tokens, dtype=np.uint32)


def put(namespace: Namespace, ids: Tokens, model: str = "generator", **options: Any) -> npt.NDArray[np.uint8]:
    pages = SimulatedModel(namespace.spec, model).pages(ids, 0, len(ids) // SPEC.page_tokens)
    namespace.put(ids, pages, **options)
    return pages


def dropped(namespace: Namespace, ids: Tokens, model: str = "generator", from_page: int = 0) -> npt.NDArray[np.uint8]:
    """Put pages, and drop them to text."""
    pages = put(namespace, ids, model)
    assert namespace.drop_to_text(ids, from_page=from_page) == len(pages) - from_page
    return pages


def fetched(namespace: Namespace, ids: Tokens, rebuild_s: float = 20.0) -> npt.NDArray[np.uint8]:
    with namespace.match(ids, rebuild_s=rebuild_s) as match:
        out = np.empty((match.pages, namespace.spec.page_bytes), np.uint8)
        if match.pages:
            namespace.fetch(match, out)
        return out


def state(daemon: DaemonProcess, namespace: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(f"{daemon.http}/v1/namespaces/{namespace.id}/rebuild")[2])
    return found


def settled(daemon: DaemonProcess, namespace: Namespace, pages: int) -> dict[str, Any]:
    """The state once all rebuilt pages are compared, which is some milliseconds after they are there."""
    while True:
        found = state(daemon, namespace)
        if found["same_pages"] + found["new_version_pages"] + found["uncompared_pages"] >= pages:
            return found


def totals(daemon: DaemonProcess) -> dict[str, int]:
    found: dict[str, int] = json.loads(ask(f"{daemon.http}/v1/stat")[2])["totals"]
    return found


@contextmanager
def worker(daemon: DaemonProcess, namespace: Namespace, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A rebuild worker in a process of its own."""
    command = [sys.executable, "-m", "kvstore_workers.rebuild_worker", "--endpoint", daemon.endpoint, "--namespace", namespace.id]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_an_exact_page_comes_back_as_it_was(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens()
    before = dropped(namespace, ids)
    look = namespace.match(ids, lease_s=0, rebuildable=True)
    assert (look.pages, look.rebuildable_pages) == (0, 4)
    assert namespace.match(ids, lease_s=0).rebuildable_pages == -1
    assert namespace.recipes()[0] == 4
    with worker(daemon, namespace):
        assert np.array_equal(fetched(namespace, ids), before)
        found = settled(daemon, namespace, 4)
        assert (found["rebuilt_pages"], found["same_pages"], found["new_version_pages"]) == (4, 4, 0)
        namespace.drop_to_text(ids, from_page=2)  # now with a prefix that the worker fetches, and checks
        assert np.array_equal(fetched(namespace, ids), before)
        assert settled(daemon, namespace, 6)["rebuilt_pages"] == 6


def test_tolerant_drift_is_measured_and_reported(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space("tolerant"), tokens(6)
    before = dropped(namespace, ids, "sum")
    with worker(daemon, namespace, "--model", "sum-reversed"):
        after = fetched(namespace, ids)
        distance = np.abs(after.view(np.float32).astype(float) - before.view(np.float32).astype(float))
        assert len(after) == 6
        assert 0 < distance.max() < 1e-5
        found = settled(daemon, namespace, 0)
        while not found["drift"]:
            found = state(daemon, namespace)
        drift = found["drift"]["f32"]
        assert drift["elements"] == 6 * 64
        assert 0 < drift["mean_abs"] < drift["max_abs"] <= distance.max()
        assert found["new_version_pages"] == 0
    with worker(daemon, namespace, "--model", "sum"):  # what is there now, beside what it was at first: all of it is at hand
        done = kvstore(daemon, "rebuild", namespace.id, "-t", ",".join(map(str, ids)), "--check", "--from-token", "8", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["checked_pages"] == 4
        assert found["drift"]["f32"]["elements"] == 4 * SPEC.page_bytes // 4, "what this check compared, and not what others did"
        assert found["drift"]["f32"]["max_abs"] == pytest.approx(distance[2:].max())
        again = namespace.rebuild_check(ids, from_page=5)
        assert (again.checked_pages, again.drift["f32"].elements) == (1, SPEC.page_bytes // 4)
        assert again.drift["f32"].max_abs == pytest.approx(distance[5:].max())
        all_of_them = state(daemon, namespace)
        assert all_of_them["checked_pages"] == 5
        assert all_of_them["drift"]["f32"]["elements"] == 6 * 64 + 5 * SPEC.page_bytes // 4
    text = ask(f"{daemon.http}/metrics")[2].decode()
    assert re.search(rf'kvstore_rebuild_drift_max_abs{{dtype="f32",namespace="{namespace.id}"}} [0-9.]+e-0', text)


def test_an_exact_mismatch_is_a_new_version(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    """What was computed on top of the old version is gone with it, and is computed again on top of the new one."""
    namespace, ids = space(), tokens(4)
    before = dropped(namespace, ids, "sum", from_page=1)
    with worker(daemon, namespace, "--model", "sum-reversed"):
        first = fetched(namespace, ids[:8])
        assert len(first) == 2
        assert namespace.match(ids, lease_s=0).pages == 2, "a page that was computed on the old version is served with the new one"
        assert np.array_equal(first[0], before[0])
        assert not np.array_equal(first[1], before[1])
        assert settled(daemon, namespace, 1)["new_version_pages"] == 1
        rest = fetched(namespace, ids)
        assert len(rest) == 4
        assert np.array_equal(rest[:2], first)
        found = settled(daemon, namespace, 3)
        assert (found["new_version_pages"], found["same_pages"]) == (3, 0)
    # The new version is what is on record now.
    namespace.drop_to_text(ids, from_page=1)
    with worker(daemon, namespace, "--model", "sum-reversed"):
        assert np.array_equal(fetched(namespace, ids), rest)
        assert settled(daemon, namespace, 6)["same_pages"] == 3


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


@pytest.mark.parametrize(("fault", "lease"), [("die", "60"), ("hang", "0.4")])
def test_another_worker_takes_over(daemon: DaemonProcess, space: Callable[..., Namespace], fault: str, lease: str) -> None:
    """One is killed with SIGKILL in the middle; one does not get on. A process that hangs in its function still renews: it is stopped."""
    namespace, ids = space(), tokens(3, seed=1)
    before = dropped(namespace, ids)
    with worker(daemon, namespace, "--fault", fault, "--lease-s", lease) as bad:
        assert namespace.rebuild(ids, wait_s=0.2).pages == 0
        if fault == "die":
            assert bad.wait(10) == -signal.SIGKILL
        else:
            while state(daemon, namespace)["claimed_jobs"] == 0:
                pass
            bad.send_signal(signal.SIGSTOP)  # it neither answers nor leaves
        with worker(daemon, namespace):
            assert np.array_equal(fetched(namespace, ids), before)
        assert state(daemon, namespace)["failed_attempts"] == 1


def test_waiting_ends_at_the_deadline(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(4)
    dropped(namespace, ids, from_page=1)
    assert len(fetched(namespace, ids, rebuild_s=0.1)) == 1
    progress = namespace.rebuild(ids, wait_s=0.1)
    assert (progress.pages, progress.wanted_pages, progress.waiting_jobs, progress.claimed_jobs) == (1, 4, 1, 0)
    done = kvstore(daemon, "rebuild", namespace.id, "-t", ",".join(map(str, ids)), "--wait", "0.1")
    assert (done.returncode, done.stdout) == (1, "1 of 4 pages there\n")
    short = kvstore(daemon, "rebuild", namespace.id, "-t", "1,2,3")
    assert (short.returncode, "do not fill a page of 4" in short.stderr) == (2, True), short.stderr


def test_a_recipe_whose_prefix_is_gone_as_well(daemon: DaemonProcess, client: Client, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(6)
    before = dropped(namespace, ids, from_page=4)
    assert namespace.rebuild(ids, wait_s=0).waiting_jobs == 1
    namespace.drop_to_text(ids, from_page=1)  # while the job waits
    with worker(daemon, namespace):
        assert np.array_equal(fetched(namespace, ids), before)
        assert state(daemon, namespace)["rebuilt_pages"] == 5
    assert totals(daemon)["rebuild_failed_attempts"] >= 0


def test_a_missing_recipe_is_said(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(6)
    before = dropped(namespace, ids)
    assert namespace.delete_recipes(ids, from_page=3) == 3
    assert namespace.match(ids, lease_s=0, rebuildable=True).rebuildable_pages == 3
    with pytest.raises(RebuildFailed, match="page 3 of this prefix is not in the store, and has no recipe"):
        namespace.rebuild(ids)
    put(namespace, ids)
    namespace.drop_to_text(ids, from_page=4)
    assert namespace.rebuild(ids, wait_s=0).waiting_jobs == 1
    namespace.drop_to_text(ids, from_page=1)  # while it waits, its prefix goes, and then one recipe in the middle
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(namespace.rebuild, ids, wait_s=20)
        while state(daemon, namespace)["waiting_jobs"] < 2:
            pass
        assert namespace.delete_recipes(ids, from_page=2) == 4
        with worker(daemon, namespace), pytest.raises(RebuildFailed, match=r"page 2 of the prefix .* its recipe is gone"):
            waiting.result(20)
    assert np.array_equal(before[:1], fetched(namespace, ids[:4], 0))


async def test_a_storm_is_one_rebuild(daemon: DaemonProcess, client: Client, space: Callable[..., Namespace]) -> None:
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


def test_recipes_survive_a_kill(data_dir: Path) -> None:
    sizes = ("--dram", "16MiB", "--ssd", "64MiB")
    ids = tokens(5)
    with DaemonProcess(data_dir, *sizes) as running, Client(running.endpoint) as one:
        namespace = one.namespace("kept", "rev-1", SPEC, recipes=True)
        before = dropped(namespace, ids)
        put(namespace, tokens(2, seed=9))
        running.kill()
    with DaemonProcess(data_dir, *sizes) as running, Client(running.endpoint) as one:
        namespace = one.namespace("kept")
        assert namespace.match(ids, lease_s=0, rebuildable=True).rebuildable_pages == 5
        with worker(running, namespace):
            assert np.array_equal(fetched(namespace, ids), before)
        assert running.stop() == 0


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


def test_ahead_of_need(daemon: DaemonProcess, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(3)
    before = dropped(namespace, ids)
    url, body = f"{daemon.http}/v1/namespaces/{namespace.id}/prefetch", {"tokens": ids.tolist(), "rebuild": True}
    assert "rebuilding_pages" not in json.loads(ask(url, "POST", {"tokens": ids.tolist()})[2])
    with worker(daemon, namespace, "--compute-s", "0.05"):
        assert json.loads(ask(url, "POST", body)[2])["rebuilding_pages"] == 3
        while len(out := fetched(namespace, ids, 0)) < 3:
            pass
        assert np.array_equal(out, before)
        namespace.drop_to_text(ids)
        refused = json.loads(ask(url, "POST", body | {"within_s": 0.001})[2])
        assert refused["rebuilding_pages"] == 0
        assert "it would take about" in refused["why_not"]
        assert namespace.prefetch(ids, rebuild=True, within_s=60) == 0
        while len(fetched(namespace, ids, 0)) < 3:
            pass


def test_over_http_and_from_the_command_line(daemon: DaemonProcess, client: Client, space: Callable[..., Namespace]) -> None:
    namespace, ids = space(), tokens(4)
    before, numbers, text = put(namespace, ids), ids.tolist(), ",".join(map(str, ids))
    base = f"{daemon.http}/v1/namespaces/{namespace.id}"

    def post(name: str, **body: Any) -> tuple[int, Any]:
        status, _, raw = ask(f"{base}/{name}", "POST", body)
        return status, json.loads(raw)

    assert post("drop", tokens=numbers, from_token=9) == (200, {"pages": 2})
    for number in ("18446744073709551616", "9223372036854775808"):
        past = kvstore(daemon, "drop", namespace.id, "-t", text, "--from-token", number)
        assert (past.returncode, "Traceback" in past.stderr) == (2, False), past.stderr
    with pytest.raises(BadRequest, match="can't be sent"):
        namespace.drop_to_text(ids, from_page=1 << 64)
    assert json.loads(kvstore(daemon, "drop", namespace.id, "-t", text, "--from-token", "4", "--json").stdout) == {"dropped_pages": 1}
    assert post("match", tokens=numbers)[1]["rebuildable_pages"] == 3
    assert post("rebuild", tokens=numbers, wait_s=0.01) == (
        200, {"pages": 1, "wanted_pages": 4, "waiting_jobs": 1, "claimed_jobs": 0, "checked_pages": 0, "drift": {}}
    )  # fmt: skip
    with worker(daemon, namespace):
        done = kvstore(daemon, "rebuild", namespace.id, "-t", text, "--json")
        assert json.loads(done.stdout)["pages"] == 4
        namespace.drop_to_text(ids)
        assert post("match", tokens=numbers, rebuild_s=10)[1]["pages"] == 4
    assert np.array_equal(fetched(namespace, ids, 0), before)
    count_, nbytes = namespace.recipes()
    assert json.loads(ask(f"{base}/recipes")[2]) == {"recipes": count_, "nbytes": nbytes}
    namespace.drop_to_text(ids, from_page=2)
    assert post("recipes/delete", tokens=numbers, from_token=12) == (200, {"recipes": 1})
    assert json.loads(kvstore(daemon, "recipes", namespace.id, "--delete", "--all", "--json").stdout)["deleted"] == 1
    assert kvstore(daemon, "recipes", namespace.id, "--delete").returncode == 2
    status, failed = post("rebuild", tokens=numbers)
    assert (status, failed["code"]) == (502, "rebuild_failed")
    client.namespace("no-recipes", "rev-2", SPEC)
    plain = ask(f"{daemon.http}/v1/namespaces/no-recipes/rebuild", "POST", {"tokens": numbers})
    assert (plain[0], json.loads(plain[2])["code"]) == (409, "conflict")
    with pytest.raises(Conflict):
        client.namespace("no-recipes").drop_to_text(ids)
    with pytest.raises((Conflict, Busy)):
        client.namespace("no-recipes").rebuild(ids)
