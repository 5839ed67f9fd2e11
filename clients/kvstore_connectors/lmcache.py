"""kvstore as an L2 adapter of LMCache's multiprocess mode (0.5.6): `{"type": "plugin", "module_path": "kvstore_connectors.lmcache", ...}`.

Look-ups lock by lease; loads go straight into the caller's buffers, verified; stores are taken from where they lie. When the store is down,
slow or full, look-ups find nothing, loads and stores fail, and LMCache goes on: see docs/lmcache.md.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from kvstore_connectors.engines import needs

with needs("LMCache 0.5.6", "pip install lmcache==0.5.6", "docs/lmcache.md"):
    from lmcache.lmcache_native import Bitmap
    from lmcache.logging import init_logger
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier

from kvstore_client import NotFound
from kvstore_client.match import Match
from kvstore_client.namespace import Namespace
from kvstore_connectors.hashed_deletes import delete_pages
from kvstore_connectors.hashed_link import StoreLink
from kvstore_connectors.hashed_pages import labels, scattered
from kvstore_connectors.hashed_puts import Outcome, batches, put_pages
from kvstore_connectors.lmcache_settings import KVStoreL2AdapterConfig
from kvstore_connectors.lmcache_spaces import Layout, Space, label_of, layout_asked, space_of

log = init_logger(__name__)  # LMCache's own: what goes to others is not seen unless it is a warning

_STORES_AT_ONCE = 4
"""Puts, each of up to 16 MiB or of one object."""


@dataclass(slots=True)
class _Leased:
    """A match whose lease ends when nobody holds one of its pages any more."""

    match: Match
    holders: int = 0


@dataclass(slots=True)
class _Task:
    """What was found or done for one submitted task, of so many keys."""

    keys: Sequence[Any]
    done: set[int] = field(default_factory=set)

    def bitmap(self) -> Bitmap:
        """As LMCache takes it."""
        bitmap = Bitmap(len(self.keys))
        for index in self.done:
            bitmap.set(index)
        return bitmap


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """See the module. Safe to use from several threads."""

    config_class_name = "KVStoreL2AdapterConfig"

    def __init__(self, config: KVStoreL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._config = config
        self._link = StoreLink(config.link, "lmcache", log)
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        self._lock = threading.Lock()
        self._tasks = 0
        self._stores: dict[int, L2StoreResult] = {}
        self._lookups: dict[int, Bitmap] = {}
        self._loads: dict[int, Bitmap] = {}
        # From here on only touched on the link's loop.
        self._held: dict[Any, list[tuple[_Leased, int]]] = defaultdict(list)
        self._spaces: dict[tuple[str, int], dict[Space, None]] = defaultdict(dict)
        self._asked: set[tuple[str, int]] = set()
        self._at_once = asyncio.Semaphore(_STORES_AT_ONCE)
        self._in_order = asyncio.Lock()
        log.info(
            "kvstore L2 adapter: %s, revision %s. Bytes move between the store and LMCache's host memory; with pinned memory that a GPU"
            " copies from and to, this adapter has not been tested.",
            config.link.endpoint, config.revision,
        )  # fmt: skip
        self._link.greet()

    # --- LMCache's interface --------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Readable when stores are done."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when look-ups are done."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """Readable when loads are done."""
        return int(self._load_event.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects under keys; those that are there stay as they are."""
        number = self._number()
        self._link.submit(self._store(number, list(keys), list(objects)))
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """What was stored since this was last asked."""
        with self._lock:
            done, self._stores = self._stores, {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """See which keys are there, and lease them."""
        number = self._number()
        self._link.submit(self._lookup(number, list(keys), dict(group_layout_descs)))
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """What a look-up found, once; None while it runs."""
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """End what a look-up began. A lease that can't be ended now ends by itself."""
        self._link.submit(self._unlock(list(keys)))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load keys into the buffers of objects."""
        number = self._number()
        self._link.submit(self._load(number, list(keys), list(objects)))
        return number

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """What a load brought, once; None while it runs."""
        with self._lock:
            return self._loads.pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Delete keys on every tier, but for what is leased."""
        sizes = self._link.wait(self._delete(list(keys)), {})
        if sizes:
            self._notify_keys_deleted(list(sizes), list(sizes.values()))

    def report_status(self) -> dict[str, Any]:
        """Whether the store answers."""
        return {"is_healthy": not self._link.away, "type": type(self).__name__, "endpoint": self._config.link.endpoint}

    def close(self) -> None:
        """End what is under way and give everything up; the store ends the leases."""
        self._link.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    def _number(self) -> int:
        with self._lock:
            self._tasks += 1
            return self._tasks

    # --- on the loop ----------------------------------------------------------------------------------------------------

    async def _open(self, space: Space) -> Namespace:
        namespace = await self._link.namespace(space.name, space.fingerprint, space.spec)
        self._spaces[space.model, space.group][space] = None
        return namespace

    def _space(self, key: Any, layout: Layout) -> Space:
        return space_of(key.model_name, self._config.revision, key.object_group_id, layout, self._config.chunk_tokens)

    def _refused(self, key: Any) -> bool:
        """Whether a hash is so short that another prompt may well have the same."""
        if len(key.chunk_hash) >= self._config.min_hash_bytes:
            return False
        self._link.say(
            "hash", f"chunk hashes of {len(key.chunk_hash)} bytes are not stored, as they collide: set LMCache's hash_algorithm to blake3"
        )
        return True

    async def _store(self, number: int, keys: list[Any], objects: list[Any]) -> None:
        stored: dict[int, int] = {}
        whole = False
        try:
            spaces: dict[Space, list[int]] = defaultdict(list)
            for index, (key, obj) in enumerate(zip(keys, objects, strict=True)):
                if not self._refused(key):
                    spaces[self._space(key, Layout.of_object(obj))].append(index)
            puts = [
                self._store_some(space, keys, objects, indices[run])
                for space, indices in spaces.items()
                for run in batches(len(indices), space.layout.nbytes)
            ]
            there = dict(chain.from_iterable(await asyncio.gather(*puts)))
            whole = len(there) == len(keys)
            stored = {index: nbytes for index, nbytes in sorted(there.items()) if nbytes}
            if stored:
                self._notify_keys_stored([keys[index] for index in stored], list(stored.values()))
        except Exception:  # whatever it was: who waits is told, and LMCache goes on
            log.exception("a store failed")
        finally:
            with self._lock:
                self._stores[number] = L2StoreResult(whole, sum(stored.values()) if whole else 0)
            self._store_event.notify()

    async def _store_some(self, space: Space, keys: list[Any], objects: list[Any], indices: list[int]) -> list[tuple[int, int]]:
        """Store objects of one layout. Those that are there then, each with its bytes if it is new, else 0."""
        nbytes = space.layout.nbytes
        data = scattered([[objects[index].data_ptr] for index in indices], nbytes)

        async def put() -> Outcome:
            namespace = await self._open(space)
            return await put_pages(namespace, [label_of(keys[index]) for index in indices], data, durable=self._config.link.durable)

        async with self._at_once:
            done = await self._link.attempt(put, None, self._config.link.transfer_timeout_s)
        if done is None:
            return []
        if done.error is not None:
            self._link.refused(done.error)
        return [(index, nbytes if new else 0) for index, new in zip(indices, done.new, strict=True) if new is not None]

    async def _lookup(self, number: int, keys: list[Any], descs: dict[int, Any]) -> None:
        task = _Task(keys)
        try:
            groups: dict[tuple[str, int], list[int]] = defaultdict(list)
            for index, key in enumerate(keys):
                if not self._refused(key):
                    groups[key.model_name, key.object_group_id].append(index)
            for (model, group), indices in groups.items():
                await self._lookup_group(task, indices, layout_asked(descs, group), model, group)
        except Exception:  # whatever it was: who waits is told that nothing is there
            log.exception("a look-up failed")
        finally:
            with self._lock:
                self._lookups[number] = task.bitmap()
            self._lookup_event.notify()

    async def _lookup_group(self, task: _Task, indices: list[int], layout: Layout | None, model: str, group: int) -> None:
        """Look in the namespace of the layout that is asked for; then in those where bytes of a serde, or of no layout, can be."""
        options = self._config.link
        if (model, group) not in self._asked:
            await self._link.attempt(partial(self._find_raw, model, group), None, options.lookup_timeout_s)
        known = self._spaces[model, group]
        asked = None if layout is None else space_of(model, self._config.revision, group, layout, self._config.chunk_tokens)
        others = [space for space in known if space != asked and (asked is None or space.layout.raw)]
        for space in ([asked] if asked is not None else []) + others:
            left = [index for index in indices if index not in task.done]
            if not left:
                return
            look = partial(self._match, space, [task.keys[index] for index in left], options.lease_s)
            found = await self._link.attempt(look, None, options.lookup_timeout_s)
            if found is None:
                continue
            leased = _Leased(found)
            for page in found.there():
                self._held[task.keys[left[page]]].append((leased, page))
                leased.holders += 1
                task.done.add(left[page])

    async def _match(self, space: Space, keys: Iterable[Any], lease_s: float) -> Match:
        namespace = await self._open(space)
        return await namespace.match(labels(map(label_of, keys)), lease_s=lease_s, holes=True)

    async def _find_raw(self, model: str, group: int) -> None:
        """Namespaces from before this process whose objects are bytes in a row: only those can be told without an object."""
        for namespace in await self._link.client.namespaces():
            space = space_of(model, self._config.revision, group, Layout.raw_bytes(namespace.spec.page_bytes), self._config.chunk_tokens)
            if namespace.name.startswith("lmcache.") and namespace.info.fingerprint == space.fingerprint:
                self._spaces[model, group][space] = None
        self._asked.add((model, group))

    async def _load(self, number: int, keys: list[Any], objects: list[Any]) -> None:
        task = _Task(keys)
        try:
            layouts: dict[Space, list[int]] = defaultdict(list)
            for index, (key, obj) in enumerate(zip(keys, objects, strict=True)):
                if not self._refused(key):
                    layouts[self._space(key, Layout.of_object(obj))].append(index)
            for space, indices in layouts.items():
                await self._load_space(task, space, indices, objects)
            if task.done:
                self._notify_keys_accessed([keys[index] for index in sorted(task.done)])
        except Exception:  # whatever it was: who waits is told what came
            log.exception("a load failed")
        finally:
            with self._lock:
                self._loads[number] = task.bitmap()
            self._load_event.notify()

    async def _load_space(self, task: _Task, space: Space, indices: list[int], objects: list[Any]) -> None:
        """Load objects of one layout: first out of what their look-up leased, then what was not, or is not any more."""
        timeout = self._config.link.transfer_timeout_s
        leased: dict[int, tuple[_Leased, list[tuple[int, int]]]] = {}
        for index in indices:
            for held, page in self._held.get(task.keys[index], ()):
                if held.match.valid and held.match.namespace.name == space.name:
                    leased.setdefault(id(held), (held, []))[1].append((page, index))
                    break
        for held, pages in leased.values():
            await self._link.attempt(partial(self._fetch, task, held.match, pages, objects), None, timeout)
        left = [index for index in indices if index not in task.done]

        async def fetch_left() -> None:
            match = await self._match(space, [task.keys[index] for index in left], timeout)
            try:
                await self._fetch(task, match, [(page, left[page]) for page in match.there()], objects)
            finally:
                self._link.release(match)

        if left:
            await self._link.attempt(fetch_left, None, timeout)

    async def _fetch(self, task: _Task, match: Match, pages: list[tuple[int, int]], objects: list[Any]) -> None:
        """Fetch (page of the match, index of the object), pages in a row at a time."""
        first = 0
        pages = sorted(pages)
        for at in range(1, len(pages) + 1):
            if at == len(pages) or pages[at][0] != pages[at - 1][0] + 1:
                await self._fetch_run(task, match, pages[first:at], objects)
                first = at

    async def _fetch_run(self, task: _Task, match: Match, run: list[tuple[int, int]], objects: list[Any]) -> None:
        namespace = match.namespace
        buffers = scattered([[objects[index].data_ptr] for _, index in run], namespace.spec.page_bytes)
        try:
            await namespace.fetch(match, buffers, pages=(run[0][0], run[-1][0] + 1))
        except NotFound:  # one of them does not verify, or has gone; the others may be good
            for one in run if len(run) > 1 else ():
                await self._fetch_run(task, match, [one], objects)
        else:
            task.done.update(index for _, index in run)

    async def _unlock(self, keys: list[Any]) -> None:
        async with self._in_order:
            for key in keys:
                held = self._held.get(key)
                if not held:
                    continue
                leased, _ = held.pop(0)
                if not held:
                    del self._held[key]
                leased.holders -= 1
                if not leased.holders:
                    await self._link.attempt(leased.match.release, None, self._config.link.lookup_timeout_s)

    async def _delete(self, keys: list[Any]) -> dict[Any, int]:
        sizes: dict[Any, int] = {}
        async with self._in_order:  # what was unlocked before can be deleted
            await self._delete_all(keys, sizes)
        return sizes

    async def _delete_all(self, keys: list[Any], sizes: dict[Any, int]) -> None:
        spaces: dict[Space, list[Any]] = defaultdict(list)
        for key in keys:
            for space in self._spaces[key.model_name, key.object_group_id]:
                spaces[space].append(key)
        for space, its in spaces.items():
            nothing: set[bytes] = set()
            gone = await self._link.attempt(partial(self._delete_some, its, space), nothing, self._config.link.transfer_timeout_s)
            sizes.update((key, space.layout.nbytes) for key in its if label_of(key) in gone)

    async def _delete_some(self, keys: list[Any], space: Space) -> set[bytes]:
        return await delete_pages(await self._open(space), [label_of(key) for key in keys])
