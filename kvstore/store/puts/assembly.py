"""Puts by several shards: what one computation has brought so far, until its pages are whole and enter the tree.

All shards of a computation carry its put id. What a shard has committed is kept, pinned and invisible, until every layer and
head of every required component is there, for a page and for the pages before it. Optional components may follow later.
Bookkeeping on the loop's thread: no await, no I/O.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.digests import KEY_BYTES
from kvstore.errors import KVStoreError
from kvstore.hints import NO_HINTS, Hints
from kvstore.kvspec import PartRange
from kvstore.radix.pages import Slots
from kvstore.radix.values import NewPages
from kvstore.store.puts.bringing_in import bring_in, is_whole, let_go
from kvstore.store.puts.pending import Pending
from kvstore.store.space import Space

_log = logging.getLogger("kvstore.store")

_AT_ONCE = 256
"""So many assemblies are looked at in one go where many are given up."""
ADVANCED_AT_ONCE = 16
"""So many pages of a flat namespace that get their last shard, or what they lack, enter the tree before others have a turn."""
MAX_PENDING_PAGES = 1 << 17
"""Of all computations: each costs some hundred bytes besides its parts."""


@dataclass(frozen=True, slots=True)
class Bringing:
    """Who brings something, until when it is kept (`expires`, monotonic) unless more comes, and what is to become of it."""

    owner: int
    expires: float
    durable: bool = False
    hints: Hints = NO_HINTS


@dataclass(eq=False, slots=True)
class Assembly:
    """What is pending of one computation, in a flat namespace of one page of it, and whose shards are in it.

    It ends at `expires` unless more comes.
    """

    space: Space
    name: "_Name"
    expires: float
    owners: set[int]
    durable: bool
    pending: list[Pending]
    hints: Hints = NO_HINTS
    """Those of the shard that came last with any."""

    @property
    def put_id(self) -> bytes:
        """The computation."""
        return self.name[1]


_Name = tuple[int, bytes, bytes]
"""Namespace, put id and, where pages stand alone, the page's key: nothing binds one of them to another."""


def _name(space: Space, put_id: bytes, keys: bytes) -> _Name:
    return space.number, put_id, keys[:KEY_BYTES] if space.spec.flat else b""


class Assemblies:
    """All assemblies of a daemon."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[_Name, Assembly] = OrderedDict()
        """The next to expire first: each time more comes, it is kept for as long."""
        self._by_space: dict[int, dict[_Name, Assembly]] = {}
        self._by_owner: dict[int, dict[_Name, None]] = {}
        self._doomed: deque[Iterator[Assembly | None]] = deque()
        """What is to be given up, found out when it is its turn; None for what is not, after all."""
        self.pages = 0
        """Pages that are not whole yet, or wait for a page before them."""

    def __len__(self) -> int:
        return len(self._by_id)

    def of_space(self, space: Space) -> list[Assembly]:
        """Those of a namespace."""
        return list(self._by_space.get(space.number, {}).values())

    def _add(self, assembly: Assembly) -> None:
        self._by_id[assembly.name] = self._by_space.setdefault(assembly.space.number, {})[assembly.name] = assembly

    def _remove(self, assembly: Assembly) -> None:
        del self._by_id[assembly.name]
        own = self._by_space[assembly.space.number]
        del own[assembly.name]
        if not own:
            del self._by_space[assembly.space.number]
        for owner in assembly.owners:
            self._disown(owner, assembly.name)

    def _own(self, owner: int, assembly: Assembly) -> None:
        assembly.owners.add(owner)
        self._by_owner.setdefault(owner, {})[assembly.name] = None

    def _disown(self, owner: int, name: "_Name") -> None:
        names = self._by_owner.get(owner)
        if names is not None:  # None: it is gone
            names.pop(name, None)
            if not names:
                del self._by_owner[owner]

    def pending_of(self, space: Space, put_id: bytes, key: bytes = b"") -> list[Pending]:
        """What is pending under a put id; in a flat namespace, of the page `key`."""
        assembly = self._by_id.get((space.number, put_id, key))
        return assembly.pending if assembly else []

    def present(self, space: Space, put_id: bytes, first: int, keys: bytes, ranges: tuple[PartRange, ...]) -> npt.NDArray[np.bool_]:
        """Which parts (pages, parts) of a put that is about to start are here already."""
        found = np.zeros((len(keys) // KEY_BYTES, len(ranges)), np.bool_)
        if space.spec.flat:
            places: dict[tuple[PartRange, ...], Slots] = {}  # nearly all pages have the same parts, and comparing those is what takes long
            for page in range(len(found)):
                for pending in self.pending_of(space, put_id, keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]):
                    if (at := places.get(pending.ranges)) is None:
                        of = {part: place for place, part in enumerate(pending.ranges)}
                        at = places[pending.ranges] = np.array([of.get(part, -1) for part in ranges], np.int32)
                    found[page] = (at >= 0) & (pending.rows[0, at] >= 0)
            return found
        asked = Pending(first, b"", keys, b"", (), np.empty((len(found), 0), np.int32))
        for pending in self.pending_of(space, put_id):
            low, high = max(first, pending.first), min(asked.end, pending.end)
            if low < high and pending.meets(asked):
                for part, part_range in enumerate(ranges):
                    if part_range in pending.ranges:
                        here = pending.rows[low - pending.first : high - pending.first, pending.ranges.index(part_range)]
                        found[low - first : high - first, part] = here >= 0
        return found

    def deposit(self, space: Space, put_id: bytes, pending: Pending, bring: Bringing) -> None:
        """Take in what a shard brought. Every row of it is pinned once, which is ours to undo from here on."""
        name = _name(space, put_id, pending.keys)
        assembly = self._by_id.get(name)
        if assembly is None:
            assembly = Assembly(space, name, bring.expires, set(), False, [])
            self._add(assembly)
        else:
            self._by_id.move_to_end(name)
        assembly.expires = max(assembly.expires, bring.expires)
        self._own(bring.owner, assembly)
        assembly.durable |= bring.durable
        assembly.hints = assembly.hints if bring.hints == NO_HINTS else bring.hints
        for other in list(assembly.pending):
            if not other.meets(pending):  # asked anew after each join: what goes on from here may be two branches
                continue
            assembly.pending.remove(other)
            self.pages -= len(other.rows)
            pending, spare = other.joined(pending)
            for row in spare:
                space.unpin(row)
        assembly.pending.append(pending)
        self.pages += len(pending.rows)

    def alone(self, space: Space, put_id: bytes, parent: bytes, ranges: tuple[PartRange, ...]) -> bool:
        """Whether pages of these parts, all of them here, wait for nothing: they are whole, nothing else is pending of their computation,
        and the page before them (the key `parent`) is in the tree. Not for flat namespaces.
        """
        if (space.number, put_id, b"") in self._by_id or not is_whole(space, ranges):
            return False
        return parent == space.tree.root_key or space.tree.pages.find_key(parent) >= 0

    def take_whole(self, space: Space, put_id: bytes, pending: Pending) -> bool:
        """Bring what a put brought straight into the tree, if nothing else is pending of its computation and it is simply new, whole
        pages below one that is there. Returns whether it was; if not, `deposit` it. Raises NoSpace, with the pages given up.

        That is what most puts are, and it costs them a third of what going through an assembly does.
        """
        if not (pending.rows >= 0).all() or not self.alone(space, put_id, pending.parent, pending.ranges):
            return False
        self.bring_whole(space, put_id, pending)
        return True

    @staticmethod
    def bring_whole(space: Space, put_id: bytes, pending: Pending) -> None:
        """As `take_whole`, of what is known to be like that."""
        new = NewPages(pending.keys, put_id, pending.rows, pending.ranges)
        try:
            space.insert(pending.parent, pending.labels, pending.extras_of(pending.first, len(pending.rows)), new)
        finally:
            for row in pending.rows.ravel().tolist():
                space.unpin(row)

    def take_alone(
        self, space: Space, put_id: bytes, pending: Pending, existed: npt.NDArray[np.bool_], bring: Bringing
    ) -> tuple[bool, list[bytes]]:
        """Take in pages that each stand alone: those that are simply new and whole go straight into the tree, all or (NoSpace) none.

        `existed` says which are in the tree already. The others wait for their shards, or give a page what it lacks. Returns whether any
        went straight into the tree, and the keys of those others: `advance` each.
        """
        some, every = (pending.rows >= 0).any(axis=1), (pending.rows >= 0).all(axis=1)
        names = [_name(space, put_id, pending.key(page)) for page in range(len(existed))]
        waiting = np.array([name in self._by_id for name in names], np.bool_)
        simple = every & ~existed & ~waiting & is_whole(space, pending.ranges)
        others = np.flatnonzero((some | waiting) & ~simple).tolist()
        apart = [pending.alone(page) for page in others]  # before any row is let go
        if simple.any():
            try:
                mine = pending if simple.all() else pending.chosen(np.flatnonzero(simple).tolist())
                space.insert_alone(mine.labels, mine.extras, NewPages(mine.keys, put_id, mine.rows, mine.ranges))
            except BaseException:
                for one in apart:
                    let_go(space, one, slice(None), one.rows >= 0)
                raise
            finally:
                for row in pending.rows[simple].ravel().tolist():
                    space.unpin(row)
        for one in apart:
            self.deposit(space, put_id, one, bring)
        return bool(simple.any()), [pending.key(page) for page in others]

    def advance_each(self, space: Space, put_id: bytes, keys: list[bytes]) -> Iterator[list[tuple[Assembly, bytes]]]:
        """Bring into the tree what is whole now, some pages of a flat namespace (`keys`) a step; each step returns as `advance` does.

        Of other namespaces it is one step: a computation, or, without a key, those that waited for pages that are there now.
        """
        if not space.spec.flat:
            yield self.advance(space, put_id) if keys else self.advance_others(space)
            return
        for at in range(0, len(keys), ADVANCED_AT_ONCE):
            if space.dropped:
                return
            yield [gained for key in keys[at : at + ADVANCED_AT_ONCE] for gained in self.advance(space, put_id, key)]

    def advance(self, space: Space, put_id: bytes, key: bytes = b"") -> list[tuple[Assembly, bytes]]:
        """Bring into the tree what is whole now of a computation, and of others what only waited for that.

        In a flat namespace that is about one page, `key`. Returns who went on, each with the key of the last page that gained.
        Raises NoSpace, with the computation given up.
        """
        own = self._by_id.get((space.number, put_id, key))
        try:
            went_on = self._advance_one(own) if own is not None else []
        except KVStoreError:
            if own is not None:
                self.give_up(own)
            raise
        return went_on + self.advance_others(space) if went_on and not space.spec.flat else went_on

    def advance_others(self, space: Space) -> list[tuple[Assembly, bytes]]:
        """Bring in what only waited for pages that have come into a namespace's tree; returns as `advance` does."""
        went_on: list[tuple[Assembly, bytes]] = []
        more = bool(self._by_id)
        while more:
            more = False
            for other in self.of_space(space):
                if any(p.waits and space.tree.pages.find_key(p.parent) >= 0 for p in other.pending):
                    try:
                        gained = self._advance_one(other)
                    except KVStoreError as error:
                        _log.warning("pages that waited for others are given up: %s", error.message)
                        self.give_up(other)
                        continue
                    went_on += gained
                    more |= bool(gained)
        return went_on

    def _advance_one(self, assembly: Assembly) -> list[tuple[Assembly, bytes]]:
        went_on: list[tuple[Assembly, bytes]] = []
        for pending in sorted(assembly.pending, key=lambda p: p.first):
            if (last := bring_in(assembly.space, assembly.put_id, pending)) is not None:
                went_on.append((assembly, last))
            if not (pending.rows >= 0).any():
                assembly.pending.remove(pending)
                self.pages -= len(pending.rows)
        if not assembly.pending:
            self._remove(assembly)
        return went_on

    def adopt(self, space: Space, put_id: bytes, keys: bytes, owner: int) -> bool:
        """A client builds on what an earlier try of its shard brought: that stays as long as the client does. Whether there is any.

        `keys` are those of the pages that it is about to put.
        """
        ends = range(KEY_BYTES, len(keys) + 1, KEY_BYTES) if space.spec.flat else (KEY_BYTES,)
        found = [self._by_id.get(_name(space, put_id, keys[end - KEY_BYTES : end])) for end in ends]
        for assembly in found:
            if assembly is not None:
                self._own(owner, assembly)
        return any(assembly is not None for assembly in found)

    def give_up(self, assembly: Assembly) -> None:
        """Give up what is pending."""
        self._remove(assembly)
        for pending in assembly.pending:
            self.pages -= len(pending.rows)
            let_go(assembly.space, pending, slice(None), pending.rows >= 0)

    def give_up_all(self) -> None:
        """Give up everything."""
        for assembly in list(self._by_id.values()):
            self.give_up(assembly)

    # --- giving up many, some at a time --------------------------------------------------------------------------------

    def release_owner(self, owner: int) -> None:
        """A client is gone. What it brought stays as long as another shard of the computation is alive, who may bring the rest."""
        if names := self._by_owner.pop(owner, None):
            self._doom(self._left_by(owner, list(names)))

    def expire(self, now: float) -> None:
        """The time is `now`: give up those whose time is over."""
        self._doom(self._expired(now))

    def end_space(self, space: Space) -> None:
        """A namespace was dropped."""
        self._doom(assembly if self._by_id.get(assembly.name) is assembly else None for assembly in self.of_space(space))

    def _left_by(self, owner: int, names: "list[_Name]") -> Iterator[Assembly | None]:
        for name in names:
            assembly = self._by_id.get(name)
            if assembly is not None:
                assembly.owners.discard(owner)
            yield assembly if assembly is not None and not assembly.owners else None

    def _expired(self, now: float) -> Iterator[Assembly | None]:
        while self._by_id and (first := next(iter(self._by_id.values()))).expires <= now:
            yield first

    def _doom(self, them: Iterator[Assembly | None]) -> None:
        self._doomed.append(them)
        self.release_some()

    @property
    def some_left(self) -> bool:
        """Whether there may be more to give up: call `release_some` in turns of the loop."""
        return bool(self._doomed)

    def release_some(self) -> None:
        """Give up some of what is to be given up."""
        for _ in range(_AT_ONCE):
            if not self._doomed:
                return
            try:
                assembly = next(self._doomed[0])
            except StopIteration:
                self._doomed.popleft()
                continue
            if assembly is not None:
                self.give_up(assembly)
