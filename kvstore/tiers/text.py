"""The text tier: recipes in an LMDB environment of their own, by namespace number and page key.

Blocking: call from an executor thread; changes from one thread only. A change is durable when its call returns. LMDB has no
checksums: a recipe that does not verify is none. Besides the recipes there is an index by age, one by parent, and a record
of count and bytes for each namespace; all are made anew when their number says that something is missing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import lmdb
from xxhash import xxh3_128_digest

from kvstore.digests import DIGEST_BYTES, KEY_BYTES
from kvstore.lmdb_files import STRUCTURAL, Gate, check_order, mark_damaged, open_environment, open_readonly, probe, writing
from kvstore.tiers import Usage
from kvstore.tiers.recipe import MIN_RECORD, Recipe, decode_recipe, parent_of, verifies

_RECIPE, _AGE, _CHILD, _COUNT, _PROBE = b"R", b"A", b"K", b"C", b"T"
_ENTRIES = 3
"""Of a recipe: itself, and one in each index."""
ENTRY_BYTES = 256
"""Bytes that a recipe is counted with beside its own: keys and indices, and LMDB's overhead on them, about."""
_PARENT_BYTES = 16
"""So much of the parent's key is in its index: nothing is decided by it that is not looked up by whole keys then."""
_STEP = 2048
_STAMP = 8
"""A value begins with its place in the index by age, which changes without the record being made anew."""


@dataclass(frozen=True, slots=True)
class NewRecipe:
    """A recipe to be written: encoded, and what the indices need of it."""

    number: int
    key: bytes
    parent: bytes
    stamp_ms: int
    value: bytes

    @property
    def cost(self) -> int:
        """Bytes that it is counted with."""
        return _STAMP + len(self.value) + ENTRY_BYTES


@dataclass(slots=True)
class RecipeBatch:
    """Changes to commit together; deletions come first. Recipes are named by (namespace number, page key)."""

    delete: list[tuple[int, bytes]] = field(default_factory=list)
    put: list[NewRecipe] = field(default_factory=list)


@dataclass(slots=True)
class Holding:
    """Recipes of a namespace, and the bytes that they are counted with."""

    recipes: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Aged:
    """A recipe by age."""

    stamp_ms: int
    number: int
    key: bytes


class RecipeFile:
    """One LMDB environment. `capacity` bounds the bytes of recipes as they are counted; who writes keeps to it."""

    def __init__(self, path: Path, capacity: int = 0, *, readonly: bool = False) -> None:
        self._path = path
        self.capacity = capacity
        self._map_bytes = 3 * capacity + (64 << 20)
        self._gate = Gate()
        before = _folder(path)
        self._env = open_readonly(path) if readonly else open_environment(path, self._map_bytes, max_spare_txns=4)
        self.holdings: dict[int, Holding] = {}
        """By namespace number. Changed by the one thread that writes."""
        self.sound = False
        """Whether counts and indices accounted for what is there when it was opened."""
        try:
            self.sound = self._read_counts()
            if not self.sound and not readonly:
                if _folder(path) == before:
                    self.salvage()  # what is missing is damage, and to read on might end the process
                else:
                    self.recount()
        except STRUCTURAL:
            if readonly:
                raise
            self.salvage()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def probe(self) -> None:
        """See whether the disk takes a write (see lmdb_files.probe). Raises lmdb.Error or OSError."""
        probe(self._env, self._path, [_PROBE], bytes, self._open_anew)

    def _open_anew(self) -> lmdb.Environment:
        with self._gate.alone():
            self._env.close()
            self._env = open_environment(self._path, self._map_bytes, max_spare_txns=4)
        return self._env

    def usage(self) -> Usage:
        """Bytes of recipes, as they are counted."""
        return Usage(self.capacity, sum(holding.nbytes for holding in list(self.holdings.values())))

    # --- reading -------------------------------------------------------------------------------------------------------

    def read(self, number: int, namespace_digest: bytes, keys: Iterable[bytes]) -> list[Recipe | None]:
        """The recipes of some pages; None where there is none, or none that verifies."""
        with self._gate.shared(), self._env.begin() as txn:
            values = [(key, txn.get(_recipe_key(number, key))) for key in keys]
        return [None if value is None else decode_recipe(namespace_digest, key, value[_STAMP:]) for key, value in values]

    def upwards(self, number: int, namespace_digest: bytes, key: bytes, limit: int) -> list[Recipe]:
        """The recipes of a page and of those before it, from it towards the root: up to the first that is lacking, at most `limit`."""
        found: list[Recipe] = []
        with self._gate.shared(), self._env.begin() as txn:
            while len(found) < limit and (value := txn.get(_recipe_key(number, key))) is not None:
                recipe = decode_recipe(namespace_digest, key, value[_STAMP:])
                if recipe is None:
                    break
                found.append(recipe)
                key = recipe.parent
        return found

    def have(self, number: int, namespace_digest: bytes, keys: Iterable[bytes]) -> list[bool]:
        """Which pages have a recipe that verifies."""
        with self._gate.shared(), self._env.begin() as txn:
            values = [(key, txn.get(_recipe_key(number, key))) for key in keys]
        return [value is not None and verifies(namespace_digest, key, value[_STAMP:]) for key, value in values]

    def oldest(self, limit: int, before_ms: int | None = None) -> list[Aged]:
        """The recipes that were written longest ago, those before `before_ms` if given."""
        with self._gate.shared(), self._env.begin() as txn, txn.cursor() as cursor:
            keys = list(islice(cursor.iternext(values=False), limit)) if cursor.set_range(_AGE) else []
        keys = keys[: bisect_left(keys, True, key=lambda key: not key.startswith(_AGE))]
        found = [Aged(int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:13], "big"), key[13:]) for key in keys]
        return [aged for aged in found if before_ms is None or aged.stamp_ms < before_ms]

    def below(self, number: int, root: bytes, limit: int = 1 << 20) -> list[bytes]:
        """The keys of a page and of all pages below it that have recipes (the page's own even if it has none), parents first."""
        found = [root]
        with self._gate.shared(), self._env.begin() as txn, txn.cursor() as cursor:
            for parent in found:
                prefix = _child_prefix(number, parent)
                more = cursor.set_range(prefix)
                while more and len(found) < limit and (key := cursor.key()).startswith(prefix):
                    found.append(key[len(prefix) :])
                    more = cursor.next()
        return found

    def scan(self, number: int, namespace_digest: bytes, after: bytes | None = None) -> tuple[int, list[bytes], bytes | None]:
        """Look at the next recipes of a namespace: how many, the keys of those that do not verify, and the key to go on behind."""
        prefix = _RECIPE + number.to_bytes(4, "big")
        start = prefix if after is None else prefix + after + b"\0"
        with self._gate.shared(), self._env.begin() as txn, txn.cursor() as cursor:
            items = list(islice(cursor.iternext(), _STEP)) if cursor.set_range(start) else []
        if items:
            check_order(items[-1][0], start)
        mine = [(key[5:], value) for key, value in items if key.startswith(prefix)]
        bad = [key for key, value in mine if not verifies(namespace_digest, key, value[_STAMP:])]
        return len(mine), bad, mine[-1][0] if len(mine) == _STEP else None

    def keys(self, number: int, after: bytes | None = None) -> tuple[list[bytes], bytes | None]:
        """The next page keys of a namespace that have recipes, sound or not, and the key to go on behind."""
        prefix = _RECIPE + number.to_bytes(4, "big")
        start = prefix if after is None else prefix + after + b"\0"
        with self._gate.shared(), self._env.begin() as txn, txn.cursor() as cursor:
            names = list(islice(cursor.iternext(values=False), _STEP)) if cursor.set_range(start) else []
        mine = [name[5:] for name in names if name.startswith(prefix)]
        return mine, mine[-1] if len(mine) == _STEP else None

    def numbers(self) -> list[int]:
        """The namespace numbers that have recipes or a count, without a look at each recipe."""
        found: set[int] = set()
        with self._gate.shared(), self._env.begin() as txn, txn.cursor() as cursor:
            for kind in (_RECIPE, _COUNT):
                start = kind
                while cursor.set_range(start) and (key := check_order(cursor.key(), start)).startswith(kind):
                    number = int.from_bytes(key[1:5], "big")
                    found.add(number)
                    if number == 0xFFFFFFFF:
                        break
                    start = kind + (number + 1).to_bytes(4, "big")
        return sorted(found)

    # --- writing -------------------------------------------------------------------------------------------------------

    def commit(self, batch: RecipeBatch) -> None:
        """Apply a batch in one transaction; it is durable when this returns. Raises lmdb.Error or OSError, nothing done."""
        holdings = {number: Holding(h.recipes, h.nbytes) for number, h in self.holdings.items()}
        touched: set[int] = set()
        with writing(self._env, self._path) as txn:
            for number, key in batch.delete:
                if _take_out(txn, holdings, number, key):
                    touched.add(number)
            for new in batch.put:
                _take_out(txn, holdings, new.number, new.key)
                txn.put(_recipe_key(new.number, new.key), new.stamp_ms.to_bytes(_STAMP, "big") + new.value)
                txn.put(_age_key(new.stamp_ms, new.number, new.key), b"")
                txn.put(_child_prefix(new.number, new.parent) + new.key, b"")
                holding = holdings.setdefault(new.number, Holding())
                holding.recipes += 1
                holding.nbytes += new.cost
                touched.add(new.number)
            _write_counts(txn, holdings, touched)
        self.holdings = holdings

    def restamp(self, aged: Iterable[Aged], stamp_ms: int) -> None:
        """Let recipes count as written at a later time."""
        with writing(self._env, self._path) as txn:
            for one in aged:
                _delete_seen(txn, _age_key(one.stamp_ms, one.number, one.key))
            for one in aged:
                name = _recipe_key(one.number, one.key)
                value = bytes(txn.get(name, b""))
                if value:
                    txn.delete(_age_key(_stamp_of(value), one.number, one.key))
                    txn.put(name, stamp_ms.to_bytes(_STAMP, "big") + value[_STAMP:])
                    txn.put(_age_key(stamp_ms, one.number, one.key), b"")

    def forget(self, aged: Sequence[Aged]) -> None:
        """Delete recipes by age, and their places in that index even if the recipes are gone already."""
        holdings = {number: Holding(h.recipes, h.nbytes) for number, h in self.holdings.items()}
        with writing(self._env, self._path) as txn:
            for one in aged:
                _delete_seen(txn, _age_key(one.stamp_ms, one.number, one.key))
            for one in aged:
                _take_out(txn, holdings, one.number, one.key)
            _write_counts(txn, holdings, {one.number for one in aged})
        self.holdings = holdings

    def drop_namespace(self, number: int) -> None:
        """Delete all recipes of a namespace, durably."""
        name = number.to_bytes(4, "big")
        with writing(self._env, self._path) as txn:
            with txn.cursor() as cursor:
                while cursor.set_range(_RECIPE + name) and (key := bytes(cursor.key())).startswith(_RECIPE + name):
                    txn.delete(_age_key(_stamp_of(bytes(cursor.value())), number, key[5:]))
                    _delete_seen(txn, key)
                while cursor.set_range(_CHILD + name) and bytes(cursor.key()).startswith(_CHILD + name):
                    cursor.delete()
            txn.delete(_COUNT + name)
        self.holdings = {known: holding for known, holding in self.holdings.items() if known != number}

    def recount(self) -> None:
        """Make the indices and the counts anew from the recipes, after damage. What has no sound key goes."""
        holdings: dict[int, Holding] = {}
        for kind in (_COUNT, _AGE, _CHILD):  # the counts first: without them the next start begins this again
            while True:
                with writing(self._env, self._path) as txn, txn.cursor() as cursor:
                    some = list(islice(cursor.iternext(values=False), _STEP)) if cursor.set_range(kind) else []
                    gone = [key for key in map(bytes, some) if key.startswith(kind)]
                    for key in gone:
                        _delete_seen(txn, key)
                if not gone:
                    break
        for items in self._all_recipes():
            with writing(self._env, self._path) as txn:
                for key, value in items:
                    if len(key) != 5 + KEY_BYTES or len(value) < _STAMP + MIN_RECORD:
                        txn.delete(key)
                        continue
                    number = int.from_bytes(key[1:5], "big")
                    txn.put(_age_key(_stamp_of(value), number, key[5:]), b"")
                    txn.put(_child_prefix(number, parent_of(value[_STAMP:])) + key[5:], b"")
                    holding = holdings.setdefault(number, Holding())
                    holding.recipes += 1
                    holding.nbytes += len(value) + ENTRY_BYTES
        with writing(self._env, self._path) as txn:
            _write_counts(txn, holdings, set(holdings))
        self.holdings = holdings

    def salvage(self) -> None:
        """Its structure is damaged: close it, and open a fresh one with what can be read of it."""
        mark_damaged(self._path)
        self._open_anew()
        self.recount()

    def _all_recipes(self) -> Iterator[list[tuple[bytes, bytes]]]:
        start = _RECIPE
        while True:
            with self._env.begin() as txn, txn.cursor() as cursor:
                some = list(islice(cursor.iternext(), _STEP)) if cursor.set_range(start) else []
            if some:
                check_order(some[-1][0], start)
            mine = [(key, value) for key, value in some if key.startswith(_RECIPE)]
            if mine:
                yield mine
            if len(mine) < _STEP:
                return
            start = mine[-1][0] + b"\0"

    def _read_counts(self) -> bool:
        """Read the holdings. False if they do not verify, or do not account for what is there."""
        found: dict[int, Holding] = {}
        with self._env.begin() as txn, txn.cursor() as cursor:
            more = cursor.set_range(_COUNT)
            while more and (key := cursor.key()).startswith(_COUNT):
                value = cursor.value()
                if len(key) != 5 or len(value) != 16 + DIGEST_BYTES or xxh3_128_digest(key + value[:16]) != value[16:]:
                    return False
                number = int.from_bytes(key[1:5], "big")
                found[number] = Holding(int.from_bytes(value[:8], "little"), int.from_bytes(value[8:16], "little"))
                more = cursor.next()
            probe = txn.get(_PROBE) is not None
        self.holdings = found
        entries: int = self._env.stat()["entries"]
        return entries == sum(_ENTRIES * holding.recipes + 1 for holding in found.values()) + probe


def _folder(path: Path) -> int:
    """Tells a folder from the one that a salvage puts in its place."""
    return path.stat().st_ino if path.exists() else 0


def _stamp_of(value: bytes) -> int:
    return int.from_bytes(value[:_STAMP], "big")


def _recipe_key(number: int, key: bytes) -> bytes:
    return _RECIPE + number.to_bytes(4, "big") + key


def _age_key(stamp_ms: int, number: int, key: bytes) -> bytes:
    return _AGE + stamp_ms.to_bytes(8, "big") + number.to_bytes(4, "big") + key


def _child_prefix(number: int, parent: bytes) -> bytes:
    return _CHILD + number.to_bytes(4, "big") + parent[:_PARENT_BYTES]


def _delete_seen(txn: lmdb.Transaction, key: bytes) -> None:
    """Delete a key that a cursor came to. One that is not found is out of order, and would come again for ever: raises CorruptedError."""
    if not txn.delete(key):
        raise lmdb.CorruptedError(f"keys are out of order: {key.hex()} is not where it belongs")


def _take_out(txn: lmdb.Transaction, holdings: dict[int, Holding], number: int, key: bytes) -> bool:
    """Delete a recipe with its places in the indices. False if there is none."""
    value = bytes(txn.get(_recipe_key(number, key), b""))
    if not value:
        return False
    txn.delete(_recipe_key(number, key))
    txn.delete(_age_key(_stamp_of(value), number, key))
    txn.delete(_child_prefix(number, parent_of(value[_STAMP:])) + key)
    holding = holdings.setdefault(number, Holding())
    holding.recipes = max(holding.recipes - 1, 0)
    holding.nbytes = max(holding.nbytes - len(value) - ENTRY_BYTES, 0)
    return True


def _write_counts(txn: lmdb.Transaction, holdings: dict[int, Holding], numbers: Iterable[int]) -> None:
    for number in numbers:
        key, holding = _COUNT + number.to_bytes(4, "big"), holdings.get(number, Holding())
        body = holding.recipes.to_bytes(8, "little") + holding.nbytes.to_bytes(8, "little")
        txn.put(key, body + xxh3_128_digest(key + body))
        holdings[number] = holding
