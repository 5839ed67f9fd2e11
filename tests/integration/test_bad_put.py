"""Puts that contradict themselves or each other, over real sockets: a typed error, the daemon goes on, and nothing is left behind."""

from typing import Any

import numpy as np
import pytest

from kvstore.api.wire import FrameType, slice_digest, unpack
from kvstore.api.wire.messages import ErrorReply
from kvstore.api.wire.put_messages import Commit, Committed, PutStart
from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, context, fetch_checked
from tests.integration.raw import RawClient, code
from tests.integration.raw_put import WHOLE, page_slices, send_all, slices_frame, start_put


def test_a_wrong_hash_on_a_put(raw: RawClient) -> None:
    ready = start_put(raw, 20)
    slices = page_slices(20, 0)
    raw.send_raw(slices_frame(ready.handle, 0, 0, 0, slices, [slice_digest(b"other") for _ in slices]))
    assert raw.error().code == "bad_digest"
    assert code(raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))) == "bad_digest"
    assert code(raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))) == "not_found", "it has ended"
    assert raw.alive()


@pytest.mark.parametrize(
    ("page", "part", "first", "size", "count"),
    [
        (0, 0, 0, 4095, 1),
        (0, 0, 0, 4097, 1),
        (0, 0, 0, 4096, 2),
        (0, 0, 0, 8192, 1),
        (0, 0, 3, 8192, 2),
        (0, 0, 4, 4096, 1),
        (0, 0, 0xFFFF, 4096, 1),
        (0, 1, 0, 4096, 1),
        (4, 0, 0, 4096, 1),
        (0xFFFFFFFF, 0, 0, 4096, 1),
        (0, 0, 0, 1 << 20, 1),
    ],
)
def test_a_wrong_part_size_or_place(raw: RawClient, page: int, part: int, first: int, size: int, count: int) -> None:
    ready = start_put(raw, 20)
    raw.send_raw(slices_frame(ready.handle, page, part, first, [bytes(size)], [bytes(16)] * count))
    assert raw.error().code == "bad_request"
    assert code(raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))) == "bad_request"
    assert raw.alive()


def test_other_slices_in_the_same_place_spoil_the_put(daemon: DaemonProcess, raw: RawClient) -> None:
    ready = start_put(raw, 430)
    send_all(raw, ready, 430)
    raw.send_raw(slices_frame(ready.handle, 0, 0, 0, [bytes(4096)]))
    assert code(raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))) == "bad_request"


def test_the_same_slices_may_come_again(daemon: DaemonProcess, raw: RawClient) -> None:
    ready = start_put(raw, 440)
    send_all(raw, ready, 440)
    raw.send_raw(slices_frame(ready.handle, 0, 0, 0, page_slices(440, 0)))
    assert raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))[0].type is FrameType.COMMITTED
    with Client(daemon.endpoint, connections=1) as client:
        client.namespace("pages").delete(context(440))  # the fixture wants DRAM as it was before


def test_slices_of_no_put(raw: RawClient) -> None:
    raw.send_raw(slices_frame(123456, 0, 0, 0, page_slices(20, 0)))
    assert raw.error().code == "not_found"
    assert raw.alive()


def test_a_commit_with_slices_missing(raw: RawClient) -> None:
    ready = start_put(raw, 20)
    raw.send_raw(slices_frame(ready.handle, 0, 0, 0, page_slices(20, 0)))
    raw.send_raw(slices_frame(ready.handle, 1, 0, 1, page_slices(20, 1)[1:]))
    frame = raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))
    assert code(frame) == "bad_request"
    assert "slice 0 of page 1" in unpack(ErrorReply, frame[1]).message
    assert code(raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))) == "not_found"


@pytest.mark.parametrize("comes", [True, False])
def test_a_commit_whose_wait_is_over_between_two_frames(daemon: DaemonProcess, raw: RawClient, comes: bool) -> None:
    ready = start_put(raw, 23)
    with RawClient(daemon.endpoint, session=raw.session) as other:
        raw.send(FrameType.COMMIT, 9, Commit(handle=ready.handle, wait_ms=1500))
        assert raw.alive(), "the COMMIT has begun, as this PING came behind it"
        if comes:
            other.send_raw(slices_frame(ready.handle, 0, 0, 0, page_slices(23, 0)))
            assert other.alive(), "and the slices were read"
        assert code(raw.receive()) == ("busy" if comes else "bad_request")
        assert code(raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))) == "not_found", "it has ended"


@pytest.mark.parametrize(
    "changes",
    [
        {"put_id": b"short"},
        {"first_page": 4},
        {"first_page": -1},
        {"parts": []},
        {"parts": [(0, 0, 8, 1, 1)]},
        {"spans": [(0, 5)]},
        {"spans": [(0, 2), (2, 4)]},
        {"parts": [(0, 0, 9, 0, 2)]},
        {"parts": [(0, 0, 8, 0, 2), (0, 0, 8, 0, 2)]},
        {"parts": [(7, 0, 8, 0, 2)]},
        {"ack": "maybe"},
    ],
)
def test_a_put_that_contradicts_the_spec(raw: RawClient, changes: dict[str, Any]) -> None:
    message: dict[str, Any] = {"namespace": "pages", "put_id": b"p" * 16, "first_page": 0, "parts": WHOLE} | changes
    assert code(raw.ask(FrameType.PUT, PutStart(**message), context(20).tobytes())) == "bad_request"
    assert raw.alive()


def test_a_put_without_its_parent(raw: RawClient) -> None:
    message = PutStart(namespace="pages", put_id=b"p" * 16, first_page=2, parts=WHOLE)
    assert code(raw.ask(FrameType.PUT, message, context(987).tobytes())) == "missing_parent"


def test_a_put_beyond_capacity(daemon: DaemonProcess, raw: RawClient) -> None:
    tokens = np.arange(5000 * SPEC.page_tokens, dtype=np.uint32)
    message = PutStart(namespace="pages", put_id=b"p" * 16, first_page=0, parts=WHOLE)
    assert code(raw.ask(FrameType.PUT, message, tokens.tobytes())) == "bad_request"
    assert code(raw.ask(FrameType.PUT, message, tokens[: 4096 * SPEC.page_tokens].tobytes())) == "no_space"
    assert raw.alive()


def test_the_same_page_twice_with_other_bytes(daemon: DaemonProcess, raw: RawClient) -> None:
    ready = start_put(raw, 1, put_id=b"q" * 16)
    assert (ready.first_needed, ready.total_pages) == (4, 4), "pages that are there were asked for again"
    committed = unpack(Committed, raw.ask(FrameType.COMMIT, Commit(handle=ready.handle))[1])
    assert (committed.new_pages, committed.existing_pages) == (0, 4)


def test_two_puts_of_one_page_at_once(daemon: DaemonProcess) -> None:
    with RawClient(daemon.endpoint) as one, RawClient(daemon.endpoint) as other:
        first, second = start_put(one, 310), start_put(other, 310, put_id=b"z" * 16)
        send_all(other, second, 310, salt=b"another computation")
        send_all(one, first, 310)
        done = unpack(Committed, one.ask(FrameType.COMMIT, Commit(handle=first.handle))[1])
        late = unpack(Committed, other.ask(FrameType.COMMIT, Commit(handle=second.handle))[1])
    assert (done.new_pages, late.new_pages, late.existing_pages) == (4, 0, 4)
    with Client(daemon.endpoint) as client:
        assert fetch_checked(client.namespace("pages"), context(310)) == 4


@pytest.mark.parametrize("stage", ["started", "in a slice", "all slices"])
def test_a_client_that_dies_in_the_middle_of_a_put(daemon: DaemonProcess, raw: RawClient, stage: str) -> None:
    with RawClient(daemon.endpoint) as dying:
        ready = start_put(dying, 410)
        frame = slices_frame(ready.handle, 0, 0, 0, page_slices(410, 0))
        if stage == "in a slice":
            dying.send_raw(frame[: len(frame) // 2])
        elif stage == "all slices":
            send_all(dying, ready, 410)
    with Client(daemon.endpoint) as client:
        assert client.namespace("pages").match(context(410), lease_s=0).pages == 0


def test_another_session_can_not_touch_a_put(daemon: DaemonProcess, raw: RawClient) -> None:
    ready = start_put(raw, 420)
    with RawClient(daemon.endpoint) as other:
        other.send_raw(slices_frame(ready.handle, 0, 0, 0, page_slices(420, 0)))
        assert other.error().code == "not_found"
        assert code(other.ask(FrameType.COMMIT, Commit(handle=ready.handle))) == "not_found"
