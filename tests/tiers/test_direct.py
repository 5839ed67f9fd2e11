"""Reading past the page cache: the same bytes as ever, and a way on where the file system can't."""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from kvstore.digests import DIGEST_BYTES, blob_id, slice_digest
from kvstore.errors import Busy, Corrupt
from kvstore.kvspec import SliceLayout
from kvstore.tiers.direct import LARGEST_READ, DirectFile
from kvstore.tiers.ssd import BlobBatch, BlobFile, extents_beside

MIB = 1 << 20
LAYOUT = SliceLayout((MIB,) * 5)
STORED = 5 * (MIB + DIGEST_BYTES)


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def is_direct(fd: int) -> bool:
    """Whether a file was opened to be read past the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(1).bytes(5 * MIB + 1234))
    forget(path)
    opened = DirectFile(path)
    if not opened.works:
        pytest.skip("the file system has no O_DIRECT")
    opened.close()
    return path


def test_any_range_is_read(file: Path) -> None:
    data, opened, rng = file.read_bytes(), DirectFile(file), np.random.default_rng(2)
    for _ in range(50):
        at = int(rng.integers(0, len(data)))
        nbytes = int(rng.integers(1, LARGEST_READ))
        with opened.read(at, nbytes) as raw:
            assert raw is not None
            assert raw == data[at : at + nbytes], "short only where the file ends"
    opened.close()


def test_without_memory_it_is_read_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    blob_file = BlobFile(tmp_path, 64 * MIB)
    blob, stored = make_blob()
    blob_file.commit(BlobBatch(put=[(1, blob, stored)]))
    forget(extents_beside(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.direct._make_buffer", no_memory)
        assert read(blob_file, blob) == stored
        forget(extents_beside(tmp_path))
        patch.setattr(os, "preadv", no_memory)
        with pytest.raises(Busy, match="can't be read now"):  # it is not lost
            read(blob_file, blob)
    assert read(blob_file, blob) == stored
    blob_file.close()


def test_what_the_page_cache_has_is_known(file: Path) -> None:
    opened = DirectFile(file)
    assert not opened.cached(MIB + 5, MIB)
    with file.open("rb", buffering=0) as reader:
        reader.seek(MIB)
        reader.read(MIB + 4096)
        assert opened.cached(MIB + 5, MIB)
        assert not opened.cached(0, 5 * MIB), "all of it must be there"
        assert not opened.cached(5 * MIB, 2 * MIB), "there is no so much"
    with file.open("ab") as writer:
        writer.write(bytes(2 * MIB))
    assert opened.cached(5 * MIB + 4096, MIB), "what is written later counts, too"
    opened.close()


def test_a_file_system_that_refuses_is_read_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse when the file is opened, some when it is read."""
    blob, stored = make_blob()
    real_open, real_preadv = os.open, os.preadv

    def refuse_open(path: Path, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *more)

    def refuse_read(fd: int, buffers: list[memoryview], at: int) -> int:
        if is_direct(fd):
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_preadv(fd, buffers, at)

    for name, refuse in (("open", refuse_open), ("preadv", refuse_read)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            blob_file = BlobFile(tmp_path / name, 64 * MIB)
            blob_file.commit(BlobBatch(put=[(1, blob, stored)]))
            forget(extents_beside(tmp_path / name))
            assert read(blob_file, blob) == stored
            blob_file.close()


@pytest.mark.parametrize("nbytes", [100, 4096, 5000])
def test_a_read_that_comes_short_is_no_end_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """read(2) may always give less, and past the page cache a read can go on only at whole pages."""
    blob_file = BlobFile(tmp_path, 64 * MIB)
    blob, stored = make_blob()
    blob_file.commit(BlobBatch(put=[(1, blob, stored)]))
    forget(extents_beside(tmp_path))
    real_preadv, short = os.preadv, 0

    def come_short(fd: int, buffers: list[memoryview], at: int) -> int:
        nonlocal short
        if is_direct(fd):
            short += 1
            return min(nbytes, real_preadv(fd, buffers, at))
        return real_preadv(fd, buffers, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", come_short)
        assert read(blob_file, blob) == stored
    blob_file.close()
    if not short:
        pytest.skip("the file system has no O_DIRECT")


def test_a_blob_file_that_was_cut_short_is_known_as_such(tmp_path: Path) -> None:
    blob_file = BlobFile(tmp_path, 64 * MIB)
    blob, stored = make_blob()
    blob_file.commit(BlobBatch(put=[(1, blob, stored)]))
    at = extents_beside(tmp_path).read_bytes().index(stored[4 * MIB : 4 * MIB + 64].tobytes())
    os.truncate(extents_beside(tmp_path), at)
    forget(extents_beside(tmp_path))
    with pytest.raises(Corrupt, match="ends at"):
        read(blob_file, blob)
    blob_file.close()


def make_blob(seed: int = 3) -> tuple[bytes, memoryview]:
    payload = np.random.default_rng(seed).bytes(5 * MIB)
    table = b"".join(slice_digest(payload[at : at + MIB]) for at in range(0, 5 * MIB, MIB))
    return blob_id(table), memoryview(payload + table)


def read(blob_file: BlobFile, blob: bytes, arrived: list[int] | None = None) -> bytes:
    target = bytearray(STORED)
    blob_file.read(1, blob, LAYOUT, memoryview(target), arrived=None if arrived is None else arrived.append)
    return bytes(target)


def test_large_blobs_come_back_wherever_their_extents_lie(tmp_path: Path) -> None:
    blob_file = BlobFile(tmp_path, 256 * MIB)
    others = [(1, seed.to_bytes(16, "big"), memoryview(np.random.default_rng(seed).bytes(200_000 + 7_000 * seed))) for seed in range(60)]
    blob_file.commit(BlobBatch(put=others))
    for step in (2, 3, 5):  # holes of all sizes, in which a blob's extents end up
        blob_file.commit(BlobBatch(delete=[(number, name, len(data)) for number, name, data in others[::step]]))
        blob_file.commit(BlobBatch())
        del others[::step]
        blob, stored = make_blob(step)
        blob_file.commit(BlobBatch(put=[(1, blob, stored)]))
        for cold in (True, False, True):
            if cold:
                forget(extents_beside(tmp_path))
            arrived: list[int] = []
            assert read(blob_file, blob, arrived) == stored
            assert arrived == sorted(set(arrived))
            assert all(0 < count < LAYOUT.count for count in arrived)
    blob_file.close()


@pytest.mark.parametrize("cold", [True, False])
def test_changed_bytes_of_a_large_blob_are_never_given_out(tmp_path: Path, *, cold: bool) -> None:
    blob_file = BlobFile(tmp_path, 64 * MIB)
    blob, stored = make_blob()
    blob_file.commit(BlobBatch(put=[(1, blob, stored)]))
    data = extents_beside(tmp_path).read_bytes()
    for number in range(6):  # in each slice, and in the digest table
        start = number * MIB + 500 if number < 5 else 5 * MIB
        at = data.index(stored[start : start + 64].tobytes())
        with extents_beside(tmp_path).open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 1]))
        if cold:
            forget(extents_beside(tmp_path))
        arrived: list[int] = []
        with pytest.raises(Corrupt):
            read(blob_file, blob, arrived)
        assert all(count <= number for count in arrived)
        with extents_beside(tmp_path).open("r+b") as file:
            file.seek(at)
            file.write(data[at : at + 1])
    assert read(blob_file, blob) == stored
    blob_file.close()
