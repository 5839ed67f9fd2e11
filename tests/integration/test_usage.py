"""What goes wrong in new hands: the SDK says which argument is wrong and what it expects, and what it waited for in vain."""

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api.wire import FrameType
from kvstore.api.wire.messages import ErrorReply, Message
from kvstore_client import (
    AsyncClient,
    BadRequest,
    Busy,
    Client,
    Component,
    ConnectionLost,
    DeadlineExceeded,
    Hints,
    KVSpec,
    KVStoreError,
    PartRange,
    extra_digest,
)
from kvstore_client.blocking import Namespace
from kvstore_client.namespace import Namespace as AsyncNamespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, fetch_checked, open_namespace
from tests.integration.raw import RawClient

HYBRID = KVSpec(4, (Component("full", 2, 1, 16), Component("state", 1, 1, 16)))
STREAMED = KVSpec(4, (Component("full", 4, 1, 64),), group_layers=1)

WRONG: list[tuple[str, Callable[[Namespace], object]]] = [
    ("put_id is 'abc', not 16 bytes", lambda n: n.put(context(1), content(context(1)), put_id="abc")),  # type: ignore[arg-type]
    ("put_id is b'abc', not 16 bytes", lambda n: n.put(context(1), content(context(1)), put_id=b"abc")),
    ("hints is 'x', not a Hints", lambda n: n.put(context(1), content(context(1)), hints="x")),  # type: ignore[arg-type]
    ("hints is 'x', not a Hints", lambda n: n.match(context(1), hints="x")),  # type: ignore[arg-type]
    ("timeout is 'a', not a number of seconds", lambda n: n.match(context(1), timeout="a")),  # type: ignore[arg-type]
    ("timeout is 0, not a number of seconds above 0", lambda n: n.match(context(1), timeout=0)),
    ("timeout is -1.5, not a number of seconds above 0", lambda n: n.put(context(1), content(context(1)), timeout=-1.5)),
    ("lease_s is '9', not a number of seconds", lambda n: n.match(context(1), lease_s="9")),  # type: ignore[arg-type]
    ("parts is 'yes', not True or False", lambda n: n.match(context(1), parts="yes")),  # type: ignore[arg-type]
    ("base is 5, not a Match", lambda n: n.match(context(1), base=5)),  # type: ignore[arg-type]
    ("parts is PartRange.*not a tuple of PartRange", lambda n: n.put(context(1), b"", parts=n.spec.whole())),  # type: ignore[arg-type]
    ("not a buffer, such as a numpy array or bytes: give its `array`", lambda n: n.put(context(1), n._client.buffer(8))),
    ("data is None, not a buffer", lambda n: n.put(context(1), None)),
    ("data is a list|data is \\[", lambda n: n.put(context(1), [1, 2])),
    ("numpy.ascontiguousarray", lambda n: n.put(context(1), np.zeros((64, 64), np.uint8)[:, ::2])),
    ("first_page is 1.5, not a whole number", lambda n: n.put(context(1), b"", first_page=1.5)),  # type: ignore[arg-type]
    ("durable is 'yes', not True or False", lambda n: n.put(context(1), b"", durable="yes")),  # type: ignore[arg-type]
    ("spans is 3, not a pair", lambda n: n.put(context(1), b"", spans=3)),  # type: ignore[arg-type]
    ("extras is .*not a mapping", lambda n: n.match(context(1), extras={0: b"short"})),
    ("progress is 1, not a function", lambda n: n.put(context(1), b"", progress=1)),  # type: ignore[arg-type]
    ("match is None, not a Match", lambda n: n.fetch(None, bytearray(1))),  # type: ignore[arg-type]
    ("match is None, not a Match", lambda n: n.view(None)),  # type: ignore[arg-type]
    ("pages is 3, not a pair", lambda n: n.prefetch(context(1), pages=3)),  # type: ignore[arg-type]
    ("ttl_s is 'long', not a number", lambda n: n.pin(context(1), "long")),  # type: ignore[arg-type]
    ("put_id is None, not 16 bytes", lambda n: n.follow(None)),  # type: ignore[arg-type]
    ("from_token is 'x', not a whole number", lambda n: n.abandon(context(1), from_token="x")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("words", "call"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_argument_is_named_with_what_is_expected(daemon: DaemonProcess, words: str, call: Callable[[Namespace], object]) -> None:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        with pytest.raises(BadRequest, match=words) as told:
            call(namespace)
        assert isinstance(told.value, TypeError)
        namespace.match(context(1), lease_s=0)  # the connection is still there


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("endpoint is 7421, not HOST:PORT", {"endpoint": 7421}),
        ("timeout is 'a', not a number of seconds", {"timeout": "a"}),
        ("timeout is 0, not a number of seconds above 0", {"timeout": 0}),
        ("connections is '2', not a whole number", {"connections": "2"}),
        ("token is b'secret', not text", {"token": b"secret"}),
        ("local_addresses is '127.0.0.1', not a list", {"local_addresses": "127.0.0.1"}),
        ("reconnect is 'x', not a number", {"reconnect": "x"}),
    ],
)
def test_a_client_says_what_it_can_not_be_made_of(words: str, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=words) as told:
        Client(**given)
    assert isinstance(told.value, BadRequest)


def test_namespaces_and_hints_of_the_wrong_kind(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        with pytest.raises(BadRequest, match="name is 5, not text"):
            client.namespace(5)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match=r"spec is \{\}, not a KVSpec"):
            client.namespace("x", "rev-1", {})  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="spec is missing"):
            client.namespace("pages", "rev-1")
    for wrong in ({"session": 5}, {"turn": "whose"}, {"ended": "how"}, {"ttl_s": "x"}):
        with pytest.raises(BadRequest, match=next(iter(wrong))):
            Hints(**wrong)


def test_numbers_of_numpy_are_numbers(daemon: DaemonProcess) -> None:
    tokens = context(8_100)
    with Client(daemon.endpoint, timeout=np.float64(20)) as client:
        namespace = open_namespace(client)
        namespace.put(tokens[: 2 * SPEC.page_tokens], content(tokens)[: 2 * SPEC.page_bytes])
        done = namespace.put(tokens, content(tokens, 2), first_page=np.int64(2), durable=np.bool_(True))  # type: ignore[arg-type]
        assert done.new_pages == 2
        with namespace.match(tokens, lease_s=np.float32(30)) as match:  # type: ignore[arg-type]
            out = np.zeros(2 * SPEC.page_bytes, np.uint8)
            assert namespace.fetch(match, out, pages=(np.int64(1), np.int64(3))) == out.nbytes  # type: ignore[arg-type]


def test_what_stands_for_a_default_and_other_forms_of_numbers_and_bytes(daemon: DaemonProcess) -> None:
    tokens, digest = context(8_150), extra_digest([("image", b"x")])
    whole = PartRange(*map(np.int64, (0, 0, 8, 0, 2)))  # type: ignore[arg-type]
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        extras = {np.int64(1): bytearray(digest)}
        assert namespace.put(tokens, content(tokens), parts=(whole,), extras=extras).new_pages == 4  # type: ignore[arg-type]
        with namespace.match(tokens, extras={1: digest}) as match:
            assert match.pages == 4
            assert namespace.fetch(match, bytearray(4 * SPEC.page_bytes), wanted=whole) == 4 * SPEC.page_bytes
        again = namespace.put(tokens, content(tokens), parts=(), extras={1: memoryview(digest)}, put_id=b"")  # type: ignore[dict-item]
        assert again.existing_pages == 4
        for wrong in ({-1: digest}, {0: digest[:31]}, {0.5: digest}, {0: 5}):
            with pytest.raises(BadRequest, match=r"extras is .*, not a mapping"):
                namespace.match(tokens, extras=wrong)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="put_id is b'', not 16 bytes"):
            namespace.follow(b"")
        half = SPEC.part_bytes(PartRange(0, 0, 8, 0, 1))
        with pytest.raises(BadRequest, match="only under the same put_id"):
            namespace.put(tokens, bytes(4 * half), parts=(PartRange(0, 0, 8, 0, 1),), put_id=b"")


async def test_asynchronous_calls_are_known_as_such(daemon: DaemonProcess) -> None:
    assert all(map(inspect.iscoroutinefunction, (AsyncNamespace.put, AsyncNamespace.match, AsyncNamespace.fetch, AsyncClient.ping)))
    assert not inspect.iscoroutinefunction(AsyncNamespace.stream_put)
    async with AsyncClient(daemon.endpoint) as client:
        asked = client.namespace("pages", "rev-1", SPEC, retention_s="x")  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="retention_s is 'x'"):
            await asked


class Malformed(Message):
    """A PUT whose put id is text."""

    namespace: str
    put_id: str
    first_page: int
    parts: list[tuple[int, int, int, int, int]]


@pytest.mark.parametrize("kind", [FrameType.PUT, FrameType.MATCH, FrameType.FETCH])
def test_a_field_of_the_wrong_kind_is_refused_and_the_connection_goes_on(daemon: DaemonProcess, kind: FrameType) -> None:
    with Client(daemon.endpoint) as client:
        open_namespace(client)
    with RawClient(daemon.endpoint) as raw:
        raw.send(kind, 7, Malformed(namespace=5, put_id="abc", first_page=0, parts=[]), context(1).tobytes())  # type: ignore[arg-type]
        refused = raw.error()
        assert isinstance(refused, ErrorReply)
        assert refused.code == "bad_request"
        assert "namespace" in refused.message
        assert raw.alive()


def test_the_port_of_the_other_plane_is_told_apart(daemon: DaemonProcess) -> None:
    from kvstore.cli.common import http_json

    with pytest.raises(KVStoreError, match=r"this is HTTP.*ports of their own"):
        Client(daemon.http.removeprefix("http://"))
    with pytest.raises(ConnectionLost, match=r"the data plane answers at .*, 7420 by default"):
        http_json(f"http://{daemon.endpoint}", "/v1/stat")
    with pytest.raises(ConnectionLost, match="does not speak TLS: is it http://"):
        http_json(daemon.http.replace("http:", "https:"), "/v1/stat")
    with pytest.raises(ConnectionLost, match=r"no daemon answers.*Connection refused"):
        http_json("http://127.0.0.1:1", "/v1/stat")


def test_a_shard_without_a_put_id_is_refused(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        namespace, heads = open_namespace(client), SPEC.components[0].kv_heads
        half = PartRange(0, 0, SPEC.components[0].layers, 0, heads // 2)
        rest = PartRange(0, 0, SPEC.components[0].layers, heads // 2, heads)
        tokens = context(8_200)
        with pytest.raises(BadRequest, match="only under the same put_id"):
            namespace.put(tokens, bytes(4 * SPEC.part_bytes(half)), parts=(half,))
        assert namespace.put(tokens, bytes(4 * SPEC.page_bytes), parts=(half, rest)).new_pages == 4, "both halves at once need none"


def test_a_hybrid_put_of_one_component_by_default_warns(daemon: DaemonProcess) -> None:
    tokens = np.arange(8, dtype=np.uint32)
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("hybrid-usage", "rev-1", HYBRID)
        data = bytes(2 * HYBRID.part_bytes(HYBRID.whole(0)))
        with pytest.warns(UserWarning, match=r"component 0 only.*1 \(state\).*parts=\(spec.whole\(0\), spec.whole\(1\)\)"):
            namespace.put(tokens, data)
        session = namespace.session()
        session.extend(tokens + 50)
        puts: tuple[Callable[[], object], ...] = (lambda: namespace.put(tokens + 100, data), lambda: session.put(data))
        for put in puts:
            with pytest.warns(UserWarning, match="component 0 only") as warned:
                put()
            assert [one.filename for one in warned] == [__file__], "it is about the caller's line"
        session.close()
        assert namespace.match(tokens, lease_s=0).pages == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            namespace.put(tokens, data, parts=(HYBRID.whole(0),))


async def test_a_hybrid_put_warns_of_the_line_that_awaits_it(daemon: DaemonProcess) -> None:
    tokens = np.arange(8, dtype=np.uint32)
    async with AsyncClient(daemon.endpoint) as client:
        namespace = await client.namespace("hybrid-usage-asyncio", "rev-2", HYBRID)
        data = bytes(2 * HYBRID.part_bytes(HYBRID.whole(0)))
        async with namespace.session() as session:
            await session.extend(tokens + 50)
            for put in (namespace.put, lambda _, pages: session.put(pages)):
                with pytest.warns(UserWarning, match="component 0 only") as warned:
                    await put(tokens, data)
                assert [one.filename for one in warned] == [__file__]


def test_a_commit_too_early_is_refused_and_the_put_goes_on(daemon: DaemonProcess) -> None:
    tokens = np.arange(8, dtype=np.uint32)
    with Client(daemon.endpoint) as client:
        namespace = client.namespace("early", "rev-1", STREAMED)
        layer = bytes(2 * STREAMED.layer_bytes(STREAMED.whole()))
        with namespace.stream_put(tokens) as put:
            put.send(0, 1, layer)
            with pytest.raises(BadRequest, match=r"\[1, 2\) are the first that are missing \(3 of 4"):
                put.commit()
            for low in range(1, 4):
                put.send(low, low + 1, layer)
            assert put.commit().new_pages == 2
            with pytest.raises(BadRequest, match="has ended"):
                put.send(0, 1, layer)
            with pytest.raises(BadRequest, match="has ended"):
                put.commit()
        with namespace.stream_put(tokens) as again:
            assert again.commit().existing_pages == 2, "nothing is wanted of pages that are there"


def test_a_daemon_that_is_gone_is_told_of(data_dir: Path) -> None:
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "16MiB") as daemon:
        patient, hasty = Client(daemon.endpoint), Client(daemon.endpoint, timeout=60, reconnect=0.2)
        with patient, hasty:
            namespaces = [open_namespace(client) for client in (patient, hasty)]
            daemon.kill()
            gone = r"within 0.5 s: connection_lost: can't connect to .*: Connection refused"
            told_in_time(gone, lambda: namespaces[0].match(context(1), timeout=0.5))
            with pytest.raises(ConnectionLost, match=r"Connection refused.*has been away for"):
                namespaces[1].match(context(1))
            with pytest.raises(ConnectionLost, match="Connection refused"):
                namespaces[1].put(context(1), content(context(1)))


def test_a_client_that_gave_up_finds_a_daemon_that_is_back(data_dir: Path) -> None:
    place = ("--dram", "16MiB", "--ssd", "16MiB", "--unix-socket", str(data_dir.parent / "s"))
    with DaemonProcess(data_dir, *place) as first:
        client = Client(first.unix_endpoint, reconnect=0)
        namespace = open_namespace(client)
        namespace.put(context(1), content(context(1)), durable=True)
        first.kill()
        with pytest.raises(ConnectionLost, match=r"can't connect|connection broke"):
            namespace.match(context(1))
    with DaemonProcess(data_dir, *place), client:
        assert fetch_checked(namespace, context(1)) == 4


def test_a_daemon_that_stays_busy_is_told_of(data_dir: Path) -> None:
    patience = {"KVSTORE_PUT_WAIT": "0.05", "KVSTORE_MAX_LEASED": "64MiB"}
    small = DaemonProcess(data_dir, "--dram", "2MiB", "--ssd", "1MiB", environment=patience)
    with small as daemon, Client(daemon.endpoint) as client:
        namespace = open_namespace(client)

        seeds = iter(range(0, 4000, 10))

        def fill() -> None:
            for seed in seeds:
                namespace.put(context(seed), content(context(seed)), timeout=0.5)
                namespace.match(context(seed))

        def stream() -> None:
            with namespace.stream_put(context(5_000), timeout=0.5):
                pass

        still = f"^the daemon at {daemon.endpoint} was still busy after 0.5 s: "
        for call in (fill, stream):
            assert isinstance(told_in_time(still, call).__cause__, Busy)


def told_in_time(said: str, call: Callable[[], object]) -> DeadlineExceeded:
    """A call ends with its deadline, and says why. Where the machine stood still it had no time to find out: then it is made again."""
    for _ in range(20):
        with pytest.raises(DeadlineExceeded) as told:
            call()
        if re.search(said, told.value.message):
            return told.value
    raise AssertionError(told.value.message)


def test_objects_say_what_they_are(daemon: DaemonProcess) -> None:
    client = Client(daemon.endpoint)
    namespace = open_namespace(client)
    namespace.put(context(8_900), content(context(8_900)))
    assert repr(client) == f"<Client of {daemon.endpoint}, connected>"
    assert repr(namespace).startswith(f"<Namespace 'pages' ({namespace.id}): full; 4 tokens and {SPEC.page_bytes:,} bytes a page")
    with namespace.match(context(8_900)) as match:
        assert repr(match) == "<Match of 4 pages (16 tokens) in 'pages', leased>"
        assert repr(match.inner) == repr(match)
        view = namespace.view(match)
        assert repr(view) == f"<LocalView of 4 parts ({4 * SPEC.page_bytes:,} bytes) in 'pages', valid>"
    assert repr(match) == "<Match of 4 pages (16 tokens) in 'pages', not leased>"
    assert repr(view).endswith("in 'pages', not valid>")
    session = namespace.session()
    session.extend(context(8_900))
    assert repr(session) == repr(session.inner) == "<Session of 16 tokens in 'pages', 4 pages leased>"
    session.close()
    assert repr(session) == "<Session of 16 tokens in 'pages', closed>"
    client.close()
    assert repr(client) == f"<Client of {daemon.endpoint}, closed>"
    assert repr(AsyncClient("127.0.0.1:1", token="secret")) == "<AsyncClient of 127.0.0.1:1, not connected yet>"
