"""What a connection sends: one frame at a time, and whole. One that is cut short ends the connection."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import TypeVar

from kvstore.api.replies import Reply
from kvstore.api.request_stats import RequestStats
from kvstore.api.wire import Channel, FrameType, encode, pack
from kvstore.api.wire.descriptors import DescriptorChannel
from kvstore.api.wire.eager import begin
from kvstore.api.wire.messages import ErrorReply, Message
from kvstore.errors import Busy, ConnectionLost, KVStoreError

T = TypeVar("T")

_log = logging.getLogger("kvstore.connection")

_FIRST_BYTES = 64 << 10
"""A longer reply does not go out before what was put off for it is done: its rest would be copied."""


class Outbox:
    """Frames for a client, by who answers its requests. `timeout_s`: how long the client may take over a frame."""

    def __init__(self, channel: Channel, stats: RequestStats, timeout_s: float) -> None:
        self.lock = asyncio.Lock()
        """Held while a frame goes out."""
        self._channel = channel
        self._stats = stats
        self._timeout_s = timeout_s
        self._broken = False

    async def reply(self, request: int, frame_type: FrameType, message: Message, payload: bytes = b"") -> None:
        """Send one control frame."""
        buffers = encode(frame_type, request, pack(message), payload)
        async with self.lock:
            await self.whole(self._channel.send(buffers))

    async def send_at_once(self, gather: Callable[[], list[bytes | memoryview] | None]) -> bool:
        """Send what `gather` returns, which is called when it can be sent; False if that is nothing."""
        async with self.lock:
            buffers = gather()
            if buffers is None:
                return False
            if self._broken:
                raise ConnectionLost("a frame was cut short")
            left = self._channel.send_now(buffers)
            del buffers  # they lie in segments, which could not be given back while a client reads slowly
            if left:
                await self.whole(self._channel.send([left]))
        return True

    async def whole(self, sending: Coroutine[None, None, T]) -> T:
        """Send a frame. One that is cut short, by time or by a task that ends, spoils the connection: it is given up."""
        if self._broken:
            sending.close()
            raise ConnectionLost("a frame was cut short")
        self._channel.bound_writes(self._timeout_s)
        try:
            return await sending
        except (TimeoutError, asyncio.CancelledError) as error:
            self._broken = True
            raise ConnectionLost("the client does not take what is sent to it") from error
        except ConnectionLost:
            self._broken = True
            raise

    async def send_reply(self, request: int, reply: Reply) -> None:
        """Send a reply, with its descriptors if it has any."""
        if reply.after is not None:
            await self._reply_first(request, reply, reply.after)
            return
        if not reply.descriptors:
            await self.reply(request, reply.type, reply.message, reply.payload)
            return
        assert isinstance(self._channel, DescriptorChannel)
        buffers = encode(reply.type, request, pack(reply.message), reply.payload)
        try:
            async with self.lock:
                await self.whole(self._channel.send_with(buffers, reply.descriptors))
        except Busy:
            if reply.unsent is not None:
                reply.unsent()
            raise
        finally:
            for descriptor in reply.descriptors:
                os.close(descriptor)

    async def _reply_first(self, request: int, reply: Reply, after: Callable[[], None]) -> None:
        """Send a reply, then do what was put off for it; before that if the reply would have to wait."""
        buffers = encode(reply.type, request, pack(reply.message), reply.payload)
        turn = begin(self.lock.acquire())
        put_off = turn is None and len(reply.payload) <= _FIRST_BYTES
        if not put_off:
            after()
        if turn is not None:
            await turn
        try:
            if not put_off:
                await self.whole(self._channel.send(buffers))
                return
            try:
                left = b"" if self._broken else self._channel.send_now(buffers)
            finally:
                after()
            if left:
                await self.whole(self._channel.send([left]))
        finally:
            self.lock.release()

    async def error(self, request: int, error: KVStoreError) -> None:
        """Say why a request failed."""
        self._stats.errors[error.code] += 1
        message = ErrorReply(
            code=error.code, message=error.message, retry_after_ms=error.retry_after_ms, done_pages=error.done_pages
        )  # fmt: skip
        await self.reply(request, FrameType.ERROR, message)

    async def last_words(self, error: KVStoreError) -> None:
        """Say why the connection ends, if the client hears that at once."""
        try:
            async with asyncio.timeout(1):
                await self.error(0, error)
        except (ConnectionLost, TimeoutError):
            _log.debug("the client did not wait to hear why it was cut off")
