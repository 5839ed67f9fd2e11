"""The hash index built at once holds what adding one by one would, and goes on like any other."""

import numpy as np
import pytest

from kvstore.hash_index import HashIndex


@pytest.mark.parametrize("count", [0, 1, 3, 500, 20_000])
@pytest.mark.parametrize("bits", [64, 12, 41])
def test_built_at_once(count: int, bits: int) -> None:
    rng = np.random.default_rng(count + bits)
    hashes = rng.integers(0, 1 << 63, count, dtype=np.uint64) >> np.uint64(64 - bits) if count else np.empty(0, np.uint64)
    if bits == 41:  # all homes near the end of their tables: entries run past it
        hashes |= np.uint64(0xFFFFF000_00)
    if bits == 12:
        hashes, count = hashes[:500], min(count, 500)
    index = HashIndex.built(hashes, np.arange(count, dtype=np.int32))
    assert len(index) == count
    for slot, value in enumerate(hashes.tolist()):
        assert slot in index.candidates(value)
    for slot, value in enumerate(hashes.tolist()):
        if slot % 2:
            index.remove(value, slot)
    index.add_many(hashes[1::2].tolist(), (np.arange(count)[1::2] + count).tolist())
    for slot, value in enumerate(hashes.tolist()):
        assert (slot + count if slot % 2 else slot) in index.candidates(value)
        assert slot % 2 == 0 or slot not in index.candidates(value)
    assert len(index) == count


def test_reserved_room_is_enough_for_evenly_spread_hashes() -> None:
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 1 << 63, 50_000, dtype=np.uint64).tolist()
    index = HashIndex()
    index.reserve(len(hashes))
    before = index.nbytes
    index.add_many(hashes, list(range(len(hashes))))
    assert index.nbytes == before
    assert all(slot in index.candidates(value) for slot, value in enumerate(hashes))
