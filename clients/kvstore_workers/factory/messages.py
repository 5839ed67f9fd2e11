"""What the orchestrator and its workers say to each other: msgspec structs, MessagePack, one a frame, over a Unix socket.

Times are of the machine's monotonic clock, which all processes share.
"""

import asyncio
import struct
from typing import TypeVar

import msgspec

from kvstore.api.wire import ConnectionLost, ProtocolError

T = TypeVar("T")
_HEAD = struct.Struct("<I")
_MOST_BYTES = 4 << 20
SEND_S = 10.0


class Prompt(msgspec.Struct, frozen=True):
    """A turn's prompt as a trace gives it, and how much it is to make of it."""

    turn: int
    input_tokens: int
    output_tokens: int
    blocks: list[int]
    tail_block: int | None
    deadline: float


class Fill(msgspec.Struct, tag="fill", frozen=True):
    """Fill a turn. `reuse` is off in a run without the store's help; `stream`: begin with the first layers there."""

    prompt: Prompt
    attempt: int
    put_id: bytes
    reuse: bool = True
    stream: bool = True


class Decode(msgspec.Struct, tag="decode", frozen=True):
    """Decode a turn. With a `put_id` its fill is under way, and predicted to be done at `due_at`."""

    prompt: Prompt
    attempt: int
    put_id: bytes = b""
    first_page: int = 0
    due_at: float = 0.0


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Have nothing more to do with a turn."""

    turn: int


class Change(msgspec.Struct, tag="change", frozen=True):
    """Become another kind when what is under way is done."""

    kind: str


class Ack(msgspec.Struct, tag="ack", frozen=True):
    """The words up to this number have been heard."""

    number: int


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """There is no more work."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A worker is there (again), and has these turns (with the attempt) under way."""

    name: str
    kind: str
    slots: int
    fills: list[tuple[int, int]]
    decodes: list[tuple[int, int]]


class Started(msgspec.Struct, tag="started", frozen=True):
    """A fill computes: its put is under way, from a page on."""

    turn: int
    attempt: int
    first_page: int
    due_at: float


class Filled(msgspec.Struct, tag="filled", frozen=True):
    """A turn's first token is out, at `token_at`, and its pages are in the store. Seconds; `wait_s` is for the accelerator."""

    turn: int
    attempt: int
    kind: str
    worker: str
    begun_at: float
    token_at: float
    match_s: float
    fetch_s: float
    wait_s: float
    compute_s: float
    cached_tokens: int
    streamed: bool
    number: int = 0


class Retired(msgspec.Struct, tag="retired", frozen=True):
    """A turn's last token is out, at `done_at`. `waited_s` is from the order to its place in the batch."""

    turn: int
    attempt: int
    worker: str
    done_at: float
    waited_s: float
    output_tokens: int
    followed: bool
    number: int = 0


class Lost(msgspec.Struct, tag="lost", frozen=True):
    """A stage could not be done."""

    turn: int
    attempt: int
    stage: str
    why: str
    number: int = 0


class Changed(msgspec.Struct, tag="changed", frozen=True):
    """The worker is of another kind now."""

    kind: str


class Stats(msgspec.Struct, tag="stats"):
    """What a worker has done since it began, and what its HBM holds: byte-seconds, bytes, seconds, by kind where that matters."""

    name: str
    kind: str
    busy_s: dict[str, float]
    alive_s: dict[str, float]
    hbm_used: float
    hbm_idle: float
    hbm_moving: float
    hbm_now: tuple[int, int, int]
    hbm_dropped: int
    hbm_late: int
    moved: dict[str, int]
    wrong_bytes: int
    verified_bytes: int
    decode_tokens: float


Order = Fill | Decode | Cancel | Change | Ack | Bye
Word = Hello | Started | Filled | Retired | Lost | Changed | Stats
_orders = msgspec.msgpack.Decoder(Order)
_words = msgspec.msgpack.Decoder(Word)


class Channel:
    """One end of a connection. A message that is no message, or too long, ends it with ProtocolError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, message: Order | Word) -> None:
        """Send one. Raises ConnectionLost if it can't be, or not within ten seconds."""
        body = msgspec.msgpack.encode(message)
        try:
            self._writer.write(_HEAD.pack(len(body)) + body)
            async with asyncio.timeout(SEND_S):
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"the other end does not take a message: {error!r}") from None

    async def order(self) -> Order:
        """The next order. Raises ConnectionLost at the end."""
        return _decode(_orders, await self._body())

    async def word(self) -> Word:
        """The next word of a worker. Raises ConnectionLost at the end."""
        return _decode(_words, await self._body())

    async def _body(self) -> bytes:
        try:
            (size,) = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            if size > _MOST_BYTES:
                raise ProtocolError(f"a message of {size} bytes: at most {_MOST_BYTES} are taken")
            return await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            raise ConnectionLost("the other end is gone") from None

    async def close(self) -> None:
        """Close it."""
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # it is gone all the same


def _decode(decoder: "msgspec.msgpack.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"that is no message of the factory: {error}") from None
