"""Memory files on huge pages."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.memfds import HUGE_PAGE, make_huge, map_memfd, populate, prefault
from tests.apart import apart
from tests.descriptors import descriptors

F_SEAL_FUTURE_WRITE = 0x10
"""Not in Python 3.11's fcntl."""


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_CLOEXEC)
    yield made
    os.close(made)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def on_huge_pages(view: memoryview) -> int:
    """Bytes of the map that the kernel has mapped by whole huge pages."""
    smaps = Path("/proc/self/smaps").read_text()
    entry = smaps[re.search(rf"^{address(view):x}-", smaps, re.MULTILINE).start() :]  # type: ignore[union-attr]
    return int(re.search(r"ShmemPmdMapped: +(\d+) kB", entry)[1]) << 10  # type: ignore[index]


@pytest.mark.parametrize("nbytes", [1, 5000, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 4096, 3 * HUGE_PAGE + 8])
def test_a_map_is_the_file(descriptor: int, nbytes: int) -> None:
    os.ftruncate(descriptor, nbytes)
    memory, view = map_memfd(descriptor, nbytes)
    assert len(view) == nbytes
    assert nbytes < HUGE_PAGE or address(view) % HUGE_PAGE == 0
    view[0], view[-1] = 7, 9
    assert os.pread(descriptor, 1, 0) == (b"\7" if nbytes > 1 else b"\t")
    assert os.pread(descriptor, 1, nbytes - 1) == b"\t"
    assert populate(view)
    assert os.fstat(descriptor).st_blocks * 512 >= nbytes, "all of it is there"
    other, seen = map_memfd(descriptor, nbytes, mmap.PROT_READ)
    prefault(seen)
    assert seen.readonly
    assert seen == view
    for map_, its in ((memory, view), (other, seen)):
        its.release()
        map_.close()


def test_a_map_holds_no_descriptor(descriptor: int) -> None:
    os.ftruncate(descriptor, 2 * HUGE_PAGE)
    before = descriptors()
    memory, view = map_memfd(descriptor, 2 * HUGE_PAGE)
    assert descriptors() <= before
    view.release()
    memory.close()


def test_a_map_stays_while_it_is_looked_at(descriptor: int) -> None:
    os.ftruncate(descriptor, HUGE_PAGE)
    memory, view = map_memfd(descriptor, HUGE_PAGE)
    kept = np.frombuffer(view, np.uint8, 10, 5)
    with pytest.raises(BufferError):
        memory.close()
    del memory, view
    kept[:] = 3
    assert os.pread(descriptor, 10, 5) == b"\3" * 10


def test_what_can_not_be_mapped_says_so(descriptor: int) -> None:
    os.ftruncate(descriptor, HUGE_PAGE)
    closed = os.dup(descriptor)
    os.close(closed)
    with pytest.raises(OSError, match="descriptor"):
        map_memfd(closed, HUGE_PAGE)
    with pytest.raises(OSError, match="memory"):
        map_memfd(descriptor, 1 << 60)


_READ = bytearray(1 << 16)
"""Made ahead: where no map is to be had, there is no memory for a file of 65,000 lines."""


def maps() -> int:
    """Maps of this process."""
    count = 0
    with Path("/proc/self/maps").open("rb", buffering=0) as file:
        while size := file.readinto(_READ):
            count += _READ.count(b"\n", 0, size)
    return count


@pytest.mark.parametrize("nbytes", [5000, 3 * HUGE_PAGE + 8])
def test_a_file_that_may_not_be_written_leaves_no_addresses_taken(nbytes: int) -> None:
    """The kernel finds that out when addresses are set aside already."""
    sealed = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(sealed, nbytes)
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        before = maps()
        for _ in range(100):
            with pytest.raises(PermissionError):
                map_memfd(sealed, nbytes)
        assert maps() <= before + 10
        memory, view = map_memfd(sealed, nbytes, mmap.PROT_READ)
        assert not any(view[:100])
        view.release()
        memory.close()
    finally:
        os.close(sealed)


def crowded() -> list[str]:
    """Map a file where the process may have no further map, then one more each time. What becomes of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    filler = mmap.mmap(-1, most * mmap.PAGESIZE, prot=mmap.PROT_READ)
    first = int(np.frombuffer(filler, np.uint8).ctypes.data)
    for page in range(1, most - maps() - 50, 2):  # each page of another kind is two maps more
        assert not libc.mprotect(first + page * mmap.PAGESIZE, mmap.PAGESIZE, 0)
    descriptor = os.memfd_create("crowded", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * HUGE_PAGE)
    singles: list[mmap.mmap] = []
    with contextlib.suppress(OSError):
        while True:
            singles.append(mmap.mmap(-1, mmap.PAGESIZE))
    found = []
    for _ in range(5):
        taken = maps()
        try:
            memory, view = map_memfd(descriptor, 2 * HUGE_PAGE)
        except OSError as error:
            found.append(f"{errno.errorcode[error.errno or 0]} with {most - taken} to spare")
        else:
            view[-1] = 1
            view.release()
            memory.close()
            found.append("mapped")
        assert maps() == taken, "some of it is left"
        singles.pop().close()
    return found


def test_a_process_with_as_many_maps_as_it_may_have_is_told_so() -> None:
    found = apart(crowded)
    assert found is not None, "the process died of it"
    assert found[0].startswith("ENOMEM"), "there is none to be had at all"
    assert found[1].startswith("ENOMEM"), "there are addresses, but no further map for the file among them"
    assert found[-1] == "mapped"


def test_memory_is_on_huge_pages_and_what_was_in_it_stays(descriptor: int) -> None:
    size = 4 * HUGE_PAGE + 4096
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, b"before", HUGE_PAGE + 3)
    memory, view = map_memfd(descriptor, size)
    if not make_huge(view):
        pytest.skip("this system gives no huge pages to shared memory")
    prefault(view)
    assert on_huge_pages(view) == 4 * HUGE_PAGE
    assert bytes(view[HUGE_PAGE + 3 : HUGE_PAGE + 10]) == b"before\0"
    assert not any(view[:HUGE_PAGE])
    view.release()
    memory.close()
