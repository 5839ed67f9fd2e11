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
from kvstore_workers.factory.running import Running
from kvstore_workers.factory.settings import write_settings
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


def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvstore_workers.factory",
        "--turns",
        "3",
        "--seconds",
        "1",
        "--probes",
        "0",
        "--bytes-per-token",
        "64",
    ]
    workers = [
        "--bytes-per-token",
        "64",
        "--prefill",
        "1",
        "--midfill",
        "1",
        "--decode",
        "1",
        "--mode",
        "disaggregated",
        "--dram",
        "64MiB",
        "--ssd",
        "64MiB",
    ]
    done = subprocess.run([*command, *workers, "--json", str(tmp_path / "j")], capture_output=True, text=True, timeout=90)
    assert "bytes checked, wrong" in done.stdout, done.stdout + done.stderr
    (figures,) = json.loads((tmp_path / "j").read_text())["runs"].values()
    assert figures["done"] == figures["turns"] == 3
    assert figures["wrong_bytes"] == 0
    wrong = subprocess.run([*command, "--trace", "x@fast"], capture_output=True, text=True, timeout=90)
    assert wrong.returncode == 1
    assert "FILE@SPEED" in wrong.stderr
