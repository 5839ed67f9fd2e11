"""Where LMDB's values lie: what is found is what LMDB itself gives, in the snapshot of a transaction, or an error."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from kvstore.lmdb_find import Damaged, Overtaken, find_entries


@contextmanager
def file_of(env: lmdb.Environment, path: Path) -> Iterator[int]:
    descriptor = os.open(path / "data.mdb", os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        env.close()


def opened(path: Path) -> lmdb.Environment:
    return lmdb.open(str(path), map_size=256 << 20, sync=False)


def found(env: lmdb.Environment, descriptor: int, prefix: bytes) -> dict[bytes, bytes]:
    with env.begin() as txn:
        entries = find_entries(descriptor, txn.id(), prefix)
        assert [entry.key for entry in entries] == sorted(entry.key for entry in entries)
        return dict(entries)


@pytest.mark.parametrize("seed", range(6))
def test_finds_what_lmdb_finds(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    env, expected = opened(tmp_path), {}
    with file_of(env, tmp_path) as descriptor:
        assert found(env, descriptor, b"") == {}
        for _ in range(12):  # of small values, and of such as have pages of their own; with many and with few keys a prefix
            with env.begin(write=True) as txn:
                for _ in range(draw.randrange(120)):
                    key = bytes([draw.randrange(3), draw.randrange(256)]) + draw.randbytes(draw.randrange(1, 40))
                    expected[key] = draw.randbytes(draw.choice((3, 100, 1500, 5000, 69_616)))
                    txn.put(key, expected[key])
                for key in draw.sample(sorted(expected), len(expected) // 5):
                    txn.delete(key)
                    del expected[key]
            prefixes = [b"", b"\0", b"\2", b"\3", b"\1\x80", *(key[:3] for key in draw.sample(sorted(expected), min(5, len(expected))))]
            for prefix in prefixes:
                assert found(env, descriptor, prefix) == {k: v for k, v in expected.items() if k.startswith(prefix)}


def test_a_transaction_sees_what_was_there_when_it_began(tmp_path: Path) -> None:
    env = opened(tmp_path)
    with file_of(env, tmp_path) as descriptor:
        for number in range(3):
            with env.begin(write=True) as txn:
                txn.put(b"key", bytes([number]) * 5000)
        with env.begin() as reader:
            with env.begin(write=True) as txn:
                txn.put(b"key", b"x" * 5000)
                txn.put(b"key2", b"x" * 5000)
            assert find_entries(descriptor, reader.id(), b"key") == [(b"key", b"\2" * 5000)]
            with env.begin(write=True) as txn:
                txn.put(b"key", b"y" * 5000)
            with pytest.raises(Overtaken):
                find_entries(descriptor, reader.id(), b"key")


def test_pages_that_are_none(tmp_path: Path) -> None:
    env = opened(tmp_path)
    with file_of(env, tmp_path) as descriptor:
        with env.begin(write=True) as txn:
            for number in range(2000):
                txn.put(number.to_bytes(4, "big"), bytes(50))
        with env.begin() as txn:
            transaction = txn.id()
        assert len(find_entries(descriptor, transaction, b"")) == 2000
        pages = os.fstat(descriptor).st_size // 4096
        refused = 0
        for page in range(2, pages):
            before = os.pread(descriptor, 16, page * 4096)
            os.pwrite(descriptor, b"\xff" * 16, page * 4096)
            try:
                find_entries(descriptor, transaction, b"")
            except Damaged:
                refused += 1
            os.pwrite(descriptor, before, page * 4096)
        assert refused > 20
        os.pwrite(descriptor, bytes(4096), 0)
        os.pwrite(descriptor, bytes(4096), 4096)
        with pytest.raises(Overtaken):
            find_entries(descriptor, transaction, b"")


def test_a_page_number_beyond_any_file(tmp_path: Path) -> None:
    """Each bit of a leaf that names a value's page, flipped: what can't be read says so, and no other error comes."""
    env = opened(tmp_path)
    with file_of(env, tmp_path) as descriptor:
        with env.begin(write=True) as txn:
            txn.put(b"key", bytes(5000))
        with env.begin() as txn:
            transaction = txn.id()
        leaf = next(at for at in range(8192, os.fstat(descriptor).st_size, 4096) if b"key" in os.pread(descriptor, 4096, at)[16:])
        at = leaf + os.pread(descriptor, 4096, leaf).rindex(b"key") + 3
        name = os.pread(descriptor, 8, at)
        for bit in range(64):
            os.pwrite(descriptor, (int.from_bytes(name, "little") ^ 1 << bit).to_bytes(8, "little"), at)
            with pytest.raises(Damaged):
                find_entries(descriptor, transaction, b"key")
        os.pwrite(descriptor, name, at)
        assert find_entries(descriptor, transaction, b"key") == [(b"key", bytes(5000))]
