"""The SSD tier on real LMDB files."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.errors import Corrupt, DataDirError, NotFound
from kvstore.kvspec import SliceLayout
from kvstore.tiers.blob_index import BlobIndex
from kvstore.tiers.extent_file import ExtentFile
from kvstore.tiers.extent_record import blob_key
from kvstore.tiers.ssd import BlobBatch, BlobFile, extents_beside
from kvstore.tiers.stored import verify_stored

LAYOUT = SliceLayout((5000, 5000, 3000))


def make(seed: int, layout: SliceLayout = LAYOUT) -> tuple[bytes, memoryview]:
    payload = np.random.default_rng(seed).bytes(layout.payload_bytes)
    table = b"".join(slice_digest(payload[o : o + s]) for o, s in zip(layout.offsets, layout.sizes, strict=False))
    return blob_id(table), memoryview(payload + table)


@pytest.fixture
def blob_file(tmp_path: Path) -> BlobFile:
    return BlobFile(tmp_path, 16 << 20)


def read(blob_file: BlobFile, number: int, blob: bytes) -> bytes:
    target = bytearray(LAYOUT.payload_bytes + DIGEST_BYTES * LAYOUT.count)
    blob_file.read(number, blob, LAYOUT, memoryview(target))
    return bytes(target)


def test_blobs_come_back_and_space_is_accounted(blob_file: BlobFile) -> None:
    made = [make(seed) for seed in range(20)]
    blob_file.commit(BlobBatch(put=[(1, *m) for m in made]))
    assert all(read(blob_file, 1, blob) == bytes(data) for blob, data in made)
    footprint = blob_file.footprint(len(made[0][1]))
    assert blob_file.usage().used == 20 * footprint
    blob_file.commit(BlobBatch(put=[(1, *made[0])]))
    assert blob_file.usage().used == 20 * footprint, "a blob written twice was counted twice"
    blob_file.commit(BlobBatch(delete=[(1, blob, len(data)) for blob, data in made[:15]]))
    assert blob_file.usage().used == 5 * footprint
    with pytest.raises(NotFound):
        read(blob_file, 1, made[0][0])
    with pytest.raises(NotFound):
        read(blob_file, 2, made[19][0])
    assert {blob for blob, _ in blob_file.stored_blobs(1)} == {blob for blob, _ in made[15:]}


def test_a_batch_as_large_as_the_tier_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pages as one context has are written at once, and what they push out is deleted: more than the file has beside the tier."""
    monkeypatch.setattr("kvstore.tiers.ssd._ROOM_BYTES", 4 << 20)
    monkeypatch.setattr("kvstore.tiers.ssd._STEP_BYTES", 1 << 20)
    blob_file, data, old = BlobFile(tmp_path, 32 << 20), memoryview(bytes(1 << 20)), list[tuple[int, bytes, int]]()
    count = blob_file.capacity // blob_file.footprint(len(data))
    for turn in range(6):
        new = [(1, bytes([turn, number]) * 8, data) for number in range(count)]
        blob_file.commit(BlobBatch(delete=old, put=new))
        assert blob_file.usage().used == count * blob_file.footprint(len(data))
        old = [(number, blob, len(data)) for number, blob, _ in new]
    with pytest.raises(lmdb.MapFullError):
        blob_file.commit(BlobBatch(put=[(1, bytes([9, number]) * 8, data) for number in range(count)]))
    blob_file.close()


def test_a_count_that_can_not_be_is_mended(blob_file: BlobFile, tmp_path: Path) -> None:
    """A flipped bit in the number of entries: the tier would be full for ever."""
    made = [make(seed) for seed in range(20)]
    blob_file.commit(BlobBatch(put=[(1, *m) for m in made]))
    used = blob_file.usage().used
    blob_file.close()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    for meta in (0, 4096):
        data[meta + 124] ^= 1  # bit 32 of the count
    (tmp_path / "data.mdb").write_bytes(data)
    mended = BlobFile(tmp_path, 16 << 20)
    assert mended.usage().used == used
    assert all(read(mended, 1, blob) == bytes(stored) for blob, stored in made)


def test_a_lost_meta_page_costs_nothing(blob_file: BlobFile, tmp_path: Path) -> None:
    """A flipped bit in the format version of one of the two."""
    made = [make(seed) for seed in range(20)]
    for one in made:
        blob_file.commit(BlobBatch(put=[(1, *one)]))
    blob_file.close()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    data[16 + 4 + 2] ^= 8
    (tmp_path / "data.mdb").write_bytes(data)
    mended = BlobFile(tmp_path, 16 << 20)
    assert sum(read(mended, 1, blob) == bytes(stored) for blob, stored in made[:-1]) == len(made) - 1


def test_deleted_space_is_used_again_without_growth(blob_file: BlobFile, tmp_path: Path) -> None:
    sizes = []
    for generation in range(30):
        old = [make(generation * 50 + i) for i in range(50)]
        blob_file.commit(BlobBatch(put=[(1, *m) for m in old]))
        blob_file.commit(BlobBatch(delete=[(1, blob, len(data)) for blob, data in old]))
        sizes.append(extents_beside(tmp_path).stat().st_size)
    assert sizes[-1] <= 1.1 * sizes[4]


def test_a_namespace_is_dropped_alone(blob_file: BlobFile) -> None:
    blob, data = make(1)
    blob_file.commit(BlobBatch(put=[(1, blob, data), (2, blob, data), (3, blob, data)]))
    assert blob_file.namespace_numbers() == [1, 2, 3]
    blob_file.drop_namespace(2, batch=1)
    assert blob_file.namespace_numbers() == [1, 3]
    assert read(blob_file, 3, blob) == bytes(data)


def test_changed_bytes_are_never_given_out(blob_file: BlobFile, tmp_path: Path) -> None:
    blob, data = make(1)
    rng = np.random.default_rng(2)
    for _ in range(60):
        changed = bytearray(data)
        bit = int(rng.integers(len(changed) * 8))
        changed[bit // 8] ^= 1 << bit % 8
        blob_file.commit(BlobBatch(put=[(1, blob, memoryview(bytes(changed)))]))
        with pytest.raises(Corrupt):
            read(blob_file, 1, blob)


@contextmanager
def index_of(path: Path) -> Iterator[lmdb.Transaction]:
    """The index of a tier that is closed, to be changed."""
    with lmdb.open(str(path), map_size=64 << 20) as env, env.begin(write=True) as txn:
        yield txn


@pytest.mark.parametrize("value", [b"short", bytes(36), bytes(48)])
def test_a_record_that_does_not_verify_is_a_lost_blob(blob_file: BlobFile, tmp_path: Path, value: bytes) -> None:
    made = [make(seed) for seed in range(3)]
    blob_file.commit(BlobBatch(put=[(1, *one) for one in made]))
    blob_file.close()
    with index_of(tmp_path) as txn:
        txn.put(blob_key(1, made[1][0]), value)
    again = BlobFile(tmp_path, 16 << 20)
    with pytest.raises(NotFound):
        read(again, 1, made[1][0])
    again.commit(BlobBatch(put=[(1, *made[1])]))
    assert all(read(again, 1, blob) == bytes(data) for blob, data in made)
    again.close()


def test_what_is_used_is_counted_anew_at_each_start(blob_file: BlobFile, tmp_path: Path) -> None:
    made = [make(seed) for seed in range(40)]
    blob_file.commit(BlobBatch(put=[(seed % 3, *one) for seed, one in enumerate(made)]))
    blob_file.commit(BlobBatch(delete=[(0, blob, len(data)) for blob, data in made[::3]]))
    usage, free = blob_file.usage(), blob_file._blocks._space
    blob_file._blocks.allocate([])  # takes back what was freed
    blob_file.close()
    again = BlobFile(tmp_path, 16 << 20)
    assert again.usage() == usage
    assert again._blocks._space.extents() == free.extents()
    again.close()


def test_of_two_records_that_name_the_same_blocks_the_later_is_right(blob_file: BlobFile, tmp_path: Path) -> None:
    """As an old index page that was taken for a new one would have it: what is deleted then must not free another's blocks."""
    old, new = make(1), make(2)
    blob_file.commit(BlobBatch(put=[(1, *old)]))
    blob_file.close()
    with index_of(tmp_path) as txn:
        stale = bytes(txn.get(blob_key(1, old[0])) or b"")
    file = BlobFile(tmp_path, 16 << 20)
    file.commit(BlobBatch(delete=[(1, old[0], len(old[1]))]))
    file.commit(BlobBatch(put=[(1, *new)]))  # where the old one was
    file.close()
    with index_of(tmp_path) as txn:
        assert bytes(txn.get(blob_key(1, new[0])) or b"")[8:20] == stale[8:20]
        txn.put(blob_key(1, old[0]), stale)
    file = BlobFile(tmp_path, 16 << 20)
    assert file.stored_blobs(1) == [(new[0], file.footprint(len(new[1])))]
    assert file.usage().used == file.footprint(len(new[1]))
    file.commit(BlobBatch(delete=[(1, old[0], len(old[1]))]))
    file.commit(BlobBatch(put=[(1, *make(seed)) for seed in range(3, 30)]))
    assert read(file, 1, new[0]) == bytes(new[1])
    file.close()


def test_blobs_beyond_the_end_of_a_file_cut_short_free_nothing_of_others(blob_file: BlobFile, tmp_path: Path) -> None:
    made = [make(seed) for seed in range(20)]
    for one in made:
        blob_file.commit(BlobBatch(put=[(1, *one)]))
    blob_file.close()
    os.truncate(extents_beside(tmp_path), 10 * blob_file.footprint(len(made[0][1])))
    file = BlobFile(tmp_path, 16 << 20)
    assert {blob for blob, _ in file.stored_blobs(1)} == {blob for blob, _ in made[:10]}
    more = [make(seed) for seed in range(20, 40)]
    file.commit(BlobBatch(put=[(1, *one) for one in more]))
    file.commit(BlobBatch(delete=[(1, blob, len(data)) for blob, data in made[10:]]))
    file.commit(BlobBatch(put=[(1, *make(seed)) for seed in range(40, 60)]))
    assert all(read(file, 1, blob) == bytes(data) for blob, data in [*made[:10], *more])
    file.close()


@pytest.mark.parametrize("bit", [8 * 8 + 3, 8 * 8 + 55, 8 * 8 + 63, 16 * 8 + 6, 16 * 8 + 31, 63])
def test_a_flipped_bit_in_one_of_many_records_costs_one_blob_and_little_time(blob_file: BlobFile, tmp_path: Path, bit: int) -> None:
    """One that names half of the file is in the way of all the others."""
    made = [make(seed) for seed in range(200)]
    blob_file.commit(BlobBatch(put=[(1, *one) for one in made]))
    blob_file.close()
    with index_of(tmp_path) as txn:
        value = bytearray(txn.get(blob_key(1, made[3][0])) or b"")
        value[bit // 8] ^= 1 << bit % 8
        txn.put(blob_key(1, made[3][0]), bytes(value))
    file = BlobFile(tmp_path, 16 << 20)
    left = {blob for blob, _ in file.stored_blobs(1)}
    assert left >= {blob for blob, _ in made} - {made[3][0]}
    assert all(read(file, 1, blob) == bytes(data) for blob, data in made if blob != made[3][0])
    with pytest.raises(NotFound):
        read(file, 1, made[3][0])
    file.commit(BlobBatch(put=[(1, *made[3])]))
    file.close()
    again = BlobFile(tmp_path, 16 << 20)
    assert all(read(again, 1, blob) == bytes(data) for blob, data in made)
    again.close()


def test_an_index_whose_file_is_missing_is_not_emptied(blob_file: BlobFile, tmp_path: Path) -> None:
    """It may come back: a store that is restored in two steps, a mount that is late."""
    made = make(1)
    blob_file.commit(BlobBatch(put=[(1, *made)]))
    blob_file.close()
    away = tmp_path / "away"
    extents_beside(tmp_path).rename(away)
    with pytest.raises(DataDirError, match="is missing or empty, in which the index"):
        BlobFile(tmp_path, 16 << 20)
    assert not extents_beside(tmp_path).exists()
    away.rename(extents_beside(tmp_path))
    again = BlobFile(tmp_path, 16 << 20)
    assert read(again, 1, made[0]) == bytes(made[1])
    again.close()


def test_a_commit_that_fails_takes_nothing(blob_file: BlobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, other = make(1), make(2)
    blob_file.commit(BlobBatch(put=[(1, *kept)]))
    usage, free = blob_file.usage(), blob_file._blocks._space.extents()
    for owner, name in ((ExtentFile, "write"), (ExtentFile, "sync"), (BlobIndex, "commit")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(OSError, match="nput/output"):
                blob_file.commit(BlobBatch(put=[(1, *other)], delete=[(1, kept[0], len(kept[1]))]))
        assert (blob_file.usage(), blob_file._blocks._space.extents()) == (usage, free)
        assert read(blob_file, 1, kept[0]) == bytes(kept[1])
    blob_file.commit(BlobBatch(put=[(1, *other)]))
    assert read(blob_file, 1, other[0]) == bytes(other[1])


def fail(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_blob_that_is_deleted_while_it_is_read_comes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are not written over before, though there are no others."""
    monkeypatch.setattr("kvstore.tiers.ssd._ROOM_BYTES", 0)
    blob, data = make(1)
    footprint = -(-len(data) // 4096) * 4096
    file = BlobFile(tmp_path, 10 * footprint)
    blobs = [(blob, data), *(make(seed) for seed in range(2, 12))]
    file.commit(BlobBatch(put=[(1, *one) for one in blobs]))
    found, go_on, real = threading.Event(), threading.Event(), ExtentFile.read

    def gated(*given: Any, **named: Any) -> None:
        found.set()
        go_on.wait(20)
        real(*given, **named)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(ExtentFile, "read", gated)
        reading = pool.submit(read, file, 1, blob)
        assert found.wait(20)
        file.commit(BlobBatch(delete=[(1, blob, len(data))]))
        with pytest.raises(lmdb.MapFullError):
            file._commit_at_once(BlobBatch(put=[(1, *make(99))]))
        go_on.set()
        assert reading.result() == bytes(data)
    file.commit(BlobBatch(put=[(1, *make(99))]))
    assert read(file, 1, make(99)[0]) == bytes(make(99)[1])
    file.close()


def test_an_index_with_keys_out_of_order_is_salvaged_at_the_start(blob_file: BlobFile, tmp_path: Path) -> None:
    """LMDB's cursor might go through it for ever."""
    made = sorted(make(seed) for seed in range(3))
    blob_file.commit(BlobBatch(put=[(1, *one) for one in made]))
    blob_file.close()
    data = (tmp_path / "data.mdb").read_bytes()
    (tmp_path / "data.mdb").write_bytes(data.replace(blob_key(1, made[1][0]), blob_key(0, made[1][0])))
    file = BlobFile(tmp_path, 16 << 20)
    assert all(read(file, 1, blob) == bytes(stored) for blob, stored in (made[0], made[2]))
    assert tmp_path.with_name(tmp_path.name + ".damaged").exists()
    file.close()


def test_the_whole_table_counts() -> None:
    blob, data = make(1)
    verify_stored(blob, LAYOUT, data)
    with pytest.raises(Corrupt):
        verify_stored(make(2)[0], LAYOUT, data)


def test_blobs_are_listed_in_order_in_parts_and_whole(blob_file: BlobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sorted((make(i) for i in range(30)), key=lambda m: m[0])
    blob_file.commit(BlobBatch(put=[(number, *m) for m in made for number in (1, 2)]))
    expected = [(blob, blob_file.footprint(len(data))) for blob, data in made]
    assert blob_file.stored_blobs(1) == expected
    monkeypatch.setattr("kvstore.tiers.blob_index._AT_ONCE", 7)
    assert blob_file.stored_blobs(1) == expected
    assert blob_file.stored_blobs(2, expected[6][0], 9) == expected[7:16]
    assert blob_file.stored_blobs(1, expected[-1][0]) == []
    assert blob_file.stored_blobs(3) == []


def test_a_list_of_blobs_reads_none_of_them(tmp_path: Path) -> None:
    """They would be read from the disk, a page of each extent at a time."""
    path = tmp_path / "large"
    blob_file = BlobFile(path, 64 << 20)
    data = memoryview(bytes(16 << 20))
    blob_file.commit(BlobBatch(put=[(1, bytes([n]) * 16, data) for n in range(3)]))
    blob_file.close()
    reading = BlobFile.readonly(path)
    try:
        before = resident_map_bytes(path)
        assert len(reading.stored_blobs(1)) == 3
        assert resident_map_bytes(path) - before < 64 << 10
    finally:
        reading.close()


def resident_map_bytes(path: Path) -> int:
    """Of the maps that this process has of files in a folder."""
    found, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            mine = str(path) in line
        elif mine and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found
