"""What has bytes, given to every public call that takes some: taken for what it is, or refused with a typed error, never with a raw one."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest

from kvstore_client import BadRequest, Client, KVSpec, Scattered, extra_digest
from kvstore_client.blocking import Namespace
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, content, context, open_namespace

FLAT = KVSpec(4, SPEC.components, max_slice_bytes=4096, hash_bytes=16, flat=True)
DATA = content(context(1))


def released() -> Any:
    view = memoryview(bytearray(64))
    view.release()
    return view


def strided(nbytes: int, kind: Literal["B", "I", "f"] = "B") -> Any:
    return memoryview(bytearray(2 * nbytes)).cast(kind)[::2]


def of_ctypes(data: Any) -> Any:
    raw = bytes(data)
    return (ctypes.c_ubyte * len(raw)).from_buffer_copy(raw)


@pytest.fixture
def namespace(daemon: DaemonProcess) -> Iterator[Namespace]:
    with Client(daemon.endpoint) as client:
        namespace = open_namespace(client)
        namespace.put(context(1), DATA)
        yield namespace


@pytest.fixture
def flat(namespace: Namespace) -> Namespace:
    return namespace._client.namespace("of-digests", "rev-1", FLAT)


Call = Callable[[Namespace, Any], object]

WITH_LABELS: list[Call] = [
    lambda n, given: n.match(given),
    lambda n, given: n.put(given, DATA),
    lambda n, given: n.stream_put(given).__enter__(),
    lambda n, given: n.session().extend(given),
    lambda n, given: n.prefetch(given),
    lambda n, given: n.pin(given, 1),
    lambda n, given: n.abandon(given),
    lambda n, given: n.delete(given),
    lambda n, given: n.delete_recipes(given),
    lambda n, given: n.drop_to_text(given),
    lambda n, given: n.rebuild(given),
]


@pytest.mark.parametrize("call", WITH_LABELS)
def test_digests(flat: Namespace, call: Call) -> None:
    for wrong in (strided(64), memoryview(strided(64)), released(), strided(64, "I"), 5, np.zeros(64, "M8[s]"), [released()]):
        with pytest.raises(BadRequest):
            call(flat, wrong)


@pytest.mark.parametrize("call", WITH_LABELS)
def test_token_ids(namespace: Namespace, call: Call) -> None:
    for wrong in (strided(16), released(), strided(16, "f"), memoryview((ctypes.c_void_p * 4)()), 5, np.zeros(16, "M8[s]")):
        with pytest.raises(BadRequest):
            call(namespace, wrong)


def test_data(namespace: Namespace, flat: Namespace) -> None:
    calls: list[Call] = [
        lambda n, given: n.put(context(2), given),
        lambda n, given: n.put(context(2), Scattered(given, [[0]] * 4)),
        lambda n, given: n.stream_put(context(2)).__enter__().send(0, 8, given),
        lambda n, given: flat.put(bytes(64), given),
    ]
    for call in calls:
        for wrong in (strided(len(DATA)), released(), 5, np.zeros(4, "M8[s]"), [1]):
            with pytest.raises(BadRequest):
                call(namespace, wrong)


def test_buffers_to_receive_into(namespace: Namespace) -> None:
    with namespace.match(context(1)) as match, namespace.session() as session:
        session.extend(context(1))
        calls: list[Callable[[Any], object]] = [
            lambda given: namespace.fetch(match, given),
            lambda given: namespace.fetch(match, Scattered(given, [[0]] * 4)),
            lambda given: session.fetch(given),
            lambda given: namespace.view(match).copy_into(given),
        ]
        for call in calls:
            for wrong in (strided(len(DATA)), released(), 5, np.zeros(4, "M8[s]"), [1], (ctypes.c_ubyte * 5)()):
                with pytest.raises(BadRequest):
                    call(wrong)


def test_digests_of_extra_keys_and_of_puts(namespace: Namespace) -> None:
    given: tuple[Any, ...] = (released(), strided(15), 5)
    for wrong in given:
        with pytest.raises(BadRequest):
            namespace.match(context(1), extras={0: wrong})
        with pytest.raises(BadRequest):
            namespace.put(context(2), DATA, put_id=wrong)
        with pytest.raises(BadRequest):
            namespace.follow(wrong)
        with pytest.raises(BadRequest):
            namespace.abandon_session(wrong)
    for wrong in given[::2]:
        with pytest.raises(BadRequest):
            extra_digest([("image", wrong)])


def test_memory_of_ctypes(namespace: Namespace, flat: Namespace) -> None:
    """Its buffers name their byte order, by which a memoryview can't be cast; they are bytes one after the other all the same."""
    assert namespace.put(context(3), of_ctypes(content(context(3)))).new_pages
    out = of_ctypes(bytes(len(DATA)))
    with namespace.match(context(3)) as match:
        assert namespace.fetch(match, out) == len(DATA)
    assert bytes(out) == content(context(3)).tobytes()
    ids: Any = (ctypes.c_uint32 * 16)(*context(3).tolist())
    assert namespace.match(ids).pages == namespace.match(memoryview(ids)).pages == 4
    assert flat.put(memoryview(of_ctypes(bytes(range(64)))), DATA).new_pages == 4
    assert flat.match(bytes(range(64))).pages == 4


@pytest.mark.parametrize("kind", [">u4", "c8", [("a", "u1"), ("O", "u1")]])
def test_numbers_of_any_kind_are_bytes(namespace: Namespace, kind: Any) -> None:
    tokens = context(40)
    namespace.put(tokens, content(tokens).view(kind))
    out = np.zeros(len(DATA), np.uint8)
    with namespace.match(tokens) as match:
        assert namespace.fetch(match, out.view(kind)) == len(DATA)
    assert np.array_equal(out, content(tokens))
    namespace.delete(tokens)
