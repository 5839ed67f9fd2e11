"""The orchestrator process: replays traces at their times, gives turns to workers, and journals what became of them.

It decides nothing by itself: the floor does. Started again after a kill it goes on from its journal, takes up what workers that
come back have under way, and reads the turns that are left from the traces.
"""

import argparse
import asyncio
import secrets
import sys
from pathlib import Path

from kvstore.api.wire import KVStoreError
from kvstore_client import AsyncClient, Namespace
from kvstore_workers.factory.arrivals import Arrival, arrivals, probe
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.journal import Arrived, Begun, Ended, Event, Journal, Sampled, read_journal
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
    Started,
    Stats,
    Word,
)
from kvstore_workers.factory.node import now
from kvstore_workers.factory.settings import Settings, read_settings
from kvstore_workers.factory.turns import CancelOrder, ChangeOrder, DecodeOrder, FillOrder, Stage, Turn
from kvstore_workers.generator import prompt_tokens

_TICK_S = 0.05
_SAMPLE_S = 0.25
_LOOK_S = 2.0
_QUEUED = 4096
_BYE_S = 5.0
_PROBE_TOKENS = 4
_STAGES = {"fill": Stage.FILLING, "decode": Stage.DECODING}


class Peer:
    """A connected worker: what is to be sent to it waits in a bounded queue, so that a slow one holds up nobody."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.channel = channel
        self.stats: Stats | None = None
        self.outgoing: asyncio.Queue[Order] = asyncio.Queue(_QUEUED)

    async def send_all(self) -> None:
        """Send what comes, for ever."""
        while True:
            await self.channel.send(await self.outgoing.get())


class Orchestrator:
    """One run."""

    def __init__(self, settings: Settings, namespace: Namespace) -> None:
        self._settings = settings
        self._namespace = namespace
        self._floor = settings.floor()
        self._rules = settings.rules()
        self._journal_path = Path(settings.journal)
        self._arrivals = arrivals(settings)
        self._known: dict[int, Arrival] = {}
        self._peers: dict[str, Peer] = {}
        self._started: dict[int, Started] = {}
        self._put_ids: dict[int, bytes] = {}
        self._filled: dict[int, int] = {}
        self._begun = 0.0
        self._held_until = 0.0
        self._arriving = True
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until all turns are over."""
        done = self._read_journal()
        self._journal = Journal(self._journal_path)
        if not self._begun:
            self._begun = now() + 0.5
            self._journal.add(Begun(self._begun))
        else:
            self._held_until = now() + self._settings.settle_s
            self._journal.add(Event(now(), "orchestrator started again"))
        server = await asyncio.start_unix_server(self._serve, self._settings.socket)
        try:
            async with server, asyncio.TaskGroup() as group:
                beside = [group.create_task(self._work()), group.create_task(self._sample())]
                await self._arrive_all(done)
                await self._all_over()
                for pair in range(2 * self._settings.probes):
                    await self._probe(pair)
                for task in beside:
                    task.cancel()
                await self._say_bye()
        finally:
            self._journal.close()

    # --- turns come ----------------------------------------------------------------------------------------------------

    def _read_journal(self) -> set[int]:
        """What is known from before: turns that are over or filled are not begun again."""
        known: set[int] = set()
        by_number = {a.number: a for a in self._arrivals}
        for line in read_journal(self._journal_path):
            match line:
                case Begun():
                    self._begun = line.at
                case Arrived() if line.turn in by_number:
                    known.add(line.turn)
                    self._known[line.turn] = by_number[line.turn]
                    self._floor.turns[line.turn] = self._turn(by_number[line.turn], line.cached_tokens)
                case Filled() if (turn := self._floor.turns.get(line.turn)) is not None and not turn.over:
                    turn.stage, turn.filled_at = Stage.READY, now()
                    self._filled[line.turn] = line.attempt
                case Retired() if (turn := self._floor.turns.get(line.turn)) is not None:
                    turn.stage = Stage.DONE
                case Ended() if (turn := self._floor.turns.get(line.turn)) is not None:
                    turn.stage = Stage.GIVEN_UP
                case _:
                    pass
        for turn in self._floor.turns.values():
            self._floor.arrive(turn)
        return known

    def _turn(self, arrival: Arrival, cached_tokens: int) -> Turn:
        return self._rules.turn(
            arrival.number, self._begun + arrival.at, arrival.request.input_tokens, cached_tokens, aggregated=self._settings.aggregated
        )

    async def _arrive_all(self, known: set[int]) -> None:
        async with asyncio.TaskGroup() as group:
            for arrival in self._arrivals:
                if arrival.number in known:
                    continue
                await asyncio.sleep(max(self._begun + arrival.at - now(), 0.0))
                group.create_task(self._arrive(arrival))
        self._arriving = False
        self._changed.set()

    async def _arrive(self, arrival: Arrival) -> None:
        started = now()
        cached = await self._look(arrival) if self._settings.reuse else 0
        turn = self._turn(arrival, cached)
        if arrival.probe:
            turn.output_tokens = _PROBE_TOKENS
        self._known[arrival.number] = arrival
        self._journal.add(
            Arrived(turn.number, turn.arrived, turn.kind.value, turn.short, turn.input_tokens, cached, now() - started, arrival.probe)
        )
        self._floor.arrive(turn)
        self._carry_out()

    async def _look(self, arrival: Arrival) -> int:
        """How much of a prompt the store has; nothing, if it does not say so in time."""
        tokens = await asyncio.to_thread(prompt_tokens, arrival.request)
        try:
            match = await self._namespace.match(tokens, lease_s=0, parts=False, timeout=_LOOK_S)
        except KVStoreError:
            return 0
        return min(match.tokens, arrival.request.input_tokens - 1)

    async def _all_over(self) -> None:
        while self._arriving or not all(turn.over for turn in self._floor.turns.values()):
            self._changed.clear()
            await self._changed.wait()

    async def _probe(self, number: int) -> None:
        """One long-prefix midfill on an idle factory."""
        arrival = probe(self._arrivals, number, now() - self._begun)
        if arrival is not None:
            tokens = await asyncio.to_thread(prompt_tokens, arrival.request)
            await self._namespace.prefetch(tokens)  # both of a pair find it in DRAM
            await self._arrive(arrival)
            await self._all_over()

    # --- workers -------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        peer: Peer | None = None
        sending: asyncio.Task[None] | None = None
        try:
            hello = await channel.word()
            if not isinstance(hello, Hello):
                return
            self._leave(hello.name, "it came back")
            peer = self._peers[hello.name] = Peer(hello.name, channel)
            strange = self._floor.join(hello.name, Kind(hello.kind), hello.slots, hello.fills, hello.decodes)
            for turn in strange:
                self._send(hello.name, Cancel(turn))
            self._journal.add(Event(now(), "worker came", hello.name))
            sending = asyncio.create_task(peer.send_all())
            self._carry_out()
            while True:
                self._hear(peer, await channel.word())
        except KVStoreError:
            pass  # it is gone; its turns go to others
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            if peer is not None and self._peers.get(peer.name) is peer:
                self._leave(peer.name, "its connection ended")
            await channel.close()

    def _leave(self, name: str, why: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        self._journal.add(Event(now(), "worker left", name, why=why))
        if peer.stats is not None:
            self._journal.add(peer.stats)
        self._floor.leave(name, now())
        self._carry_out()

    def _hear(self, peer: Peer, word: Word) -> None:
        match word:
            case Stats():
                peer.stats = word
                return
            case Started():
                self._started[word.turn] = word
                self._floor.started(word.turn, word.attempt, now())
            case Filled():
                turn = self._floor.turns.get(word.turn)
                if turn is not None and turn.fill_attempt == word.attempt and self._filled.get(word.turn) != word.attempt:
                    self._filled[word.turn] = word.attempt  # also if decode, which followed it, is done already
                    self._journal.add(word)
                self._floor.filled(word.turn, word.attempt, now())
            case Retired():
                turn = self._floor.turns.get(word.turn)
                if turn is not None and not turn.over:
                    self._journal.add(word)
                self._floor.retired(word.turn, now())
            case Lost():
                self._journal.add(Event(now(), f"{word.stage} lost", peer.name, word.turn, word.why))
                self._floor.lost(word.turn, word.attempt, _STAGES.get(word.stage, Stage.DECODING), now())
            case Changed():
                self._journal.add(Event(now(), f"became {word.kind}", peer.name))
                self._floor.changed(peer.name, Kind(word.kind))
            case Hello():
                return
        if isinstance(word, Filled | Retired | Lost):
            self._send(peer.name, Ack(word.number))
        self._carry_out()

    def _send(self, name: str, order: Order) -> None:
        peer = self._peers.get(name)
        if peer is None:
            return
        try:
            peer.outgoing.put_nowait(order)
        except asyncio.QueueFull:  # it takes nothing: as good as gone
            self._leave(name, "it takes no orders")

    # --- what is done --------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Pass the floor's orders on."""
        if now() >= self._held_until:
            for order in self._floor.orders(now()):
                match order:
                    case FillOrder():
                        put_id = self._put_ids[order.turn] = secrets.token_bytes(16)
                        arrival = self._known[order.turn]
                        fill = Fill(self._prompt(order.turn), order.attempt, put_id, self._settings.reuse, arrival.stream)
                        self._started.pop(order.turn, None)
                        self._send(order.worker, fill)
                    case DecodeOrder():
                        self._send(order.worker, self._decode(order))
                    case CancelOrder():
                        self._send(order.worker, Cancel(order.turn))
                    case ChangeOrder():
                        self._journal.add(Event(now(), f"is to become {order.kind.value}", order.worker))
                        self._send(order.worker, Change(order.kind.value))
        self._changed.set()

    def _decode(self, order: DecodeOrder) -> Decode:
        started = self._started.get(order.turn)
        if not order.follow or started is None:
            return Decode(self._prompt(order.turn), order.attempt)
        return Decode(self._prompt(order.turn), order.attempt, self._put_ids[order.turn], started.first_page, started.due_at)

    def _prompt(self, number: int) -> Prompt:
        turn, request = self._floor.turns[number], self._known[number].request
        return Prompt(number, request.input_tokens, turn.output_tokens, list(request.blocks), request.tail_block, turn.deadline)

    async def _work(self) -> None:
        over: set[int] = set()
        while True:
            await asyncio.sleep(_TICK_S)
            self._floor.tick(now())
            for turn in self._floor.turns.values():
                if turn.stage is Stage.GIVEN_UP and turn.number not in over:
                    over.add(turn.number)
                    why = "its deadline has passed" if now() > turn.deadline else "it was begun too often"
                    self._journal.add(Ended(turn.number, now(), why))
            self._carry_out()

    async def _sample(self) -> None:
        while True:
            view = self._floor.view(now())
            held = [peer.stats.hbm_now for peer in self._peers.values() if peer.stats is not None]
            used, idle, moving = (sum(h[i] for h in held) for i in range(3))
            kinds: dict[str, int] = {}
            for worker in self._floor.workers.values():
                kinds[worker.kind.value] = kinds.get(worker.kind.value, 0) + 1
            self._journal.add(Sampled(now(), view.waiting, view.filling, view.ready, view.decoding, (used, idle, moving), kinds))
            await asyncio.sleep(_SAMPLE_S)

    async def _say_bye(self) -> None:
        """Let the workers' last figures come in, and send them home."""
        await asyncio.sleep(2 * _SAMPLE_S)
        for name in list(self._peers):
            self._send(name, Bye())
        try:
            async with asyncio.timeout(_BYE_S):
                while self._peers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            for name in list(self._peers):
                self._leave(name, "it did not end")


async def _main(settings: Settings) -> None:
    async with AsyncClient(settings.unix_endpoint or settings.endpoint, connections=1, name="orchestrator") as client:
        await Orchestrator(settings, await client.namespace(settings.namespace)).run()


def main() -> None:
    """Run the orchestrator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    try:
        settings = read_settings(parser.parse_args().settings)
        Path(settings.socket).unlink(missing_ok=True)  # of one that was killed
        asyncio.run(_main(settings))
    except KVStoreError as error:
        sys.exit(f"factory orchestrator: {error.code}: {error.message}")


if __name__ == "__main__":
    main()
