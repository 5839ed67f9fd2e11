"""Puts whose slices and COMMIT follow without waiting to hear what is wanted."""

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api.wire import SLICES_META, FrameType, encode, pack, unpack
from kvstore.api.wire.put_messages import Commit, Committed, Follow, FollowedPuts, PutHandle, PutReady, PutStart
from kvstore.api.wire.writing import Bulk
from kvstore_client import Client, Component, KVSpec, PutResult
from kvstore_client.connection import Connection
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import RawClient, code, stat, wait_for_baseline
from tests.integration.raw_put import WHOLE, page_slices, slices_frame


def put_frame(handle: int, seed: int, request: int = 1, **changes: Any) -> bytes:
    said: dict[str, Any] = {"namespace": "pages", "put_id": b"p" * 16, "first_page": 0, "parts": WHOLE, "handle": handle} | changes
    return b"".join(bytes(b) for b in encode(FrameType.PUT, request, pack(PutStart(**said)), context(seed).tobytes()))


def commit_frame(handle: int, request: int = 2, wait_ms: int = 1000) -> bytes:
    return b"".join(bytes(b) for b in encode(FrameType.COMMIT, request, pack(Commit(handle=handle, wait_ms=wait_ms))))


def pages_of(handle: int, seed: int, pages: range = range(4)) -> bytes:
    return b"".join(slices_frame(handle, page, 0, 0, page_slices(seed, page)) for page in pages)


def wanted_and_committed(raw: RawClient, request: int = 2) -> tuple[list[tuple[int, int, int]], Committed]:
    """The answers to a put of which not all is wanted; they may come in any order."""
    answers = {header.request: (header.type, meta) for header, meta, _ in (raw.receive() for _ in range(2))}
    assert {number: kind for number, (kind, _) in answers.items()} == {1: FrameType.PUT_READY, request: FrameType.COMMITTED}, answers
    return unpack(PutReady, answers[1][1]).wanted, unpack(Committed, answers[request][1])


def committed(raw: RawClient, request: int = 2) -> Committed:
    header, meta, _ = raw.receive()
    assert (header.type, header.request) == (FrameType.COMMITTED, request), (header, meta)
    return unpack(Committed, meta)


def forget(daemon: DaemonProcess, seed: int) -> None:
    """The fixture wants DRAM as it was before."""
    with Client(daemon.endpoint, connections=1) as client:
        client.namespace("pages").delete(context(seed), from_page=1)


def test_one_journey(raw: RawClient, daemon: DaemonProcess) -> None:
    handle = secrets.randbits(62) + 1
    raw.send_raw(put_frame(handle, 2) + pages_of(handle, 2) + commit_frame(handle))
    assert wanted_and_committed(raw) == ([(0, 1, 4)], Committed(new_pages=3, existing_pages=1))  # its first page is the fixture's
    with Client(daemon.endpoint, connections=1) as client:
        assert fetch_checked(client.namespace("pages"), context(2)) == 4
    forget(daemon, 2)


def test_what_is_there_is_dropped(raw: RawClient) -> None:
    handle = secrets.randbits(62) + 1
    changed = [slices_frame(handle, page, 0, 0, page_slices(1, page, b"another computation")) for page in range(4)]
    raw.send_raw(put_frame(handle, 1) + b"".join(changed) + commit_frame(handle))
    assert wanted_and_committed(raw) == ([], Committed(new_pages=0, existing_pages=4))


@pytest.mark.parametrize("connections", [1, 2])
def test_what_is_there_is_not_sent_again(data_dir: Path, monkeypatch: pytest.MonkeyPatch, connections: int) -> None:
    """48 MiB of which all but the last MiB is there: the client hears of it while it sends."""
    sent: list[int] = []
    send = Connection.send_frames

    async def spy(self: Connection, frames: Sequence[Bulk], number: int, behind: Sequence[bytes | memoryview] = ()) -> None:
        sent.extend(SLICES_META.unpack(meta)[1] for meta, _ in frames)
        await send(self, frames, number, behind)

    monkeypatch.setattr(Connection, "send_frames", spy)
    spec = KVSpec(page_tokens=1, components=(Component("full", layers=32, kv_heads=1, head_dim=1 << 13),))  # pages of 1 MiB
    data = np.arange(48 << 17, dtype=np.uint64)
    with (
        DaemonProcess(data_dir, "--dram", "256MiB", "--ssd", "256MiB") as daemon,
        Client(daemon.endpoint, connections=connections, shared_memory=False) as client,
    ):
        namespace = client.namespace("large", "large", spec)
        namespace.put(context(9, 48)[:47], data[: 47 << 17])
        assert set(sent) == set(range(47))
        sent.clear()
        assert namespace.put(context(9, 48)[:48], data) == PutResult(new_pages=1, existing_pages=47, pending_pages=0)
        assert 47 in sent
        assert len(sent) < 48, "how soon it hears of it is for the machine to say"
        with namespace.match(context(9, 48)[:48]) as match:
            back = np.empty_like(data)
            namespace.fetch(match, back)
            assert (back == data).all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"first_page": 3}, "missing_parent"),
        ({"namespace": "none"}, "unknown_namespace"),
        ({"put_id": b"short"}, "bad_request"),
    ],
)
def test_one_that_can_t_begin_is_told_why(raw: RawClient, changes: dict[str, Any], why: str) -> None:
    raw.send_raw(put_frame(77, 50, **changes) + pages_of(77, 50) + commit_frame(77))
    answers = [raw.receive() for _ in range(6)]  # the PUT, four SLICES that have nowhere to go, the COMMIT
    assert code(next(a for a in answers if a[0].request == 1)) == why
    assert code(next(a for a in answers if a[0].request == 2)) == "not_found"
    assert raw.alive()


@pytest.mark.parametrize("handle", [-1, 1 << 63, (1 << 64) - 1])
def test_handles_that_are_none(raw: RawClient, handle: int) -> None:
    raw.send_raw(put_frame(handle, 50))
    assert code(raw.receive()) == "bad_request"
    assert raw.alive()


def test_a_commit_before_anything_came_takes_nothing(raw: RawClient) -> None:
    raw.send_raw(put_frame(77, 50) + commit_frame(77, wait_ms=0))
    assert code(raw.receive()) == "bad_request"
    assert raw.alive()


def test_handles_are_an_owner_s_own(daemon: DaemonProcess, raw: RawClient) -> None:
    raw.send_raw(put_frame(77, 50, request=1))
    assert raw.alive()
    with RawClient(daemon.endpoint) as other:
        other.send_raw(pages_of(77, 50, range(1)) + commit_frame(77))
        assert [code(other.receive()) for _ in range(2)] == ["not_found", "not_found"]
        other.send_raw(put_frame(77, 51) + pages_of(77, 51) + commit_frame(77))
        assert committed(other).new_pages == 4
    raw.send_raw(put_frame(77, 50, request=3))
    assert code(raw.receive()) == "bad_request", "two puts under one handle"
    raw.send_raw(pages_of(77, 50) + commit_frame(77))
    assert committed(raw) == Committed(new_pages=3, existing_pages=1)
    with Client(daemon.endpoint, connections=1) as client:
        assert [fetch_checked(client.namespace("pages"), context(seed)) for seed in (50, 51)] == [4, 4]
        client.namespace("pages").delete(context(50))


def test_a_follower_of_a_put_never_gets_another_of_its_handle(raw: RawClient, daemon: DaemonProcess) -> None:
    """A producer that gives two puts of one computation the same handle, one after the other."""
    with RawClient(daemon.endpoint) as follower:
        raw.send_raw(put_frame(77, 50))
        assert raw.alive()
        ask = Follow(namespace="pages", put_id=b"p" * 16, wait_ms=0)
        first = unpack(FollowedPuts, follower.ask(FrameType.FOLLOW, ask)[1]).items
        raw.send_raw(b"".join(bytes(b) for b in encode(FrameType.ABORT, 3, pack(PutHandle(handle=77)))))
        assert raw.receive()[0].type is FrameType.OK
        raw.send_raw(put_frame(77, 60))
        assert raw.alive()
        both = unpack(FollowedPuts, follower.ask(FrameType.FOLLOW, ask)[1]).items
        assert len({put.handle for put in both}) == 2
        assert first[0].handle in {put.handle for put in both}
    raw.send_raw(b"".join(bytes(b) for b in encode(FrameType.ABORT, 3, pack(PutHandle(handle=77)))))
    assert raw.receive()[0].type is FrameType.OK


def test_aborted_in_the_middle(raw: RawClient) -> None:
    frame = encode(FrameType.ABORT, 3, pack(PutHandle(handle=77)))
    raw.send_raw(put_frame(77, 50) + pages_of(77, 50, range(2)) + b"".join(bytes(b) for b in frame))
    header, _, _ = raw.receive()
    assert header.type is FrameType.OK
    raw.send_raw(pages_of(77, 50, range(2, 3)))
    assert code(raw.receive()) == "not_found"


def test_a_full_tier_is_waited_for(data_dir: Path) -> None:
    """Slices of a put that has no room yet: first they wait, then the client asks before it sends again, and all of it succeeds."""
    stay = {"KVSTORE_HIGH_WATERMARK": "1", "KVSTORE_LOW_WATERMARK": "0.99"}  # or some could leave before they are leased
    with (
        DaemonProcess(data_dir, "--dram", "1MiB", "--ssd", "64MiB", environment=stay) as daemon,
        Client(daemon.endpoint, connections=1) as client,
    ):
        namespace = open_namespace(client)
        pages = 60  # of 64 that fit
        namespace.put(context(1, pages), content(context(1, pages)))
        match = namespace.match(context(1, pages), lease_s=30)
        done = []
        putting = threading.Thread(target=lambda: done.append(namespace.put(context(11, 8), content(context(11, 8)))))
        putting.start()
        time.sleep(1.5)
        assert not done, "there was room: this test shows nothing"
        match.release()
        putting.join(30)
        assert [result.new_pages for result in done] == [8]
        assert fetch_checked(namespace, context(11, 8)) == 8


def test_a_client_that_goes_away_leaves_nothing(daemon: DaemonProcess, raw: RawClient) -> None:
    used = stat(daemon.http)["tiers"]["dram"]["used"]
    whole = put_frame(77, 50) + pages_of(77, 50) + commit_frame(77)
    for at in np.linspace(0, len(whole) - 1, 12).astype(int).tolist():
        with RawClient(daemon.endpoint) as other:
            other.send_raw(whole[:at])
    raw.sock.close()
    wait_for_baseline(daemon.http, used)
    assert SPEC.page_bytes * 4 < len(whole)
