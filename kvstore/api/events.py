"""Publishes over ZeroMQ what comes to the tiers and leaves them, in the form of vLLM's KV events. See docs/events.md.

A PUB socket has [topic, sequence number (8 bytes, big-endian), batch]. A ROUTER socket answers [empty, first sequence number] with the
batches from there on that are still in the buffer, each as [empty, topic, sequence number, batch], and ends with the number -1.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq

from kvstore.api.event_messages import END, AllBlocksCleared, Event, KVEventBatch, events_of
from kvstore.api.event_settings import EventSettings
from kvstore.errors import BadRequest
from kvstore.store import NamespaceSettings
from kvstore.store.stats import Stats
from kvstore.store.tier_events import TierEvents

_log = logging.getLogger("kvstore.events")

_PAUSE_S = 0.01
"""Between two looks at what has changed."""
_PAGES = 512
"""About the most pages of a batch."""
_BUFFER_BATCHES, _BUFFER_BYTES = 10_000, 64 << 20
_HIGH_WATER, _REPLAY_HIGH_WATER = 1000, 100
"""Messages that wait for one subscriber, and for one who asked for a replay."""
_MAX_REQUEST = 4096
_MAX_REPLAYS = 8
_POLL_S = 0.02
_GIVE_UP_S = 10.0
"""A replay that its reader does not take for so long ends without an end."""
_LINGER_MS = 200


class EventPublisher:
    """`open` it, and `close` it. `started` is the first number: the microseconds of the daemon's start, so that none comes twice."""

    def __init__(self, source: TierEvents, settings: EventSettings, stats: Stats, started: int) -> None:
        self._source = source
        self._settings = settings
        self._stats = stats
        self._next = started
        self._changed = asyncio.Event()
        self._buffer: dict[int, tuple[bytes, bytes]] = {}
        """By sequence number, without holes: topic and batch."""
        self._first = started
        self._buffered = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._replays: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, namespaces: Iterable[NamespaceSettings], died: asyncio.Event) -> None:
        """Listen, and tell that nothing is anywhere, of all that is here and of these namespaces, before anything else is told.

        Raises BadRequest if an address can't be listened on. `died` is set if publishing ends by a bug.
        """
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        try:
            endpoint = _listen(self._pub, "events", self._settings.endpoint, _HIGH_WATER)
            replay = ""
            if self._settings.replay:
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what a slow reader does not take is lost silently
                replay = _listen(self._router, "events_replay", self._settings.replay, _REPLAY_HIGH_WATER)
        except BaseException:
            await self._close_sockets()
            raise
        _log.info("KV events on %s%s", endpoint, f", replay on {replay}" if replay else "")
        for topic in dict.fromkeys(
            [self._settings.common_topic, *(self._settings.topic_of(each.tenant, each.name) for each in namespaces)]
        ):
            self._publish(topic, [AllBlocksCleared()])
        self._source.changed = self._changed.set
        self._changed.set()
        self._tasks = [asyncio.create_task(self._run(), name="kvstore-events")]
        if replay:
            self._tasks.append(asyncio.create_task(self._answer(), name="kvstore-event-replays"))
        for task in self._tasks:
            task.add_done_callback(lambda ended: None if ended.cancelled() else died.set())

    async def close(self) -> None:
        """Stop."""
        self._source.changed = lambda: None
        tasks = [*self._tasks, *self._replays]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close_sockets()

    async def _close_sockets(self) -> None:
        for each in (self._pub, self._router):
            each.close(linger=_LINGER_MS)
        await asyncio.to_thread(self._context.term)  # waits for what lingers

    # --- publishing ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (changes := self._source.take(_PAGES)) is not None:
                if events := events_of(changes, self._settings.hashes):
                    self._publish(self._settings.topic_of(changes.settings.tenant, changes.settings.name), events)
                await asyncio.sleep(0)
            await asyncio.sleep(_PAUSE_S)

    def _publish(self, topic: bytes, events: list[Event]) -> None:
        payload = self._encoder.encode(KVEventBatch(time.time(), events, 0))
        number, self._next = self._next, self._next + 1
        self._buffer[number] = (topic, payload)
        self._buffered += len(payload)
        while len(self._buffer) > _BUFFER_BATCHES or (self._buffered > _BUFFER_BYTES and len(self._buffer) > 1):
            self._buffered -= len(self._buffer.pop(self._first)[1])
            self._first += 1
        self._stats.event_batches += 1
        # A PUB socket never waits: what a subscriber has no room for, it does not get, and can ask for again.
        self._pub.send_multipart((topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    # --- replay --------------------------------------------------------------------------------------------------------

    async def _answer(self) -> None:
        """Take requests, as long as not too many are being answered; the others wait in the socket.

        Looks again and again: the descriptor of a ZeroMQ socket tells of changes only, and sending takes notice of them too.
        """
        while True:
            while len(self._replays) < _MAX_REPLAYS and (request := self._receive()) is not None:
                task = asyncio.create_task(self._replay(*request), name="kvstore-event-replay")
                self._replays.add(task)
                task.add_done_callback(self._replays.discard)
            await asyncio.sleep(_POLL_S)

    def _receive(self) -> tuple[bytes, int, bytes] | None:
        """The next request: who asks, from which number on, and a prefix of the topics that it wants; None if there is none."""
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) in (3, 4) and not frames[1] and len(frames[2]) == 8:
                return frames[0], int.from_bytes(frames[2], "big"), frames[3] if len(frames) == 4 else b""
            _log.warning("a request for a replay is not understood: send an empty frame, then 8 bytes, big-endian")

    async def _replay(self, peer: bytes, first: int, topics: bytes) -> None:
        """Send what is in the buffer from a number on, up to what is the newest when it is sent."""
        self._stats.event_replays += 1
        with contextlib.suppress(TimeoutError, zmq.ZMQError):  # it does not read, or is gone
            number = max(first, self._first)
            while number < self._next:
                number = max(number, self._first)  # of what was dropped meanwhile it sees that it is missing
                topic, payload = self._buffer[number]
                if topic.startswith(topics):
                    await self._send((peer, b"", topic, number.to_bytes(8, "big"), payload))
                number += 1
            await self._send((peer, b"", b"", END, b""))

    async def _send(self, frames: tuple[bytes, ...]) -> None:
        async with asyncio.timeout(_GIVE_UP_S):
            while True:
                try:
                    self._router.send_multipart(frames, zmq.NOBLOCK)
                    break
                except zmq.Again:
                    await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(0)


def _listen(socket: "zmq.Socket[bytes]", name: str, endpoint: str, high_water: int) -> str:
    """Bind a socket. Returns the address, with the port that was taken if it was 0. Raises BadRequest."""
    socket.set_hwm(high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise BadRequest(f"{name}: can't listen on {endpoint}: {error}. Give another address, or end who listens there") from error
    taken: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if taken.startswith("ipc://") and not taken.startswith("ipc://@"):
        Path(taken.removeprefix("ipc://")).chmod(0o600)
    return taken
