"""Computing pages again: asking for it, and the worker that does it around any function."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import (
    DIGEST_BYTES,
    DTYPE_BYTES,
    BadRequest,
    Busy,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    DiskFailing,
    Drift,
    FrameType,
    KVSpec,
    KVStoreError,
    NotFound,
    PartRange,
    measure,
)
from kvstore.api.wire.messages import Empty
from kvstore.api.wire.rebuild_messages import RebuildClaim, RebuildEnd, RebuildJob, RebuildRenew
from kvstore_client.arguments import BOUND, FLAG, FUNCTION, TEXT, TIMEOUT, checked, instance, readable
from kvstore_client.client import AsyncClient
from kvstore_client.namespace import Namespace
from kvstore_client.times import milliseconds
from kvstore_client.tokens import Extras

_log = logging.getLogger("kvstore.rebuild")

_EXTRA_BYTES = 2 * DIGEST_BYTES
_LOOK_S = 0.05
_PAUSE_S = 1.0
_GRACE_S = 10.0
"""How long the daemon may take to answer beyond what it was asked to wait."""

Bytes = npt.NDArray[np.uint8]
Prefix = Mapping[int, Bytes]
"""By component, the pages before those to be produced on which it is needed, one row of bytes a page, the last ones if not all."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rebuild function is to produce: the pages [first_page, last_page) of a prefix of these tokens, in a namespace.

    `bodies` have what was given (`text` or `reference`) in place of a page's tokens, which are zeros then. With `check` the pages
    are there, and what is produced is compared with them.
    """

    namespace: Namespace
    first_page: int
    last_page: int
    extras: Extras
    bodies: Mapping[int, tuple[str, bytes]]
    check: bool
    attempt: int

    @property
    def spec(self) -> KVSpec:
        """What the pages are made of."""
        return self.namespace.spec

    @property
    def pages(self) -> int:
        """How many pages."""
        return self.last_page - self.first_page

    def pages_of(self, component: int) -> tuple[int, int]:
        """The pages [first, last) of which a component is to be produced: all, or those that the last boundary needs."""
        needed = self.spec.boundary_pages(component)
        return (max(self.first_page, self.last_page - needed) if needed else self.first_page), self.last_page

    def shape(self, component: int) -> tuple[int, int]:
        """Pages, and bytes of a page, of what is to be produced of a component; each page in axis order."""
        first, last = self.pages_of(component)
        return last - first, self.spec.part_bytes(self.spec.whole(component))


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild function may return in place of arrays alone: with the `tokens` of the whole prefix, where it had to find them."""

    arrays: Any
    tokens: npt.NDArray[np.uint32] | None = None


RebuildFunction = Callable[[npt.NDArray[np.uint32], Prefix, Wanted], Any]
"""Given the tokens up to `last_page`, the prefix and what is wanted: an array (of component 0) or arrays by component, or a Rebuilt;
or ELSEWHERE if it had somebody else put the pages. Async or plain; a plain one runs in a thread."""


class Elsewhere(Enum):
    """See ELSEWHERE."""

    ELSEWHERE = "elsewhere"


ELSEWHERE = Elsewhere.ELSEWHERE
"""What a rebuild function returns that had somebody else put the pages (an engine's connector): the worker waits until they are there."""


class AsyncRebuildWorker:
    """Claims what is to be computed again, has a function compute it, and puts the result.

        worker = AsyncRebuildWorker(client, "chat")

        @worker.rebuild
        def compute(tokens, prefix, wanted): ...

        await worker.run()

    Give it a client of its own: while it waits for work, a request is under way. `namespace` is a name or an id, all of the tenant's if
    empty. A claim lasts `lease_s` seconds and is renewed while the function runs. Without `fetch_prefix` the function gets no prefix.
    """

    @checked(client=instance(AsyncClient, "an AsyncClient", optional=False), namespace=TEXT, fetch_prefix=FLAG, put_timeout=TIMEOUT)
    def __init__(
        self, client: AsyncClient, namespace: str = "", *, lease_s: float = 30.0, wait_s: float = 20.0, fetch_prefix: bool = True,
        put_timeout: float = 120.0,
    ) -> None:  # fmt: skip
        milliseconds("lease_s", lease_s)
        milliseconds("wait_s", wait_s)
        self.done = 0
        """Jobs done."""
        self.failed = 0
        """Jobs given up."""
        self._client = client
        self._namespace = namespace
        self._lease_s = lease_s
        self._wait_s = wait_s
        self._fetch_prefix = fetch_prefix
        self._put_timeout = put_timeout
        self._function: RebuildFunction | None = None
        self._known: dict[str, Namespace] = {}

    @checked(function=FUNCTION)
    def rebuild(self, function: RebuildFunction) -> RebuildFunction:
        """Have this function compute the pages. A decorator."""
        self._function = function
        return function

    async def run(self) -> None:
        """Work until cancelled. A daemon that can't be reached, or has no time, is asked again."""
        while True:
            try:
                await self.run_once()
            except (Busy, Cancelled, ConnectionLost, DeadlineExceeded, DiskFailing) as error:
                _log.warning("no work just now: %s", error.message)
                await asyncio.sleep(_PAUSE_S)

    @checked(wait_s=replace(BOUND, optional=True))
    async def run_once(self, wait_s: float | None = None) -> bool:
        """Wait for a job and do it. False if there was none. What goes wrong with a job is told to the daemon, and logged."""
        if self._function is None:
            raise BadRequest("this worker has no function: give it one with @worker.rebuild")
        wait_s = self._wait_s if wait_s is None else wait_s
        claim = RebuildClaim(namespace=self._namespace, wait_ms=milliseconds("wait_s", wait_s), lease_ms=int(self._lease_s * 1000))
        job, payload = await self._client.call(FrameType.REBUILD_CLAIM, claim, RebuildJob, timeout=wait_s + _GRACE_S)
        if not job.job:
            return False
        error, drift = "", list[tuple[str, Drift]]()
        try:
            async with self._renewing(job):
                drift = await self._do(self._function, job, payload)
        except _Over:
            self.done += 1  # the pages have come meanwhile, or it is another's by now
            return True
        except asyncio.CancelledError:
            await asyncio.shield(self._hand_back(job))
            raise
        except Exception as raised:  # noqa: BLE001 - whatever it is, the job is for another worker then
            error = raised.message if isinstance(raised, KVStoreError) else f"{type(raised).__name__}: {raised}"
            _log.warning("pages [%d, %d) can't be computed again: %s", job.first_page, job.last_page, error)
        self.failed += bool(error)
        self.done += not error
        figures = [(dtype, d.elements, d.differing, d.not_finite, d.max_abs, d.sum_abs) for dtype, d in drift]
        with contextlib.suppress(NotFound):
            await self._client.call(FrameType.REBUILD_END, RebuildEnd(job=job.job, error=error[:500], drift=figures), Empty)
        return True

    async def _hand_back(self, job: RebuildJob) -> None:
        """The worker is stopped in the middle: the job need not wait for its lease to end."""
        with contextlib.suppress(KVStoreError):
            await self._client.call(FrameType.REBUILD_END, RebuildEnd(job=job.job, error="the worker was stopped"), Empty, timeout=1)

    @contextlib.asynccontextmanager
    async def _renewing(self, job: RebuildJob) -> AsyncIterator[None]:
        """Keep the claim while the block runs; if it is over, so is the block, with _Over."""
        task = asyncio.current_task()
        assert task is not None
        over = False

        async def renew() -> None:
            nonlocal over
            message = RebuildRenew(job=job.job, lease_ms=int(self._lease_s * 1000))
            while True:
                await asyncio.sleep(self._lease_s / 3)
                try:
                    await self._client.call(FrameType.REBUILD_RENEW, message, Empty)
                except NotFound:
                    over = True
                    task.cancel()
                    return
                except KVStoreError as error:
                    _log.warning("a claim can't be renewed just now: %s", error.message)

        renewing = asyncio.create_task(renew())
        try:
            yield
        except asyncio.CancelledError:
            if not over:
                raise
            task.uncancel()
            raise _Over from None
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _do(self, function: RebuildFunction, job: RebuildJob, payload: bytes) -> list[tuple[str, Drift]]:
        namespace = await self._namespace_of(job)
        tokens, wanted = _unpacked(namespace, job, payload)
        prefix = await self._prefix(tokens, wanted)
        result = await _called(function, tokens, prefix, wanted)
        if result is None:
            raise BadRequest("the rebuild function returned nothing: return the pages, or ELSEWHERE if somebody else puts them")
        if result is ELSEWHERE:
            if wanted.check:
                raise BadRequest("pages that an engine puts by itself can't be compared: it is not what computes them here")
            await self._until_there(tokens, wanted)
            return []
        if isinstance(result, Rebuilt):
            tokens, result = tokens if result.tokens is None else result.tokens, result.arrays
        arrays = _checked(result, wanted)
        if wanted.check:
            return await self._compared(tokens, wanted, arrays)
        await self._put(job, tokens, wanted, arrays)
        return []

    async def _namespace_of(self, job: RebuildJob) -> Namespace:
        if job.namespace not in self._known:
            self._known[job.namespace] = await self._client.namespace(job.namespace)
        return self._known[job.namespace]

    async def _prefix(self, tokens: npt.NDArray[np.uint32], wanted: Wanted) -> dict[int, Bytes]:
        if not self._fetch_prefix or not wanted.first_page:
            return {}
        return await self._fetched(tokens, wanted, wanted.first_page, 0)

    async def _fetched(self, tokens: npt.NDArray[np.uint32], wanted: Wanted, pages: int, first: int) -> dict[int, Bytes]:
        """What the boundary after `pages` needs of each component, from page `first` on."""
        namespace, spec = wanted.namespace, wanted.spec
        found: dict[int, Bytes] = {}
        extras = {page: extra for page, extra in wanted.extras.items() if page < pages}
        async with await namespace.match(tokens[: pages * spec.page_tokens], extras=extras, lease_s=self._put_timeout) as match:
            if match.pages < pages:
                raise NotFound(f"the store has {match.pages} pages of the prefix, not {pages}")
            for component in range(len(spec.components)):
                low, high = match.pages_of(component)
                low = max(low, first)
                found[component] = np.empty((high - low, spec.part_bytes(spec.whole(component))), np.uint8)
                await namespace.fetch(match, found[component], pages=(low, high), wanted=spec.whole(component), timeout=self._put_timeout)
        return found

    async def _put(self, job: RebuildJob, tokens: npt.NDArray[np.uint32], wanted: Wanted, arrays: Mapping[int, Bytes]) -> None:
        spec = wanted.spec
        for run in job.runs:
            first, last = run.first_page, run.first_page + run.pages
            parts = tuple(PartRange(*part) for part in run.parts)
            data = np.concatenate([_cut(spec, part, arrays[part.component], first - wanted.pages_of(part.component)[0], run.pages)
                                   for part in parts], axis=1)  # fmt: skip
            extras = {page: extra for page, extra in wanted.extras.items() if page < last}
            await wanted.namespace.put(
                tokens[: last * spec.page_tokens], data, first_page=first, parts=parts, put_id=job.put_id, extras=extras,
                timeout=self._put_timeout,
            )  # fmt: skip

    async def _compared(self, tokens: npt.NDArray[np.uint32], wanted: Wanted, arrays: Mapping[int, Bytes]) -> list[tuple[str, Drift]]:
        there = await self._fetched(tokens, wanted, wanted.last_page, wanted.first_page)
        by_dtype: dict[str, Drift] = {}
        for component, array in arrays.items():
            dtype = wanted.spec.components[component].dtype
            drift = await asyncio.to_thread(measure, dtype, there[component], array)
            by_dtype.setdefault(dtype, Drift()).add(drift)
        return list(by_dtype.items())

    async def _until_there(self, tokens: npt.NDArray[np.uint32], wanted: Wanted) -> None:
        """Wait until somebody else has put the pages."""
        asked = tokens[: wanted.last_page * wanted.spec.page_tokens]
        async with self._client.deadline(self._put_timeout):
            while (await wanted.namespace.match(asked, extras=wanted.extras, lease_s=0, parts=False)).pages < wanted.last_page:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)


class _Over(Exception):
    """The job is done, or another's."""


async def _called(function: RebuildFunction, tokens: npt.NDArray[np.uint32], prefix: Prefix, wanted: Wanted) -> Any:
    target = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(target):
        result: Any = await function(tokens, prefix, wanted)
        return result
    result = await asyncio.to_thread(function, tokens, prefix, wanted)
    return await result if isinstance(result, Awaitable) else result


def _unpacked(namespace: Namespace, job: RebuildJob, payload: bytes) -> tuple[npt.NDArray[np.uint32], Wanted]:
    width = job.last_page * namespace.spec.page_tokens * 4
    tokens, at = np.frombuffer(payload, "<u4", width // 4).astype(np.uint32), width
    extras, bodies = {}, {}
    for page in job.extra_pages:
        extras[page] = payload[at : at + _EXTRA_BYTES]
        at += _EXTRA_BYTES
    for page, kind, nbytes in job.bodies:
        bodies[page] = (kind, payload[at : at + nbytes])
        at += nbytes
    return tokens, Wanted(namespace, job.first_page, job.last_page, extras, bodies, job.check, job.attempt)


def _checked(result: Any, wanted: Wanted) -> dict[int, Bytes]:
    """What a function returned, as bytes by component. Raises BadRequest for a wrong shape or type."""
    arrays = result if isinstance(result, Mapping) else {0: result}
    found: dict[int, Bytes] = {}
    for component, kind in enumerate(wanted.spec.components):
        pages, size = wanted.shape(component)
        if component not in arrays:
            raise BadRequest(f"the rebuild function returned nothing for component {component}")
        array = arrays[component]
        if isinstance(array, np.ndarray) and array.itemsize not in (1, DTYPE_BYTES[kind.dtype]):
            raise BadRequest(f"component {component} is of {kind.dtype}, the rebuild function returned {array.dtype}")
        given = np.ascontiguousarray(array).tobytes() if isinstance(array, np.ndarray) else array
        raw = np.frombuffer(readable(given, f"what the rebuild function returned for component {component}"), np.uint8)
        if raw.nbytes != pages * size or (isinstance(array, np.ndarray) and array.ndim > 1 and array.shape[0] != pages):
            shape = array.shape if isinstance(array, np.ndarray) else (raw.nbytes,)
            raise BadRequest(
                f"the rebuild function returned {raw.nbytes} bytes of shape {shape} for component {component}; "
                f"wanted are {pages} pages of {size} bytes"
            )
        found[component] = raw.reshape(pages, size)
    return found


def _cut(spec: KVSpec, part: PartRange, array: Bytes, first: int, pages: int) -> Bytes:
    """A part of some pages out of whole ones: axis order is layer, plane, head, token, dim."""
    kind = spec.components[part.component]
    whole = array[first : first + pages].reshape(pages, kind.layers, kind.planes, kind.kv_heads, -1)
    return whole[:, part.layer_lo : part.layer_hi, :, part.head_lo : part.head_hi].reshape(pages, -1)
