"""The contract of L2AdapterInterface, in the spirit of LMCache's own tests of its adapters, over a real daemon."""

import os
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.internal_api import L2AdapterListener

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.lmcache.objects import desc, empty_obj, key, load, lookup, make_adapter, memory_obj, same, store
from tests.integration.raw import stat


@pytest.fixture
def adapter(either_daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An adapter to a daemon, once with shared memory and once without; a revision of its own for each test."""
    made = make_adapter(either_daemon.endpoint, revision=request.node.name)
    yield made
    made.close()


class Listener(L2AdapterListener):  # type: ignore[misc]
    """Notes what it is told."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


def test_three_descriptors_and_no_result_before_its_time(adapter: Any) -> None:
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3
    assert all(os.fstat(fd) for fd in fds)
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    assert poller.poll(0) == []
    assert adapter.pop_completed_store_tasks() == {}
    assert adapter.query_lookup_and_lock_result(99) is None
    assert adapter.query_load_result(99) is None


def test_what_is_stored_comes_back_byte_for_byte(adapter: Any) -> None:
    keys, objects = [key(n) for n in range(5)], [memory_obj(n) for n in range(5)]
    assert lookup(adapter, keys) == []
    done = store(adapter, keys, objects)
    assert (done.is_successful(), done.bytes_transferred()) == (True, sum(obj.get_size() for obj in objects))
    assert lookup(adapter, keys) == [0, 1, 2, 3, 4]
    targets = [empty_obj() for _ in keys]
    assert load(adapter, keys, targets) == [0, 1, 2, 3, 4]
    assert all(same(*pair) for pair in zip(objects, targets, strict=True))
    adapter.submit_unlock(keys)


def test_a_result_is_given_once(adapter: Any) -> None:
    keys = [key(1)]
    store(adapter, keys, [memory_obj(1)])
    task = adapter.submit_lookup_and_lock_task(keys, {0: desc()})
    poller = select.poll()
    poller.register(adapter.get_lookup_and_lock_event_fd(), select.POLLIN)
    assert poller.poll(10_000)
    assert adapter.query_lookup_and_lock_result(task) is not None
    assert adapter.query_lookup_and_lock_result(task) is None
    assert adapter.pop_completed_store_tasks() == {}


def test_a_look_up_finds_what_is_there_behind_holes(adapter: Any) -> None:
    keys = [key(n) for n in range(8)]
    there = [1, 2, 5, 7]
    store(adapter, [keys[n] for n in there], [memory_obj(n) for n in there])
    assert lookup(adapter, keys) == there
    targets = [empty_obj() for _ in keys]
    assert load(adapter, keys, targets) == there
    assert all(same(targets[n], memory_obj(n)) for n in there)
    assert all(same(targets[n], empty_obj()) for n in (0, 3, 4, 6))


def test_loads_need_no_look_up(adapter: Any) -> None:
    store(adapter, [key(1)], [memory_obj(1)])
    target = empty_obj()
    assert load(adapter, [key(1), key(2)], [target, empty_obj()]) == [0]
    assert same(target, memory_obj(1))


def test_what_is_there_is_not_stored_again(adapter: Any) -> None:
    listener = Listener()
    adapter.register_listener(listener)
    size = memory_obj(1).get_size()
    assert store(adapter, [key(1)], [memory_obj(1)]).bytes_transferred() == size
    again = store(adapter, [key(1), key(2)], [memory_obj(7), memory_obj(2)])
    assert (again.is_successful(), again.bytes_transferred()) == (True, size)
    assert listener.stored == [(key(1), size), (key(2), size)]
    assert adapter.get_usage().total_bytes_used == 2 * size
    target = empty_obj()
    load(adapter, [key(1)], [target])
    assert same(target, memory_obj(1))  # the first stays
    assert listener.accessed == [key(1)]


def test_many_objects_of_a_store_are_few_puts(adapter: Any, either_daemon: DaemonProcess) -> None:
    """Of two shapes, and one key twice: each shape is one put."""
    wide = (2, 2, 16, 64)
    numbers = [*range(20), 3]
    keys = [*(key(n) for n in numbers), *(key(n, group=1) for n in range(10))]
    objects = [*(memory_obj(n) for n in numbers), *(memory_obj(n, wide) for n in range(10))]
    before = stat(either_daemon.http)["totals"]["puts"]
    listener = Listener()
    adapter.register_listener(listener)
    done = store(adapter, keys, objects)
    assert (done.is_successful(), done.bytes_transferred()) == (True, 20 * objects[0].get_size() + 10 * objects[-1].get_size())
    assert [told for told, _ in listener.stored] == [*keys[:20], *keys[21:]]
    assert stat(either_daemon.http)["totals"]["puts"] == before + 2
    descs, targets = {0: desc(), 1: desc(wide)}, [*(empty_obj() for _ in numbers), *(empty_obj(wide) for _ in range(10))]
    assert lookup(adapter, keys, descs) == list(range(31))
    assert load(adapter, keys, targets) == list(range(31))
    assert all(same(*pair) for pair in zip(objects, targets, strict=True))


def test_keys_differ_by_each_of_their_fields(adapter: Any) -> None:
    one: dict[str, Any] = {"model": "org/model", "rank": 0, "group": 0, "salt": ""}
    variants = [one, one | {"model": "org/other"}, one | {"rank": 1}, one | {"rank": -1}, one | {"group": 1}, one | {"salt": "a"}]
    keys = [key(1, **fields) for fields in variants]
    descs = {0: desc(), 1: desc()}
    store(adapter, keys[:1], [memory_obj(0)])
    assert lookup(adapter, keys, descs) == [0]
    store(adapter, keys[1:], [memory_obj(n) for n in range(1, len(keys))])
    assert lookup(adapter, keys, descs) == list(range(len(keys)))
    targets = [empty_obj() for _ in keys]
    load(adapter, keys, targets)
    assert all(same(targets[n], memory_obj(n)) for n in range(len(keys)))


def test_layouts_and_dtypes_share_nothing(adapter: Any) -> None:
    store(adapter, [key(1)], [memory_obj(1)])
    other_shape, other_dtype = (2, 2, 32, 16), torch.float16
    assert lookup(adapter, [key(1)], {0: desc(other_shape)}) == []
    assert lookup(adapter, [key(1)], {0: desc(dtype=other_dtype)}) == []
    assert load(adapter, [key(1)], [empty_obj(other_shape)]) == []
    assert load(adapter, [key(1)], [empty_obj(dtype=other_dtype)]) == []
    assert lookup(adapter, [key(1)]) == [0]


def test_a_look_up_that_says_no_layout_finds_what_this_process_stored(adapter: Any) -> None:
    store(adapter, [key(1)], [memory_obj(1)])
    assert lookup(adapter, [key(1), key(2)], {}) == [0]
    assert load(adapter, [key(1)], [empty_obj()]) == [0]


def test_revisions_share_nothing(either_daemon: DaemonProcess) -> None:
    one, other = (make_adapter(either_daemon.endpoint, revision=name) for name in ("sha-1", "sha-2"))
    try:
        store(one, [key(1)], [memory_obj(1)])
        assert lookup(other, [key(1)]) == []
        assert load(other, [key(1)], [empty_obj()]) == []
    finally:
        one.close()
        other.close()


def test_another_process_finds_bytes_of_a_serde(either_daemon: DaemonProcess) -> None:
    """Those are bytes in a row, stored under a layout that no look-up names."""
    raw = {"shape": (4096,), "dtype": torch.uint8}
    one = make_adapter(either_daemon.endpoint, revision="serde-1")
    store(one, [key(1)], [memory_obj(1, **raw)])
    one.close()
    other = make_adapter(either_daemon.endpoint, revision="serde-1")
    try:
        assert lookup(other, [key(1), key(2)]) == [0]
        target = empty_obj(**raw)
        assert load(other, [key(1)], [target]) == [0]
        assert same(target, memory_obj(1, **raw))
    finally:
        other.close()


def test_a_lock_is_a_lease_until_it_is_given_back_as_often_as_it_was_taken(adapter: Any, either_daemon: DaemonProcess) -> None:
    listener = Listener()
    adapter.register_listener(listener)
    keys = [key(1), key(2)]
    store(adapter, keys, [memory_obj(1), memory_obj(2)])
    assert lookup(adapter, keys) == [0, 1]
    assert lookup(adapter, keys[:1]) == [0]
    adapter.delete(keys)
    assert listener.deleted == []
    adapter.submit_unlock(keys)
    adapter.delete(keys)
    assert listener.deleted == [keys[1]]
    adapter.submit_unlock(keys[:1])
    adapter.submit_unlock(keys)  # once too often: harmless
    adapter.delete(keys)
    assert listener.deleted == [keys[1], keys[0]]
    assert adapter.get_usage().total_bytes_used == 0
    assert lookup(adapter, keys) == []


def test_pages_are_in_flat_namespaces(adapter: Any, either_daemon: DaemonProcess) -> None:
    store(adapter, [key(1)], [memory_obj(1)])
    with Client(either_daemon.endpoint) as client:
        ours = [n for n in client.namespaces() if n.name.startswith("lmcache.")]
    assert ours
    assert all(n.spec.flat and n.spec.hash_bytes == 32 for n in ours)


def test_short_hashes_are_refused_unless_it_is_said_otherwise(adapter: Any, either_daemon: DaemonProcess) -> None:
    short = [key(1, width=4)]
    assert not store(adapter, short, [memory_obj(1)]).is_successful()
    assert lookup(adapter, short) == []
    assert load(adapter, short, [empty_obj()]) == []
    other = make_adapter(either_daemon.endpoint, revision="short-1", min_hash_bytes=4)
    try:
        assert store(other, short, [memory_obj(1)]).is_successful()
        assert lookup(other, short) == [0]
    finally:
        other.close()


@pytest.mark.parametrize("size", [1, 7, 4099, 65_536, 3 << 20], ids=str)
def test_objects_of_any_size(adapter: Any, size: int) -> None:
    one = {"shape": (size,), "dtype": torch.uint8}
    assert store(adapter, [key(1)], [memory_obj(3, **one)]).is_successful()
    target = empty_obj(**one)
    assert load(adapter, [key(1)], [target]) == [0]
    assert same(target, memory_obj(3, **one))


def test_two_threads(adapter: Any) -> None:
    """As LMCache's store and prefetch controllers do."""
    keys = [key(n) for n in range(60)]

    def stores() -> None:
        for n in range(0, 60, 6):
            assert store(adapter, keys[n : n + 6], [memory_obj(m) for m in range(n, n + 6)]).is_successful()

    def loads() -> None:
        for _ in range(20):
            hit = lookup(adapter, keys)
            targets = [empty_obj() for _ in hit]
            mine = [keys[n] for n in hit]
            assert load(adapter, mine, targets) == list(range(len(hit)))
            assert all(same(target, memory_obj(n)) for target, n in zip(targets, hit, strict=True))
            adapter.submit_unlock(mine)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(stores), threads.submit(loads)]:
            done.result()
    assert lookup(adapter, keys) == list(range(60))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"revision": ""}, "revision"),
        ({"revision": "main"}, "main"),
        ({"endpint": "x:1"}, "endpint"),
        ({"lease_s": -1}, "lease_s"),
        ({"durable": "yes"}, "durable"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_adapter("127.0.0.1:1", **params)
