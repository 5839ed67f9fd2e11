"""Feeds the decoders with random and mutated bytes. Only ProtocolError and BadRequest may come out, and little memory go in."""

import resource
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import msgspec

from kvstore.api.convert import split_tokens
from kvstore.api.wire import FrameType, check_run, cut, decode_header, pack_runs, unpack, unpack_runs
from kvstore.api.wire.frames import HEADER_BYTES, MAX_BULK_PAYLOAD, MAX_CONTROL_PAYLOAD, MAX_META
from kvstore.api.wire.messages import CreateNamespace
from kvstore.errors import BadRequest, ProtocolError
from kvstore.kvspec import KVSpec, PartRange, SliceLayout
from tests.fuzz import grammar
from tests.integration.pages import SPEC

MAX_GROWTH = 256 << 20
"""Bytes that a decoder's process may grow by, whatever it is fed with."""

_LAYOUTS = [SPEC.slice_layout(SPEC.whole()), SPEC.slice_layout(PartRange(0, 0, 1, 0, 1)), SliceLayout((1 << 20,) * 64 + (5,))]


@dataclass(slots=True)
class DecoderReport:
    """What became of the inputs, by decoder, and the first few that did what they must not."""

    inputs: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def _frame(rng: Random) -> None:
    kind = rng.choice(list(FrameType))
    raw = grammar.request_frame(kind, rng.randrange(1 << 64), rng, grammar.World())
    if rng.random() < 0.8:
        raw = grammar.spoil(raw, rng)
    if rng.random() < 0.05:
        raw = rng.choice([b"", b"kV\x01"]) + rng.randbytes(64)
    raw = raw.ljust(HEADER_BYTES, b"\0")
    header = decode_header(raw[:HEADER_BYTES])
    assert header.meta_bytes <= MAX_META
    assert header.payload_bytes <= (MAX_BULK_PAYLOAD if header.type is FrameType.SLICES else MAX_CONTROL_PAYLOAD)
    assert header.trailer_bytes <= 16 * header.payload_bytes
    body = raw[HEADER_BYTES:]
    meta = body[: header.meta_bytes]
    payload = b"" if header.bulk else body[header.meta_bytes : header.meta_bytes + header.payload_bytes]
    header.verify(raw[:HEADER_BYTES], meta, payload)


def _message(rng: Random) -> None:
    kind = rng.choice(grammar.MESSAGES)
    meta = grammar.meta(rng.choice([kind, kind, kind, rng.choice(grammar.MESSAGES)]), rng, grammar.World())
    if rng.random() < 0.5:
        meta = grammar.mutate(rng, meta)
    elif rng.random() < 0.05:
        meta = rng.randbytes(rng.randrange(100))
    assert isinstance(unpack(kind, meta), kind)


def _runs(rng: Random) -> None:
    data = pack_runs([grammar.run(rng, 4) for _ in range(rng.choice([0, 1, 2, 50]))])
    if rng.random() < 0.3:
        data = grammar.mutate(rng, data)
    for found in unpack_runs(data):
        layout = rng.choice(_LAYOUTS)
        check_run(found, layout)
        total = at = 0
        for piece in islice(cut(found, layout), 5000):
            assert 0 < piece.size <= layout.sizes[piece.slice]
            assert layout.offsets[piece.slice] <= piece.offset
            assert piece.offset + piece.size <= layout.offsets[piece.slice + 1]
            assert piece.offset >= at
            total, at = total + piece.size, piece.offset + piece.size
        assert total <= found.segments * found.length


def _tokens(rng: Random) -> None:
    data = rng.randbytes(rng.choice([0, 1, 31, 32, 64, 4096]))
    pages = [rng.choice(grammar.INTERESTING) if rng.random() < 0.2 else rng.randrange(50) for _ in range(rng.choice([0, 1, 2, 200]))]
    tokens, extras = split_tokens(data, pages)
    assert len(tokens) + sum(map(len, extras.values())) == len(data)
    assert sorted(extras) == sorted(pages)


def _spec(rng: Random) -> None:
    spec = SPEC.to_dict()
    target = rng.choice([spec, spec["components"][0]])
    for _ in range(rng.choice([1, 1, 2])):
        target[rng.choice([*target, "novelty"])] = grammar.wild(rng)
    message = unpack(CreateNamespace, msgspec.msgpack.encode({"name": "x", "fingerprint": "y", "spec": spec}))
    found = KVSpec.from_dict(message.spec)
    assert found.slice_layout(found.whole()).count <= 1 << 18


TARGETS = {"frame": _frame, "message": _message, "runs": _runs, "tokens": _tokens, "spec": _spec}


def fuzz(seed: int, first: int, count: int, report: DecoderReport) -> None:
    """Feed inputs number `first` to `first + count`. Input n of a seed is always the same: `--seed S --first N --inputs 1`."""
    names = list(TARGETS)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for number in range(first, first + count):
        name = names[number % len(names)]
        report.inputs += 1
        try:
            TARGETS[name](Random(f"{seed}:{number}"))
            report.accepted[name] += 1
        except (ProtocolError, BadRequest):
            report.refused[name] += 1
        except Exception as error:  # noqa: BLE001 - that is what is being looked for
            report.wrong[f"{name}: {type(error).__name__}"] += 1
            if report.wrong[f"{name}: {type(error).__name__}"] <= 3:
                report.failures.append(f"input {number} of seed {seed} ({name}):\n{traceback.format_exc(limit=-4)}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - start
    if grown > MAX_GROWTH:
        report.failures.append(f"inputs {first} to {first + count} of seed {seed}: the process grew by {grown} bytes")
