"""Replays a trace over several worker processes, keeping the order between requests that depend on each other."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict

from kvstore.api.wire import KVStoreError
from kvstore_workers.trace import Request, dependencies
from kvstore_workers.worker import Outcome

_STOP_S = 10.0
_LINE_LIMIT = 1 << 20


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def start(cls, *arguments: str) -> AsyncIterator["WorkerProcess"]:
        """Run a worker with these arguments; it is ended at the end."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstore_workers.worker", *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LINE_LIMIT,
        )  # fmt: skip
        try:
            yield cls(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except (TimeoutError, asyncio.CancelledError):
                process.kill()
                await process.wait()

    async def run(self, request: Request) -> Outcome:
        """Have one request served."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise KVStoreError(f"a worker died at request {request.number}; what it printed says why")
        return Outcome(**json.loads(line))


async def replay(requests: list[Request], workers: list[tuple[str, ...]], on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
    """Serve all requests, each by the next free of the workers (given by their arguments), in the trace's order.

    A request waits until those that it shares pages with are committed, so with room for everything the hits are those of
    the trace in order, whatever the number of workers.
    """
    needs = dependencies(requests)
    done = [asyncio.Event() for _ in requests]
    outcomes: list[Outcome] = []
    async with AsyncExitStack() as stack:
        free: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        for arguments in workers:
            free.put_nowait(await stack.enter_async_context(WorkerProcess.start(*arguments)))

        async def serve(index: int, worker: WorkerProcess) -> None:
            outcome = await worker.run(requests[index])
            outcomes.append(outcome)
            on_outcome(outcome)
            done[index].set()
            free.put_nowait(worker)

        async with asyncio.TaskGroup() as group:
            for index in range(len(requests)):
                for earlier in needs[index]:
                    await done[earlier].wait()
                group.create_task(serve(index, await free.get()))
    return outcomes
