"""All puts under way: how they begin, and how they are given up. What ends well is committed by `committing.py`."""

import asyncio
import secrets
from collections.abc import Callable
from operator import mul

import numpy as np
import numpy.typing as npt

from kvstore.digests import DIGEST_BYTES
from kvstore.errors import BadRequest, Busy, KVStoreError, NoSpace, UnknownNamespace
from kvstore.radix.components import Masks
from kvstore.radix.values import EMPTY_PATH, Path
from kvstore.store.dram.copies import Copies
from kvstore.store.dram.residency import Residency
from kvstore.store.puts.assembly import MAX_PENDING_PAGES, Assemblies
from kvstore.store.puts.committing import Commits
from kvstore.store.puts.open_puts import OpenPuts
from kvstore.store.puts.pages import check_apart, check_pages, check_parent, done_pages, masks_of, name_alone, name_pages, slots_of
from kvstore.store.puts.put import Put
from kvstore.store.puts.request import Ack, PutRequest, check_parts
from kvstore.store.quotas import Quotas
from kvstore.store.space import Space
from kvstore.store.ssd.writeback import Writeback
from kvstore.store.stats import Stats
from kvstore.store.uses import Uses
from kvstore.tiers.dram import Arena

MAX_OPEN_PUTS = 1024
"""Each holds the tokens of its pages, so their number is bounded."""


class Puts:
    """See the module's text. `idle_s`: seconds without a slice, or without another shard, after which a put is given up."""

    def __init__(
        self, arena: Arena, residency: Residency, writeback: Writeback, stats: Stats, uses: Uses, idle_s: float,
        footprint: Callable[[int], int], ssd_bytes: int, quotas: Quotas, copies: Copies,
    ) -> None:  # fmt: skip
        self.assemblies = Assemblies()
        self.open = OpenPuts(stats)
        self.commits = Commits(self.open, self.assemblies, writeback, stats, uses, copies, idle_s)
        self._arena = arena
        self._residency = residency
        self._writeback = writeback
        self._stats = stats
        self._idle_s = idle_s
        self._footprint = footprint
        self._ssd_bytes = ssd_bytes
        self._quotas = quotas
        self._many = asyncio.Event()

    # --- beginning -----------------------------------------------------------------------------------------------------

    async def begin(
        self, owner: int, space: Space, request: PutRequest, base: Path = EMPTY_PATH, handle: int = 0, name: int = 0
    ) -> Put:  # fmt: skip
        """Start a put: check it, find out which of its parts are missing, and take DRAM slots for them.

        An owner that gives it a `handle` sends at once, whatever is wanted; a `name` is only what it calls it. Raises MissingParent, Busy
        or NoSpace; then nothing is held.
        """
        if len(self.open) >= MAX_OPEN_PUTS:
            self._stats.puts_busy += 1
            raise Busy("too many puts are under way", retry_after_ms=100)
        if space.loading:
            self._stats.puts_busy += 1
            raise Busy(f"namespace {space.settings.name!r} is still being loaded: it can be read, and written to soon", retry_after_ms=500)
        if len(request.tokens) % space.tree.pages.token_bytes:
            raise BadRequest(f"a put covers whole pages of {space.spec.label_words} tokens, not {len(request.tokens) / 4:g} tokens")
        check_parts(space.spec, request, base.pages + len(request.tokens) // space.tree.pages.token_bytes)
        own_name = handle or name
        if self.open.has_name(owner, own_name) or not 0 <= own_name < 1 << 63:
            raise BadRequest("the handle of a put, and its name, is 63 random bits, and not that of another")
        put = Put(secrets.randbits(63), owner, space, request, self._arena, base.pages)
        put.own_name, put.at_once = own_name, handle > 0
        self._check(put)
        path = base if space.spec.flat else self._hold_prefix(put, base)
        self.open.add(put)
        try:
            if space.spec.flat:
                _hold_alone(put)
            else:
                await name_pages(put, path, space.tree.path_slots(path))
                check_parent(put, path, self.open.of_put_id(space, request.put_id), self.assemblies)
            wanted = self._wanted(put, masks_of(put))
            self._count_in_flight(put, self._check_size(put, wanted))
            put.want(wanted)
            sizes = put.parts.stored_sizes
            for page, part in put.wanted_cells():
                put.add_slot(page, part, await self._residency.allocate(space, sizes[part]))
            if space.dropped:
                raise UnknownNamespace(f"namespace {space.settings.name!r} was dropped")
        except BaseException as error:
            self._stats.count_refusal(error)
            if isinstance(error, KVStoreError):
                error = error.after(done_pages(put)) if isinstance(error, NoSpace) and put.keys and not space.spec.flat else error
                put.fail(error)  # what was sent behind it is told that, too
            self.open.abort(put)
            raise error
        put.ready = True
        put.begun.set()
        self.open.tell_opened()
        return put

    def _check(self, put: Put) -> None:
        request, space = put.request, put.space
        pages = put.total_pages - request.first_page
        if len(request.put_id) != DIGEST_BYTES:
            raise BadRequest(f"the put id is {len(request.put_id)} bytes, not {DIGEST_BYTES}")
        check_pages(put)
        if space.spec.flat:
            name_alone(put)
        check_apart(put, self.open.of_put_id(space, request.put_id), self.assemblies)
        alone = put.parts.components & space.tree.rules.required == space.tree.rules.required
        if not alone and self.assemblies.pages + pages > MAX_PENDING_PAGES:
            raise Busy("too many pages wait for other shards", retry_after_ms=1000)

    @staticmethod
    def _hold_prefix(put: Put, base: Path) -> Path:
        """Pin those pages of a put's prefix that are there, labels known from here on. Returns their path."""
        tree, request = put.space.tree, put.request
        path = tree.match(request.tokens, request.extras, base)
        path = tree.open_path(path, request.tokens, request.extras, base.pages)
        put.hold([tree.hold(path)] if path.pages else [], min(path.pages, put.total_pages))
        return path

    def _wanted(self, put: Put, existing: Masks | None) -> npt.NDArray[np.bool_]:
        """Which parts are to be sent: those that no page has, and that did not come with an earlier try of this shard."""
        ranges, required = put.request.ranges, put.space.tree.rules.required
        wanted = put.in_spans()
        if existing is not None:
            exists = existing != 0
            bits = np.array([1 << r.component for r in ranges], np.uint16)
            has = (existing[:, np.newaxis] & bits) != 0
            wanted &= ~exists[:, np.newaxis] | (~has & ((bits & required) == 0))
        if self.assemblies.adopt(put.space, put.request.put_id, put.keys, put.owner):
            wanted &= ~self.assemblies.present(put.space, put.request.put_id, put.first_page, put.keys, ranges)
        return wanted

    def _count_in_flight(self, put: Put, nbytes: int) -> None:
        """From now until it ends, what the put takes in DRAM is in flight. Raises Busy or NoSpace by the tenant's quota."""
        if put.closed:
            raise put.why_ended
        tenant = put.space.settings.tenant
        self._quotas.start_put(tenant, nbytes)
        put.at_end.append(lambda: self._quotas.end(tenant, nbytes))

    def _check_size(self, put: Put, wanted: npt.NDArray[np.bool_]) -> int:
        """A put that can never fit is refused at once. Returns the bytes it takes in DRAM."""
        cells: list[int] = wanted[0].tolist() if len(wanted) == 1 else wanted.sum(axis=0).tolist()
        needed: int = sum(map(mul, cells, put.parts.slot_bytes))
        if needed > self._arena.capacity:
            raise NoSpace(
                f"a put of {needed} bytes does not fit into a DRAM tier of {self._arena.capacity}: "
                "put fewer pages at once, or give the daemon a larger --dram"
            )
        if put.request.ack is Ack.DURABLE:
            on_disk = sum(n * self._footprint(size) for n, size in zip(cells, put.parts.stored_sizes, strict=True))
            if on_disk > self._ssd_bytes:
                raise NoSpace(f"a durable put of {on_disk} bytes does not fit into an SSD tier of {self._ssd_bytes}")
        return needed

    @staticmethod
    async def begun(put: Put, wait_s: float) -> None:
        """Wait until a put that is sent at once can take what is sent. Raises Busy, or why it has ended or will."""
        if put.error is not None:
            raise put.error
        if not put.ready:
            await asyncio.sleep(0)  # who was begun without a task has one from here on
            try:
                async with asyncio.timeout(wait_s):
                    await put.begun.wait()
            except TimeoutError:
                raise Busy("there is no room for the put yet", retry_after_ms=50) from None
        if put.error is not None or put.closed:  # meanwhile
            raise put.why_ended

    # --- ending --------------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Give up puts that receive nothing any more, and pages whose other shards do not come."""
        for put in self.open:
            if put.last_used + self._idle_s < now:
                self.open.abort(put)
        self.assemblies.expire(now)
        self._released()

    def release_owner(self, owner: int) -> None:
        """A client is gone: its puts leave nothing."""
        for put in [p for p in self.open if p.owner == owner]:
            self.open.abort(put)
        self.assemblies.release_owner(owner)
        self._released()

    def _released(self) -> None:
        """Shards were given up; if there are many, the rest goes in turns of the loop."""
        self._writeback.poke()
        if self.assemblies.some_left:
            self._many.set()

    async def give_up_shards(self) -> None:
        """A background task: of many shards that are to be given up, some at a time."""
        while True:
            await self._many.wait()
            self._many.clear()
            while self.assemblies.some_left:
                await asyncio.sleep(0)
                self.assemblies.release_some()
                self._writeback.poke()

    def end_space(self, space: Space) -> None:
        """A namespace is dropped."""
        for put in self.open.of_space(space):
            put.fail(UnknownNamespace(f"namespace {space.settings.name!r} was dropped"))
            self.open.abort(put)
        self.assemblies.end_space(space)
        self._released()
        self.commits.wake_waiters()
        self.open.tell_opened()

    def close(self) -> None:
        """The daemon stops: everything under way ends."""
        for put in self.open:
            self.open.abort(put)
        self.assemblies.give_up_all()


def _hold_alone(put: Put) -> None:
    """Pin those pages of a put to a flat namespace that are there."""
    tree, slots = put.space.tree, slots_of(put)
    there = slots >= 0
    for slot in slots[there].tolist():
        tree.hold(tree.path_to(slot))
    put.hold([put.key(page) for page in np.flatnonzero(there).tolist()], len(slots) if there.all() else int(there.argmin()))
