"""Every kind of request cut at every byte: the connection ends there, and nothing of it stays.

`make cuts` tries all offsets (of what is beyond 4,096 bytes of a frame, one in a hundred).
"""

import os
import struct
from random import Random

import pytest

from kvstore.api.wire import FrameType, unpack
from kvstore.api.wire.frames import HEADER_BYTES
from kvstore.api.wire.put_messages import PutReady
from tests.faults.baseline import Held, wait_for_baseline
from tests.faults.conftest import Faulty
from tests.fuzz import grammar
from tests.integration.raw import RawClient

ALL = os.environ.get("KVSTORE_TEST_CUTS") == "all"
_SEED = 5
_SAMPLE = 5
_EVERY, _STRIDE = 4096, 101
"""Of `make cuts`: so many bytes of a frame are cut one by one. Beyond is payload, which may be long and is all alike: one in so many."""


def offsets(frame: bytes) -> list[int]:
    """Where to cut: everywhere, as said above, or at the bounds of every field and a few other places."""
    if ALL:
        return [*range(min(len(frame), _EVERY)), *range(_EVERY, len(frame), _STRIDE), len(frame)]
    meta, payload = struct.unpack_from("<II", frame, 16)
    bounds = [0, 2, 3, 4, 8, 16, 20, 24, HEADER_BYTES, HEADER_BYTES + meta, HEADER_BYTES + meta + payload, len(frame)]
    near = {at + by for at in bounds for by in (-1, 0, 1)}
    return sorted({at for at in near if 0 <= at <= len(frame)} | {Random(_SEED).randrange(len(frame)) for _ in range(_SAMPLE)})


def frame_of(kind: FrameType, handle: int) -> bytes:
    """A fair request of this kind."""
    world = grammar.World(handles=[handle], put_seed=1234)
    if kind is FrameType.SLICES:
        return grammar.fair_slices(handle, world.put_seed, 1)
    return grammar.request_frame(kind, 9, Random(_SEED), world)


@pytest.mark.timeout(3600 if ALL else 300)
def test_requests_cut_at_every_byte(start: Faulty) -> None:
    daemon = start(client_timeout=5)
    baseline, world = Held.by(daemon), grammar.World(put_seed=1234)
    tried = 0
    for kind in grammar.REQUEST_TYPES:
        for at in offsets(frame_of(kind, 1 << 62)):
            with RawClient(daemon.unix_endpoint if at % 2 else daemon.endpoint, hello=kind is not FrameType.HELLO) as client:
                handle = 1
                if kind is not FrameType.HELLO:
                    client.send_raw(grammar.fair_put(Random(at), world))
                    header, meta, _ = client.receive()
                    assert header.type is FrameType.PUT_READY, (kind, at, meta)
                    handle = unpack(PutReady, meta).handle
                client.send_raw(frame_of(kind, handle)[:at])
                tried += 1
        wait_for_baseline(daemon, baseline)
    print(f"{tried} cuts of {len(grammar.REQUEST_TYPES)} kinds of request")
    assert tried > 20 * len(grammar.REQUEST_TYPES)
