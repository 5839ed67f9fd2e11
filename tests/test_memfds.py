"""Memory files on huge pages."""

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.memfds import HUGE_PAGE, make_huge, map_memfd, populate, prefault
from tests.descriptors import descriptors


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
