"""Runs a factory: a daemon, an orchestrator and worker processes, all real, until the orchestrator is done."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvstore.api.wire import DeadlineExceeded, KVStoreError
from kvstore_client import AsyncClient, fingerprint_revision
from kvstore_workers.daemon_process import DaemonProcess
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.model import factory_spec
from kvstore_workers.factory.settings import Settings, write_settings

_STOP_S = 5.0
_ORCHESTRATORS = 3
_MODEL = fingerprint_revision("factory", "1")


@dataclass(slots=True)
class Running:
    """The processes of a factory under way."""

    settings: Settings
    path: Path
    workers: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    orchestrator: asyncio.subprocess.Process | None = None

    async def start_worker(self, name: str, kind: Kind, *, unix: bool) -> None:
        """Another worker process."""
        arguments = ["--settings", str(self.path), "--name", name, "--kind", kind.value, *(["--unix"] if unix else [])]
        self.workers[name] = await _python("kvstore_workers.factory.worker", *arguments)

    async def start_orchestrator(self) -> None:
        """The orchestrator process; after it was killed, another one that goes on."""
        self.orchestrator = await _python("kvstore_workers.factory.orchestrator", "--settings", str(self.path))

    async def finished(self, timeout: float) -> None:
        """Wait until all turns are over. An orchestrator that dies is started again. Raises KVStoreError if it does not end well."""
        try:
            async with asyncio.timeout(timeout):
                for _ in range(_ORCHESTRATORS):
                    assert self.orchestrator is not None
                    code = await self.orchestrator.wait()
                    if code == 0:
                        return
                    if code > 0:
                        raise KVStoreError(f"the orchestrator ended with exit code {code}; what it printed says why")
                    await self.start_orchestrator()
                raise KVStoreError(f"the orchestrator was killed {_ORCHESTRATORS} times")
        except TimeoutError:
            raise DeadlineExceeded(f"the factory did not finish within {timeout:g} s") from None

    async def stop(self) -> None:
        """End all processes."""
        processes = [*self.workers.values(), *([self.orchestrator] if self.orchestrator else [])]
        try:
            async with asyncio.timeout(_STOP_S):
                await asyncio.gather(*(p.wait() for p in processes))
        except TimeoutError:
            pass  # those that are left did not end by themselves
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _python(module: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdin=asyncio.subprocess.DEVNULL)


@asynccontextmanager
async def factory(
    daemon: DaemonProcess, folder: Path, settings: Settings, kinds: Sequence[Kind], bytes_per_token: int
) -> AsyncIterator[Running]:
    """A factory with these workers on a daemon, in a namespace of its own; every second one reaches it over the Unix socket."""
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace(folder.name, _MODEL, factory_spec(bytes_per_token))
    with tempfile.TemporaryDirectory(prefix="kvf-") as short:  # paths of Unix sockets are short
        settings = msgspec.structs.replace(
            settings, endpoint=daemon.endpoint, unix_endpoint=daemon.unix_endpoint, namespace=namespace.id,
            socket=str(Path(short) / "factory.sock"), journal=str(folder / "journal"),
        )  # fmt: skip
        running = Running(settings, folder / "settings.json")
        await asyncio.to_thread(write_settings, settings, running.path)
        try:
            await running.start_orchestrator()
            for index, kind in enumerate(kinds):
                await running.start_worker(f"{kind.value}-{index}", kind, unix=index % 2 == 0)
            yield running
        finally:
            await running.stop()
    async with AsyncClient(daemon.endpoint) as client:
        await (await client.namespace(namespace.id)).drop()
