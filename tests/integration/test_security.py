"""Tokens and tenants on both planes of a real daemon. How tokens come and go is in test_token_changes.py."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.api.wire import PROTOCOL_VERSION, FrameType
from kvstore.api.wire.frames import SLICES_META, encode_bulk
from kvstore.api.wire.messages import (
    CreateNamespace,
    Empty,
    FetchRequest,
    Hello,
    LeaseRequest,
    Matched,
    MatchRequest,
    Message,
    NamespaceInfo,
    NamespaceName,
    Pinned,
    Prefix,
)
from kvstore.api.wire.messages import unpack as read
from kvstore.api.wire.put_messages import Follow, Outcome, PutHandle, PutReady, PutStart
from kvstore.kvspec import namespace_digest
from kvstore_client import Client, Forbidden, Unauthenticated, UnknownNamespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import RawClient, stat, wait_for_baseline
from tests.integration.secured import ADMIN, ALICE, ALICE_READS, BOB, EXPIRED, ask, write_tokens


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("secured")
    tokens = write_tokens(folder / "tokens.toml")
    with DaemonProcess(folder / "data", "--dram", "64MiB", "--ssd", "256MiB", "--tokens-file", str(tokens)) as running:
        yield running


def client(daemon: DaemonProcess, token: str, connections: int = 1) -> Client:
    return Client(daemon.endpoint, token=token, connections=connections)


# --- who comes in ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "wrong-0123456789abcdef", EXPIRED, ALICE[:-1], ALICE + "0"])
def test_who_is_not_let_in(secured: DaemonProcess, token: str) -> None:
    for endpoint in (secured.endpoint, secured.unix_endpoint):
        with pytest.raises(Unauthenticated), Client(endpoint, token=token):
            pass
    for path in ("/v1/stat", "/v1/namespaces", "/metrics", "/v1/namespaces/x", f"/v1/blobs/x/{'0' * 32}"):
        status, headers, body = ask(secured.http + path, token)
        assert (status, json.loads(body)["code"]) == (401, "unauthenticated")
        assert headers["WWW-Authenticate"].startswith("Bearer")
    assert ask(secured.http + "/v1/namespaces/x", token, "DELETE")[0] == 401
    assert ask(secured.http + "/healthz", token)[0] == ask(secured.http + "/readyz", token)[0] == 200
    wait_for_baseline(secured.http, token=ADMIN)


def test_the_environment_gives_the_token(secured: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TOKEN", ALICE)
    with Client(secured.endpoint) as alice:
        open_namespace(alice)


def test_only_a_small_hello_comes_first(secured: DaemonProcess) -> None:
    """Somebody unknown can't make the daemon read, or keep, anything to speak of."""
    for kind, message, payload in (
        (FrameType.PING, Empty(), b""),
        (FrameType.HELLO, Hello(versions=[PROTOCOL_VERSION], token="x" * 9000), b""),
        (FrameType.HELLO, Hello(versions=[PROTOCOL_VERSION], token=ALICE), b"payload"),
    ):
        with RawClient(secured.endpoint, hello=False) as raw:
            raw.send(kind, 0, message, payload)
            assert raw.error().code == "protocol"
            assert raw.closed()
    with RawClient(secured.endpoint, hello=False) as raw:
        raw.send_raw(encode_bulk(FrameType.SLICES, 1, SLICES_META.pack(1, 0, 0, 0), 16, 1) + bytes(32))
        assert raw.error().code == "protocol"
        assert raw.closed()


# --- what they may -----------------------------------------------------------------------------------------------------------


def test_a_read_token_reads_and_does_not_write(secured: DaemonProcess) -> None:
    tokens = context(1)
    with client(secured, ALICE, 2) as alice, client(secured, ALICE_READS, 2) as reader:
        namespace = alice.namespace("shared", "shared", SPEC)
        namespace.put(tokens, content(tokens))
        seen = reader.namespace("shared")
        assert fetch_checked(seen, tokens) == 4
        assert [n.name for n in reader.namespaces() if n.name == "shared"]
        other = context(20)
        for refused in (
            lambda: seen.put(other, content(other)),
            lambda: seen.drop(),
            lambda: reader.namespace("new", "rev-1", SPEC),
        ):
            with pytest.raises(Forbidden, match="has read access, and the request needs write access"):
                refused()
        assert fetch_checked(namespace, other) == 0


def test_a_read_token_can_not_write_into_the_put_of_another_connection(secured: DaemonProcess) -> None:
    tokens = context(30)
    with RawClient(secured.endpoint, token=ALICE) as writer:
        with RawClient(secured.endpoint, token=ALICE_READS, session=writer.session) as reader:
            space = read_info(
                writer.ask(FrameType.NAMESPACE_CREATE, CreateNamespace(name="raw", fingerprint="raw", spec=SPEC.to_dict()))[1]
            )
            start = PutStart(namespace=space, put_id=bytes(16), first_page=0, parts=[(0, 0, 8, 0, 2)])
            header, meta, _ = writer.ask(FrameType.PUT, start, tokens.tobytes())
            assert header.type is FrameType.PUT_READY
            handle = read(PutReady, meta).handle
            reader.send_raw(encode_bulk(FrameType.SLICES, 5, SLICES_META.pack(handle, 0, 0, 0), 4096, 1) + bytes(4096 + 16))
            assert reader.error().code == "forbidden"
            for kind in (FrameType.COMMIT, FrameType.ABORT):
                reader.send(kind, 6, PutHandle(handle=handle))
                assert reader.error().code == "forbidden"
            assert reader.alive()
        assert writer.ask(FrameType.ABORT, PutHandle(handle=handle))[0].type is FrameType.OK


def read_info(meta: bytes) -> str:
    return read(NamespaceInfo, meta).id


def test_http_access(secured: DaemonProcess) -> None:
    http = secured.http
    body = json.dumps({"name": "web", "fingerprint": "f", "spec": SPEC.to_dict()}).encode()
    status, _, refused = ask(f"{http}/v1/namespaces", ALICE_READS, "POST", body)
    assert (status, json.loads(refused)["code"]) == (403, "forbidden")
    assert ask(f"{http}/v1/namespaces", ALICE, "POST", body)[0] == 201
    assert ask(f"{http}/v1/namespaces/web", ALICE_READS)[0] == 200
    assert ask(f"{http}/v1/namespaces/web/match", ALICE_READS, "POST", b'{"tokens": [1]}')[0] == 200
    assert ask(f"{http}/v1/namespaces/web", ALICE_READS, "DELETE")[0] == 403
    assert ask(f"{http}/metrics", ALICE)[0] == 403
    assert ask(f"{http}/metrics", ADMIN)[0] == 200
    assert ask(f"{http}/v1/namespaces/web", ADMIN)[0] == 404  # an admin sees totals, not pages
    assert ask(f"{http}/v1/namespaces/web", ALICE, "DELETE")[0] == 204
    assert ask(f"{http}/nowhere")[0] == ask(f"{http}/nowhere", ALICE)[0] == 404


def test_stat_is_of_the_tenant_or_for_an_admin_of_all(secured: DaemonProcess) -> None:
    tokens = context(40)
    with client(secured, ALICE) as alice, client(secured, BOB) as bob:
        for left in bob.namespaces():  # by tests before
            left.drop()
        alice.namespace("stat", "stat", SPEC).put(tokens, content(tokens), durable=True)
        mine, his, everything = (stat(secured.http, token) for token in (ALICE_READS, BOB, ADMIN))
    assert mine["tiers"]["dram"]["used"] >= 4 * SPEC.page_bytes
    assert mine["tiers"]["ssd"]["used"] >= 4 * SPEC.page_bytes
    assert (mine["sessions"], his["sessions"], everything["sessions"]) == (1, 1, 2)
    assert "stat" in {n["name"] for n in mine["namespaces"]}
    assert his["namespaces"] == []
    assert his["tiers"]["dram"]["used"] == his["tiers"]["ssd"]["used"] == 0
    assert "totals" not in his
    assert "alice" in {n["tenant"] for n in everything["namespaces"]}


# --- a tenant learns nothing ---------------------------------------------------------------------------------------------------


PREFIXES = (FrameType.PREFETCH, FrameType.PIN, FrameType.ABANDON, FrameType.DELETE)


def probes(space: str, blob: bytes) -> list[tuple[FrameType, Message, bytes]]:
    tokens = context(50).tobytes()
    start = PutStart(namespace=space, put_id=bytes(16), first_page=0, parts=[(0, 0, 8, 0, 2)])
    run = np.array([0, 1], "<u4").tobytes() + np.array([0, 16, 16], "<u8").tobytes()
    return [
        (FrameType.NAMESPACE_GET, NamespaceName(namespace=space), b""),
        (FrameType.NAMESPACE_GET, NamespaceName(namespace="secret-plans"), b""),
        (FrameType.NAMESPACE_LIST, Empty(), b""),
        (FrameType.MATCH, MatchRequest(namespace=space, parts=True, lease_ms=1000), tokens),
        (FrameType.FETCH, FetchRequest(namespace=space, blobs=1), blob + run),
        (FrameType.FETCH, FetchRequest(namespace="mine", blobs=1), blob + run),
        (FrameType.MATCH, MatchRequest(namespace="mine", parts=True), tokens),
        (FrameType.PUT, start, tokens),
        *((kind, Prefix(namespace=space, ttl_ms=1000), tokens) for kind in PREFIXES),
        *((kind, Prefix(namespace="mine", ttl_ms=1000), tokens) for kind in PREFIXES),
        (FrameType.FOLLOW, Follow(namespace="mine", put_id=bytes(16)), b""),
        (FrameType.FOLLOW, Follow(namespace=space, put_id=bytes(16)), b""),
        (FrameType.NAMESPACE_DROP, NamespaceName(namespace=space), b""),
    ]


def replies_to_numbers(daemon: DaemonProcess, lease: int, handle: int, pin: int) -> list[bytes]:
    """What bob hears, to the byte, when he asks for a lease, a put and a pin by their numbers."""
    heard = []
    with RawClient(daemon.endpoint, token=BOB) as bob:
        for kind, message in (
            (FrameType.LEASE_RENEW, LeaseRequest(lease=lease, lease_ms=1000)),
            (FrameType.LEASE_RELEASE, LeaseRequest(lease=lease)),
            (FrameType.COMMIT, PutHandle(handle=handle)),
            (FrameType.ABORT, PutHandle(handle=handle)),
            (FrameType.OUTCOME, Outcome(handle=handle)),
            (FrameType.UNPIN, Pinned(namespace="mine", pin=pin)),
            (FrameType.MATCH, MatchRequest(namespace="mine", base=lease)),
        ):
            header, meta, body = bob.ask(kind, message)
            heard.append(bytes([header.type]) + meta + body)
        bob.send_raw(encode_bulk(FrameType.SLICES, 5, SLICES_META.pack(handle, 0, 0, 0), 4096, 1) + bytes(4096 + 16))
        header, meta, body = bob.receive()
        heard.append(bytes([header.type]) + meta + body)
    return [
        reply.replace(str(lease).encode(), b"LEASE").replace(str(handle).encode(), b"PUT").replace(str(pin).encode(), b"PIN")
        for reply in heard
    ]


def replies(daemon: DaemonProcess, space: str, blob: bytes) -> list[bytes]:
    """What bob hears, to the byte, on both planes, when he asks for a namespace and a blob by their names."""
    heard = []
    with RawClient(daemon.endpoint, token=BOB) as bob:
        for kind, message, payload in probes(space, blob):
            header, meta, body = bob.ask(kind, message, payload)
            if kind is FrameType.MATCH and header.type is FrameType.MATCHED:
                assert read(Matched, meta).pages == 0
            heard.append(bytes([header.type]) + meta + body)
    match = json.dumps({"tokens": context(50).tolist(), "parts": True}).encode()
    for method, path, sent in (
        ("GET", f"/v1/namespaces/{space}", None),
        ("GET", "/v1/namespaces/secret-plans", None),
        ("GET", "/v1/namespaces", None),
        ("POST", f"/v1/namespaces/{space}/match", match),
        ("POST", "/v1/namespaces/mine/match", match),
        ("GET", f"/v1/blobs/{space}/{blob.hex()}", None),
        ("HEAD", f"/v1/blobs/{space}/{blob.hex()}", None),
        ("GET", f"/v1/blobs/mine/{blob.hex()}", None),
        ("DELETE", f"/v1/namespaces/{space}", None),
    ):
        status, headers, body = ask(daemon.http + path, BOB, method, sent)
        heard.append(repr((method, path, status, sorted(headers.items()), body)).encode())
    return heard


def as_long_as(number: int) -> int:
    """A number that stands for nothing, with as many digits."""
    return int("".join(str(9 - int(digit)) if place else digit for place, digit in enumerate(str(number))))


def test_what_is_anothers_is_as_what_never_was(secured: DaemonProcess) -> None:
    """Full replies, before anything of alice's was there and with all of it there, are the same bytes."""
    space = namespace_digest("alice", "secret-model", SPEC)[:16].hex()
    tokens = context(50)
    with client(secured, BOB) as bob:
        bob.namespace("mine", "secret-model", SPEC)  # the same model and spec: a namespace of his own all the same
    with client(secured, BOB) as scout:  # which blob id alice's bytes will have
        twin = scout.namespace("twin", "twin", SPEC)
        twin.put(tokens, content(tokens))
        with twin.match(tokens) as match:
            blob = match.inner._ids[:16]
        twin.drop()
    before = replies(secured, space, blob)
    with RawClient(secured.endpoint, token=ALICE) as raw:
        with client(secured, ALICE) as alice:
            namespace = alice.namespace("secret-plans", "secret-model", SPEC)
            assert namespace.id == space
            namespace.put(tokens, content(tokens), durable=True)
        _, meta, ids = raw.ask(FrameType.MATCH, MatchRequest(namespace=space, parts=True, lease_ms=60_000), tokens.tobytes())
        assert ids[:16] == blob
        hers = read(Matched, meta).lease
        start = PutStart(namespace=space, put_id=bytes(16), first_page=0, parts=[(0, 0, 8, 0, 2)])
        her_put = read(PutReady, raw.ask(FrameType.PUT, start, context(51).tobytes())[1]).handle
        assert before == replies(secured, space, blob)
        her_pin = read(Pinned, raw.ask(FrameType.PIN, Prefix(namespace=space, ttl_ms=60_000), tokens.tobytes())[1]).pin
        asked, nothing = (hers, her_put, her_pin), (as_long_as(hers), as_long_as(her_put), as_long_as(her_pin))
        assert replies_to_numbers(secured, *asked) == replies_to_numbers(secured, *nothing)
        for kind, message in ((FrameType.LEASE_RELEASE, LeaseRequest(lease=hers)), (FrameType.UNPIN, Pinned(namespace=space, pin=her_pin))):
            assert raw.ask(kind, message)[0].type is FrameType.OK, "bob's tries did not leave it alone"
    with client(secured, ALICE) as alice:
        assert fetch_checked(alice.namespace(space), tokens) == 4
        alice.namespace(space).drop()


def test_a_session_of_another_tenant_is_one_that_never_was(secured: DaemonProcess) -> None:
    def join(token: str, session: bytes) -> bytes:
        with RawClient(secured.endpoint, hello=False) as raw:
            raw.send(FrameType.HELLO, 0, Hello(versions=[PROTOCOL_VERSION], token=token, session=session))
            header, meta, _ = raw.receive()
            return bytes([header.type]) + meta

    with RawClient(secured.endpoint, token=ALICE) as alice:
        assert join(BOB, alice.session) == join(BOB, bytes(16))
        assert join(ALICE_READS, alice.session) != join(ALICE_READS, bytes(16))


def test_equal_bytes_of_two_tenants_are_stored_twice(secured: DaemonProcess) -> None:
    tokens = context(60)
    for token in (ALICE, BOB):
        with client(secured, token) as mine:
            before = stat(secured.http, ADMIN)["totals"]["put_pages"]
            done = mine.namespace("equal", "equal", SPEC).put(tokens, content(tokens))
            assert (done.new_pages, stat(secured.http, ADMIN)["totals"]["put_pages"] - before) == (4, 4)
    with client(secured, ALICE) as alice:
        alice.namespace("equal").drop()
        with pytest.raises(UnknownNamespace):
            alice.namespace("equal")
    with client(secured, BOB) as bob:
        assert fetch_checked(bob.namespace("equal"), tokens) == 4


def test_the_command_line_shows_its_token(secured: DaemonProcess) -> None:
    from tests.integration.test_cli import kvstore

    refused = kvstore(secured, "status")
    assert refused.returncode == 2
    assert "unauthenticated" in refused.stderr
    assert "`kvstore --token TOKEN" in refused.stderr
    assert kvstore(secured, "--token", ALICE_READS, "status").returncode == 0
    with client(secured, ALICE) as alice:
        alice.namespace("cli", "cli", SPEC)
    found = kvstore(secured, "--token", ALICE_READS, "match", "cli", "-t", "1,2,3,4", "--json")
    assert json.loads(found.stdout)["pages"] == 0
