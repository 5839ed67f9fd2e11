"""A worker process by itself, with a test in the orchestrator's place; and the command."""

import asyncio
import json
import struct
import subprocess
import sys
from pathlib import Path

import msgspec

from kvstore_client import AsyncClient
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.messages import Bye, Change, Changed, Channel, Decode, Hello, Lost, Prompt, Word
from kvstore_workers.factory.model import factory_spec
from kvstore_workers.factory.report import Journalled
from kvstore_workers.factory.running import Running
from kvstore_workers.factory.settings import write_settings
from kvstore_workers.trace import AGENTS, excerpt_path
from tests.factory.test_factory import QUICK


async def next_of(channel: Channel, kind: type[Word]) -> Word:
    while not isinstance(word := await channel.word(), kind):
        pass
    return word


async def test_a_worker_changes_its_kind_comes_back_and_goes_when_it_is_told(daemon: DaemonProcess, tmp_path: Path) -> None:
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("itself", "rev-1", factory_spec(64))
    settings = msgspec.structs.replace(
        QUICK, endpoint=daemon.endpoint, namespace=namespace.id, socket=str(tmp_path / "s"), journal="", change_s=0.05
    )
    running = Running(settings, tmp_path / "settings.json")
    write_settings(settings, running.path)
    came: asyncio.Queue[tuple[Channel, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda r, w: came.put_nowait((Channel(r, w), w)), settings.socket)
    async with server, asyncio.timeout(60):
        await running.start_worker("w", Kind.DECODE, unix=False)
        try:
            channel, writer = await came.get()
            assert await next_of(channel, Hello) == Hello("w", "decode", settings.slots, [], [])
            prompt = Prompt(5, 2048, 3, [91, 92, 93, 94], None, deadline=asyncio.get_running_loop().time() + 30)
            await channel.send(Decode(prompt, 2))
            lost = await next_of(channel, Lost)
            assert isinstance(lost, Lost)
            assert (lost.turn, lost.attempt, lost.stage) == (5, 2, "decode")
            assert "0 of its 4 pages" in lost.why
            await channel.send(Change("prefill"))
            assert await next_of(channel, Changed) == Changed("prefill")
            writer.write(struct.pack("<I", 3) + b"abc")  # that is no order
            channel, _ = await came.get()
            hello = await next_of(channel, Hello)
            assert isinstance(hello, Hello)
            assert (hello.kind, hello.decodes) == ("prefill", [(5, 2)]), "what was not heard is said again"
            assert await next_of(channel, Lost) == lost
            await channel.send(Bye())
            assert await running.workers["w"].wait() == 0
        finally:
            await running.stop()


def test_a_trace_goes_through_all_stages_by_the_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvstore_workers.factory",
        "--turns",
        "8",
        "--seconds",
        "1",
        "--probes",
        "1",
        "--mode",
        "disaggregated",
    ]
    traces = ["--trace", f"{excerpt_path()}@30", "--trace", f"{excerpt_path(AGENTS)}@60", "--dram", "64MiB", "--ssd", "64MiB"]
    workers = ["--bytes-per-token", "64", "--prefill", "1", "--midfill", "1", "--decode", "1"]
    files = ["--json", str(tmp_path / "f"), "--journal", str(tmp_path / "j")]
    done = subprocess.run([*command, *traces, *workers, *files], capture_output=True, text=True, timeout=90)
    assert "layer streaming" in done.stdout, done.stdout + done.stderr
    (figures,) = json.loads((tmp_path / "f").read_text())["runs"].values()
    assert figures["done"] == figures["turns"] == 8
    assert figures["wrong_bytes"] == 0
    assert figures["verified_bytes"] > 1 << 20
    assert figures["followed"] > 0, "no decode followed a put under way"
    assert figures["compute_s"] <= figures["compute_s_store_off"]
    assert set(figures["utilisation"]) == {"prefill", "midfill", "decode"}
    assert any(name.startswith("fetch_unix") for name in figures["moved"])
    assert len(figures["streaming"]["pairs"]) == 1
    assert figures["streaming"]["pairs"][0]["cached_tokens"] > 2048
    journal = Journalled.read(tmp_path / "j.disaggregated")
    assert len(journal.filled) == 10
    for number, filled in journal.filled.items():
        parts = filled.match_s + filled.wait_s + filled.fetch_s + filled.compute_s
        assert parts <= filled.token_at - journal.arrived[number].at + 1e-3, "the parts are more than the whole"
    wrong = subprocess.run([*command, "--trace", "x@fast"], capture_output=True, text=True, timeout=90)
    assert wrong.returncode == 1
    assert "FILE@SPEED" in wrong.stderr
