"""The recipes' file: what is written is read, in the right order of age, and damage is noticed and mended."""

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import lmdb
import pytest

from kvstore.kvspec import PartRange
from kvstore.tiers.recipe import Recipe, RecipeKind, RecipePart, decode_recipe, encode_recipe
from kvstore.tiers.text import Holding, NewRecipe, RecipeBatch, RecipeFile

DIGEST = b"d" * 32
ROOT = b"r" * 32


def key_of(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=32).digest()


def recipe(name: object, parent: bytes = ROOT, stamp: int = 1000, body: bytes = b"\1\0\0\0" * 8) -> Recipe:
    parts = (RecipePart(PartRange(0, 0, 4, 0, 1), b"b" * 16, 4096, b"few"), RecipePart(PartRange(0, 0, 4, 1, 2), b"c" * 16, 4096))
    return Recipe(key_of(name), parent, 3, RecipeKind.TOKENS, body, bytes(32), b"v" * 16, stamp, parts)


def new(one: Recipe, number: int = 7) -> NewRecipe:
    return NewRecipe(number, one.key, one.parent, one.written_ms, encode_recipe(DIGEST, one))


def entries(path: Path, prefix: bytes) -> list[tuple[bytes, bytes]]:
    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
        return [(bytes(k), bytes(v)) for k, v in txn.cursor() if bytes(k).startswith(prefix)]


def test_encoding() -> None:
    one = recipe("a")
    raw = encode_recipe(DIGEST, one)
    assert decode_recipe(DIGEST, one.key, raw) == one
    assert decode_recipe(b"e" * 32, one.key, raw) is None
    assert decode_recipe(DIGEST, key_of("b"), raw) is None
    for at in range(0, len(raw), 7):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << at % 8
        assert decode_recipe(DIGEST, one.key, bytes(flipped)) is None
    assert decode_recipe(DIGEST, one.key, raw[:20]) is None


def test_written_read_and_replaced(tmp_path: Path) -> None:
    file = RecipeFile(tmp_path / "recipes", 1 << 20)
    first, second = recipe(1, stamp=5), recipe(2, key_of(1), stamp=6)
    file.commit(RecipeBatch(put=[new(first), new(second)]))
    assert (tmp_path / "recipes" / "data.mdb").stat().st_mode & 0o777 == 0o600
    assert file.read(7, DIGEST, [first.key, key_of(3), second.key]) == [first, None, second]
    assert file.read(8, DIGEST, [first.key]) == [None]
    assert [one.key for one in file.oldest(10)] == [first.key, second.key]
    again = replace(first, written_ms=9, version=b"w" * 16)
    file.commit(RecipeBatch(put=[new(again)]))
    assert file.read(7, DIGEST, [first.key]) == [again]
    assert [one.key for one in file.oldest(10)] == [second.key, first.key]
    assert file.oldest(10, before_ms=7) == file.oldest(1)
    assert file.holdings[7].recipes == 2
    assert file.usage().used == file.holdings[7].nbytes > 0
    file.restamp(file.oldest(1), 20)
    assert [(one.key, one.stamp_ms) for one in file.oldest(10)] == [(first.key, 9), (second.key, 20)]
    assert file.read(7, DIGEST, [second.key]) == [second]
    file.forget(file.oldest(1))
    assert file.read(7, DIGEST, [first.key, second.key]) == [None, second]
    file.close()
    file = RecipeFile(tmp_path / "recipes", 1 << 20)
    assert file.sound
    assert file.holdings[7].recipes == 1
    file.close()


def test_what_hangs_below(tmp_path: Path) -> None:
    file = RecipeFile(tmp_path / "recipes", 1 << 20)
    chain = [recipe(0), recipe(1, key_of(0)), recipe(2, key_of(1)), recipe("other", key_of(0)), recipe("apart")]
    file.commit(RecipeBatch(put=[new(one) for one in chain] + [new(recipe(1, key_of(0)), 8)]))
    assert set(file.below(7, key_of(0))) == {key_of(0), key_of(1), key_of(2), key_of("other")}
    assert file.below(7, key_of(2)) == [key_of(2)]
    file.commit(RecipeBatch(delete=[(7, key) for key in file.below(7, key_of(1))]))
    assert file.have(7, DIGEST, [key_of(0), key_of(1), key_of(2), key_of("other")]) == [True, False, False, True]
    assert file.numbers() == [7, 8]
    file.drop_namespace(7)
    assert file.numbers() == [8]
    assert file.holdings == {8: Holding(1, file.usage().used)}
    file.close()
    assert len(entries(tmp_path / "recipes", b"")) == 4


@pytest.mark.parametrize("lost", [b"A", b"K", b"C"])
def test_indices_that_lost_something_are_made_anew(tmp_path: Path, lost: bytes) -> None:
    path = tmp_path / "recipes"
    file = RecipeFile(path, 1 << 20)
    chain = [recipe(number, key_of(number - 1), stamp=number) for number in range(1, 40)]
    file.commit(RecipeBatch(put=[new(one) for one in chain]))
    used = file.usage().used
    file.close()
    victim = entries(path, lost)[0][0]
    with lmdb.open(str(path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        txn.delete(victim)
    assert not RecipeFile(path, readonly=True).sound
    file = RecipeFile(path, 1 << 20)
    assert file.usage().used == used
    assert [one.key for one in file.oldest(100)] == [one.key for one in chain]
    assert len(file.below(7, chain[0].key)) == 39
    file.close()
    assert RecipeFile(path, readonly=True).sound


def test_a_bad_record_is_none(tmp_path: Path) -> None:
    path, one = tmp_path / "recipes", recipe(1)
    file = RecipeFile(path, 1 << 20)
    file.commit(RecipeBatch(put=[new(one), new(recipe(2))]))
    file.close()
    raw = bytearray((path / "data.mdb").read_bytes())
    at = raw.find(one.body)
    raw[at] ^= 4
    (path / "data.mdb").write_bytes(raw)
    file = RecipeFile(path, 1 << 20)
    read = file.read(7, DIGEST, [one.key, key_of(2)])
    assert sum(found is None for found in read) == 1
    count, bad, after = file.scan(7, DIGEST)
    assert (count, len(bad), after) == (2, 1, None)
    file.commit(RecipeBatch(delete=[(7, key) for key in bad]))
    assert file.holdings[7].recipes == 1
    file.close()


def out_of_order(path: Path, kind: bytes) -> None:
    """Damage the first key of a kind so that it comes after the next ones: a cursor still meets it first, a search by it finds nothing."""
    key = entries(path, kind)[0][0]
    damaged = key[:-32] + b"\xff" + key[-31:]
    data = (path / "data.mdb").read_bytes()
    assert key in data
    (path / "data.mdb").write_bytes(data.replace(key, damaged))
    assert entries(path, kind)[0][0] == damaged


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [b"R", b"K"])
def test_a_namespace_with_a_key_out_of_order_is_dropped_or_said_to_be_damaged(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "recipes"
    file = RecipeFile(path, 1 << 20)
    file.commit(RecipeBatch(put=[new(recipe(number, stamp=5)) for number in range(1, 9)]))
    file.close()
    out_of_order(path, kind)
    file = RecipeFile(path, 1 << 20)
    try:
        file.drop_namespace(7)
    except lmdb.CorruptedError:
        file.salvage()
        file.drop_namespace(7)
    assert 7 not in file.holdings
    file.close()
    assert not entries(path, b"R")


@pytest.mark.timeout(20)
def test_an_age_out_of_order_is_damage_and_no_endless_expiry(tmp_path: Path) -> None:
    path = tmp_path / "recipes"
    file = RecipeFile(path, 1 << 20)
    file.commit(RecipeBatch(put=[new(recipe(number, stamp=5)) for number in range(1, 9)]))
    file.close()
    out_of_order(path, b"A")
    file = RecipeFile(path, 1 << 20)
    with pytest.raises(lmdb.CorruptedError):
        file.forget(file.oldest(10))
    with pytest.raises(lmdb.CorruptedError):
        file.restamp(file.oldest(10), 9)
    file.salvage()
    aged = file.oldest(10)
    assert len(aged) == 8
    file.restamp(aged, 9)
    file.forget(file.oldest(10))
    assert not file.oldest(10)
    file.close()
