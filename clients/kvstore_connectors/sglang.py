"""kvstore as SGLang's HiCache storage (0.5.23), through its `dynamic` backend: module `kvstore_connectors.sglang`, class `HiCacheKVStore`.

With `interface_v1` pages go from and to the rows of the host pool without a copy in between. Where SGLang passes the keys before a
page (`hicache_storage_pass_prefix_keys`), pages are a tree of their keys, put many at a time; where it does not, each stands alone.
Pools beside the KV pool (windows, states, indexers) each have a namespace. All calls block, and may come from several threads.
See docs/sglang.md.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstore_connectors.engines import needs

with needs("SGLang 0.5.23", "pip install sglang==0.5.23", "docs/sglang.md"):
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvstore_client import BadRequest, NotFound, Scattered
from kvstore_client.match import Match
from kvstore_client.namespace import Namespace
from kvstore_connectors.hashed_link import LinkOptions, StoreLink
from kvstore_connectors.hashed_pages import labels, scattered
from kvstore_connectors.hashed_puts import batches, put_pages
from kvstore_connectors.sglang_pools import HostPool, PageForm, PageSpace, Shard, key_label, tensor_kind, tensor_rows
from kvstore_connectors.sglang_restore import restorable

log = logging.getLogger(__name__)
T = TypeVar("T")

Pages = set[int]
"""Some pages of a call, by their places in its list."""

_ENGINES_OWN = ("backend_name", "module_path", "class_name", "interface_v1")
_PUTS_AT_ONCE = 4
"""Each of up to 16 MiB, or of one page."""


class HiCacheKVStore(HiCacheStorage):  # type: ignore[misc]
    """See the module."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        given = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in _ENGINES_OWN}
        self._revision = str(given.pop("revision", ""))
        self._model = storage_config.model_name or ""
        options = LinkOptions.take(given)
        if given:
            raise BadRequest(
                f"unknown settings of the kvstore backend: {', '.join(sorted(given))} (docs/sglang.md has those that there are)"
            )
        PageForm(1, 1, packed=False).space(self._model, self._revision, 1, {}, chain=False)  # a revision that moves is refused here
        self._config = storage_config
        self._v1 = bool((storage_config.extra_config or {}).get("interface_v1", 0))
        self.registered_pools: dict[Any, Any] = {}
        self._pools: dict[str, HostPool] = {}
        self._spaces: dict[str, dict[bool, PageSpace]] = {}
        self._sizes: dict[tuple[str, int], PageSpace] = {}
        self._chained: bool | None = None
        self._lock = threading.Lock()
        self._at_once = asyncio.Semaphore(_PUTS_AT_ONCE)
        self._link = StoreLink(options, "sglang", log)
        log.info(
            "kvstore HiCache backend: %s, model %s at revision %s. Bytes move between the store and SGLang's host pools; with pools that"
            " are pinned for a GPU, this backend has not been tested.",
            options.endpoint, self._model, self._revision,
        )  # fmt: skip
        self._link.greet()

    # --- pools ----------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(str(PoolName.KV), mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool by name; the KV pool comes so, too."""
        self.registered_pools[host_pool_name] = host_pool
        if str(host_pool_name) not in self._pools or str(host_pool_name) != str(PoolName.KV):
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        """Work out the namespaces of a pool. One whose pages the store can't describe is left out, and said."""
        try:
            pool = HostPool(name, host_pool)
            settings = self._settings(name, pool)
            spaces = {chain: pool.form.space(self._model, self._revision, pool.page_size, settings, chain=chain) for chain in (True, False)}
        except BadRequest as error:
            self._link.say(f"pool {name}", f"kvstore does not keep the pages of the pool {name}: {error}")
            return
        self._pools[name], self._spaces[name] = pool, spaces

    @property
    def _anchor(self) -> HostPool | None:
        return self._pools.get(str(PoolName.KV))

    def _settings(self, name: str, pool: HostPool | None) -> dict[str, object]:
        """What the bytes of a pool's pages depend on."""
        replicated = bool(self._config.is_mla_model) and name != str(PoolName.MAMBA)
        shard = Shard.of(self._config, replicated=replicated)
        where = {"tp": shard.tp, "pp": shard.pp, "cp": shard.cp, "dcp": shard.dcp}
        return {**(pool.settings if pool is not None else {"pool": name}), "shard": where}

    def _space(self, pool: HostPool, *, chain: bool) -> PageSpace:
        return self._spaces[pool.name][chain]

    # --- zero copy ------------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many keys in a row, from the first on, are there: one match."""
        if not keys:
            return 0
        if not self._v1 or self._anchor is None:
            return self._packed_exists(keys)
        pool, prefix = self._anchor, _prefix(extra_info)
        if prefix is not None:
            self._chained = True
        pages = 0
        if self._chained is not False:
            pages = self._count(self._space(pool, chain=True), keys, prefix or [])
        if self._chained is not True and not pages:
            pages = self._count(self._space(pool, chain=False), keys, [])
        return pages

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fetch pages into the host pool; those from the first that is not there on are False."""
        return self._get(self._anchor, keys, host_indices, _prefix(extra_info))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Put pages from where they lie in the host pool."""
        return self._set(self._anchor, keys, host_indices, _prefix(extra_info))

    # --- several pools --------------------------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> PoolTransferResult:
        """How far the KV pages go, and which lengths of prefix can be restored with what the other pools have."""
        pages = self.batch_exists(keys, extra_info)
        prefix = _prefix(extra_info) or []
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        lengths = set(range(1, pages + 1))
        for transfer in pool_transfers or ():
            pool = self._pools.get(str(transfer.name))
            if not lengths or transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # a pool that is not reported carries no verdict
            trailing = 0 if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else max(1, len(transfer.keys or ()))
            before = prefix[len(prefix) - min(len(prefix), max(trailing - 1, 0)) :]
            there = self._there(pool, [*before, *keys[:pages]]) if pool is not None else []
            own = restorable([page in there for page in range(len(before) + pages)], len(before), trailing, at_root=not prefix)
            if own:
                hits[transfer.name] = max(own)
            lengths &= own
        return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Fetch pages into several pools."""
        return {transfer.name: self._get(*self._of(transfer, extra_info)) for transfer in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Put pages of several pools."""
        return {transfer.name: self._set(*self._of(transfer, extra_info)) for transfer in transfers}

    def _of(self, transfer: Any, extra_info: Any) -> tuple[HostPool | None, list[str], Any, list[str] | None]:
        """Pool, keys, indices and, for the KV pool, the keys before: its pages are a tree, those of the others each stand alone."""
        name = str(transfer.name)
        prefix = _prefix(extra_info) if name == str(PoolName.KV) else None
        return self._pools.get(name), list(transfer.keys or ()), transfer.host_indices, prefix

    # --- one page in one piece (interface_v1 off) -----------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fetch a page into a tensor."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        """Fetch pages into tensors; None for what is not there."""
        found: list[torch.Tensor | None] = [None] * len(keys)
        alike: dict[tuple[str, int], list[int]] = {}
        for index, target in enumerate(target_locations or ()):
            if isinstance(target, torch.Tensor) and target.is_contiguous() and target.nbytes:
                alike.setdefault(tensor_kind(target), []).append(index)
        for kind, indices in alike.items():
            targets = [target_locations[index] for index in indices]
            fetch = partial(self._fetch, self._packed_space(kind), [keys[index] for index in indices], [], targets)
            got: Pages = self._wait_transfer(fetch, set())
            for number in got:
                found[indices[number]] = targets[number]
        return found

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Put a page that is a tensor."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Put pages that are tensors. True if all are there then."""
        whole = [value.contiguous() for value in values or () if isinstance(value, torch.Tensor) and value.nbytes]
        if len(whole) != len(keys):
            return False
        alike: dict[tuple[str, int], list[int]] = {}
        for index, value in enumerate(whole):
            alike.setdefault(tensor_kind(value), []).append(index)
        for kind, indices in alike.items():
            data = scattered(tensor_rows([whole[index] for index in indices]), kind[1])
            put = partial(self._put, self._packed_space(kind), [keys[index] for index in indices], [], data)
            done: Pages = self._wait_transfer(put, set())
            if len(done) < len(indices):
                return False
        return True

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def _packed_space(self, kind: tuple[str, int]) -> PageSpace:
        """Of pages that are tensors of a dtype and a size."""
        pool = self._anchor
        with self._lock:
            if kind not in self._sizes:
                settings = {**self._settings(str(PoolName.KV), pool), "tensor": kind}
                form, tokens = PageForm(1, kind[1], packed=True), pool.page_size if pool is not None else 1
                self._sizes[kind] = form.space(self._model, self._revision, tokens, settings, chain=False)
            return self._sizes[kind]

    def _packed_exists(self, keys: list[str]) -> int:
        if self._anchor is not None:
            self._packed_space(self._anchor.packed_kind)
        with self._lock:
            spaces = list(self._sizes.values())
        return max((self._count(space, keys, []) for space in spaces), default=0)

    # --- the rest of the interface --------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget all pages of the namespaces that this backend has used."""

        async def drop() -> bool:
            for namespace in await self._link.opened():
                await namespace.drop()
            return True

        done = self._link.wait(self._link.attempt(drop, False, self._link.options.transfer_timeout_s), False)
        self._link.forget()
        return done

    def close(self) -> None:
        """End everything."""
        self._link.close()

    # --- transfers ------------------------------------------------------------------------------------------------------

    def _wait_transfer(self, work: Callable[[], Awaitable[T]], otherwise: T) -> T:
        return self._link.wait(self._link.attempt(work, otherwise, self._link.options.transfer_timeout_s), otherwise)

    def _wait_lookup(self, work: Callable[[], Awaitable[T]], otherwise: T) -> T:
        return self._link.wait(self._link.attempt(work, otherwise, self._link.options.lookup_timeout_s), otherwise)

    async def _open(self, space: PageSpace) -> Namespace:
        return await self._link.namespace(space.name, space.fingerprint, space.spec)

    def _count(self, space: PageSpace, keys: Sequence[str], prefix: Sequence[str]) -> int:
        """How many keys after a prefix are there."""

        async def count() -> int:
            namespace = await self._open(space)
            match = await namespace.match(labels(map(key_label, [*prefix, *keys])), lease_s=0, parts=False)
            return max(match.pages - len(prefix), 0)

        return self._wait_lookup(count, 0)

    def _there(self, pool: HostPool, keys: Sequence[str]) -> list[int]:
        """Which of some keys, each of which stands alone, are there."""

        async def look() -> list[int]:
            namespace = await self._open(self._space(pool, chain=False))
            return (await namespace.match(labels(map(key_label, keys)), lease_s=0, holes=True)).there()

        return self._wait_lookup(look, []) if keys else []

    def _fits(self, pool: HostPool | None, keys: Sequence[str], host_indices: Any) -> bool:
        """Whether indices are those of as many pages as there are keys; it is said if not."""
        if pool is not None and host_indices is not None and host_indices.numel() == len(keys) * pool.page_size:
            return True
        self._link.say("indices", "kvstore: host indices do not fit the keys, or the pool is not registered; these pages are left out")
        return False

    def _get(self, pool: HostPool | None, keys: Sequence[str], host_indices: Any, prefix: Sequence[str] | None) -> list[bool]:
        if pool is None or not keys or not self._fits(pool, keys, host_indices):
            return [False] * len(keys)
        got: Pages = set()
        for chain in self._where(pool, prefix):
            room = pool.room(len(keys)) if pool.form.packed else None
            target = room if room is not None else pool.addresses(host_indices, 0, len(keys))
            got = self._wait_transfer(partial(self._fetch, self._space(pool, chain=chain), keys, prefix or [], target), set())
            if room is not None:
                for page in got:
                    pool.unpack(host_indices, page, [room[page]])
            if got:
                break
        return [page in got for page in range(len(keys))]

    def _where(self, pool: HostPool, prefix: Sequence[str] | None) -> list[bool]:
        """In which namespaces to look: the tree (True), the flat one (False), or, as long as nobody knows, both."""
        if pool is not self._anchor:
            return [False]
        if prefix is not None:
            self._chained = True
        return [True, False] if self._chained is None else [self._chained]

    async def _fetch(self, space: PageSpace, keys: Sequence[str], prefix: Sequence[str], target: Any) -> Pages:
        """Fetch pages; which came. `target` is tensors, or the addresses of rows by page."""
        namespace = await self._open(space)
        wanted = labels(map(key_label, [*prefix, *keys]))
        match = await namespace.match(wanted, lease_s=self._link.options.lease_s, holes=namespace.spec.flat)
        got: Pages = set()
        try:
            pages = [page - len(prefix) for page in match.there() if page >= len(prefix)]
            rows = target if not isinstance(target[0], torch.Tensor) else tensor_rows(target)
            row_bytes = space.spec.page_bytes // len(rows[0])
            first = 0
            for at in range(1, len(pages) + 1):
                if at == len(pages) or pages[at] != pages[at - 1] + 1:
                    run = pages[first:at]
                    got |= await self._fetch_run(namespace, match, run, len(prefix), [rows[page] for page in run], row_bytes)
                    first = at
        finally:
            self._link.release(match)
        return got

    async def _fetch_run(
        self, namespace: Namespace, match: Match, run: list[int], shift: int, rows: list[list[int]], row_bytes: int
    ) -> Pages:
        try:
            pages = (run[0] + shift, run[-1] + shift + 1)
            await namespace.fetch(match, scattered(rows, row_bytes), pages=pages)
        except NotFound:  # one of them does not verify, or has gone; the others may be good
            if len(run) == 1:
                return set()
            ones = [await self._fetch_run(namespace, match, [page], shift, [its], row_bytes) for page, its in zip(run, rows, strict=True)]
            return set().union(*ones)
        return set(run)

    def _set(self, pool: HostPool | None, keys: Sequence[str], host_indices: Any, prefix: Sequence[str] | None) -> list[bool]:
        if pool is None or not keys or not self._fits(pool, keys, host_indices):
            return [False] * len(keys)
        if pool is self._anchor and self._chained is None:
            self._chained = prefix is not None
        chain = pool is self._anchor and prefix is not None
        packed = pool.packed(host_indices, 0, len(keys)) if pool.form.packed else None
        rows = tensor_rows(packed) if packed is not None else pool.addresses(host_indices, 0, len(keys))
        data = scattered(rows, pool.form.row_bytes)
        done: Pages = self._wait_transfer(partial(self._put, self._space(pool, chain=chain), keys, prefix or [], data), set())
        return [page in done for page in range(len(keys))]

    async def _put(self, space: PageSpace, keys: Sequence[str], prefix: Sequence[str], data: Scattered) -> Pages:
        """Put pages; which are there then."""
        namespace, durable = await self._open(space), self._link.options.durable
        if not space.spec.flat:
            await namespace.put(labels(map(key_label, [*prefix, *keys])), data, first_page=len(prefix), durable=durable)
            return set(range(len(keys)))

        async def some(run: slice) -> Pages:
            async with self._at_once:
                done = await put_pages(namespace, [*map(key_label, keys[run])], data.pages(run.start, run.stop), durable=durable)
            if done.error is not None:
                self._link.refused(done.error)
            return {run.start + page for page, new in enumerate(done.new) if new is not None}

        runs = batches(len(keys), space.spec.page_bytes)
        outcomes = await asyncio.gather(*map(some, runs), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(failed) == len(outcomes):
            raise failed[0]
        return set().union(*(outcome for outcome in outcomes if not isinstance(outcome, BaseException)))


def _prefix(extra_info: Any) -> list[str] | None:
    """The keys before those of a call, if they are passed."""
    prefix = getattr(extra_info, "prefix_keys", None)
    return None if prefix is None else list(prefix)
