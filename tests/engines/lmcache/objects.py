"""LMCache's keys and memory objects, made for tests, and waiting for its tasks. Only its public interface."""

import json
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

WAIT_S = 30.0
SHAPE = (2, 2, 16, 32)


def plugin(endpoint: str, **params: Any) -> dict[str, Any]:
    """The JSON that a user gives to `--l2-adapter`."""
    params = {"revision": "test-1", "endpoint": endpoint, **params}
    names = {"type": "plugin", "module_path": "kvstore_connectors.lmcache", "class_name": "KVStoreL2Adapter"}
    return {**names, "adapter_params": params}


def make_adapter(endpoint: str, **params: Any) -> Any:
    """Our adapter, by LMCache's own factory."""
    given = json.loads(json.dumps(plugin(endpoint, **params)))
    return create_l2_adapter(get_l2_adapter_config_class("plugin").from_dict(given))


def key(number: int, *, model: str = "org/model", rank: int = 0, group: int = 0, salt: str = "", width: int = 32) -> Any:
    """A key, by the number of its chunk."""
    return ObjectKey(number.to_bytes(width, "big"), model, rank, group, salt)


def memory_obj(fill: float, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A memory object of its own, filled with a pattern that depends on `fill` and on the place."""
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).remainder(97).add(fill).to(dtype)
    meta = MemoryObjMetadata(
        shape=torch.Size(shape), dtype=dtype, address=tensor.data_ptr(), phy_size=tensor.nbytes, fmt=MemoryFormat.KV_2LTD, ref_count=1,
        shapes=[torch.Size(shape)], dtypes=[dtype],
    )  # fmt: skip
    return TensorMemoryObj(tensor.view(torch.uint8), meta, parent_allocator=None)


def empty_obj(shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A memory object to load into."""
    obj = memory_obj(0, shape, dtype)
    obj.raw_data.fill_(0xEE)
    return obj


def desc(shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The layout of such objects, as look-ups carry it."""
    return MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[dtype])


def wait_for(event_fd: int, poll_result: Callable[[], Any]) -> Any:
    """What a task brought, once its descriptor said so."""
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    while (found := poll_result()) is None:
        assert poller.poll(WAIT_S * 1000), "nothing was told in time"
        consume_fd(event_fd)
    return found


def store(adapter: Any, keys: list[Any], objects: list[Any]) -> L2StoreResult:
    """Store, and wait."""
    task = adapter.submit_store_task(keys, objects)
    done: dict[int, L2StoreResult] = {}

    def take() -> L2StoreResult | None:
        done.update(adapter.pop_completed_store_tasks())
        return done.get(task)

    return wait_for(adapter.get_store_event_fd(), take)


def found(bitmap: Bitmap) -> list[int]:
    """The indices that are set."""
    return list(bitmap.get_indices_list())


def lookup(adapter: Any, keys: list[Any], descs: Mapping[int, Any] | None = None) -> list[int]:
    """Look up and lock, and wait: the indices that are there."""
    task = adapter.submit_lookup_and_lock_task(keys, {0: desc()} if descs is None else descs)
    return found(wait_for(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task)))


def load(adapter: Any, keys: list[Any], objects: list[Any]) -> list[int]:
    """Load, and wait: the indices that came."""
    task = adapter.submit_load_task(keys, objects)
    return found(wait_for(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)))


def same(one: Any, other: Any) -> bool:
    """Whether two objects hold the same bytes."""
    return bool(torch.equal(one.raw_data, other.raw_data))
