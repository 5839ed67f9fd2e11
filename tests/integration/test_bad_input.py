"""Bad input over real sockets: a typed error or a counted miss each time, the daemon goes on, and nothing is left behind."""

import struct

import numpy as np
import pytest

from kvstore.api.wire import FrameType, Run, encode, pack, pack_runs, unpack
from kvstore.api.wire.messages import (
    Cancel,
    CreateNamespace,
    Empty,
    FetchRequest,
    Hello,
    LeaseRequest,
    Matched,
    MatchRequest,
    NamespaceName,
)
from kvstore.api.wire.put_messages import Commit, PutStart
from kvstore_client import BadRequest, Client, Costs, NoSpace
from kvstore_client.put import put_once
from kvstore_client.put_layout import PutLayout
from kvstore_client.whole import Whole
from kvstore_workers.daemon_process import DaemonProcess
from tests.faults.baseline import unexpected
from tests.integration.pages import SPEC, context
from tests.integration.raw import RawClient, code, stat
from tests.integration.raw_put import WHOLE, slices_frame

# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 5, 31, 32, 40, 60])
def test_a_truncated_frame(raw: RawClient, cut: int) -> None:
    frame = b"".join(bytes(b) for b in encode(FrameType.MATCH, 1, pack(MatchRequest(namespace="pages")), context(1).tobytes()))
    raw.send_raw(frame[:cut])
    raw.sock.shutdown(1)
    assert raw.closed()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(40),
        bytes(64),
        b"kV\x09\x10" + bytes(60),
        b"kV\x01\xee" + bytes(60),
        np.random.default_rng(1).bytes(4096),
    ],
)
def test_garbage(raw: RawClient, garbage: bytes) -> None:
    raw.send_raw(garbage)
    assert raw.error().code == "protocol"
    assert raw.closed()


@pytest.mark.parametrize("kind", [FrameType.MATCH, FrameType.SLICES, FrameType.PUT])
@pytest.mark.parametrize(("meta", "payload"), [(1 << 31, 0), (0, 1 << 31), (0xFFFFFFFF, 0xFFFFFFFF)])
def test_an_oversized_frame(raw: RawClient, kind: FrameType, meta: int, payload: int) -> None:
    raw.send_raw(struct.pack("<2sBBIQIIQ", b"kV", 1, kind, 1 if kind is FrameType.SLICES else 0, 1, meta, payload, 0))
    assert raw.error().code == "protocol"
    assert raw.closed()


def test_a_frame_changed_on_the_way(raw: RawClient) -> None:
    frame = bytearray(b"".join(bytes(b) for b in encode(FrameType.MATCH, 1, pack(MatchRequest(namespace="pages")), context(1).tobytes())))
    frame[-3] ^= 4
    raw.send_raw(bytes(frame))
    assert raw.error().code == "protocol"
    assert raw.closed()


def test_a_malformed_message(raw: RawClient) -> None:
    raw.send_raw(b"".join(bytes(b) for b in encode(FrameType.MATCH, 1, b"\xc1\xff", b"")))
    assert raw.error().code == "protocol"
    assert raw.closed()


def test_a_reply_sent_by_a_client(raw: RawClient) -> None:
    raw.send(FrameType.WELCOME, 1, LeaseRequest(lease=1))
    assert raw.error().code == "protocol"
    assert raw.closed()


def test_no_handshake(daemon: DaemonProcess, raw: RawClient) -> None:
    with RawClient(daemon.endpoint, hello=False) as other:
        other.send(FrameType.MATCH, 1, MatchRequest(namespace="pages"))
        assert other.error().code == "protocol"
        assert other.closed()


def test_slices_before_the_handshake(daemon: DaemonProcess, raw: RawClient) -> None:
    with RawClient(daemon.endpoint, hello=False) as other:
        other.send_raw(slices_frame(1, 0, 0, 0, [b"slice"]))
        assert other.error().code == "protocol"
        assert other.closed()
    assert not unexpected(daemon)


def test_versions_and_sessions_of_another_world(daemon: DaemonProcess, raw: RawClient) -> None:
    with RawClient(daemon.endpoint, hello=False) as other:
        assert code(other.ask(FrameType.HELLO, Hello(versions=[2, 99]))) == "version_mismatch"
    with RawClient(daemon.endpoint, hello=False) as other:
        assert code(other.ask(FrameType.HELLO, Hello(versions=[1], session=b"s" * 16))) == "not_found"


# --- reading ----------------------------------------------------------------------------------------------------------


def first_blob(raw: RawClient) -> bytes:
    _, meta, payload = raw.ask(FrameType.MATCH, MatchRequest(namespace="pages", parts=True), context(1).tobytes())
    assert unpack(Matched, meta).pages == 4
    return payload[:16]


@pytest.mark.parametrize(
    "run",
    [
        Run(0, 0, SPEC.page_bytes + 1),
        Run(0, SPEC.page_bytes, 1),
        Run(0, 1 << 62, 1 << 62),
        Run(0, 0, 64, 1 << 62, 4),
        Run(0, 0, 64, 8, 4),
        Run(0, 0, 0),
        Run(0, 0, 64, 64, 0),
        Run(0, 0, SPEC.page_bytes, 0, 0),
        Run(1, 0, 64),
        Run(0xFFFFFFFF, 0, 64),
    ],
)
def test_offsets_outside_a_blob(raw: RawClient, run: Run) -> None:
    blob = first_blob(raw)
    assert code(raw.ask(FrameType.FETCH, FetchRequest(namespace="pages", blobs=1), blob + pack_runs([run]))) == "bad_request"
    assert code(raw.ask(FrameType.FETCH, FetchRequest(namespace="pages", blobs=1), blob)) == "bad_request", "no runs at all"
    assert raw.alive()


@pytest.mark.parametrize(("blobs", "payload"), [(0, b""), (1, b"short"), (-1, bytes(64)), (1 << 40, bytes(64)), (1, bytes(16 + 31))])
def test_a_fetch_that_contradicts_itself(raw: RawClient, blobs: int, payload: bytes) -> None:
    assert code(raw.ask(FrameType.FETCH, FetchRequest(namespace="pages", blobs=blobs), payload)) in ("bad_request", "not_found")
    assert raw.alive()


def test_a_blob_that_is_not_there_is_a_counted_miss(daemon: DaemonProcess, raw: RawClient) -> None:
    before = stat(daemon.http)["totals"]["fetch_misses"]
    request = FetchRequest(namespace="pages", blobs=1)
    assert code(raw.ask(FrameType.FETCH, request, b"\x11" * 16 + pack_runs([Run(0, 0, 1)]))) == "not_found"
    assert stat(daemon.http)["totals"]["fetch_misses"] == before + 1
    assert raw.alive()


def test_an_unknown_namespace(raw: RawClient) -> None:
    for kind, message in (
        (FrameType.MATCH, MatchRequest(namespace="nope")),
        (FrameType.NAMESPACE_GET, NamespaceName(namespace="nope")),
        (FrameType.NAMESPACE_DROP, NamespaceName(namespace="nope")),
        (FrameType.FETCH, FetchRequest(namespace="nope", blobs=1)),
        (FrameType.PUT, PutStart(namespace="nope", put_id=b"p" * 16, first_page=0, parts=WHOLE)),
    ):
        assert code(raw.ask(kind, message)) == "unknown_namespace"
    assert raw.alive()


def test_tokens_and_extras_that_do_not_add_up(raw: RawClient) -> None:
    assert code(raw.ask(FrameType.MATCH, MatchRequest(namespace="pages"), b"abc")) == "bad_request"
    assert code(raw.ask(FrameType.MATCH, MatchRequest(namespace="pages", extra_pages=[0, 1]), bytes(63))) == "bad_request"
    assert code(raw.ask(FrameType.MATCH, MatchRequest(namespace="pages", extra_pages=[0, 0]), bytes(64))) == "bad_request"
    assert code(raw.ask(FrameType.MATCH, MatchRequest(namespace="pages", lease_ms=10**9), context(1).tobytes())) == "bad_request"
    assert code(raw.ask(FrameType.LEASE_RELEASE, LeaseRequest(lease=12345))) == "not_found"
    assert raw.alive()


def test_a_quiet_release_is_not_answered(raw: RawClient) -> None:
    raw.send(FrameType.LEASE_RELEASE, 5, LeaseRequest(lease=12345, quiet=True))
    header, _, _ = raw.ask(FrameType.PING, Empty(), request=6)
    assert (header.type, header.request) == (FrameType.OK, 6)


def test_a_request_cancelled_in_the_same_breath_is_answered(raw: RawClient) -> None:
    """More of them than a connection may have under way: each gives its place back."""
    spec = CreateNamespace(name="breath", fingerprint="rev-1", spec=SPEC.to_dict())
    for kind, message in (
        (FrameType.COMMIT, Commit(handle=1)),
        (FrameType.NAMESPACE_CREATE, spec),
        (FrameType.FETCH, FetchRequest(namespace="nope", blobs=1)),
    ):
        for number in range(100, 170):
            request = b"".join(bytes(b) for b in encode(kind, number, pack(message)))
            cancel = b"".join(bytes(b) for b in encode(FrameType.CANCEL, 0, pack(Cancel(target=number))))
            raw.send_raw(request + cancel)
            assert raw.receive()[0].request == number
    assert raw.alive()


def test_a_request_number_used_twice(raw: RawClient) -> None:
    blob = first_blob(raw)
    payload = blob + pack_runs([Run(0, 0, SPEC.page_bytes)])
    for _ in range(2):
        raw.send(FrameType.FETCH, 9, FetchRequest(namespace="pages", blobs=1), payload)
    seen = [raw.receive()[0].type for _ in range(3)]
    assert FrameType.FETCHED in seen or FrameType.ERROR in seen


# --- through the SDK --------------------------------------------------------------------------------------------------


def test_the_sdk_says_what_is_wrong_before_anything_is_sent(daemon: DaemonProcess, raw: RawClient) -> None:
    with Client(daemon.endpoint, connections=1) as client:
        namespace = client.namespace("pages")
        with pytest.raises(BadRequest, match="uint32"):
            namespace.match(context(1).astype(np.int64))  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="bytes of data"):
            namespace.put(context(20), bytes(5))
        with namespace.match(context(1)) as match:
            with pytest.raises(BadRequest, match="writable"):
                namespace.fetch(match, bytearray(7))
            with pytest.raises(BadRequest, match="read-only"):
                namespace.fetch(match, bytes(4 * SPEC.page_bytes))
            for component in (-1, 3):
                with pytest.raises(BadRequest, match=f"component {component} does not exist"):
                    namespace.view(match, component=component)
                with pytest.raises(BadRequest, match=f"component {component} does not exist"):
                    namespace.view(match, component=component, pages=(0, 1))
        with pytest.raises(BadRequest, match="estimate is None"):
            namespace.match(context(1), estimate=None)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="prefill_us = 'x', which is no number"):
            Costs("x")  # type: ignore[arg-type]
        for nbytes in ("64MiB", 0, -1, 2.5, True):
            with pytest.raises(BadRequest, match="whole number of bytes"):
                client.buffer(nbytes)  # type: ignore[arg-type]
        for nbytes in (1 << 50, 1 << 70):
            with pytest.raises(NoSpace, match="no memory for a buffer"):
                client.buffer(nbytes)
        huge = np.arange(4096 * SPEC.page_tokens, dtype=np.uint32).tobytes()
        data, layout = memoryview(bytes(4096 * SPEC.page_bytes)), PutLayout(SPEC, (SPEC.whole(),), 0, 4096)
        with pytest.raises(NoSpace):
            client.run(put_once(namespace.inner.client, _start(namespace.id), huge, data, layout, Whole(0.0)))


def _start(namespace: str) -> PutStart:
    return PutStart(namespace=namespace, put_id=b"h" * 16, first_page=0, parts=WHOLE)
