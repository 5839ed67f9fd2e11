"""The stages of a turn on a worker node: a fill that computes layer group by layer group, and a decode."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import numpy as np

from kvstore.api.wire import DeadlineExceeded, KVStoreError, NotFound
from kvstore.tiers.hbm import PageSet
from kvstore_client import Follower, Match, PutStream
from kvstore_workers.factory.controls import Kind
from kvstore_workers.factory.messages import Decode, Fill, Filled, Prompt, Retired, Started, Word
from kvstore_workers.factory.model import GROUP_LAYERS, GROUPS, Bytes, output_tokens
from kvstore_workers.factory.node import Node, Pages, in_thread, missing, now

Say = Callable[[Word], Awaitable[None]]
_LEASE_S = 60.0
_FOLLOW_S = 2.0
_WHOLE_S = 10.0


class Filling:
    """One fill. The prefix streams in while the engine still computes the turn before; the new pages stream out."""

    def __init__(self, node: Node, order: Fill, say: Say) -> None:
        self._node = node
        self._order = order
        self._say = say
        self._begun = now()
        self._match: Match | None = None
        self._match_s = self._fetch_s = self._wait_s = 0.0
        self._hit = 0

    async def run(self) -> None:
        """Fill the turn, and in an aggregated worker decode it too. Raises what went wrong."""
        node, prompt = self._node, self._order.prompt
        async with AsyncExitStack() as stack:
            pages = await node.pages(prompt)
            await self._look_up(pages, stack)
            cached = min(self._hit * node.shards.spec.page_tokens, prompt.input_tokens - 1)
            cost = node.cost.fill_s(prompt.input_tokens - cached, cached)
            busy_until, moment = node.engine_free_at, now()
            node.engine_free_at = max(busy_until, moment) + cost
            page_set = self._bring(pages, busy_until if busy_until > moment else None)
            if page_set is not None:
                stack.push_async_callback(page_set.release)
            await node.engine.acquire()
            try:
                self._wait_s = now() - moment
                if page_set is not None and page_set.error is not None:  # it waited beyond its grace time, or its bytes were lost
                    page_set = self._bring(pages, None)
                    assert page_set is not None
                    stack.push_async_callback(page_set.release)
                if page_set is not None:
                    started = now()
                    await page_set.placed()
                    self._fetch_s += now() - started
                    views = await stack.enter_async_context(page_set.use())
                else:
                    views = []
                flow = await stack.enter_async_context(_Flow(self, pages, page_set, views))
                await self._say(Started(prompt.turn, self._order.attempt, self._hit, now() + cost))
                for group in range(GROUPS):
                    await self._wait_for(page_set, group)
                    await node.compute(cost / GROUPS)
                    flow.send(group)
                token_at = now()
            finally:
                node.engine.release()
            await flow.finish()
            await self._say(self._filled(token_at, cost, cached))
            if node.kind is Kind.AGGREGATED:
                await self._release_match()
                done_at = await node.decode(prompt.turn, prompt.input_tokens, prompt.output_tokens)
                await self._say(Retired(prompt.turn, 0, "", done_at, 0.0, prompt.output_tokens, False))
        if node.kind is Kind.AGGREGATED:
            await put_suffix(node, prompt, pages)

    def _filled(self, token_at: float, cost: float, cached: int) -> Filled:
        return Filled(
            self._order.prompt.turn, self._order.attempt, self._node.kind.value, "", self._begun, token_at, self._match_s, self._fetch_s,
            self._wait_s, cost, cached, self._order.stream,
        )  # fmt: skip

    async def _look_up(self, pages: Pages, stack: AsyncExitStack) -> None:
        if not (self._order.reuse and pages.seeds):
            return
        started = now()
        self._match = await self._node.namespace.match(pages.tokens, lease_s=_LEASE_S)
        stack.push_async_callback(self._release_match)
        self._match_s = now() - started
        self._hit = self._match.pages

    async def _release_match(self) -> None:
        if self._match is not None:
            await self._match.release()

    def _bring(self, pages: Pages, needed_at: float | None) -> PageSet | None:
        if not pages.seeds:
            return None
        return self._node.bring(self._match, self._hit, len(pages.seeds) - self._hit, needed_at)

    async def _wait_for(self, page_set: PageSet | None, group: int) -> None:
        """The layers of a group, or all of them before the first one in a fill that is not streamed."""
        if page_set is None or not self._hit:
            return
        started = now()
        await page_set.arrived(group if self._order.stream else None)
        self._fetch_s += now() - started

    @property
    def node(self) -> Node:
        """Where it runs."""
        return self._node

    @property
    def order(self) -> Fill:
        """What is to be done."""
        return self._order

    @property
    def hit(self) -> int:
        """The pages that need no computing."""
        return self._hit


class _Flow:
    """The bytes of a fill beside its computing: new pages go out as their layers are computed, and what came in is checked."""

    def __init__(self, filling: Filling, pages: Pages, page_set: PageSet | None, views: list[memoryview]) -> None:
        self._filling = filling
        self._pages = pages
        self._page_set = page_set
        self._views = views
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Task[None] | None = None
        self._puts: list[PutStream] = []
        self._rooms: list[Bytes] = []

    async def __aenter__(self) -> "_Flow":
        node, hit, seeds = self._filling.node, self._filling.hit, self._pages.seeds
        cut = hit * node.shards.page_bytes
        self._rooms = [np.frombuffer(view, np.uint8)[cut:] for view in self._views]
        if hit < len(seeds):
            self._ready = asyncio.create_task(self._make_ready(hit))
            self._tasks.append(self._ready)
        if hit:
            self._tasks.append(asyncio.create_task(self._check()))
        return self

    async def _make_ready(self, hit: int) -> None:
        """Open the puts, a part an accelerator, while the first layers are computed; and have the bytes of the new pages."""
        node = self._filling.node
        producing = asyncio.create_task(in_thread(node.shards.produce, self._pages.seeds[hit:], self._rooms))
        try:
            for part in node.shards.parts:
                put = node.outgoing.stream_put(
                    self._pages.tokens, first_page=hit, part=part, put_id=self._filling.order.put_id, whole_s=_WHOLE_S
                )
                self._puts.append(await self._stack.enter_async_context(put))
        finally:
            await producing  # it writes into HBM: the memory must not go before

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def _check(self) -> None:
        assert self._page_set is not None
        await self._page_set.arrived()
        await self._filling.node.verify(self._pages.seeds[: self._filling.hit], self._views)

    def send(self, group: int) -> None:
        """The layers of a group are computed: send them."""
        if self._ready is not None:
            self._tasks.append(asyncio.create_task(self._send(group, self._ready)))

    async def _send(self, group: int, ready: "asyncio.Task[None]") -> None:
        await asyncio.shield(ready)
        node, low = self._filling.node, group * GROUP_LAYERS
        for put, room in zip(self._puts, self._rooms, strict=True):
            data = room.reshape(GROUPS, -1)[group]
            await put.send(low, low + GROUP_LAYERS, memoryview(data), timeout=node.settings.deadline_s)
            node.meter.moved[f"put_{node.path}"] += len(data)

    async def finish(self) -> None:
        """All is sent, committed and checked. Raises what went wrong."""
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(put.commit() for put in self._puts))


async def decode(node: Node, order: Decode, say: Say) -> None:
    """Bring a turn's pages into HBM, from the store or along with the put that makes them, and decode it. Raises what went wrong."""
    begun, prompt = now(), order.prompt
    pages = await node.pages(prompt)
    async with AsyncExitStack() as stack:
        follower = await _follow(node, order, len(pages.seeds), stack)
        page_set = await _bring(node, order, pages, follower, stack)
        waited = now() - begun
        if page_set is None:
            done_at = await node.decode(prompt.turn, prompt.input_tokens, prompt.output_tokens)
        else:
            await page_set.placed()
            async with page_set.use() as views:
                await node.first_pass(page_set, prompt.input_tokens)
                waited = now() - begun
                checking = asyncio.create_task(node.verify(pages.seeds, views))
                try:
                    done_at = await node.decode(prompt.turn, prompt.input_tokens, prompt.output_tokens - 1)
                finally:
                    await checking
    await say(Retired(prompt.turn, order.attempt, "", done_at, waited, prompt.output_tokens, follower is not None))
    await put_suffix(node, prompt, pages)


async def _follow(node: Node, order: Decode, pages: int, stack: AsyncExitStack) -> Follower | None:
    """The put under way; None if there is none to be followed (it may be committed already)."""
    if not order.put_id or pages <= order.first_page:
        return None
    try:
        follower = await stack.enter_async_context(node.namespace.follow(order.put_id, timeout=_FOLLOW_S))
    except (NotFound, DeadlineExceeded):
        return None
    return follower if follower.pages[1] == pages else None


async def _bring(node: Node, order: Decode, pages: Pages, follower: Follower | None, stack: AsyncExitStack) -> PageSet | None:
    if not pages.seeds:
        return None
    hit = follower.pages[0] if follower is not None else len(pages.seeds)
    match = await node.namespace.match(pages.tokens, lease_s=_LEASE_S)
    stack.push_async_callback(match.release)
    if match.pages < hit:
        raise missing(order.prompt.turn, match.pages, hit)
    if follower is not None:
        page_set = node.bring_followed(match, hit, follower, len(pages.seeds) - hit, order.due_at)
    else:
        page_set = node.bring(match, hit, 0, None)
    stack.push_async_callback(page_set.release)
    return page_set


async def put_suffix(node: Node, prompt: Prompt, pages: Pages) -> None:
    """What was decoded goes back to the store: the whole pages that the rest of the prompt and the output make."""
    spec = node.shards.spec
    whole = (prompt.input_tokens + prompt.output_tokens) // spec.page_tokens
    if whole <= len(pages.seeds):
        return

    def make() -> tuple[Pages, Bytes]:
        output = output_tokens(prompt.turn, (whole - len(pages.seeds)) * spec.page_tokens)
        tokens = np.concatenate([pages.tokens, output])
        seeds = node.shards.seeds(tokens)
        data = np.empty((whole - len(pages.seeds), spec.page_bytes), np.uint8)
        node.shards.whole_pages(seeds[len(pages.seeds) :], data)
        return Pages(tokens, seeds), data

    grown, data = await asyncio.to_thread(make)
    try:
        await node.outgoing.put(grown.tokens, data, first_page=len(pages.seeds), timeout=node.settings.deadline_s)
        node.meter.moved[f"put_{node.path}"] += data.nbytes
    except KVStoreError:
        node.meter.moved["suffixes_lost"] += 1  # its prefix has left the store meanwhile: then so does the suffix
