"""Moving blobs in DRAM, so that what is free in segments of one size becomes room for another.

A blob is moved only if nobody can be looking at it: not pinned, and needed by no leased page. While it is copied (in the
executor) it is pinned, and it takes its new place only if it is still so that nobody else does.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.store.dram.leased import LeasedBlobs
from kvstore.store.space import Space
from kvstore.store.space_blobs import OWNER_ROW, OWNER_SHIFT
from kvstore.store.stats import Stats
from kvstore.store.waits import finish_despite_cancel
from kvstore.tiers.dram import Arena
from kvstore.tiers.segments import Segment, close_segments
from kvstore.tiers.vacating import MoveBudget, choose

_log = logging.getLogger("kvstore.mover")
_BATCH_BYTES = 64 << 20
_HEADROOM_SHARE = 24
_HOPELESS_S, _REST_S = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class _Move:
    """A blob on its way from one slot to another."""

    space: Space
    row: int
    source: int
    target: int
    stored: int


class Vacator:
    """Vacates segments, one batch at a time, within a budget: for those who wait for room, and ahead of them."""

    def __init__(self, arena: Arena, executor: Executor, spaces: Callable[[], Iterable[Space]], stats: Stats, budget: MoveBudget) -> None:
        self._arena = arena
        self._executor = executor
        self._spaces = spaces
        self._stats = stats
        self._budget = budget
        self._headroom = arena.capacity // _HEADROOM_SHARE
        self._task: asyncio.Task[bool] | None = None
        self._hopeless = (0.0, 0)
        self._rest_until = 0.0
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether blobs are being moved."""
        return self._task is not None

    def asked(self, nbytes: int) -> None:
        """A place for so many bytes is wanted: that much more may be moved, in proportion."""
        self._budget.earn(nbytes)

    async def make_room(self, nbytes: int, wait_s: float) -> bool:
        """Try to get `nbytes` free outside all segments. Returns whether it is worth to try for a segment again."""
        if self._task is None and not self._start(nbytes - self._arena.room):
            return False
        task = self._task
        assert task is not None
        await asyncio.wait({task}, timeout=wait_s)
        return not task.done() or task.result()

    def keep_headroom(self) -> None:
        """Vacate ahead of need, in the background, if little is left outside the segments."""
        missing = self._headroom - self._arena.room
        if self._task is not None or missing <= 0:
            return
        usage, loop = self._arena.usage(), asyncio.get_running_loop()
        if usage.capacity - usage.used >= self._headroom and loop.time() >= self._rest_until:
            self._start(missing, 1)

    def _start(self, *wanted: int) -> bool:
        """Start to look for what can be vacated, and to vacate it: so many bytes, or else the next number of them."""
        now = asyncio.get_running_loop().time()
        until, hopeless = self._hopeless
        if self._stopped or not self._budget.available or (now < until and wanted[-1] >= hopeless):
            return False
        self._task = asyncio.create_task(self._run(wanted), name="kvstore-vacate")
        return True

    async def _run(self, wanted: Sequence[int]) -> bool:
        leased: dict[int, LeasedBlobs] = {}
        try:
            gained = await self._vacate_some(wanted, leased)
        except Exception:
            _log.critical("moving blobs failed", exc_info=True)
            raise
        finally:
            for one in leased.values():
                one.close()
            self._task = None
        if gained:
            self.keep_headroom()
        return gained

    async def _vacate_some(self, wanted: Sequence[int], leased: dict[int, LeasedBlobs]) -> bool:
        for nbytes in wanted:
            if victims := await self._choose(max(nbytes, 1), leased):
                return await self._vacate(victims, self._begin(victims), leased)
        now = asyncio.get_running_loop().time()
        self._hopeless = (now + _HOPELESS_S, wanted[-1])
        self._rest_until = now + _REST_S if len(wanted) > 1 else self._rest_until
        return False

    async def stop(self) -> None:
        """Move nothing more; returns once what is under way has ended."""
        self._stopped = True
        if self._task is not None:
            await asyncio.wait({self._task})

    # --- one batch -----------------------------------------------------------------------------------------------------

    async def _choose(self, wanted: int, leased: dict[int, LeasedBlobs]) -> list[int]:
        """The segments to vacate, as they are at the end; `leased` gets what is leased in their namespaces, which is looked for."""
        while True:
            spaces, unknown = {space.number: space for space in self._spaces()}, set[int]()
            most = min(self._budget.available, max(_BATCH_BYTES, wanted))
            movable = partial(self._movable, spaces, leased, unknown)
            victims = choose(self._arena.candidates(), wanted, most, movable)
            if not unknown:
                return victims
            for number in unknown & spaces.keys():
                leased[number] = await LeasedBlobs.of(spaces[number])

    def _movable(self, spaces: dict[int, Space], leased: dict[int, LeasedBlobs], unknown: set[int], number: int) -> bool:
        """Whether nobody has what is in a segment; `unknown` gets its namespaces of which it is not known yet what is leased."""
        found = self._arena.owned_slots(number)
        if found is None:
            return False
        owned = _by_space(found[1])
        if any(number not in spaces or spaces[number].blobs.pins[rows].any() for number, rows in owned):
            return False
        new = {number for number, _ in owned} - leased.keys()
        unknown |= new
        return not any(leased[number].needs(rows).any() for number, rows in owned if number not in new)

    async def _vacate(self, victims: list[int], moves: list[_Move], leased: dict[int, LeasedBlobs]) -> bool:
        copied = False
        try:
            view = self._arena.view
            pairs = [(view(m.source)[: m.stored], view(m.target)[: m.stored]) for m in moves]
            await finish_despite_cancel(asyncio.get_running_loop().run_in_executor(self._executor, _copy, pairs))
            for one in leased.values():
                await one.follow()
            copied = True
        finally:
            self._switch(moves, leased if copied else None)
            empty = [number for number in victims if self._arena.is_empty(number)]
            for number in victims:
                if number not in empty:
                    self._arena.reopen(number)
        await self.give_back([self._arena.retire(number) for number in empty])
        return bool(empty)

    def _begin(self, victims: list[int]) -> list[_Move]:
        """Shut the segments; find new places for what is in them, and pin it."""
        arena, spaces = self._arena, {space.number: space for space in self._spaces()}
        for number in victims:
            arena.shut(number)
        moves = []
        for number in victims:
            found = arena.owned_slots(number)
            assert found is not None, "a segment with slots of puts was chosen"
            sources, owners = (column.tolist() for column in found)
            targets = arena.allocate_dense(arena.class_of(sources[0]), len(sources))
            for source, target, owner in zip(sources, targets, owners, strict=True):
                space, row = spaces[owner >> OWNER_SHIFT], owner & OWNER_ROW
                space.pin(row)
                moves.append(_Move(space, row, source, target, space.stored_bytes(row)))
        return moves

    def _switch(self, moves: list[_Move], leased: dict[int, LeasedBlobs] | None) -> None:
        """Let the blobs take their new places, but for those that somebody has begun to use or has lost meanwhile.

        Without `leased` they were not copied, and none does.
        """
        for move in moves:
            space, row, blobs = move.space, move.row, move.space.blobs
            self._arena.moved(move.target)
            alone = blobs.pins[row] == 1 and blobs.pages[row] and blobs.slot[row] == move.source
            if leased is not None and alone and not leased[space.number].needs(np.array([row])).any():
                space.clear_slot(row)
                space.set_slot(row, move.target)
                self._stats.moved_blobs += 1
            else:
                self._arena.free(move.target)
            space.unpin(row)
        moved = sum(move.stored for move in moves)
        self._budget.spend(moved)
        self._stats.moved_stored_bytes += moved

    async def give_back(self, retired: list[Segment]) -> None:
        """Close segments, and say that there is room."""
        if retired:
            closing = asyncio.get_running_loop().run_in_executor(self._executor, close_segments, retired)
            try:
                await finish_despite_cancel(closing)
            finally:
                self._arena.release(retired)


def _by_space(owners: npt.NDArray[np.int64]) -> list[tuple[int, npt.NDArray[np.int64]]]:
    numbers = owners >> OWNER_SHIFT
    return [(int(number), owners[numbers == number] & OWNER_ROW) for number in np.unique(numbers)]


def _copy(pairs: list[tuple[memoryview, memoryview]]) -> None:
    for source, target in pairs:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
