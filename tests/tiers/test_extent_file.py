"""The file of extents: what is written into any extents comes back from them, however it is read."""

import fcntl
import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import Corrupt
from kvstore.memfds import map_memfd
from kvstore.tiers.extent_file import BLOCK_BYTES, ExtentFile, blocks_for
from kvstore.tiers.free_space import Extent, FreeSpace

MIB = 1 << 20


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def random_bytes(seed: int, nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(nbytes))


def aligned(nbytes: int) -> memoryview:
    """Memory as DRAM slots are: of whole pages."""
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, blocks_for(nbytes) * BLOCK_BYTES)
        return map_memfd(descriptor, blocks_for(nbytes) * BLOCK_BYTES)[1]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("seed", range(6))
def test_any_part_comes_back_from_wherever_it_was_written(tmp_path: Path, seed: int) -> None:
    draw, file, space = random.Random(seed), ExtentFile(tmp_path / "extents"), FreeSpace(20_000)
    holes = space.allocate([draw.randrange(1, 300) for _ in range(60)])
    assert holes is not None
    for hole in holes[::2]:
        space.free(hole)
    sizes = [draw.choice((1, 100, 4096, 70_000, 700_000, 3 * MIB, 9 * MIB + 17)) for _ in range(12)]
    places = space.allocate([blocks_for(size) for size in sizes])
    assert places is not None
    blobs = [(extents, random_bytes(number, size)) for number, (extents, size) in enumerate(zip(places, sizes, strict=True))]
    file.write(blobs)
    file.sync()
    for extents, data in blobs:
        for uncached, room in ((True, True), (False, True), (True, False), (False, False)):
            if draw.random() < 0.5:
                forget(tmp_path / "extents")
            out = aligned(len(data)) if room else memoryview(bytearray(len(data)))
            file.read(extents, 0, len(data), out, uncached=uncached, to_end=True)
            assert out[: len(data)] == data
            assert not any(out[len(data) :]), "behind a blob there are zeros in its last block"
            start = draw.randrange(len(data))
            end = draw.randrange(start, len(data)) + 1
            out = memoryview(bytearray(len(data)))
            file.read(extents, start, end, out, uncached=uncached)
            assert out[start:end] == data[start:end]
            assert not any(out[:start])
    file.close()


def test_large_ones_are_read_straight_into_aligned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, data, extents = ExtentFile(tmp_path / "extents"), random_bytes(1, 5 * MIB + 80), [Extent(3, 1000), Extent(2000, 281)]
    if not file._direct.works:
        pytest.skip("the file system has no O_DIRECT")
    file.write([(extents, data)])
    forget(tmp_path / "extents")
    real, straight = os.preadv, list[int]()

    def watching(fd: int, buffers: list[memoryview], at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            straight.append(len(buffers[0]))
        return real(fd, buffers, at)

    def no_buffer() -> memoryview:
        raise AssertionError("a buffer was made")

    monkeypatch.setattr(os, "preadv", watching)
    monkeypatch.setattr("kvstore.tiers.direct._make_buffer", no_buffer)
    out = aligned(len(data))
    file.read(extents, 0, len(data), out, uncached=False, to_end=True)
    assert out[: len(data)] == data
    assert straight == [1000 * BLOCK_BYTES, 281 * BLOCK_BYTES]
    file.close()


@pytest.mark.parametrize("to_end", [False, True])
def test_nothing_behind_a_part_is_written_to_but_at_the_end_of_a_blob(tmp_path: Path, *, to_end: bool) -> None:
    """Another thread may have read and verified what is there."""
    file, data = ExtentFile(tmp_path / "extents"), random_bytes(1, 3 * MIB)
    file.write([([Extent(0, 768)], data)])
    for size in (MIB - 1, MIB + 1, MIB + 4095, 2 * MIB + 100):
        forget(tmp_path / "extents")
        out = aligned(len(data))
        out[:] = b"\1" * len(out)
        file.read([Extent(0, 768)], 0, size, out, uncached=False, to_end=to_end)
        end = blocks_for(size) * BLOCK_BYTES if to_end else size
        assert out[:size] == data[:size]
        assert set(out[end:]) == {1}
    file.close()


def test_a_file_that_ends_before_a_blob_does_is_known_as_such(tmp_path: Path) -> None:
    file, data = ExtentFile(tmp_path / "extents"), random_bytes(1, 3 * MIB)
    file.write([([Extent(0, 768)], data)])
    file.sync()
    os.truncate(tmp_path / "extents", 2 * MIB + 5)
    for uncached in (True, False):
        with pytest.raises(Corrupt, match="ends at"):
            file.read([Extent(0, 768)], 0, len(data), aligned(len(data)), uncached=uncached)
    file.close()


def test_it_is_for_its_user_only_and_not_made_for_reading(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ExtentFile(tmp_path / "extents", readonly=True)
    ExtentFile(tmp_path / "extents").close()
    assert (tmp_path / "extents").stat().st_mode & 0o777 == 0o600


def test_writes_that_come_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: real(fd, [buffers[0][:5000]], at))
    file = ExtentFile(tmp_path / "extents")
    blobs = [([Extent(9 * number, 8)], random_bytes(number, 30_000)) for number in range(20)]
    file.write(blobs)
    for extents, data in blobs:
        out = memoryview(bytearray(len(data)))
        file.read(extents, 0, len(data), out, uncached=False, to_end=True)
        assert out == data
    file.close()
