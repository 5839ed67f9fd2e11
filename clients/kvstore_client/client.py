"""The asynchronous client: namespaces, match, fetch and put over several connections."""

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import (
    DIGEST_BYTES,
    MAX_BULK_PAYLOAD,
    BadRequest,
    Busy,
    ConnectionLost,
    DeadlineExceeded,
    FrameType,
    KVSpec,
    NotFound,
    PartRange,
)
from kvstore.api.wire.messages import (
    Commit,
    Committed,
    CreateNamespace,
    Empty,
    Leased,
    LeaseRequest,
    Matched,
    MatchRequest,
    NamespaceInfo,
    NamespaceList,
    NamespaceName,
    PutHandle,
    PutReady,
    PutStart,
)
from kvstore_client.plan import FetchPlan, Item, Stripe, page_items
from kvstore_client.pool import Pool
from kvstore_client.put_layout import PutLayout

Tokens = npt.NDArray[np.uint32] | bytes | bytearray | memoryview
Extras = Mapping[int, bytes]
DEFAULT_ENDPOINT = "127.0.0.1:7421"

_DEPTH = 2
"""Stripes that a connection has in flight, so that it never waits for the next request to travel."""
_PUT_PAGES = 4096
_PUT_BYTES = 64 << 20
"""A put is sent in commits of about so many bytes, the front of the prefix first."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """Pages that are new in the store, that had a version already, and that still lack what other shards of the put id bring."""

    new_pages: int
    existing_pages: int
    pending_pages: int = 0


@dataclass(slots=True)
class Match:
    """A matched prefix: `pages` whole pages, `tokens` tokens. While its lease lasts, none of it is evicted.

    `dram_pages` of the pages are in the daemon's DRAM (-1 if parts were not asked for).
    """

    pages: int
    tokens: int
    dram_pages: int
    lease: int
    endpoint: str
    epoch: int
    namespace: "Namespace"
    _runs: list[tuple[int, int, tuple[PartRange, ...]]] = field(repr=False)
    _ids: bytes = field(repr=False)

    async def release(self) -> None:
        """End the lease. Harmless if it is over already."""
        if self.lease:
            lease, self.lease = self.lease, 0
            await self.namespace.client.release(lease)

    async def __aenter__(self) -> "Match":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.release()

    def items(self, first: int, last: int, wanted: PartRange) -> list[Item]:
        """What to fetch for the wanted part of the pages [first, last), laid out page after page."""
        spec = self.namespace.spec
        size, at = spec.part_bytes(wanted), 0
        found: list[Item] = []
        for run_first, pages, ranges in self._runs:
            for page in range(run_first, run_first + pages):
                if first <= page < last:
                    ids = [self._ids[at + i * DIGEST_BYTES : at + (i + 1) * DIGEST_BYTES] for i in range(len(ranges))]
                    found += page_items(spec, ranges, ids, wanted, (page - first) * size)
                at += DIGEST_BYTES * len(ranges)
        return found


class AsyncClient:
    """A client of one daemon. Use it as an async context manager, or call `close`.

    `connections` carry stripes in parallel. `timeout` (seconds) bounds every call that gives none; when it passes, the
    call raises DeadlineExceeded. Lost connections are restored with backoff within that time.
    """

    def __init__(
        self, endpoint: str = DEFAULT_ENDPOINT, *, connections: int = 2, timeout: float = 30.0, name: str = "", token: str = ""
    ) -> None:
        if not 1 <= connections <= 64:
            raise BadRequest(f"{connections} connections: give 1 to 64")
        self.timeout = timeout
        self._pool = Pool(endpoint, connections, client=name or f"pid {os.getpid()}", token=token)

    async def __aenter__(self) -> "AsyncClient":
        try:
            await self.ping()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; the daemon ends this client's leases and puts."""
        await self._pool.close()

    @property
    def pool(self) -> Pool:
        """The connections."""
        return self._pool

    @asynccontextmanager
    async def deadline(self, timeout: float | None) -> AsyncIterator[None]:
        """Bound a call; raises DeadlineExceeded."""
        seconds = self.timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise DeadlineExceeded(f"no answer from {self._pool.endpoint} within {seconds:g} s") from None

    async def call(
        self, frame_type: FrameType, message: Any, reply: type[Any], payload: bytes | memoryview = b"", timeout: float | None = None
    ) -> tuple[Any, bytes]:
        """One idempotent control request, repeated if the connection breaks."""

        async def attempt() -> tuple[Any, bytes]:
            connection = await self._pool.connection(self._pool.least_busy())
            return await connection.call(frame_type, message, reply, payload)

        async with self.deadline(timeout):
            return await self._pool.retry(attempt)

    async def ping(self, timeout: float | None = None) -> None:
        """Wait until the daemon answers."""
        await self.call(FrameType.PING, Empty(), Empty, timeout=timeout)

    async def namespace(
        self, name: str, fingerprint: str | None = None, spec: KVSpec | None = None, *, recipes: bool = False, retention_s: int = 86_400
    ) -> "Namespace":
        """Open a namespace by name or id; with a fingerprint and a KV spec, create it if it is not there.

        Raises UnknownNamespace, or Conflict if the name stands for another model or spec.
        """
        if fingerprint is None or spec is None:
            info, _ = await self.call(FrameType.NAMESPACE_GET, NamespaceName(namespace=name), NamespaceInfo)
        else:
            wanted = CreateNamespace(name=name, fingerprint=fingerprint, spec=spec.to_dict(), recipes=recipes, retention_s=retention_s)
            info, _ = await self.call(FrameType.NAMESPACE_CREATE, wanted, NamespaceInfo)
        return Namespace(self, info)

    async def namespaces(self) -> list["Namespace"]:
        """All namespaces of this tenant."""
        found, _ = await self.call(FrameType.NAMESPACE_LIST, Empty(), NamespaceList)
        return [Namespace(self, info) for info in found.items]

    async def release(self, lease: int) -> None:
        """End a lease. Harmless if it is over already."""
        try:
            await self.call(FrameType.LEASE_RELEASE, LeaseRequest(lease=lease), Empty)
        except NotFound:
            pass  # it expired, or went with its session: what was asked for has happened

    async def renew(self, lease: int, lease_s: float) -> None:
        """Let a lease last `lease_s` seconds from now. Raises NotFound if it is over."""
        await self.call(FrameType.LEASE_RENEW, LeaseRequest(lease=lease, lease_ms=int(lease_s * 1000)), Leased)


class Namespace:
    """A namespace as this client sees it."""

    def __init__(self, client: AsyncClient, info: NamespaceInfo) -> None:
        self.client = client
        self.info = info
        self.id = info.id
        self.name = info.name
        self.spec = KVSpec.from_dict(info.spec)

    async def drop(self) -> None:
        """Forget the namespace and everything in it."""
        await self.client.call(FrameType.NAMESPACE_DROP, NamespaceName(namespace=self.id), Empty)

    async def match(
        self, tokens: Tokens, *, lease_s: float = 30.0, parts: bool = True, extras: Extras | None = None, timeout: float | None = None
    ) -> Match:
        """The longest prefix of `tokens` (uint32) in the store, in whole pages.

        It is leased for `lease_s` seconds (0: not at all, then it is only a look). `parts` brings what `fetch` needs;
        without, the answer is smaller. `extras` gives 32-byte digests of extra keys by page.
        """
        extra_pages, payload = _with_extras(tokens, extras)
        message = MatchRequest(namespace=self.id, lease_ms=int(lease_s * 1000), parts=parts, extra_pages=extra_pages)
        found, ids = await self.client.call(FrameType.MATCH, message, Matched, payload, timeout)
        runs = [(r.first_page, r.pages, tuple(PartRange(*p) for p in r.parts)) for r in found.runs]
        return Match(found.pages, found.tokens, found.dram_pages, found.lease, found.endpoint, found.epoch, self, runs, ids)

    async def fetch(
        self, match: Match, out: Any, *, pages: tuple[int, int] | None = None, wanted: PartRange | None = None, timeout: float | None = None
    ) -> int:
        """Fetch matched pages [first, last) into `out`, page after page; all of them by default.

        `out` is any writable buffer of (last - first) * part_bytes(wanted) bytes. `wanted` is a range of layers and heads,
        by default all of component 0. Every piece is verified. Returns the bytes fetched.

        Raises NotFound (Corrupt) if something is no longer there (did not verify): treat it as a miss.
        """
        first, last = pages or (0, match.pages)
        wanted = wanted or self.spec.whole()
        self.spec.check_range(wanted)
        if not 0 <= first <= last <= match.pages:
            raise BadRequest(f"pages [{first}, {last}) of a match of {match.pages}")
        target = memoryview(out).cast("B")
        size = (last - first) * self.spec.part_bytes(wanted)
        if len(target) != size or target.readonly:
            raise BadRequest(
                f"the buffer has {len(target)} bytes{' and is read-only' if target.readonly else ''}; {size} writable ones are needed"
            )
        if not size:
            return 0
        plan = FetchPlan(match.items(first, last, wanted), self.client.pool.size)
        async with self.client.deadline(timeout):
            await _fetch_striped(self.client.pool, self.id, plan, target)
        plan.verify()
        return plan.nbytes

    async def put(
        self, tokens: Tokens, data: Any, *, first_page: int = 0, parts: tuple[PartRange, ...] | None = None,
        spans: tuple[tuple[int, int], ...] | None = None, durable: bool = False, whole_s: float = 0.0,
        extras: Extras | None = None, put_id: bytes | None = None, timeout: float | None = None,
    ) -> PutResult:  # fmt: skip
        """Put the pages of `tokens` (the whole prefix, whole pages) from `first_page` on.

        `data` holds them page after page, each as its `parts` in order (by default one part: all of component 0); `spans`
        are the pages [first, last) that carry each part, if not all do. With `durable`, returns once they would survive a
        power cut. Waits for room while the daemon is busy.

        Shards of one computation give the same `put_id` (16 bytes) and each its own parts; a page counts once all of them
        have put it. `whole_s`: how long to wait for the others. Raises MissingParent if the pages before are not in the
        store, and NoSpace.
        """
        parts = parts or (self.spec.whole(),)
        raw = _view(tokens)
        total = len(raw) // 4 // self.spec.page_tokens
        layout = PutLayout(self.spec, parts, first_page, total, spans)
        source = memoryview(data).cast("B")
        if len(source) != layout.nbytes:
            raise BadRequest(f"{len(source)} bytes of data for {total - first_page} pages of {layout.nbytes} in all")
        put_id = put_id or secrets.token_bytes(DIGEST_BYTES)
        new = existing = pending = 0
        async with self.client.deadline(timeout):
            for first, last in layout.commits(_PUT_PAGES, _PUT_BYTES):
                upto = raw if last == total else raw[: last * self.spec.page_tokens * 4]
                extra_pages, payload = _with_extras(upto, {page: e for page, e in (extras or {}).items() if page < last})
                ranges, its_spans = layout.between(first, last)
                if not ranges:
                    continue
                message = PutStart(
                    namespace=self.id, put_id=put_id, first_page=first, spans=its_spans,
                    parts=[(p.component, p.layer_lo, p.layer_hi, p.head_lo, p.head_hi) for p in ranges],
                    ack="durable" if durable else "memory", extra_pages=extra_pages,
                )  # fmt: skip
                done = await self._put_once(message, payload, source, layout, whole_s)
                new, existing, pending = new + done.new_pages, existing + done.existing_pages, pending + done.pending_pages
        return PutResult(new, existing, pending)

    async def _put_once(
        self, message: PutStart, payload: bytes | memoryview, data: memoryview, layout: PutLayout, whole_s: float
    ) -> Committed:
        """One commit. A put that is cut off is put again: whoever commits a page first wins, so that is harmless."""

        async def attempt() -> Committed:
            while True:
                try:
                    return await self._put_attempt(message, payload, data, layout, whole_s)
                except Busy as busy:
                    await asyncio.sleep((busy.retry_after_ms or 100) / 1000)

        return await self.client.pool.retry(attempt)

    async def _put_attempt(
        self, message: PutStart, payload: bytes | memoryview, data: memoryview, layout: PutLayout, whole_s: float
    ) -> Committed:
        pool = self.client.pool
        connection = await pool.connection(0)
        ready, _ = await connection.call(FrameType.PUT, message, PutReady, payload)
        try:
            await _send_striped(pool, ready, [PartRange(*p) for p in message.parts], layout, data)
            commit = Commit(handle=ready.handle, wait_ms=10_000, whole_ms=int(whole_s * 1000))
            committed, _ = await connection.call(FrameType.COMMIT, commit, Committed)
        except asyncio.CancelledError:
            await asyncio.shield(_abort(pool, ready.handle))
            raise
        return committed


async def _abort(pool: Pool, handle: int) -> None:
    try:
        async with asyncio.timeout(1):
            connection = await pool.connection(0)
            await connection.call(FrameType.ABORT, PutHandle(handle=handle), Empty)
    except (ConnectionLost, NotFound, TimeoutError):
        pass  # then the daemon ends it with the session, or by its own time limit


async def _fetch_striped(pool: Pool, namespace: str, plan: FetchPlan, target: memoryview) -> None:
    """Stripes are handed out as connections become free; what a broken connection had goes to the others."""
    stripes: deque[Stripe] = deque(plan.stripes)

    async def work(slot: int) -> None:
        while stripes:
            stripe = stripes.popleft()
            try:
                connection = await pool.connection(slot)
                await connection.fetch(namespace, stripe, target, plan.arrived)
            except ConnectionLost:
                stripes.appendleft(stripe)
                raise

    async def attempt() -> None:
        workers = min(pool.size * _DEPTH, len(stripes))
        if workers <= 1:
            await work(pool.least_busy())
            return
        await _together([work(n % pool.size) for n in range(workers)])

    await pool.retry(attempt)


async def _send_striped(pool: Pool, ready: PutReady, parts: list[PartRange], layout: PutLayout, data: memoryview) -> None:
    """Slices are handed out to connections as these become free, in frames of up to a MiB."""
    frames = layout.frames(ready.wanted, parts, MAX_BULK_PAYLOAD)
    pending = iter(frames)

    async def work(slot: int) -> None:
        connection = await pool.connection(slot)
        for frame in pending:
            slices = [data[at : at + size] for at, size in frame.slices]
            await connection.send_slices(ready.handle, frame.page, frame.part, frame.first_slice, slices)

    workers = min(pool.size, -(-sum(frame.nbytes for frame in frames) // MAX_BULK_PAYLOAD))
    if workers <= 1:
        await work(0)
    else:
        await _together([work(n) for n in range(workers)])


async def _together(jobs: "list[Any]") -> None:
    """Run jobs concurrently; the first failure cancels the rest and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except* Exception as failures:  # noqa: BLE001 - all of them, to raise the first
        first = _leaf(failures)
        raise first from None


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _view(tokens: Tokens) -> memoryview:
    return (tokens.data if isinstance(tokens, np.ndarray) else memoryview(tokens)).cast("B")


def _with_extras(tokens: Tokens, extras: Extras | None) -> tuple[list[int], bytes | memoryview]:
    if isinstance(tokens, np.ndarray) and (tokens.dtype != np.uint32 or tokens.ndim != 1):
        raise BadRequest(f"tokens are a {tokens.ndim}-d array of {tokens.dtype}; give a 1-d array of uint32")
    view = _view(tokens)
    if not extras:
        return [], view
    pages = sorted(extras)
    return pages, b"".join([view, *(extras[page] for page in pages)])
