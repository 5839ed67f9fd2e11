"""The factory with real processes: a daemon, an orchestrator, workers; all bytes checked, and what becomes of it when some are killed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.api.wire import BadRequest
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.journal import Sampled, read_journal
from kvstore_workers.factory.report import Journalled, report
from kvstore_workers.factory.running import Running, factory
from kvstore_workers.factory.settings import Settings, read_settings, write_settings
from kvstore_workers.trace import AGENTS, excerpt_path
from tests.integration.raw import stat

QUICK = Settings(
    endpoint="", unix_endpoint="", namespace="", socket="", journal="",
    traces=[(str(excerpt_path()), 30.0), (str(excerpt_path(AGENTS)), 60.0)],
    turns=10, hbm_bytes=16 << 20, token_s=2e-6, output_median=40.0, step_s=2e-3, deadline_s=40.0, settle_s=0.5,
)  # fmt: skip
DISAGGREGATED = [Kind.PREFILL, Kind.MIDFILL, Kind.DECODE, Kind.DECODE]
HELD = ("leases", "puts_open", "pinned_blobs")


@asynccontextmanager
async def running(
    daemon: DaemonProcess, folder: Path, kinds: Sequence[Kind] = tuple(DISAGGREGATED), **changes: Any
) -> AsyncIterator[Running]:
    """A small factory."""
    async with factory(daemon, folder, msgspec.structs.replace(QUICK, **changes), kinds, 64) as found:
        yield found


def came_to(found: Running) -> tuple[Journalled, dict[str, Any]]:
    """What a run came to. Whatever else a test is about: no byte is ever wrong, and some were looked at."""
    journal = Journalled.read(Path(found.settings.journal))
    figures = report(journal, found.settings.cost())
    assert figures["wrong_bytes"] == 0
    return journal, figures


async def until(what: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.02)


async def nothing_is_held(daemon: DaemonProcess) -> None:
    def free() -> bool:
        now = stat(daemon.http)
        return not any(now[name] for name in HELD)

    await until(lambda: free(), 10)


async def test_aggregated_workers_and_no_reuse(daemon: DaemonProcess, tmp_path: Path) -> None:
    async with running(daemon, tmp_path, [Kind.AGGREGATED] * 2, aggregated=True, reuse=False, turns=6) as found:
        await found.finished(60)
    _, figures = came_to(found)
    assert figures["done"] == 6
    assert figures["cached_tokens"] == 0
    assert figures["compute_s"] == pytest.approx(figures["compute_s_store_off"])


async def test_an_orchestrator_that_is_killed_goes_on_where_it_was(daemon: DaemonProcess, tmp_path: Path) -> None:
    async with running(daemon, tmp_path, step_s=8e-3, output_median=20.0) as found:
        journal = Path(found.settings.journal)
        await until(lambda: len(Journalled.read(journal).retired) >= 1)
        pids = {name: worker.pid for name, worker in found.workers.items()}
        assert found.orchestrator is not None
        found.orchestrator.kill()
        await found.finished(60)
        assert {name: worker.pid for name, worker in found.workers.items()} == pids
    known, figures = came_to(found)
    assert figures["events"]["orchestrator started again"] == 1
    assert figures["done"] == 10
    assert figures["events"]["worker came"] >= 8, "no worker came back"
    lines = [line for line in read_journal(journal) if type(line).__name__ == "Retired"]
    assert len(lines) == len(known.retired) == 10, "a turn was done twice"
    await nothing_is_held(daemon)


async def test_a_worker_killed_with_pages_in_hbm_loses_its_turns_to_another(daemon: DaemonProcess, tmp_path: Path) -> None:
    async with running(daemon, tmp_path, step_s=8e-3, output_median=80.0) as found:  # so long that none is done before it is killed
        journal = Path(found.settings.journal)

        def in_hbm() -> bool:
            return any(isinstance(line, Sampled) and line.hbm[0] and line.decoding > 3 for line in read_journal(journal))

        await until(in_hbm)
        found.workers["decode-2"].kill()
        await found.finished(60)
    known, figures = came_to(found)
    assert figures["done"] == 10
    left = next(e.at for e in known.events if e.what == "worker left" and e.worker == "decode-2")
    after = [r for r in known.retired.values() if r.done_at > left]
    assert after
    assert {r.worker for r in after} == {"decode-3"}
    await nothing_is_held(daemon)


async def test_without_decode_workers_turns_are_given_up_at_their_deadline(daemon: DaemonProcess, tmp_path: Path) -> None:
    async with running(daemon, tmp_path, [Kind.PREFILL], turns=4, deadline_s=1.0) as found:
        await found.finished(30)
    known, figures = came_to(found)
    assert figures["given_up"] == 4
    assert figures["done"] == 0
    assert {e.why for e in known.ended.values()} == {"its deadline has passed"}
    await nothing_is_held(daemon)


def test_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    write_settings(QUICK, tmp_path / "s")
    assert read_settings(tmp_path / "s") == QUICK
    (tmp_path / "s").write_text('{"endpoint": 1}')
    with pytest.raises(BadRequest, match="can't be read"):
        read_settings(tmp_path / "s")
