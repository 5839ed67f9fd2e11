"""Messages and frames made at random from the protocol's own tables, and what can go wrong with their bytes.

Whatever is added to FrameType, to the message classes or to the request tables is fuzzed from then on, without a word here.
Every choice comes from the `random.Random` that is passed in, so a seed gives the same choices again.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec
from xxhash import xxh3_64

from kvstore.api.request_tables import QUICK, SLOW
from kvstore.api.wire import FrameType, Run, pack_runs
from kvstore.api.wire.frames import BULK, HEADER_BYTES, SLICES_META
from kvstore.api.wire.messages import Cancel, FetchRequest, Hello, Message
from kvstore.digests import slice_digest
from tests.integration.pages import SPEC, content, context


def _all_messages(base: type[Message] = Message) -> list[type[Message]]:
    return [kind for child in base.__subclasses__() for kind in (child, *_all_messages(child))]


MESSAGES = sorted({m for m in _all_messages() if m.__module__.startswith("kvstore.")}, key=lambda m: m.__name__)
"""Every message there is."""

REQUESTS: dict[FrameType, type[Message]] = {
    FrameType.HELLO: Hello, FrameType.CANCEL: Cancel, FrameType.FETCH: FetchRequest,
    **{kind: entry[0] for kind, entry in (QUICK | SLOW).items()},
}  # fmt: skip
"""Every control request there is, and its message."""

REQUEST_TYPES = [kind for kind in FrameType if kind < 64]
INTERESTING = [0, 1, 2, 3, 7, 16, 255, 256, 4095, 4096, 65535, 65536, *(1 << b for b in (20, 31, 32, 53, 62, 63)), -1, -(1 << 63)]
INTERESTING += [(1 << b) - 1 for b in (20, 31, 32, 63, 64)]


@dataclass(slots=True)
class World:
    """What a conversation may name: a daemon's namespaces, and what came back from it so far."""

    namespaces: list[str] = field(default_factory=lambda: ["pages"])
    scratch: list[str] = field(default_factory=lambda: [f"scratch{n}" for n in range(4)])
    handles: list[int] = field(default_factory=lambda: [1])
    leases: list[int] = field(default_factory=lambda: [1])
    blobs: list[bytes] = field(default_factory=lambda: [bytes(16)])
    session: bytes = b""
    requests: list[int] = field(default_factory=lambda: [0])
    known: dict[str, list[Any]] = field(default_factory=dict)
    """Numbers and ids from replies, by the name of their field: what a reply calls a pin, a request can take back."""
    put_seed: int = 0


_ENDS = ("DROP", "DELETE")
"""What the names of requests end in that take away a namespace or what is in it."""

Maker = Callable[[Random, World], Any]
_WHOLE = [(0, 0, 8, 0, 2)]
_HALVES = [(0, 0, 4, 0, 2), (0, 4, 8, 0, 2)]

HINTS: dict[str, Maker] = {
    "namespace": lambda rng, world: rng.choice(world.namespaces),
    "name": lambda rng, world: rng.choice(world.scratch),
    "fingerprint": lambda rng, world: rng.choice(["rev-1", "rev-2"]),
    "spec": lambda rng, world: SPEC.to_dict(),
    "handle": lambda rng, world: rng.choice(world.handles),
    "lease": lambda rng, world: rng.choice(world.leases),
    "put_id": lambda rng, world: rng.randbytes(16),
    "parts": lambda rng, world: rng.choice([_WHOLE, _HALVES, _HALVES[:1], _HALVES[1:]]),
    "ack": lambda rng, world: rng.choice(["memory", "durable"]),
    "versions": lambda rng, world: [1],
    "session": lambda rng, world: rng.choice([b"", world.session]),
    "target": lambda rng, world: rng.choice(world.requests),
    "first_page": lambda rng, world: rng.choice([0, 0, 0, 1, 2]),
    "blobs": lambda rng, world: rng.randrange(1, 4),
    "lease_ms": lambda rng, world: rng.choice([0, 1, 50, 5_000]),
    "wait_ms": lambda rng, world: rng.choice([0, 0, 1, 50]),
    "retention_s": lambda rng, world: rng.choice([0, 0, 1]),
    "ttl_s": lambda rng, world: rng.choice([0, 0, 1]),
    "turn": lambda rng, world: rng.choice(["", "main", "sub_agent", "sub_agent"]),
    "ended": lambda rng, world: rng.choice(["", "tool_call", "end_turn", "subagent_done"]),
    "extra_pages": lambda rng, world: rng.choice([[], [], [0], [1, 3]]),
}
"""Likely values by field name; fields without one get values of their type."""


def wild(rng: Random, depth: int = 0) -> Any:
    """Any value that MessagePack can hold."""
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return rng.choice(INTERESTING)
    if kind == 1:
        return rng.choice(["", "x", "full", "pages", "é" * rng.randrange(300), "\0", "9" * 400])
    if kind == 2:
        return rng.randbytes(rng.choice([0, 1, 15, 16, 17, 32, 300]))
    if kind == 3:
        return rng.choice([None, True, False])
    if kind == 4:
        return rng.choice([0.0, -0.0, 1.5, float("inf"), float("nan"), 1e308])
    if kind == 5:
        return msgspec.msgpack.Ext(rng.choice([-1, 0, 1, 127]), rng.randbytes(rng.choice([0, 1, 4, 8, 12])))
    if kind == 6:
        return [wild(rng, depth + 1) for _ in range(rng.randrange(6))]
    keys: list[Any] = ["kind", "layers", "x", 1, -1, None, (1, 2), b"k", 1.5]
    return {rng.choice(keys): wild(rng, depth + 1) for _ in range(rng.randrange(6))}


def typed(info: Any, name: str, rng: Random, world: World) -> Any:
    """A value of a field's type, by its name if that says more."""
    if name in world.known and rng.random() < 0.7:
        return rng.choice(world.known[name])
    if name in HINTS and not isinstance(info, msgspec.inspect.BoolType) and rng.random() < 0.9:
        return HINTS[name](rng, world)
    match info:
        case msgspec.inspect.IntType():
            return rng.choice(INTERESTING) if rng.random() < 0.5 else rng.randrange(1 << 12)
        case msgspec.inspect.StrType():
            return rng.choice(["", "a", "pages", "x" * rng.randrange(2000)])
        case msgspec.inspect.BytesType():
            return rng.randbytes(rng.choice([0, 1, 15, 16, 17, 1000]))
        case msgspec.inspect.BoolType():
            return rng.random() < 0.5
        case msgspec.inspect.FloatType():
            return rng.choice([0.0, 1.0, -1.0, float("inf"), float("nan")])
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return [typed(info.item_type, "", rng, world) for _ in range(rng.choice([0, 1, 2, 9, 300]))]
        case msgspec.inspect.TupleType():
            return [typed(item, "", rng, world) for item in info.item_types]
        case msgspec.inspect.UnionType():
            return typed(rng.choice(info.types), name, rng, world)
        case msgspec.inspect.StructType():
            return fields_of(info.cls, rng, world) if issubclass(info.cls, Message) else wild(rng)
        case msgspec.inspect.NoneType():
            return None
    return wild(rng)


_infos: dict[type[Message], Any] = {}


def fields_of(kind: type[Message], rng: Random, world: World) -> dict[str, Any]:
    """A message of a kind as plain data; now and then a field is left out, of another type, or one too many."""
    if kind not in _infos:
        _infos[kind] = msgspec.inspect.type_info(kind)
    found = {}
    for item in _infos[kind].fields:
        if item.required or rng.random() < 0.7:
            found[item.encode_name] = typed(item.type, item.encode_name, rng, world)
    if found and rng.random() < 0.015:
        del found[rng.choice(list(found))]
    if found and rng.random() < 0.025:
        found[rng.choice(list(found))] = wild(rng)
    if rng.random() < 0.02:
        found["novelty"] = wild(rng)
    return found


_encoder = msgspec.msgpack.Encoder()


def meta(kind: type[Message], rng: Random, world: World) -> bytes:
    """A message's bytes, mostly valid."""
    return endless(rng) if rng.random() < 0.003 else _encoder.encode(fields_of(kind, rng, world))


def endless(rng: Random) -> bytes:
    """A meta with values nested as deep as its size allows."""
    return b"\x81\xa4spec" + rng.choice([b"\x91", b"\x81\xa1a"]) * rng.choice([100, 5_000, 200_000]) + b"\xc0"


def mutate(rng: Random, data: bytes) -> bytes:
    """Bytes with something wrong: bits, bytes, lengths, pieces missing, doubled or moved."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if not out:
            return rng.randbytes(rng.randrange(64))
        at = rng.randrange(len(out))
        length = rng.randrange(1, min(64, len(out) - at) + 1)
        match rng.randrange(7):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, 0xC1, 0xC7, 0xDC, 0xDD, 0xDE, 0xDF, 0x93])
            case 2:
                del out[at : at + length]
            case 3:
                out[at:at] = out[at : at + length] * rng.choice([1, 1, 1, 200])
            case 4:
                out[at:at] = rng.randbytes(length)
            case 5:
                out = out[:at]
            case 6:
                width, code = rng.choice([(2, "<H"), (4, "<I"), (8, "<Q")])
                out[at : at + width] = struct.pack(code, rng.choice(INTERESTING) % (1 << 8 * width))
    return bytes(out)


def payload(kind: FrameType, said: dict[str, Any], rng: Random, world: World) -> bytes:
    """What a control request that said this may carry: tokens and extra digests, blob ids and runs, or nothing."""
    if kind is FrameType.FETCH:
        count = said.get("blobs")
        ids = [rng.choice(world.blobs) for _ in range(count if isinstance(count, int) and 0 < count < 9 else 2)]
        return b"".join(ids) + pack_runs([run(rng, len(ids)) for _ in range(rng.choice([1, 1, 2, 20]))])
    if rng.random() < 0.1:
        return rng.randbytes(rng.choice([1, 32, 1000, 70_000]))
    other = 0 if kind is FrameType.PUT else rng.randrange(3)  # `slices` has the bytes of this one context: those of another would be a lie
    tokens = context(world.put_seed + other, rng.choice([0, 1, 2, 4])).tobytes()
    extra = said.get("extra_pages")
    return tokens + rng.randbytes(32 * len(extra) if isinstance(extra, list) and rng.random() < 0.95 else rng.choice([0, 31, 32]))


def run(rng: Random, blobs: int) -> Run:
    """A run, inside the blob or not."""
    if rng.random() < 0.3:
        blob, count, offset, length, stride = (abs(rng.choice(INTERESTING)) for _ in range(5))
        return Run(blob % (1 << 32), offset % (1 << 64), length % (1 << 64), stride % (1 << 64), count % (1 << 32))
    length = rng.choice([1, 64, 4096, SPEC.page_bytes])
    count = rng.choice([1, 1, 2, SPEC.page_bytes // length])
    return Run(rng.randrange(blobs), rng.choice([0, 0, 1, 4096]), length, rng.choice([length, 2 * length, length - 1]), count)


def request_of(frame: bytes) -> int:
    """The request number in a frame's header."""
    number: int = struct.unpack_from("<Q", frame, 8)[0]
    return number


def seal(head: bytes, body: bytes, covered: int) -> bytes:
    """A frame from the first 24 bytes of its header and what follows; its check covers so many bytes of that."""
    state = xxh3_64(head)
    state.update(body[:covered])
    return head + state.intdigest().to_bytes(8, "little") + body


def control(kind: int, request: int, meta_bytes: bytes, payload_bytes: bytes) -> bytes:
    """A control frame that checks out, whatever is in it."""
    head = struct.pack("<2sBBIQII", b"kV", 1, kind, 0, request, len(meta_bytes), len(payload_bytes))
    return seal(head, meta_bytes + payload_bytes, len(meta_bytes) + len(payload_bytes))


def bulk(kind: int, request: int, meta_bytes: bytes, pieces: Sequence[bytes], digests: bytes | None = None) -> bytes:
    """A bulk frame that checks out."""
    body = b"".join(pieces)
    head = struct.pack("<2sBBIQII", b"kV", 1, kind, len(pieces), request, len(meta_bytes), len(body))
    trailer = b"".join(slice_digest(piece) for piece in pieces) if digests is None else digests
    return seal(head, meta_bytes + body + trailer, len(meta_bytes))


def fair_put(rng: Random, world: World, layers: tuple[int, int] = (0, 8)) -> bytes:
    """A PUT that the daemon takes, of some layers of a context of four pages that `fair_slices` gives the bytes of.

    Puts of a part of the layers are shards of one computation, whoever sends them.
    """
    put_id = rng.randbytes(16) if layers == (0, 8) else world.put_seed.to_bytes(16, "big")
    parts = [(0, *layers, 0, 2)]
    said = {"namespace": "pages", "put_id": put_id, "first_page": 0, "parts": parts, "ack": HINTS["ack"](rng, world)}
    return control(FrameType.PUT, rng.randrange(1, 1 << 40), _encoder.encode(said), context(world.put_seed).tobytes())


def fair_commit(rng: Random, handle: int) -> bytes:
    """A COMMIT of a put, which waits a little for slices under way."""
    return control(FrameType.COMMIT, rng.randrange(1, 1 << 40), _encoder.encode({"handle": handle, "wait_ms": rng.choice([0, 50])}), b"")


def fair_match(rng: Random) -> bytes:
    """A MATCH of a context that is most likely there, with what a fetch needs."""
    said = {"namespace": "pages", "lease_ms": rng.choice([0, 20, 5000]), "parts": True}
    return control(FrameType.MATCH, rng.randrange(1, 1 << 40), _encoder.encode(said), context(rng.randrange(5)).tobytes())


def fair_fetch(rng: Random, world: World) -> bytes:
    """A FETCH of all that was matched, whole pages and pieces of pages."""
    size = SPEC.page_bytes
    makers = [Run(0, 0, size), Run(0, 0, 64, 128, 50), Run(0, 4096, 4096), Run(0, 5, 4097), Run(0, 0, 1, 1, 2000)]
    runs = [rng.choice(makers)._replace(blob=blob) for blob in range(len(world.blobs)) for _ in range(rng.choice([1, 1, 1, 10]))]
    request = rng.randrange(1, 1 << 40)
    world.requests.append(request)
    said = {"namespace": "pages", "blobs": len(world.blobs)}
    return control(FrameType.FETCH, request, _encoder.encode(said), b"".join(world.blobs) + pack_runs(runs))


def fair_slices(handle: int, seed: int, page: int, layers: tuple[int, int] = (0, 8)) -> bytes:
    """All slices of a page's layers."""
    data = content(context(seed))[page * SPEC.page_bytes : (page + 1) * SPEC.page_bytes].tobytes()
    data = data[len(data) * layers[0] // 8 : len(data) * layers[1] // 8]
    pieces = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    return bulk(FrameType.SLICES, 7, SLICES_META.pack(handle, page, 0, 0), pieces)


def slices(rng: Random, request: int, world: World) -> bytes:
    """A SLICES frame, most likely one that its put can take."""
    page = rng.randrange(4)
    data = content(context(world.put_seed))[page * SPEC.page_bytes : (page + 1) * SPEC.page_bytes].tobytes()
    first = rng.choice([0, 0, 0, 1, 3])
    pieces = [data[at : at + 4096] for at in range(first * 4096, len(data), 4096)]
    place = SLICES_META.pack(rng.choice(world.handles) % (1 << 64), page, rng.choice([0, 0, 0, 0, 1, 65535]), first)
    digests = rng.randbytes(16 * len(pieces)) if rng.random() < 0.05 else None
    return bulk(FrameType.SLICES, request, place, pieces, digests)


def request_frame(kind: FrameType, request: int, rng: Random, world: World) -> bytes:
    """A request of this kind that checks out as a frame, and mostly is a fair one."""
    if kind is FrameType.SLICES:
        return slices(rng, request, world)
    if kind in BULK:
        return bulk(kind, request, rng.randbytes(16), [rng.randbytes(64)])
    if kind.name.endswith(_ENDS):
        world = replace(world, namespaces=world.scratch)  # or soon there would be nothing left to talk about
    message = REQUESTS.get(kind)
    said = fields_of(message, rng, world) if message else {"": wild(rng)}
    meta_bytes = endless(rng) if rng.random() < 0.003 else _encoder.encode(said)
    payload_bytes = payload(kind, said, rng, world)
    if rng.random() < 0.05:
        meta_bytes = mutate(rng, meta_bytes)
    if rng.random() < 0.05:
        payload_bytes = mutate(rng, payload_bytes)
    return control(kind, request, meta_bytes, payload_bytes)


def spoil(frame: bytes, rng: Random) -> bytes:
    """A frame gone wrong on the way, or made wrong on purpose with a check that fits."""
    if rng.random() < 0.5:
        return mutate(rng, frame)
    head, body = bytearray(frame[:24]), frame[HEADER_BYTES:]
    at, code = rng.choice([(2, "B"), (3, "B"), (4, "<I"), (8, "<Q"), (16, "<I"), (20, "<I")])
    value = rng.choice(INTERESTING) if rng.random() < 0.7 else rng.randrange(1 << 12)
    struct.pack_into(code, head, at, value % (1 << 8 * struct.calcsize(code)))
    meta_bytes, payload_bytes = struct.unpack_from("<II", head, 16)
    return seal(bytes(head), body, min(len(body), meta_bytes + (0 if head[3] in BULK else payload_bytes)))
