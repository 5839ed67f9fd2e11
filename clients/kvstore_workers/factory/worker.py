"""A worker process of the factory: takes orders over a Unix socket, and outlives the orchestrator.

If the connection breaks, what is under way goes on, and the worker comes back with it for `patience` seconds; then it ends.
Words that matter are said again until they were heard.
"""

import argparse
import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from kvstore.api.wire import ConnectionLost, KVStoreError
from kvstore_client import AsyncClient
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.messages import (
    Ack,
    Bye,
    Cancel,
    Change,
    Changed,
    Channel,
    Decode,
    Fill,
    Filled,
    Hello,
    Lost,
    Order,
    Prompt,
    Retired,
    Word,
)
from kvstore_workers.factory.node import Node, first_of, now
from kvstore_workers.factory.settings import read_settings
from kvstore_workers.factory.stages import Filling, decode

_STATS_S = 0.25
_RETRY_S = 0.1
PATIENCE_S = 20.0
"""How long a worker goes on without an orchestrator."""
_FILL, _DECODE = "fill", "decode"
_Key = tuple[str, int]


class Worker:
    """The orders of one node."""

    def __init__(self, name: str, node: Node, slots: int, socket: str) -> None:
        self._name = name
        self._node = node
        self._slots = slots
        self._socket = socket
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._attempts: dict[_Key, int] = {}
        self._unheard: dict[int, Filled | Retired | Lost] = {}
        self._numbers = 0
        self._channel: Channel | None = None
        self._next_kind: Kind | None = None
        self._over = False

    async def run(self) -> None:
        """Serve until the orchestrator says that there is no more, or none comes back."""
        beside = [asyncio.create_task(self._node.run_batch()), asyncio.create_task(self._tell_stats())]
        last = now()
        try:
            while not self._over and now() - last < PATIENCE_S:
                try:
                    reader, writer = await asyncio.open_unix_connection(self._socket)
                except OSError:
                    await asyncio.sleep(_RETRY_S)
                    continue
                await self._serve(Channel(reader, writer))
                last = now()
        finally:
            for task in (*beside, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(*beside, *self._tasks.values(), return_exceptions=True)
            await self._node.hbm.close()

    async def _serve(self, channel: Channel) -> None:
        try:
            await channel.send(self._hello())
            self._channel = channel
            for word in list(self._unheard.values()):
                await channel.send(word)
            while not self._over:
                self._obey(await channel.order())
        except KVStoreError as error:
            if not isinstance(error, ConnectionLost):
                print(f"{self._name}: {error.message}", file=sys.stderr)
        finally:
            self._channel = None
            await channel.close()

    def _hello(self) -> Hello:
        parts: dict[str, list[tuple[int, int]]] = {_FILL: [], _DECODE: []}
        for (stage, turn), attempt in self._attempts.items():
            parts[stage].append((turn, attempt))
        return Hello(self._name, self._node.kind.value, self._slots, parts[_FILL], parts[_DECODE])

    # --- what is said --------------------------------------------------------------------------------------------------

    async def say(self, word: Word) -> None:
        """Tell the orchestrator; results are kept until it has heard them."""
        if isinstance(word, Filled | Retired | Lost):
            self._numbers += 1
            word = msgspec.structs.replace(word, number=self._numbers)
            if not isinstance(word, Lost):
                word = msgspec.structs.replace(word, worker=self._name)
            self._unheard[self._numbers] = word
        channel = self._channel
        if channel is None:
            return
        try:
            await channel.send(word)
        except ConnectionLost:
            pass  # the reading side notices it too

    def _heard(self, number: int) -> None:
        """Results up to a number are known: the orchestrator need not be told again who has those turns."""
        for known in [n for n in self._unheard if n <= number]:
            word = self._unheard.pop(known)
            stage = _FILL if isinstance(word, Filled) else _DECODE if isinstance(word, Retired) else word.stage
            if self._attempts.get((stage, word.turn)) == word.attempt:
                del self._attempts[stage, word.turn]
            if isinstance(word, Filled) and (_FILL, word.turn) in self._tasks and word.kind == Kind.AGGREGATED.value:
                self._attempts[_DECODE, word.turn] = 0  # the same task goes on to decode it

    async def _tell_stats(self) -> None:
        while True:
            await asyncio.sleep(_STATS_S)
            await self.say(self._node.stats(self._name))

    # --- what is done --------------------------------------------------------------------------------------------------

    def _obey(self, order: Order) -> None:
        match order:
            case Fill():
                self._start(_FILL, order.prompt, order.attempt, Filling(self._node, order, self.say).run())
            case Decode():
                self._start(_DECODE, order.prompt, order.attempt, decode(self._node, order, self.say))
            case Cancel():
                for stage in (_FILL, _DECODE):
                    self._attempts.pop((stage, order.turn), None)
                    if (task := self._tasks.get((stage, order.turn))) is not None:
                        task.cancel()
            case Change():
                self._next_kind = Kind(order.kind)
                self._start("change", None, 0, self._change())
            case Ack():
                self._heard(order.number)
            case Bye():
                self._over = True

    def _start(self, stage: str, prompt: Prompt | None, attempt: int, work: Coroutine[Any, Any, None]) -> None:
        key = (stage, prompt.turn if prompt is not None else -1)
        before = self._tasks.get(key)
        if prompt is not None:
            self._attempts[key] = attempt
        task = self._tasks[key] = asyncio.create_task(self._guard(key, prompt, attempt, work, before))
        task.add_done_callback(lambda done: self._forget(key, done))

    def _forget(self, key: _Key, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _guard(
        self, key: _Key, prompt: Prompt | None, attempt: int, work: Coroutine[Any, Any, None], before: "asyncio.Task[None] | None"
    ) -> None:
        """Do a stage within the turn's deadline, and say so if it can't be done."""
        why = ""
        try:
            if before is not None:  # the same turn once more: only when what was left of the first attempt is gone
                before.cancel()
                await asyncio.wait([before])
            async with asyncio.timeout_at(None if prompt is None else prompt.deadline):
                await work
        except TimeoutError:
            why = "its deadline has passed"
        except Exception as error:  # noqa: BLE001 - the turn must not hang, whatever it was
            found = first_of(error)
            why = found.message if isinstance(found, KVStoreError) else repr(found)
            if not isinstance(found, KVStoreError):
                print(f"{self._name}: {key[0]} of turn {key[1]}: {found!r}", file=sys.stderr)
        finally:
            work.close()
        if why and prompt is not None:
            await self.say(Lost(prompt.turn, attempt, key[0], why))

    async def _change(self) -> None:
        """Become another kind once all turns are done."""
        while others := [task for (stage, _), task in self._tasks.items() if stage in (_FILL, _DECODE)]:
            await asyncio.wait(others)
        await asyncio.sleep(self._node.settings.change_s)
        assert self._next_kind is not None
        self._node.become(self._next_kind)
        await self.say(Changed(self._next_kind.value))


async def _main(arguments: argparse.Namespace) -> None:
    settings = read_settings(arguments.settings)
    endpoint = settings.unix_endpoint if arguments.unix else settings.endpoint
    async with (
        AsyncClient(endpoint, connections=2, shared_memory=arguments.unix, name=arguments.name, timeout=settings.deadline_s) as client,
        AsyncClient(
            endpoint, connections=1, shared_memory=arguments.unix, name=f"{arguments.name}, out", timeout=settings.deadline_s
        ) as out,
    ):
        namespaces = await client.namespace(settings.namespace), await out.namespace(settings.namespace)
        node = Node(*namespaces, settings, Kind(arguments.kind), "unix" if arguments.unix else "tcp")
        await Worker(arguments.name, node, settings.slots, settings.socket).run()


def main() -> None:
    """Run a worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--kind", required=True, choices=[kind.value for kind in Kind])
    parser.add_argument("--unix", action="store_true", help="reach the store over its Unix socket")
    try:
        asyncio.run(_main(parser.parse_args()))
    except KVStoreError as error:
        sys.exit(f"factory worker: {error.code}: {error.message}")


if __name__ == "__main__":
    main()
