"""One pool: what our backend does beside what HiCacheFile does, over SGLang's own host pools."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kvstore_client import Client
from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.sglang.pools import LAYOUTS, PAGE, chain, fill, indices, mha_pool, mla_pool, ours, page_bytes, reference, wipe

KINDS: dict[str, Callable[[str], Any]] = {"mha": mha_pool, "mla": mla_pool}
COUNT = 9
PUT, GET = [3, 0, 7, 5, 1, 10, 11, 2, 6], [12, 2, 9, 4, 0, 1, 7, 13, 5]
"""Pages of the host pool that are put from and fetched into, in no order."""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes (random ones may be no numbers)."""
    return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


def after(prefix: list[str] | None) -> Any:
    """What comes with a call where keys are passed, or are not."""
    return HiCacheStorageExtraInfo(prefix_keys=prefix)


def put_both(backend: Any, files: Any, pool: Any, keys: list[str], pages: list[int], prefix: list[str] | None) -> None:
    """Put the same pages in both."""
    assert backend.batch_set_v1(keys, indices(pool, pages), after(prefix)) == [True] * len(keys)
    assert files.batch_set(keys, [pool.get_data_page(page * PAGE) for page in pages])


def get_ours(backend: Any, pool: Any, keys: list[str], pages: list[int], prefix: list[str] | None) -> list[bool]:
    return list(backend.batch_get_v1(keys, indices(pool, pages), after(prefix)))


def get_reference(files: Any, pool: Any, keys: list[str], pages: list[int]) -> list[bool]:
    """As SGLang's controller does it for backends without zero copy."""
    found = files.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    for page, data in zip(pages, found, strict=True):
        if data is not None:
            pool.set_from_flat_data_page(page * PAGE, data)
    return [data is not None for data in found]


@pytest.mark.parametrize("passed", [True, False], ids=["chain", "flat"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_as_from_the_reference(either_daemon: DaemonProcess, tmp_path: Path, kind: str, layout: str, passed: bool) -> None:
    source, target, other = (KINDS[kind](layout) for _ in range(3))
    fill(source, 1)
    keys = chain(f"{kind} {layout} {passed}", COUNT)
    backend = ours(either_daemon.endpoint, f"{kind}-{layout}-{passed}", source, is_mla_model=kind == "mla")
    files = reference(str(tmp_path), source, is_mla_model=kind == "mla")
    assert not source.pin_memory
    try:
        root: list[str] | None = [] if passed else None
        assert backend.batch_exists(keys, after(root)) == files.batch_exists(keys) == 0
        put_both(backend, files, source, keys[:4], PUT[:4], root)
        put_both(backend, files, source, keys[4:7], PUT[4:7], keys[:4] if passed else None)
        for first in range(COUNT):
            prefix = keys[:first] if passed else None
            assert backend.batch_exists(keys[first:], after(prefix)) == files.batch_exists(keys[first:]) == max(7 - first, 0)
        backend.register_mem_pool_host(target)
        wipe(target)
        wipe(other)
        first = 2
        prefix = keys[:first] if passed else None
        mine = get_ours(backend, target, keys[first:], GET[first:], prefix)
        assert mine == get_reference(files, other, keys[first:], GET[first:]) == [True] * 5 + [False] * 2
        for at in range(first, 7):
            assert page_bytes(target, GET[at]) == page_bytes(source, PUT[at])
        assert all(page_bytes(target, page) == page_bytes(other, page) for page in range(target.page_num))  # and nothing else was touched
    finally:
        backend.close()


@pytest.mark.parametrize("kind", KINDS)
def test_one_piece_without_zero_copy(either_daemon: DaemonProcess, tmp_path: Path, kind: str) -> None:
    pool = KINDS[kind]("layer_first")
    fill(pool, 2)
    keys = chain(f"one piece {kind}", 5)
    backend = ours(either_daemon.endpoint, f"pieces-{kind}", pool, extra={"interface_v1": 0})
    files = reference(str(tmp_path), pool)
    try:
        for one in (backend, files):
            assert one.batch_exists(keys) == 0
            assert not one.exists(keys[0])
            assert one.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys]) == [None] * 5
            assert one.batch_set(keys[:2], [pool.get_data_page(page * PAGE) for page in range(2)])
            assert one.set(keys[3], pool.get_data_page(3 * PAGE))
            assert one.batch_exists(keys) == 2
            assert one.exists(keys[3])
        rooms = [[pool.get_dummy_flat_data_page() for _ in keys] for _ in range(2)]
        got, expected = backend.batch_get(keys, rooms[0]), files.batch_get(keys, rooms[1])
        assert [data is None for data in got] == [data is None for data in expected] == [False, False, True, False, True]
        assert all(same(*pair) for pair in zip(got, expected, strict=True) if pair[0] is not None)
        single = backend.get(keys[0], pool.get_dummy_flat_data_page())
        assert same(single, pool.get_data_page(0))
        backend.batch_set(keys[:1], [pool.get_data_page(PAGE)])
        assert same(backend.get(keys[0], pool.get_dummy_flat_data_page()), pool.get_data_page(0))  # the first stays, as in a file
        assert backend.clear()
        assert files.clear()
        assert backend.batch_exists(keys) == files.batch_exists(keys) == 0
        assert backend.set(keys[0], pool.get_data_page(0))
    finally:
        backend.close()


def test_pages_of_a_chain_without_their_parent_are_not_put(either_daemon: DaemonProcess) -> None:
    pool = mha_pool("page_first")
    keys = chain("orphans", 4)
    backend = ours(either_daemon.endpoint, "orphans-1", pool)
    try:
        assert backend.batch_set_v1(keys[2:], indices(pool, [2, 3]), after(keys[:2])) == [False, False]
        assert backend.batch_exists(keys[2:], after(keys[:2])) == 0
    finally:
        backend.close()


def test_keys_that_are_not_passed_at_the_root_are_found_where_they_were_passed_before(either_daemon: DaemonProcess) -> None:
    """SGLang passes None in place of no keys in some calls: a new process finds its pages all the same."""
    pool = mha_pool("page_first")
    keys = chain("root", 3)
    one = ours(either_daemon.endpoint, "root-1", pool)
    assert all(one.batch_set_v1(keys, indices(pool, [0, 1, 2]), after([])))
    assert one.batch_exists(keys, after(None)) == 3
    one.close()
    other = ours(either_daemon.endpoint, "root-1", pool)
    try:
        assert other.batch_exists(keys, None) == 3
        assert all(get_ours(other, pool, keys, [4, 5, 6], None))
    finally:
        other.close()


def test_namespaces_are_trees_where_keys_are_passed_and_flat_where_not(daemon: DaemonProcess) -> None:
    pool = mha_pool("layer_first")
    backend = ours(daemon.endpoint, "kinds-1", pool)
    keys = chain("kinds", 2)
    backend.batch_set_v1(keys, indices(pool, [0, 1]), after([]))
    backend.batch_set_v1(keys, indices(pool, [0, 1]), after(None))
    backend.close()
    with Client(daemon.endpoint) as client:
        spaces = {n.name.split(".")[-2]: n.spec for n in client.namespaces() if n.name.startswith("sglang.")}
    assert {name: spec.flat for name, spec in spaces.items()} == {"chain": False, "flat": True}
    for spec in spaces.values():
        assert (spec.hash_bytes, spec.components[0].layers, spec.group_layers) == (32, 6, 1)  # a row a layer, keys and values


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "other"},
        {"dtype": torch.float16},
        {"layout": "page_first_direct"},
        {"model_name": "org/other"},
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ],
    ids=str,
)
def test_what_is_different_shares_nothing(daemon: DaemonProcess, change: dict[str, Any]) -> None:
    pool = mha_pool("page_first")
    keys = chain("shares", 3)
    backend = ours(daemon.endpoint, "shares-1", pool)
    assert all(backend.batch_set_v1(keys, indices(pool, [0, 1, 2]), after([])))
    change = dict(change)
    revision = change.pop("revision", "shares-1")
    other_pool = mha_pool(change.pop("layout", "page_first"), dtype=change.pop("dtype", torch.bfloat16))
    other = ours(daemon.endpoint, revision, other_pool, **change)
    same = ours(daemon.endpoint, "shares-1", mha_pool("page_first"))
    try:
        assert other.batch_exists(keys, after([])) == 0
        assert get_ours(other, other_pool, keys, [0, 1, 2], []) == [False] * 3
        assert same.batch_exists(keys, after([])) == 3
    finally:
        for one in (backend, other, same):
            one.close()


def test_latent_pages_are_the_same_on_all_tensor_parallel_ranks(daemon: DaemonProcess) -> None:
    pool = mla_pool("page_first")
    keys = chain("ranks", 2)
    first, second = (ours(daemon.endpoint, "ranks-1", pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2))
    try:
        assert all(first.batch_set_v1(keys, indices(pool, [0, 1]), after([])))
        assert second.batch_exists(keys, after([])) == 2
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("extra", "words"),
    [({"revision": "main"}, "main"), ({"revision": ""}, "revision"), ({"endpint": "x"}, "endpint"), ({"lease_s": 0}, "lease_s")],
    ids=str,
)
def test_settings_that_make_no_sense(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        ours("127.0.0.1:9", "settings-1", None, extra=extra)


def test_indices_that_do_not_fit_are_refused(daemon: DaemonProcess) -> None:
    pool = mha_pool("page_first")
    backend = ours(daemon.endpoint, "fit-1", pool)
    keys = chain("fit", 2)
    try:
        assert backend.batch_set_v1(keys, indices(pool, [0]), after([])) == [False, False]
        assert backend.batch_get_v1(keys, indices(pool, [0, 1, 2]), after([])) == [False, False]
        assert backend.batch_set_v1([], indices(pool, []), after([])) == []
        assert backend.batch_exists([], after([])) == 0
    finally:
        backend.close()
