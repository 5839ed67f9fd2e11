"""The walk reads what LMDB wrote, and loses no more than what hangs from a damaged page."""

from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.lmdb_walk import Walk, read_meta


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes]]:
    """Small and large values, some of them written anew or deleted, in several transactions."""
    folder, rng = tmp_path_factory.mktemp("lmdb"), np.random.default_rng(1)
    expected: dict[bytes, bytes] = {}
    with lmdb.open(str(folder), map_size=64 << 20) as env:
        for _ in range(20):
            with env.begin(write=True) as txn:
                for _ in range(100):
                    key = b"%d" % rng.integers(5000)
                    expected[key] = rng.bytes(int(rng.integers(1, 300) if rng.random() < 0.7 else rng.integers(3000, 20_000)))
                    txn.put(key, expected[key])
                for key in list(expected)[:10]:
                    del expected[key]
                    txn.delete(key)
    return folder / "data.mdb", expected


def test_everything_is_read(written: tuple[Path, dict[bytes, bytes]]) -> None:
    file, expected = written
    walk = Walk(file)
    assert dict(walk) == expected
    assert walk.skipped == 0


def test_an_empty_file_and_one_that_is_none(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "empty"), map_size=1 << 20):
        pass
    assert list(Walk(tmp_path / "empty" / "data.mdb")) == []
    (tmp_path / "other").write_bytes(bytes(100_000))
    assert read_meta(tmp_path / "other") is None
    assert list(Walk(tmp_path / "other")) == []


@pytest.mark.parametrize("seed", range(5))
def test_damage_costs_what_hangs_from_it(written: tuple[Path, dict[bytes, bytes]], tmp_path: Path, seed: int) -> None:
    file, expected = written
    rng, data = np.random.default_rng(seed), bytearray(file.read_bytes())
    for page in rng.integers(2, len(data) // 4096, 5).tolist():
        data[page * 4096 : page * 4096 + 4096] = rng.bytes(4096) if seed % 2 else bytes(4096)
    (tmp_path / "damaged").write_bytes(data)
    found = dict(Walk(tmp_path / "damaged"))
    assert set(found) <= set(expected)
    right = sum(expected[key] == value for key, value in found.items())
    assert right > 0.5 * len(expected) or seed % 2 == 0
    for kept in (0.9, 0.5, 0.1):
        (tmp_path / "short").write_bytes(file.read_bytes()[: int(kept * len(data))])
        assert all(expected.get(key) == value for key, value in Walk(tmp_path / "short"))
